//! The requests of clients: an echo, the metadata of a file system, and the transactions of
//! SmallBank. The server keeps real files and accounts, and the clients check its responses.

use std::collections::HashMap;

use benchkv_harness::pattern::{self, Tag};
use serde::Serialize;

/// Number of files that each directory has in addition to the files of the load.
const OTHER_FILES: u64 = 16;
/// Bytes of the attributes of a file, as in `struct stat`.
const STAT_BYTES: usize = 144;
/// Number of SmallBank accounts for each client, and the initial balance of an account.
const ACCOUNTS: u64 = 1_000;
const FIRST_BALANCE: u64 = 10_000;
/// Takes the place of the second account in a transaction that changes one account.
const CASH: u64 = u64::MAX;

/// The kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// Each request is answered with a pattern of the request.
    Echo,
    /// Operations on files: each client makes a file in its directory, reads its attributes, lists
    /// the directory and removes the file, again and again.
    Metadata,
    /// Transactions on accounts of all clients, in SmallBank's mix: one call that reads an account,
    /// or one or two calls that lock an account each and then a call that commits.
    Smallbank,
}

impl Workload {
    /// Returns the maximum payload bytes of a request and of a response, if the workload sets them.
    pub(crate) fn bytes(self, depth: u32) -> Option<(usize, usize)> {
        match self {
            Self::Echo => None,
            Self::Metadata => {
                let listed = 16 + 8 * (OTHER_FILES as usize + depth as usize);
                Some((64, listed.max(STAT_BYTES)))
            }
            Self::Smallbank => Some((40, 24)),
        }
    }
}

/// The kinds of requests for files and accounts: the word after the tag.
mod verb {
    pub(super) const MAKE: u64 = 1;
    pub(super) const STAT: u64 = 2;
    pub(super) const LIST: u64 = 3;
    pub(super) const REMOVE: u64 = 4;
    pub(super) const READ: u64 = 5;
    pub(super) const LOCK: u64 = 6;
    pub(super) const COMMIT: u64 = 7;
}

/// Reads word `at` of a message; 0 beyond its end.
fn word(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(8 * at..)
        .and_then(|rest| rest.first_chunk())
        .map_or(0, |word| u64::from_le_bytes(*word))
}

const fn name(tag: Tag) -> u64 {
    (tag.endpoint() as u64) << 48 | tag.number()
}

fn put(bytes: &mut [u8], words: impl IntoIterator<Item = u64>) {
    bytes
        .chunks_exact_mut(8)
        .zip(words)
        .for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
}

#[derive(Default)]
pub(crate) struct Store {
    files: HashMap<u64, Vec<u64>>,
    /// Balance of each account, and whether the account is locked.
    accounts: Vec<(u64, bool)>,
}

impl Store {
    pub(crate) fn new(workload: Workload, clients: u32) -> Self {
        let is_kept = workload == Workload::Smallbank;
        let accounts = u64::from(is_kept) * u64::from(clients) * ACCOUNTS;
        Self {
            files: HashMap::new(),
            accounts: vec![(FIRST_BALANCE, false); accounts as usize],
        }
    }

    /// Returns the sum of all balances less the sum of the initial balances.
    pub(crate) fn gained(&self) -> u64 {
        self.accounts.iter().fold(0, |sum: u64, (balance, _)| {
            sum.wrapping_add(*balance).wrapping_sub(FIRST_BALANCE)
        })
    }

    /// Executes a request. Returns the bytes of its response; `None` if the request is malformed.
    pub(crate) fn execute(&mut self, request: &[u8], response: &mut [u8]) -> Option<usize> {
        let [tag, verb, a, b, amount] = [0, 1, 2, 3, 4].map(|at| word(request, at));
        let directory = || (0..OTHER_FILES).map(|file| u64::MAX - file).collect();
        let files = self.files.entry(a);
        let (result, bytes) = match verb {
            verb::MAKE => {
                files.or_insert_with(directory).push(b);
                (1, 24)
            }
            verb::STAT => {
                let mut files = files.or_default().iter();
                let file = files.find(|file| **file == b);
                (file.copied().unwrap_or(0), STAT_BYTES)
            }
            verb::LIST => {
                let files = files.or_default();
                put(response.get_mut(16..)?, files.iter().copied());
                (files.len() as u64, 16 + 8 * files.len())
            }
            verb::REMOVE => {
                let files = files.or_default();
                let at = files.iter().position(|file| *file == b)?;
                files.swap_remove(at);
                (1, 24)
            }
            verb::READ => (self.accounts.get(a as usize)?.0, 24),
            verb::LOCK => {
                let (_, is_locked) = self.accounts.get_mut(a as usize)?;
                (u64::from(!std::mem::replace(is_locked, true)), 24)
            }
            verb::COMMIT => {
                for (account, change) in [(a, amount), (b, amount.wrapping_neg())] {
                    if account != CASH {
                        let account = self.accounts.get_mut(account as usize);
                        let (balance, is_locked) = account.filter(|(_, is_locked)| *is_locked)?;
                        (*balance, *is_locked) = (balance.wrapping_add(change), false);
                    }
                }
                (1, 24)
            }
            _ => return None,
        };
        put(response, [!tag, result]);
        Some(bytes)
    }
}

/// A sequence of calls of a client, each of which begins when the previous call has ended.
pub(crate) struct Lane {
    workload: Workload,
    client: u64,
    number: u64,
    /// Number of finished cycles: each makes, reads, lists and removes one file.
    finished: u64,
    /// Number of calls that are done in the current cycle or transaction. A refused LOCK is not
    /// done.
    step: usize,
    /// Accounts of the transaction, in the order of their locks, and the money that is moved from
    /// the second to the first.
    accounts: [u64; 2],
    amount: u64,
    is_read_only: bool,
    /// Money that the transactions of this lane brought to the accounts.
    pub(crate) brought: u64,
    random: u64,
    all_accounts: u64,
}

impl Lane {
    pub(crate) fn new(workload: Workload, client: u32, number: u64, clients: u32) -> Self {
        let (client, all_accounts) = (u64::from(client), u64::from(clients) * ACCOUNTS);
        let random = (client << 8 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let (accounts, is_read_only) = ([0, CASH], true);
        let mut lane = Self {
            workload,
            client,
            number,
            finished: 0,
            step: 0,
            accounts,
            amount: 0,
            is_read_only,
            brought: 0,
            random,
            all_accounts,
        };
        lane.begin();
        lane
    }

    fn below(&mut self, limit: u64) -> u64 {
        // Xorshift64.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % limit
    }

    /// Begins the next transaction: 15 % read a balance, 45 % change one account, 40 % change two.
    fn begin(&mut self) {
        let kind = self.below(100);
        let a = self.below(self.all_accounts);
        let b = self.below(self.all_accounts);
        (self.is_read_only, self.amount, self.step) = (kind < 15, 1 + kind, 0);
        // The account of the smaller number is locked first, so no two transactions deadlock.
        self.accounts = if kind < 60 || a == b {
            [a, CASH]
        } else {
            [a.min(b), a.max(b)]
        };
    }

    fn file(&self) -> u64 {
        self.number << 32 | self.finished
    }

    pub(crate) fn request(&self, tag: Tag, request: &mut [u8]) {
        let [a, b] = self.accounts;
        let locks = 1 + usize::from(b != CASH);
        let (verb, a, b) = match self.workload {
            Workload::Echo => return pattern::fill_request(request, tag),
            Workload::Metadata => (
                [verb::MAKE, verb::STAT, verb::LIST, verb::REMOVE][self.step],
                self.client,
                self.file(),
            ),
            Workload::Smallbank if self.is_read_only => (verb::READ, a, 0),
            Workload::Smallbank if self.step < locks => (verb::LOCK, self.accounts[self.step], 0),
            Workload::Smallbank => (verb::COMMIT, a, b),
        };
        put(request, [name(tag), verb, a, b, self.amount]);
    }

    /// Takes the response to the last request. Returns the number of operations that end with it, 0
    /// or 1; `None` if the response is wrong.
    pub(crate) fn response(&mut self, tag: Tag, response: &[u8]) -> Option<u64> {
        if self.workload == Workload::Echo {
            return pattern::is_reply(response, tag).then_some(1);
        }
        let result = word(response, 1);
        if word(response, 0) != !name(tag) {
            return None;
        }
        if self.workload == Workload::Metadata {
            let is_right = match self.step {
                1 => result == self.file() && response.len() == STAT_BYTES,
                2 => response
                    .chunks_exact(8)
                    .skip(2)
                    .any(|file| word(file, 0) == self.file()),
                _ => result == 1,
            };
            self.step = (self.step + 1) % 4;
            self.finished += u64::from(self.step == 0);
            return is_right.then_some(1);
        }
        let locks = 1 + usize::from(self.accounts[1] != CASH);
        if self.is_read_only || self.step == locks {
            let was_read = self.is_read_only;
            if !was_read && self.accounts[1] == CASH {
                self.brought = self.brought.wrapping_add(self.amount);
            }
            self.begin();
            return (was_read || result == 1).then_some(1);
        }
        // If another transaction holds the lock, the same LOCK request is sent again.
        self.step += usize::from(result == 1);
        Some(0)
    }
}
