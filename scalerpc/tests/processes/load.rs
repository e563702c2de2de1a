//! Two processes of a hundred clients each, and four processes of five hundred.

use std::time::{Duration, Instant};

use scalerpc::ServerConfig;

use crate::crowd::SIZE;
use crate::desk::Desk;
use crate::support::plan::SLOT_BYTES;
use copyrpc_testing::helpers::{Helper, Scratch, limited, scale};

/// Entries in addition to the entries for the clients of both processes: clients that have
/// disconnected keep their entries until the server detects their ends.
const SPARE: usize = 32;
/// Number of processes that are killed, in sequence, while calls are made.
const KILLS: u64 = 5;
/// More requests than killed clients can have in the pools.
const MORE: u64 = 5_000;

fn crowd(scratch: &Scratch) -> Helper {
    Helper::start("crowd", scratch)
}

/// Raises the limit of descriptors. A software device keeps several files of each peer open: more
/// than the default limit of most systems.
fn allow_many_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    assert_eq!(
        // SAFETY: room for the answer.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) },
        0
    );
    limit.rlim_cur = limit.rlim_max;
    assert_eq!(
        // SAFETY: a valid limit, which helpers inherit.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) },
        0
    );
}

/// Steps until `done`. Fails if a process ends first; its clients have then printed why.
fn step_until(desk: &mut Desk, crowds: &mut [Helper], mut done: impl FnMut(&Desk) -> bool) {
    for step in 0_u64.. {
        if done(desk) {
            return;
        }
        if !desk.step() {
            std::thread::yield_now();
        }
        assert!(
            step % 4096 != 0 || !crowds.iter_mut().any(Helper::has_ended),
            "a process of clients has ended"
        );
    }
}

/// Each request runs once, and each response belongs to its call. Requests of killed clients run at
/// most once. The resources of killed clients return (S20); without them the processes that take
/// their places could not join.
#[test]
fn two_hundred_clients_lose_and_repeat_nothing_while_they_join_and_leave_and_are_killed() {
    limited(|| {
        allow_many_files();
        let calls = 1_000_000 * u64::from(scale());
        let scratch = Scratch::new("scalerpc-load");
        let max_clients = (2 * SIZE + SPARE) as u32;
        let config = ServerConfig {
            max_clients,
            slot_bytes: SLOT_BYTES,
            // A slice has time for some rounds of a process that polls a hundred clients, so that
            // requests are written by WRITEs as well as fetched by READs.
            slice_ns: 1_000_000,
            // No client is stopped for this long.
            drain_ns: 100_000_000_000,
            ..ServerConfig::default()
        };
        let mut desk = Desk::new(&scratch, &config);
        let mut crowds = [crowd(&scratch), crowd(&scratch)];
        let mut most = 0;
        for kill in 0..KILLS {
            step_until(&mut desk, &mut crowds, |desk| {
                most = most.max(desk.guests());
                desk.executed() >= (kill + 1) * calls / (KILLS + 1) && most >= 2 * SIZE
            });
            let dead = kill as usize % 2;
            crowds[dead].kill();
            let (living, before) = (&mut crowds[1 - dead..2 - dead], desk.executed());
            step_until(&mut desk, living, |desk| desk.executed() > before + MORE);
            step_until(&mut desk, living, |desk| {
                desk.server.clients() <= SIZE + SPARE
            });
            crowds[dead] = crowd(&scratch);
        }
        step_until(&mut desk, &mut crowds, |desk| {
            desk.executed() >= calls && desk.guests() >= 2 * SIZE
        });
        crowds.iter_mut().for_each(Helper::hang_up);
        step_until(&mut desk, &mut [], |desk| {
            desk.guests() == 0 && crowds.iter_mut().all(Helper::has_ended)
        });
        crowds.iter_mut().for_each(Helper::wait);
        step_until(&mut desk, &mut [], |desk| desk.server.clients() == 0);

        let (stats, executed) = (*desk.server.stats(), desk.executed());
        eprintln!(
            "{executed} requests ran; {} of them of {} clients that left; {KILLS} processes killed",
            desk.answered, desk.farewells
        );
        eprintln!("{} times no room; {stats:?}", desk.refused);
        assert!(
            desk.answered > calls / 4
                && desk.farewells > 2 * SIZE as u64
                && stats.slices > 100
                && stats.evictions == 0
        );
        // Accepted requests of clients that were gone before a worker took them did not run.
        assert!(executed <= stats.accepted);
        desk.close(&scratch);
    });
}

/// The resources of the server's process.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// Number of descriptors, without the descriptors of the clients' channels.
    descriptors: usize,
    /// KiB of private memory: mainly the heap.
    own: usize,
    /// KiB of shared memory: the touched part of the devices'.
    shared: usize,
    /// KiB of the heap that the test's books take.
    books: usize,
}

impl Held {
    fn by(desk: &Desk) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let kib = |name| {
            let value = status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap();
            value.trim().trim_end_matches(" kB").parse().unwrap()
        };
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count() - desk.guests();
        Self {
            descriptors,
            own: kib("RssAnon:"),
            shared: kib("RssShmem:"),
            books: desk.bytes_of_books() / 1024,
        }
    }
}

/// Clients connect, call and disconnect for half a minute, times the scale. In the end the server
/// has no more resources than after the first tenth of the time.
#[test]
#[ignore = "half a minute and more; scripts/soak scalerpc-clients"]
fn two_thousand_clients_of_four_processes_take_constant_memory_and_descriptors() {
    limited(|| {
        allow_many_files();
        const PROCESSES: usize = 4;
        const CLIENTS: usize = 500;
        let time = Duration::from_secs(30) * scale();
        let scratch = Scratch::new("scalerpc-soak");
        let max_clients = (PROCESSES * CLIENTS + SPARE) as u32;
        let config = ServerConfig {
            max_clients,
            slot_bytes: SLOT_BYTES,
            drain_ns: 100_000_000_000,
            ..ServerConfig::default()
        };
        let mut desk = Desk::new(&scratch, &config);
        let mut crowds: Vec<_> = (0..PROCESSES)
            .map(|_| Helper::start(&format!("crowd {CLIENTS}"), &scratch))
            .collect();
        let start = Instant::now();
        step_until(&mut desk, &mut crowds, |desk| {
            desk.guests() >= PROCESSES * CLIENTS && start.elapsed() > time / 10
        });
        let (before, executed) = (Held::by(&desk), desk.executed());
        let mut look = start.elapsed();
        step_until(&mut desk, &mut crowds, |desk| {
            if start.elapsed() > look {
                look += time / 10;
                eprintln!("{} clients left; {:?}", desk.farewells, Held::by(desk));
            }
            start.elapsed() > time
        });
        let after = Held::by(&desk);
        eprintln!(
            "{} requests, {} clients left; {before:?}, then {after:?}",
            desk.executed(),
            desk.farewells
        );
        assert!(desk.executed() > executed, "nothing ran");
        assert!(
            after.descriptors <= before.descriptors + SPARE,
            "descriptors: {before:?}, {after:?}"
        );
        let [first, last] = [before, after].map(|held| held.own + held.shared - held.books);
        assert!(
            last < first + first / 10 + 4096,
            "memory in KiB: {before:?}, {after:?}"
        );
        crowds.iter_mut().for_each(Helper::hang_up);
        step_until(&mut desk, &mut [], |desk| {
            desk.guests() == 0 && crowds.iter_mut().all(Helper::has_ended)
        });
        crowds.iter_mut().for_each(Helper::wait);
        step_until(&mut desk, &mut [], |desk| desk.server.clients() == 0);
        desk.close(&scratch);
    });
}
