//! Models of a whole server and its clients. One client after the other uses the only entry, with
//! lanes of one slot, so that everything is reused at once.
//!
//! Entries, lanes and bits are types of loom. The region is real, for the locks that prove clients
//! alive. The guarantee of the kernel, that a process's last store comes before the end of its
//! lock, is one atomic in the models.

use super::*;
use crate::client::Client;
use crate::views::Views;
use copyrpc_shm::dir::Dir;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::region::Region;
use copyrpc_shm::sync::{AtomicBool, AtomicU64, FIRST, yield_now};
use loom::sync::Arc;
use std::os::unix::fs::DirBuilderExt;

const KIND: u64 = 1;

struct Home {
    dir: Dir,
    region: Region,
}

impl Home {
    fn new(name: &str) -> std::sync::Arc<Self> {
        let path =
            std::path::PathBuf::from(format!("/dev/shm/shm-model-{name}-{}", std::process::id()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .unwrap();
        let dir = Dir::open(Some(&path)).unwrap();
        let region = Region::create(&dir, "r", KIND, 1, |_| {}).unwrap();
        std::sync::Arc::new(Self { dir, region })
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.dir.path());
    }
}

/// The shared memory: one entry, two lanes of one slot.
#[derive(Clone, Copy)]
struct Memory {
    entries: Entries,
    lanes: LanePairs<u64, u64>,
    ready: ReadyWords,
}

impl Memory {
    fn new() -> Self {
        let slot = || NonNull::from(Box::leak(Box::new(Slot::<Tagged<u64>>::empty()))).cast();
        let words: &'static [AtomicU64] = Box::leak(
            (0..ReadyWords::words(1))
                .map(|_| AtomicU64::new(0))
                .collect(),
        );
        let given_up = NonNull::from(Box::leak(Box::new(AtomicU64::new(0))));
        // SAFETY: all slots and words are leaked and zeroed. There is one client, and each of its
        // two lanes has a slot of its own.
        let (lanes, ready) = unsafe {
            (
                LanePairs::new((slot(), 0), (slot(), 0), given_up, 1),
                ReadyWords::new(NonNull::from(words).cast(), 1),
            )
        };
        let entries = Entries::leaked();
        entries.prepare();
        Self {
            entries,
            lanes,
            ready,
        }
    }

    fn server(self) -> Sessions<u64, u64> {
        // SAFETY: the entry and its lanes are leaked, and each model makes one server for them.
        unsafe { Sessions::new(self.entries, self.lanes, Clock::default()) }
    }

    fn join(self, home: &Home) -> Option<Client<u64, u64, u64>> {
        let region = Region::open(&home.dir, "r", KIND, 1).unwrap();
        // SAFETY: the views are not in the region, but their memory is leaked, and so outlives the
        // client.
        unsafe {
            Client::join(
                region,
                Views {
                    entries: self.entries,
                    lanes: self.lanes,
                    announced: self.ready,
                },
                0,
            )
        }
        .ok()
    }

    fn call(caller: &mut Client<u64, u64, u64>, request: u64) {
        caller.call(request, request).unwrap();
    }

    fn answer_to(caller: &mut Client<u64, u64, u64>, request: u64) {
        while caller
            .poll_slots(|user, slot, outcome| {
                assert_eq!((user, slot, outcome), (request, 0, Ok(10 * request)))
            })
            .unwrap()
            == 0
        {
            yield_now();
        }
    }
}

/// L3 (`docs/shm-protocols.md`): both lanes wrap with every call; an answer, or the next call,
/// shows that a slot is free again.
#[test]
fn loom_a_lane_pair_of_one_slot_is_reused_by_answers() {
    const CALLS: u64 = 3;
    let home = Home::new("reuse");
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 10_000;
    model.check(move || {
        let memory = Memory::new();
        let (mut server, mut wakes) = (memory.server(), memory.ready);
        let mut caller = memory.join(&home).unwrap();
        let client = loom::thread::spawn(move || {
            for n in 1..=CALLS {
                Memory::call(&mut caller, n);
                Memory::answer_to(&mut caller, n);
            }
            caller
        });
        let mut answered = 0;
        while answered < CALLS {
            server.pass(&mut wakes, &[], home.region.lock_file());
            let Some((from, payload)) = server.recv() else {
                yield_now();
                continue;
            };
            answered += 1;
            assert_eq!(payload, answered);
            assert!(server.answer(&from, ANSWERED, || 10 * answered));
        }
        client.join().unwrap();
    });
}

/// C6: a call that ends as stopped was not taken.
#[test]
fn loom_a_server_that_stops_has_not_taken_the_calls_that_end_so() {
    let home = Home::new("stop");
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 10_000;
    model.check(move || {
        let memory = Memory::new();
        let (mut server, mut wakes) = (memory.server(), memory.ready);
        let mut caller = memory.join(&home).unwrap();
        let client = loom::thread::spawn(move || {
            let is_made = caller.call(1, 1).is_ok();
            let mut ended = None;
            while caller.poll(|_, outcome| ended = Some(outcome)).is_ok() {
                yield_now();
            }
            (is_made, ended, caller)
        });
        server.pass(&mut wakes, &[], home.region.lock_file());
        let taken = server.recv();
        if let Some((from, _)) = &taken {
            assert!(server.answer(from, ANSWERED, || 10));
        }
        server.stop();
        let (is_made, ended, _) = client.join().unwrap();
        let expected = if taken.is_some() {
            Ok(10)
        } else {
            Err(copyrpc_calls::CallFailure::NotSent)
        };
        assert_eq!(ended, is_made.then_some(expected));
        assert!(
            memory.join(&home).is_none(),
            "nobody joins a server that stops"
        );
    });
}

const FORMER: u32 = FIRST.wrapping_add(1);

/// The progress of the former client of the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Joined,
    HalfWritten,
    Published,
    Notified,
    Answered,
}

/// The end of a client, and the way in which the server detects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Killed,
    /// The client gives up its entry; the server sees that by the count of departures (C3).
    Left,
    /// The client gives up its entry; the server sees that by the count of departures (C3) or by
    /// the word of the entry (C1).
    LeftBeforeRound,
}

/// C1 to C5: the entry of a client that is gone, at whatever stage, passes to the next client with
/// empty lanes, and the answer to a call of the former client reaches no client.
fn recover(name: &str, stage: Stage, end: End) {
    let (is_killed, finds_left) = (end == End::Killed, end == End::LeftBeforeRound);
    let home = Home::new(name);
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 10_000;
    model.check(move || {
        let memory = Memory::new();
        let (mut server, mut wakes) = (memory.server(), memory.ready);
        let mut former = memory.join(&home).unwrap();
        let is_dead = Arc::new(AtomicBool::new(false));
        let (dies, also_home) = (Arc::clone(&is_dead), std::sync::Arc::clone(&home));
        let clients = loom::thread::spawn(move || {
            match stage {
                Stage::Joined => {}
                Stage::HalfWritten => former.call_half(1),
                Stage::Published => former.call_unannounced(1, 1),
                Stage::Notified | Stage::Answered => Memory::call(&mut former, 1),
            }
            if stage == Stage::Answered {
                Memory::answer_to(&mut former, 1);
            }
            if is_killed {
                former.die();
                dies.store(true, Ordering::Release);
            } else {
                drop(former);
            }
            let mut next = loop {
                if let Some(next) = memory.join(&also_home) {
                    break next;
                }
                yield_now();
            };
            Memory::call(&mut next, 2);
            Memory::answer_to(&mut next, 2);
            next
        });
        let mut former = None;
        loop {
            let must_look =
                is_dead.load(Ordering::Acquire) && memory.entries.taken_by(0) == Some(FORMER);
            server.pass(&mut wakes, &[], home.region.lock_file());
            let Sessions {
                hot, reaper, table, ..
            } = &mut server;
            let file = home.region.lock_file();
            let reap = |client, _| forget(client, hot, table);
            // Runs the rounds that are due after some time.
            if must_look {
                reaper.check(file, 1 << 40, reap);
            } else if finds_left {
                reaper.reap_departed(file, reap);
            }
            let Some((from, payload)) = server.recv() else {
                yield_now();
                continue;
            };
            if payload == 2 {
                assert_eq!(from.generation, FORMER.wrapping_add(1));
                let reached = former.is_some_and(|from| server.answer(&from, ANSWERED, || 10));
                assert!(!reached, "an answer to the former client reached the next");
                assert!(server.answer(&from, ANSWERED, || 20));
                break;
            }
            assert!(
                payload == 1 && former.is_none() && from.generation == FORMER,
                "a call of the former client arrived late or twice"
            );
            if stage == Stage::Answered {
                assert!(server.answer(&from, ANSWERED, || 10));
            }
            former = Some(from);
        }
        clients.join().unwrap();
    });
}

#[test]
fn loom_the_next_client_of_a_entry_gets_its_own_answer_only() {
    for stage in [
        Stage::Joined,
        Stage::HalfWritten,
        Stage::Published,
        Stage::Notified,
        Stage::Answered,
    ] {
        for end in [End::Killed, End::Left, End::LeftBeforeRound] {
            // No client closes in the middle of a call; it can only be killed there.
            if end == End::Killed || stage != Stage::HalfWritten {
                recover(&format!("{stage:?}-{end:?}"), stage, end);
            }
        }
    }
}
