//! Clients that come and go, in entries that are few.

use super::*;
use copyrpc_shm::dir::Dir;
use copyrpc_shm::region::Region;
use std::os::unix::fs::DirBuilderExt;

const ENTRIES: usize = 3;

#[test]
fn a_million_clients_that_leave_or_die_use_up_neither_entries_nor_generations() {
    const CLIENTS: u32 = 1_000_000;
    let path = std::path::PathBuf::from(format!("/dev/shm/ipc-entries-{}", std::process::id()));
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&path)
        .unwrap();
    let region = Region::create(
        &Dir::open(Some(&path)).unwrap(),
        "r",
        1,
        Entries::bytes(ENTRIES),
        |_| {},
    )
    .unwrap();
    // Removes the name at once: the test needs the memory and its locks only.
    std::fs::remove_dir_all(&path).unwrap();
    // SAFETY: the region has the bytes of `ENTRIES` entries, zeroed and page aligned, and outlives
    // the view.
    let entries = unsafe { Entries::new(region.view().base(), ENTRIES) };
    // In the middle, the generation of the first entry starts again at 0.
    let first = u64::from(0u32.wrapping_sub(CLIENTS / 2)) << 32;
    // SAFETY: the word of the first entry, which no other thread uses yet.
    unsafe { region.view().at::<AtomicU64>(64).unwrap().as_ref() }.store(first, Ordering::Relaxed);
    let holds = |session: &Session| {
        entries
            .held_by(session.entry, session.generation)
            .is_some_and(|holding| holding.lasts())
    };
    // One stays, in the second entry.
    let leaves = entries.join(region.lock_file()).unwrap().unwrap();
    let stays = entries.join(region.lock_file()).unwrap().unwrap();
    entries.leave(leaves);
    let (mut reaper, mut now_ns) = (Reaper::of(entries), 0);
    assert!(reaper.is_due());
    reaper.pass(region.lock_file(), |_, _| {});
    let mut last = [None; ENTRIES];
    for client in 0..CLIENTS {
        let session = entries.join(region.lock_file()).unwrap().unwrap();
        let (entry, generation) = (session.entry, session.generation);
        assert!(entry != stays.entry && holds(&session));
        assert_ne!(last[entry].replace(generation), Some(generation));
        let dies = client % 64 == 0;
        if dies {
            drop(session);
        } else {
            entries.leave(session);
        }
        let mut reaped = vec![];
        if dies {
            now_ns = reaper.tick(now_ns + 1_000_000);
        }
        assert!(reaper.is_due());
        reaper.pass(region.lock_file(), |entry, generation| {
            reaped.push((entry, generation))
        });
        assert!(!reaper.is_due());
        assert_eq!(reaped, [(entry, generation)], "client {client}");
    }
    assert!(holds(&stays));
    let rest: Vec<_> = (1..ENTRIES)
        .map(|_| entries.join(region.lock_file()).unwrap().unwrap())
        .collect();
    assert!(entries.join(region.lock_file()).unwrap().is_none());
    let Ok([leaves, dies]) = <[Session; 2]>::try_from(rest) else {
        panic!("the region has three entries");
    };
    let holdings = [&stays, &leaves, &dies]
        .map(|session| entries.held_by(session.entry, session.generation).unwrap());
    entries.evict(stays.entry, stays.generation);
    entries.leave(leaves);
    drop(dies);
    assert_eq!(
        holdings.map(|holding| holding.reason_of_end()),
        [
            "the client broke the protocol",
            "the client has left",
            "the client has died"
        ]
    );
}
