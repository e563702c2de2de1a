//! Regions and their owners' deaths, with real processes: each helper is this test binary, run
//! again with a role in its environment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use copyrpc_shm::dir::Dir;
use copyrpc_shm::memfd::{Memfd, MemfdId};
use copyrpc_shm::region::{CreateError, OpenError, OwnerState, Region};
use copyrpc_testing::helpers::{self, Helper, Scratch, next_word, say, wait_for};

const KIND: u64 = 0x7465_7374;
fn create(dir: &Dir, name: &str) -> Region {
    Region::create(dir, name, KIND, 4096, |_| {}).unwrap()
}

/// Plays the other side of every test below, in a helper process.
pub(crate) fn play() {
    let Some((role, dir)) = helpers::role() else {
        return;
    };
    match role.as_str() {
        "own" => {
            let region = create(&dir, "r");
            say("ready");
            next_word();
            drop(region);
        }
        "fork" => {
            let _region = create(&dir, "r");
            // SAFETY: the child calls only async-signal-safe functions.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: both are async-signal-safe; the alarm bounds the child's life.
                unsafe {
                    libc::alarm(20);
                    libc::pause();
                    libc::_exit(0);
                }
            }
            say(child);
            next_word();
        }
        "reopen" => {
            let _region = create(&dir, "r");
            drop(std::fs::File::open(dir.path().join("r")).unwrap());
            say("ready");
            next_word();
        }
        "thread" => {
            let dir = dir.clone();
            let _region = std::thread::spawn(move || create(&dir, "r"))
                .join()
                .unwrap();
            say("ready");
            next_word();
        }
        "half" => {
            let _ = Region::create(&dir, "r", KIND, 4096, |_| {
                say("half");
                next_word();
            });
            say("whole");
            next_word();
        }
        "memfd" => {
            let memory = Memfd::create("test", 1 << 30).unwrap();
            memory.commit(0..4096).unwrap();
            // SAFETY: the page is committed and aligned.
            let word = unsafe { memory.base().cast::<AtomicU64>().as_ref() };
            word.store(0x1234, Ordering::Release);
            let id = memory.id();
            say(format_args!(
                "{} {} {} {}",
                id.token, id.bytes, id.pid, id.fd
            ));
            next_word();
        }
        "client" => {
            let region = Region::open(&dir, "r", KIND, 1).unwrap();
            let lock = region.lock_file().try_lock(7).unwrap();
            say("locked");
            next_word();
            drop(lock);
            say("free");
            next_word();
        }
        "racer" => {
            for _ in 0..50 {
                match Region::create(&dir, "r", KIND, 4096, |_| {}) {
                    Ok(region) => {
                        assert!(
                            dir.path().join("r").exists(),
                            "a living region lost its name"
                        );
                        // The region is forgotten and not dropped, so in the next round the name is
                        // taken by a living owner.
                        std::mem::forget(region);
                        say("won");
                        next_word();
                        return;
                    }
                    Err(CreateError::Exists { .. } | CreateError::Busy { .. }) => {
                        std::thread::yield_now()
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            say("lost");
            next_word();
        }
        other => panic!("unknown role {other}"),
    }
}

#[test]
fn killed_owner_is_dead_swept_and_replaced() {
    let scratch = Scratch::new("killed");
    let dir = scratch.dir();
    let mut owner = Helper::start("own", &scratch);
    assert_eq!(owner.hear(), "ready");
    let seen = Region::open(&dir, "r", KIND, 4096).unwrap();
    assert_eq!(seen.owner_state(), OwnerState::Alive);
    assert!(!seen.owner_hint());
    assert!(matches!(
        Region::create(&dir, "r", KIND, 4096, |_| {}),
        Err(CreateError::Exists { .. })
    ));
    assert_eq!(dir.sweep().unwrap(), 0, "a living region was swept");
    owner.kill();
    wait_for("the death was not noticed", || {
        seen.owner_state() == OwnerState::Dead
    });
    assert!(matches!(
        Region::open(&dir, "r", KIND, 1),
        Err(OpenError::OwnerGone { .. })
    ));
    assert_eq!(dir.sweep().unwrap(), 1);
    assert!(scratch.names().is_empty());

    let mut owner = Helper::start("own", &scratch);
    assert_eq!(owner.hear(), "ready");
    owner.kill();
    let next = create(&dir, "r");
    assert_ne!(next.epoch(), seen.epoch());
    assert_eq!(
        seen.owner_state(),
        OwnerState::Dead,
        "the successor does not revive the old region"
    );
    assert_eq!(
        Region::open(&dir, "r", KIND, 1).unwrap().epoch(),
        next.epoch()
    );
}

#[test]
fn orderly_end_is_closed_and_leaves_nothing() {
    let scratch = Scratch::new("orderly");
    let dir = scratch.dir();
    let mut owner = Helper::start("own", &scratch);
    owner.hear();
    let seen = Region::open(&dir, "r", KIND, 1).unwrap();
    owner.tell("end");
    wait_for("the end was not noticed", || {
        seen.owner_state() == OwnerState::Closed
    });
    owner.wait();
    assert!(scratch.names().is_empty());
    assert!(matches!(
        Region::open(&dir, "r", KIND, 1),
        Err(OpenError::NotFound { .. })
    ));
}

#[test]
fn forked_child_does_not_keep_a_dead_owner_alive() {
    let scratch = Scratch::new("fork");
    let dir = scratch.dir();
    let mut owner = Helper::start("fork", &scratch);
    let child: i32 = owner.hear().parse().unwrap();
    let seen = Region::open(&dir, "r", KIND, 1).unwrap();
    owner.kill();
    assert_eq!(
        // SAFETY: signal 0 only asks whether the process exists.
        unsafe { libc::kill(child, 0) },
        0,
        "the child must outlive its parent for this test"
    );
    wait_for("the child kept its parent alive", || {
        seen.owner_state() == OwnerState::Dead
    });
    // SAFETY: no pointers are involved; the child pauses until it is killed.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

#[test]
fn owner_that_reopened_and_closed_its_file_is_not_dead() {
    let scratch = Scratch::new("reopen");
    let dir = scratch.dir();
    let mut owner = Helper::start("reopen", &scratch);
    owner.hear();
    let seen = Region::open(&dir, "r", KIND, 1).unwrap();
    assert!(
        !seen.lock_file().is_held(0),
        "the premise: the lock is lost"
    );
    assert_eq!(seen.owner_state(), OwnerState::Alive);
    assert_eq!(dir.sweep().unwrap(), 0);
    owner.kill();
    wait_for("the death was not noticed", || {
        seen.owner_state() == OwnerState::Dead
    });
}

#[test]
fn end_of_the_creating_thread_is_a_hint_and_no_death() {
    let scratch = Scratch::new("thread");
    let dir = scratch.dir();
    let mut owner = Helper::start("thread", &scratch);
    owner.hear();
    let seen = Region::open(&dir, "r", KIND, 1).unwrap();
    assert!(seen.owner_hint());
    assert_eq!(seen.owner_state(), OwnerState::Alive);
    assert_eq!(dir.sweep().unwrap(), 0);
    owner.kill();
    wait_for("the death was not noticed", || {
        seen.owner_state() == OwnerState::Dead
    });
}

#[test]
fn region_is_invisible_until_it_is_whole() {
    let scratch = Scratch::new("half");
    let dir = scratch.dir();
    let mut owner = Helper::start("half", &scratch);
    assert_eq!(owner.hear(), "half");
    assert!(scratch.names().is_empty(), "a half-made region has a name");
    assert!(matches!(
        Region::open(&dir, "r", KIND, 1),
        Err(OpenError::NotFound { .. })
    ));
    owner.kill();
    assert!(
        scratch.names().is_empty(),
        "an owner killed half-way left something"
    );
    let mut owner = Helper::start("half", &scratch);
    owner.hear();
    owner.tell("go on");
    assert_eq!(owner.hear(), "whole");
}

#[test]
fn creation_killed_at_random_moments_is_seen_whole_or_not_at_all() {
    let scratch = Scratch::new("random");
    let dir = scratch.dir();
    for round in 0..20u64 {
        let mut owner = Helper::start("own", &scratch);
        let start = Instant::now();
        let delay = Duration::from_micros(round * 400);
        while start.elapsed() < delay {
            match Region::open(&dir, "r", KIND, 4096) {
                Ok(_) | Err(OpenError::NotFound { .. } | OpenError::OwnerGone { .. }) => {}
                Err(other) => panic!("round {round}: {other}"),
            }
        }
        owner.kill();
    }
    drop(create(&dir, "r"));
    assert!(scratch.names().is_empty());
}

#[test]
fn of_many_processes_that_replace_a_dead_region_one_wins() {
    let scratch = Scratch::new("race");
    for _ in 0..5 {
        let mut owner = Helper::start("own", &scratch);
        owner.hear();
        owner.kill();
        let mut racers: Vec<_> = (0..4).map(|_| Helper::start("racer", &scratch)).collect();
        let won = racers
            .iter_mut()
            .map(Helper::hear)
            .filter(|word| word == "won")
            .count();
        assert_eq!(won, 1);
        assert_eq!(scratch.names(), ["r"]);
    }
}

#[test]
fn client_lock_is_seen_and_ends_with_the_client() {
    let scratch = Scratch::new("client");
    let region = create(&scratch.dir(), "r");
    assert!(!region.lock_file().is_held(7));
    let mut client = Helper::start("client", &scratch);
    client.hear();
    assert!(region.lock_file().is_held(7));
    assert!(region.lock_file().try_lock(7).is_err());
    client.tell("unlock");
    client.hear();
    assert!(!region.lock_file().is_held(7));
    let mut client = Helper::start("client", &scratch);
    client.hear();
    client.kill();
    wait_for("a dead client's lock stays", || {
        !region.lock_file().is_held(7)
    });
    assert!(
        region.lock_file().is_held(0),
        "looking at client locks dropped the owner's"
    );
}

#[test]
fn stopped_process_memory_can_be_attached() {
    let scratch = Scratch::new("memfd");
    let mut owner = Helper::start("memfd", &scratch);
    let line = owner.hear();
    let numbers: Vec<u64> = line.split(' ').map(|n| n.parse().unwrap()).collect();
    let [token, bytes, pid, fd] = numbers[..] else {
        panic!("{line}")
    };
    let id = MemfdId {
        token,
        bytes,
        pid: pid as u32,
        fd: fd as u32,
    };
    owner.signal(libc::SIGSTOP);
    let memory = Memfd::attach(&id, true).unwrap();
    // SAFETY: the owner committed the first page.
    let word = unsafe { memory.base().cast::<AtomicU64>().as_ref() };
    assert_eq!(word.load(Ordering::Acquire), 0x1234);
    owner.kill();
    assert_eq!(
        word.load(Ordering::Acquire),
        0x1234,
        "the mapping outlives the owner"
    );
    assert!(matches!(
        Memfd::attach(&id, true),
        Err(copyrpc_shm::memfd::MemfdAttachError::NotFound { .. })
    ));
}
