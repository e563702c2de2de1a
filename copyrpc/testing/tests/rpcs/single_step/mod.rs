//! A process is single-stepped through one verb of a shared-memory RPC and stopped, or killed,
//! after every instruction: as a client and as the server. At each instruction, the other processes
//! continue; every call of a living client ends once, with the right answer or because the server
//! is dead; a request of a killed client arrives completely or not at all; entries, and the name of
//! a server, can be taken again.

pub(crate) mod client;
pub(crate) mod server;

use std::ffi::OsStr;
use std::time::Duration;

use copyrpc_shm::dir::Dir;
use copyrpc_shm::ready::ARMED;
use copyrpc_shm::region::Region;
use copyrpc_shm::sync::{AtomicU32, Ordering};

use crate::rpc::{Outcome, Rpc};
use copyrpc_testing::helpers::{Scratch, limited};
use copyrpc_testing::tracee::{Helper, Points, Tracee, Unit, on_one_core};

pub(crate) const DEPTH: usize = 8;
/// Entries of a server; the stepped process, or another client, has one of them.
pub(crate) const ENTRIES: usize = 3;
/// The numbers of the stepped process's requests are at least this number.
pub(crate) const STEPPED: u64 = 1 << 32;

/// Returns the steps at which one test stops: as many as 6 s permit, and, for the instructions of a
/// rare verb, which are thousands, as many as 0.3 s permit; both times are multiplied by
/// `SHM_TEST_SCALE`.
pub(crate) fn points(steps: usize, unit: Unit, is_rare: bool) -> Points {
    let is_sampled = is_rare && unit == Unit::Instruction;
    Points::within(
        steps,
        if is_sampled {
            Duration::from_millis(300)
        } else {
            Duration::from_secs(6)
        },
    )
}

/// The words of the sleepers in a server's region, and the flags of its lanes.
pub(crate) struct Words {
    region: Region,
    entries: usize,
}

impl Words {
    /// Opens the region of a server for `calls` calls.
    pub(crate) fn new<R: Rpc>(dir: &Dir, calls: usize) -> Self {
        let (region, entries) = R::entries(dir, calls);
        Self { region, entries }
    }

    fn at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the region lives as long as `self`, and all access to these words is atomic.
        unsafe {
            self.region
                .view()
                .at::<AtomicU32>(self.entries + offset)
                .unwrap()
                .as_ref()
        }
    }

    /// Returns whether the client of this entry must announce its calls to the server.
    pub(crate) fn is_armed(&self, entry: usize) -> bool {
        self.at(64 + 64 * entry + 8).load(Ordering::Relaxed) == ARMED
    }

    /// Makes the server look asleep. Returns the number of its wake-ups.
    pub(crate) fn lull_server(&self) -> u32 {
        self.at(12).store(1, Ordering::Relaxed);
        self.at(8).load(Ordering::Relaxed)
    }

    /// Makes the client of this entry look asleep. Returns the number of its wake-ups.
    pub(crate) fn lull_client(&self, entry: usize) -> u32 {
        self.at(64 + 64 * entry + 20).store(1, Ordering::Relaxed);
        self.at(64 + 64 * entry + 16).load(Ordering::Relaxed)
    }
}

/// A process that can be stepped, in a role. It can be [replaced](Tracee::replace).
pub(crate) fn start<R: Rpc>(role: &str, scratch: &Scratch, unit: Unit) -> Tracee {
    let role = format!("{} single step: {role}", R::NAME);
    let helper = Helper::start(&[
        ("SHM_TEST_ROLE", OsStr::new(&role)),
        ("SHM_TEST_DIR", scratch.path().as_os_str()),
    ]);
    let (mut stepped, _) = helper.fork();
    stepped.attach();
    stepped.step_by(unit);
    stepped
}

/// Runs the stepped process. Each line of its input has a verb and a number.
pub(crate) fn helper<R: Rpc>(role: &str, dir: &Dir) {
    match role {
        "client" => client::process::<R>(dir),
        "server" => server::process::<R>(dir),
        other => panic!("unknown role {other}"),
    }
}

/// Returns the verbs and numbers that the test sends.
fn orders() -> impl Iterator<Item = (String, u64)> {
    std::io::stdin().lines().map(|line| {
        let line = line.unwrap();
        let (verb, number) = line.split_once(' ').unwrap();
        (verb.to_owned(), number.parse().unwrap())
    })
}

/// Returns a client's report of the calls that ended.
fn words(ended: &[(u64, Outcome)]) -> String {
    format!("{ended:?}")
}

/// Makes the tests of each RPC.
macro_rules! steps {
    ($($rpc:ident)+: $tests:tt) => {
        $(mod $rpc { steps!(@ $rpc $tests); })+
    };
    (@ $rpc:ident { $($test:ident $role:ident::$how:ident($verb:ident, $unit:ident))* }) => {
        $(
            #[test]
            fn $test() {
                use super::$role::{$how, Verb};
                let name = concat!(stringify!($rpc), "-", stringify!($test));
                super::limited(|| super::on_one_core(|| $how::<rpc!($rpc)>(Verb::$verb, super::Unit::$unit, name)));
            }
        )*
    };
}

steps! {
    ipc delegation: {
        client_stopped_anywhere_in_call client::stop(Call, Instruction)
        client_killed_anywhere_in_call client::kill(Call, Instruction)
        client_stopped_anywhere_in_call_to_a_sleeper client::stop(WakingCall, Instruction)
        client_killed_anywhere_in_call_to_a_sleeper client::kill(WakingCall, Instruction)
        client_stopped_anywhere_in_wait client::stop(Wait, Instruction)
        client_stopped_at_any_system_call_of_wait client::stop(Wait, SystemCall)
        client_killed_anywhere_in_wait client::kill(Wait, Instruction)
        client_killed_at_any_system_call_of_wait client::kill(Wait, SystemCall)
        client_stopped_anywhere_in_poll_with_a_reply client::stop(PollReply, Instruction)
        client_killed_anywhere_in_poll_with_a_reply client::kill(PollReply, Instruction)
        client_stopped_anywhere_in_poll_without_a_reply client::stop(PollEmpty, Instruction)
        client_stopped_anywhere_in_poll_when_the_server_ends client::stop_at_the_end(PollEmpty, Instruction)
        client_killed_anywhere_in_poll_without_a_reply client::kill(PollEmpty, Instruction)
        client_stopped_anywhere_in_connect client::stop(Connect, Instruction)
        client_stopped_at_any_system_call_of_connect client::stop(Connect, SystemCall)
        client_killed_anywhere_in_connect client::kill(Connect, Instruction)
        client_killed_at_any_system_call_of_connect client::kill(Connect, SystemCall)
        client_stopped_anywhere_in_leave client::stop(Leave, Instruction)
        client_stopped_at_any_system_call_of_leave client::stop(Leave, SystemCall)
        client_killed_anywhere_in_leave client::kill(Leave, Instruction)
        client_killed_at_any_system_call_of_leave client::kill(Leave, SystemCall)
        server_stopped_anywhere_in_poll server::stop(Poll, Instruction)
        server_killed_anywhere_in_poll server::kill(Poll, Instruction)
        server_stopped_anywhere_in_poll_after_a_client_left server::stop(Reap, Instruction)
        server_killed_anywhere_in_poll_after_a_client_left server::kill(Reap, Instruction)
        server_stopped_anywhere_in_recv server::stop(Recv, Instruction)
        server_killed_anywhere_in_recv server::kill(Recv, Instruction)
        server_stopped_anywhere_in_reply server::stop(Reply, Instruction)
        server_killed_anywhere_in_reply server::kill(Reply, Instruction)
        server_stopped_anywhere_in_reply_to_a_sleeper server::stop(WakingReply, Instruction)
        server_killed_anywhere_in_reply_to_a_sleeper server::kill(WakingReply, Instruction)
        server_stopped_anywhere_in_wait server::stop(Wait, Instruction)
        server_stopped_at_any_system_call_of_wait server::stop(Wait, SystemCall)
        server_killed_anywhere_in_wait server::kill(Wait, Instruction)
        server_killed_at_any_system_call_of_wait server::kill(Wait, SystemCall)
        server_stopped_anywhere_in_reject server::stop(Reject, Instruction)
        server_killed_anywhere_in_reject server::kill(Reject, Instruction)
        server_stopped_anywhere_in_create server::stop_create(Create, Instruction)
        server_stopped_at_any_system_call_of_create server::stop_create(Create, SystemCall)
        server_killed_anywhere_in_create server::kill_create(Create, Instruction)
        server_killed_at_any_system_call_of_create server::kill_create(Create, SystemCall)
        server_stopped_anywhere_in_close server::stop_close(Close, Instruction)
        server_stopped_at_any_system_call_of_close server::stop_close(Close, SystemCall)
        server_killed_anywhere_in_close server::kill(Close, Instruction)
        server_killed_at_any_system_call_of_close server::kill(Close, SystemCall)
    }
}
