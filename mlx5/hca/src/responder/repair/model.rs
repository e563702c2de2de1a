//! All interleavings of three requesters, two of which may be killed anywhere, and the owner's
//! repair, in the steps of `Receives::pop`, `Receives::give_back` and `Hca::repair`. Every receive
//! belongs to one owner at a time, and in the end none is missing. The model also runs with one
//! step of the protocol left out or in the wrong order, and must then find a failure: this shows
//! that the model checks that step.

use std::collections::HashSet;

const WQES: usize = 4;
const POSTED: usize = 2;
const REQUESTERS: usize = 3;
/// Count up to which each requester has seen receives posted, by a check at an earlier message. The
/// first requester has made no such check.
const KNOWN: [u8; REQUESTERS] = [0, POSTED as u8, POSTED as u8];

/// The part of the protocol that is left out.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Without {
    Nothing,
    /// The pop word is read after the intents.
    PopWordFirst,
    /// The intents of the living are not read.
    Intents,
    /// Lanes are not drained.
    Drain,
    /// The list head that a returned receive replaces is not accounted for.
    HeadAccount,
    /// The count of returned receives is raised before the list has them.
    ReturnedLast,
    /// No receive is returned to the list.
    GiveBack,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Owner {
    Free,
    Posted,
    Held(usize),
}

type Word = (u8, u8);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum At {
    Idle,
    Loaded(Word),
    Checked(Word),
    Linked(Word, u8),
    Intended(Word, u8),
    Popped(Word),
    Published,
    Done,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Repair {
    Idle,
    PopRead,
    /// Number of requesters whose intents were read.
    Intents(usize),
    Drained(usize),
    GivingBack,
    HeadRead(Word, u8),
    LinkSet(Word, u8),
    Exchanged,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    word: Word,
    links: [u8; WQES],
    posted: u8,
    returned: u8,
    tail: u8,
    head: u8,
    owners: [Owner; WQES],
    at: [At; REQUESTERS],
    takes: [u8; REQUESTERS],
    known: [u8; REQUESTERS],
    intents: [Option<Word>; REQUESTERS],
    lanes: [Vec<Word>; REQUESTERS],
    kills: u8,
    /// The count that is accounted for at each index, plus one.
    taken: [u8; WQES],
    repair: Repair,
    /// Orphans, and whether they are to wait.
    orphans: Vec<(Word, bool)>,
    noticed: [bool; REQUESTERS],
}

struct Model {
    without: Without,
    seen: HashSet<State>,
    wrong: Option<String>,
}

impl State {
    fn new() -> Self {
        let mut owners = [Owner::Posted; WQES];
        owners[POSTED..].fill(Owner::Free);
        Self {
            word: (0, 0),
            links: [1, 2, 3, 0],
            posted: POSTED as u8,
            returned: 0,
            head: POSTED as u8,
            tail: WQES as u8 - 1,
            owners,
            at: [At::Idle; REQUESTERS],
            takes: [1; REQUESTERS],
            known: KNOWN,
            intents: [None; REQUESTERS],
            lanes: Default::default(),
            kills: 2,
            taken: [0; WQES],
            repair: Repair::Idle,
            orphans: vec![],
            noticed: [false; REQUESTERS],
        }
    }

    fn is_dead(&self, r: usize) -> bool {
        self.at[r] == At::Dead
    }

    fn request(&mut self, r: usize) -> Result<(), String> {
        self.at[r] = match self.at[r] {
            At::Idle if self.takes[r] == 0 => At::Done,
            At::Idle => At::Loaded(self.word),
            At::Loaded(word) if word.0 < self.known[r] => At::Checked(word),
            At::Loaded(word) if self.posted + self.returned == word.0 => {
                if word != self.word {
                    At::Loaded(self.word)
                } else {
                    self.intents[r] = None;
                    At::Done
                }
            }
            At::Loaded(word) => {
                self.known[r] = self.posted + self.returned;
                At::Checked(word)
            }
            At::Checked(word) => At::Linked(word, self.links[word.1 as usize]),
            At::Linked(word, next) => {
                self.intents[r] = Some(word);
                At::Intended(word, next)
            }
            At::Intended(word, next) if self.word == word => {
                self.word = (word.0 + 1, next);
                let owner = &mut self.owners[word.1 as usize];
                if *owner != Owner::Posted {
                    return Err(format!("receive {} popped, which is {owner:?}", word.1));
                }
                *owner = Owner::Held(r);
                At::Popped(word)
            }
            At::Intended(..) => At::Loaded(self.word),
            At::Popped(word) => {
                self.lanes[r].push(word);
                At::Published
            }
            At::Published => {
                self.intents[r] = None;
                self.takes[r] -= 1;
                At::Idle
            }
            end => end,
        };
        Ok(())
    }

    /// Takes the messages of requester `r`, as the owner does. For each message, the driver
    /// completes its receive and posts a receive.
    fn drain(&mut self, r: usize) -> Result<(), String> {
        for (count, index) in std::mem::take(&mut self.lanes[r]) {
            let at = index as usize;
            self.taken[at] = count + 1;
            if self.owners[at] != Owner::Held(r) {
                return Err(format!(
                    "receive {index} completed by {r}, but is {:?}",
                    self.owners[at]
                ));
            }
            self.owners[at] = Owner::Free;
            self.links[self.tail as usize] = index;
            self.tail = index;
            // This posts the first free receive of the list, not `index`, which is now the last.
            self.owners[self.head as usize] = Owner::Posted;
            self.head = self.links[self.head as usize];
            self.posted += 1;
        }
        Ok(())
    }

    fn repair(&mut self, without: Without) -> Result<(), String> {
        let filter =
            |orphans: &mut Vec<(Word, bool)>, word: Word| orphans.retain(|(o, _)| word.0 > o.0);
        self.repair = match self.repair {
            Repair::Idle => {
                for r in 0..REQUESTERS {
                    if self.is_dead(r) && !self.noticed[r] {
                        self.noticed[r] = true;
                        self.orphans
                            .extend(self.intents[r].map(|intent| (intent, false)));
                    }
                }
                self.orphans.iter_mut().for_each(|o| o.1 = false);
                Repair::PopRead
            }
            Repair::PopRead => {
                if without != Without::PopWordFirst {
                    filter(&mut self.orphans, self.word);
                }
                Repair::Intents(0)
            }
            Repair::Intents(REQUESTERS) => Repair::Drained(0),
            Repair::Intents(r) => {
                if !self.is_dead(r) && without != Without::Intents {
                    let intent = self.intents[r];
                    self.orphans
                        .iter_mut()
                        .for_each(|o| o.1 |= Some(o.0) == intent);
                }
                Repair::Intents(r + 1)
            }
            Repair::Drained(REQUESTERS) => {
                if without == Without::PopWordFirst {
                    filter(&mut self.orphans, self.word);
                }
                Repair::GivingBack
            }
            Repair::Drained(r) => {
                if without != Without::Drain {
                    self.drain(r)?;
                }
                Repair::Drained(r + 1)
            }
            Repair::GivingBack => match self.orphans.iter().position(|o| !o.1) {
                None => Repair::Idle,
                Some(i) => {
                    let ((count, index), _) = self.orphans.remove(i);
                    if without == Without::GiveBack || self.taken[index as usize] > count {
                        Repair::GivingBack
                    } else {
                        self.taken[index as usize] = count + 1;
                        Repair::HeadRead(self.word, index)
                    }
                }
            },
            Repair::HeadRead(word, index) => {
                self.links[index as usize] = word.1;
                if without == Without::ReturnedLast {
                    self.returned += 1;
                }
                Repair::LinkSet(word, index)
            }
            Repair::LinkSet(word, index) if self.word == word => {
                self.word.1 = index;
                if without != Without::HeadAccount {
                    self.taken[word.1 as usize] = word.0 + 1;
                }
                match self.owners[index as usize] {
                    Owner::Held(r) if self.is_dead(r) => {
                        self.owners[index as usize] = Owner::Posted
                    }
                    owner => return Err(format!("receive {index} given back, which is {owner:?}")),
                }
                Repair::Exchanged
            }
            Repair::LinkSet(_, index) => {
                if without == Without::ReturnedLast {
                    self.returned -= 1;
                }
                Repair::HeadRead(self.word, index)
            }
            Repair::Exchanged => {
                if without != Without::ReturnedLast {
                    self.returned += 1;
                }
                Repair::GivingBack
            }
        };
        Ok(())
    }

    /// Checks that the list holds exactly the posted receives, once everything has ended.
    fn check_end(&self) -> Result<(), String> {
        let mut listed = vec![];
        let mut at = self.word.1;
        for _ in 0..self.posted + self.returned - self.word.0 {
            listed.push(at);
            at = self.links[at as usize];
        }
        listed.sort_unstable();
        let posted: Vec<u8> = (0..WQES as u8)
            .filter(|&i| self.owners[i as usize] == Owner::Posted)
            .collect();
        let is_held = self.owners.iter().any(|o| matches!(o, Owner::Held(_)));
        if listed != posted || is_held {
            Err(format!("listed {listed:?}, but {:?}", self.owners))
        } else {
            Ok(())
        }
    }
}

impl Model {
    fn go(
        &mut self,
        mut state: State,
        step: impl FnOnce(&mut State) -> Result<(), String>,
    ) -> Option<State> {
        let result = step(&mut state);
        if let (Err(what), None) = (result, &self.wrong) {
            self.wrong = Some(what);
        }
        (self.wrong.is_none() && self.seen.insert(state.clone())).then_some(state)
    }

    fn run(&mut self) {
        let mut open = vec![State::new()];
        while let Some(state) = open.pop() {
            for r in 0..REQUESTERS {
                if matches!(state.at[r], At::Done | At::Dead) {
                    continue;
                }
                open.extend(self.go(state.clone(), |s| s.request(r)));
                if r < 2 && state.kills > 0 {
                    open.extend(self.go(state.clone(), |s| {
                        s.at[r] = At::Dead;
                        s.kills -= 1;
                        Ok(())
                    }));
                }
            }
            let without = self.without;
            let is_over = state.at.iter().all(|at| matches!(at, At::Done | At::Dead));
            let is_noticed = (0..REQUESTERS).all(|r| !state.is_dead(r) || state.noticed[r]);
            if is_over && is_noticed && state.repair == Repair::Idle && state.orphans.is_empty() {
                open.extend(self.go(state.clone(), |s| {
                    (0..REQUESTERS).try_for_each(|r| s.drain(r))?;
                    s.check_end()
                }));
            }
            open.extend(self.go(state.clone(), |s| s.repair(without)));
            if self.wrong.is_some() {
                return;
            }
        }
    }
}

fn explore(without: Without) -> (usize, Option<String>) {
    let mut model = Model {
        without,
        seen: HashSet::new(),
        wrong: None,
    };
    model.run();
    (model.seen.len(), model.wrong)
}

#[test]
fn no_interleaving_of_requesters_deaths_and_repair_shares_or_loses_a_receive() {
    let (states, wrong) = explore(Without::Nothing);
    println!("{states} states");
    assert_eq!(wrong, None);
    assert!(states > 100_000, "the model was not explored");
}

#[test]
fn each_order_and_account_of_the_repair_is_needed() {
    use Without::*;
    for without in [
        PopWordFirst,
        Intents,
        Drain,
        HeadAccount,
        ReturnedLast,
        GiveBack,
    ] {
        let (states, wrong) = explore(without);
        println!("without {without:?}: {states} states, {wrong:?}");
        assert!(wrong.is_some(), "nothing wrong without {without:?}");
    }
}
