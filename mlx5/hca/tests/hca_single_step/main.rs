//! A process with an `mlx5_hca::Hca` is single-stepped through one `poll`, and stopped, or killed,
//! after every instruction. It plays three roles: the requester of an atomic that also sends into a
//! copied queue; the requester that takes the answer; and the owner that copies receives, answers
//! atomics and makes CQEs. At every instruction third parties continue. An atomic is executed once
//! if its requester lives, and at most once otherwise. No receive is lost or arrives twice. A
//! stopped owner stops only the requesters of its atomics.
#![cfg(target_arch = "x86_64")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test"
)]

#[path = "../foreign/driver.rs"]
mod driver;
mod owner;
mod process;
mod requester;
mod support;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use copyrpc_testing::tracee::{Helper, Points, Tracee, again_and_again, on_one_core};
use driver::{ALL, Done, ENTRIES, End, World};
use mlx5_hca::wire::*;
use support::{scale, watchdog};

const DIR: &str = "MLX5_TEST_HCA_DIR";
const ROLE: &str = "MLX5_TEST_HCA_ROLE";
/// Watchdog, far above the duration of a test.
const WATCHDOG: Duration = Duration::from_secs(240);
/// Duration of each test, times `MLX5_TEST_SCALE`. Every instruction is tried at most once.
const SECONDS: u64 = 2;
/// Number of receives that a target keeps posted: one WQE of a list is its end.
const RECEIVES: usize = ENTRIES as usize - 1;
/// Offsets of the word of atomics, of the target of WRITEs, and of the receives' buffers.
const WORD: usize = 64;
const AREA: usize = 1024;
const BUFFERS: usize = 4096;
const BUFFER: usize = 64;
/// Bit in the immediate of a third party's message.
const OF_THIRD: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Sends, and requests an atomic.
    Asker,
    /// Takes the answer of an atomic.
    Taker,
    /// Copies receives, answers an atomic, makes CQEs.
    Owner,
}

const ROLES: [Role; 3] = [Role::Asker, Role::Taker, Role::Owner];

/// The receives of a target, which keeps all of them posted, each with a buffer.
struct Receives {
    free: VecDeque<u16>,
}

impl Receives {
    fn new(end: &mut End) -> Self {
        let mut receives = Self {
            free: (0..ENTRIES as u16).collect(),
        };
        receives.post(end);
        receives
    }

    fn post(&mut self, end: &mut End) {
        let n = self.free.len() - 1;
        for _ in 0..n {
            let (index, next) = (self.free[0], self.free[1]);
            end.write_receive(
                index,
                next,
                end.sge(BUFFERS + usize::from(index) * BUFFER, BUFFER as u32),
            );
            self.free.pop_front();
        }
        end.ring_receives(n as u16);
    }

    /// Returns the message's immediate, which is in the buffer too.
    fn take(&mut self, end: &End, wqe: u16, imm: u32) {
        assert!(!self.free.contains(&wqe), "receive {wqe} came twice");
        assert_eq!(
            u32::from_ne_bytes(end.data.get(BUFFERS + usize::from(wqe) * BUFFER)),
            imm,
            "what message {imm:#x} brought"
        );
        self.free.push_back(wqe);
    }
}

/// Posts message `imm` from `from`, without moving the doorbell record. Its bytes have their own
/// place.
fn post_send(from: &mut End, imm: u32) {
    let place = 2048 + (imm as usize % 32) * 8;
    from.data.put(place, imm.to_ne_bytes());
    let sge = from.sge(place, 4);
    from.post(Opcode::SendImm, imm, &[sge]);
}

fn post_fetch_add(from: &mut End, to: [u8; SEGMENT]) {
    let sge = from.sge(0, 8);
    from.post(
        Opcode::AtomicFetchAdd,
        0,
        &[
            to,
            AtomicSegment {
                swap_add: 1,
                compare: 0,
            }
            .emit(),
            sge,
        ],
    );
}

fn remote(words: &[u64], offset: usize) -> [u8; SEGMENT] {
    RaddrSegment {
        addr: words[1] + offset as u64,
        rkey: words[2] as u32,
    }
    .emit()
}

fn describe(end: &End, qpn: u32) -> String {
    format!("{qpn} {} {}", end.addr(0), end.key)
}

fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect()
}

/// Runs the process that the tests below stop and kill. It is not a test of its own.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn stepped_process() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let role = ROLES[std::env::var(ROLE).unwrap().parse::<usize>().unwrap()];
    again_and_again(|| {
        let world = World::shared(Path::new(&dir));
        match role {
            Role::Owner => process::own(&world),
            _ => process::ask(&world, role),
        }
    });
}

// ---- the others ----

fn new_dir(name: &str) -> PathBuf {
    let dir = PathBuf::from(format!(
        "/dev/shm/mlx5-test-hca-{name}-{}",
        std::process::id()
    ));
    std::fs::create_dir(&dir).unwrap();
    dir
}

/// Checks that the next HCA cleans up after the killed HCAs, and that no file is left then.
fn remove_dir(dir: &Path) {
    drop(World::shared(dir).hca());
    assert_eq!(
        std::fs::read_dir(dir).unwrap().count(),
        0,
        "nothing is left behind"
    );
    std::fs::remove_dir(dir).unwrap();
}

/// Starts the process that forks processes of this role.
fn helper(dir: &Path, role: Role) -> Helper {
    let number = ROLES.iter().position(|&r| r == role).unwrap().to_string();
    Helper::start(&[(DIR, dir.as_os_str()), (ROLE, number.as_ref())])
}

/// Does `work` until it returns `true`.
fn until(what: &str, mut work: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !work() {
        assert!(Instant::now() < end, "{what} does not come");
    }
}

#[test]
fn who_asks_for_an_atomic_stopped_anywhere_stalls_nobody_and_has_it_once() {
    on_one_core(|| requester::stop(Role::Asker));
}

#[test]
fn who_takes_an_answer_stopped_anywhere_stalls_nobody_and_has_it_once() {
    on_one_core(|| requester::stop(Role::Taker));
}

#[test]
fn who_asks_for_an_atomic_killed_anywhere_stalls_nobody_and_has_it_at_most_once() {
    on_one_core(|| requester::kill(Role::Asker));
}

#[test]
fn who_takes_an_answer_killed_anywhere_stalls_nobody() {
    on_one_core(|| requester::kill(Role::Taker));
}

#[test]
fn an_owner_stopped_anywhere_stops_its_atomics_and_nothing_else() {
    on_one_core(owner::stop);
}

#[test]
fn the_atomics_of_an_owner_killed_anywhere_end() {
    on_one_core(owner::kill);
}
