//! Clients that come and go, in seats that are few.

use super::*;
use shm::dir::Dir;
use shm::region::Region;
use std::os::unix::fs::DirBuilderExt;

const SEATS: usize = 3;

#[test]
fn a_million_clients_that_leave_or_die_use_up_neither_seats_nor_generations() {
    const CLIENTS: u32 = 1_000_000;
    let path = std::path::PathBuf::from(format!("/dev/shm/ipc-seats-{}", std::process::id()));
    std::fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
    let region = Region::create(&Dir::open(Some(&path)).unwrap(), "r", 1, Seats::bytes(SEATS), |_| {}).unwrap();
    // Removes the name at once: the test needs the memory and its locks only.
    std::fs::remove_dir_all(&path).unwrap();
    // SAFETY: the region has that many bytes, zeroed, page aligned, and outlives the view.
    let seats = unsafe { Seats::new(region.view().base(), SEATS) };
    // In the middle, the generation of the first seat starts again at 0.
    let first = u64::from(0u32.wrapping_sub(CLIENTS / 2)) << 32;
    // SAFETY: the word of the first seat, which nobody uses yet.
    unsafe { region.view().at::<AtomicU64>(64).unwrap().as_ref() }.store(first, Ordering::Relaxed);
    let holds = |session: &Session| seats.held_by(session.seat, session.generation).is_some_and(|holding| holding.lasts());
    // One stays, in the second seat.
    let leaves = seats.join(region.lock_file()).unwrap();
    let stays = seats.join(region.lock_file()).unwrap();
    seats.leave(leaves);
    let (mut patrol, mut now_ns) = (Patrol::of(seats), 0);
    assert!(patrol.is_due());
    patrol.pass(region.lock_file(), |_, _| {});
    let mut last = [None; SEATS];
    for client in 0..CLIENTS {
        let session = seats.join(region.lock_file()).unwrap();
        let (seat, generation) = (session.seat, session.generation);
        assert!(seat != stays.seat && holds(&session));
        assert_ne!(last[seat].replace(generation), Some(generation));
        let dies = client % 64 == 0;
        if dies {
            drop(session);
        } else {
            seats.leave(session);
        }
        let mut buried = vec![];
        if dies {
            now_ns = patrol.tick(now_ns + 1_000_000);
        }
        assert!(patrol.is_due());
        patrol.pass(region.lock_file(), |seat, generation| buried.push((seat, generation)));
        assert!(!patrol.is_due());
        assert_eq!(buried, [(seat, generation)], "client {client}");
    }
    assert!(holds(&stays));
    let rest: Vec<_> = (1..SEATS).map(|_| seats.join(region.lock_file()).unwrap()).collect();
    assert!(matches!(seats.join(region.lock_file()), Err(JoinError::Full { max_clients: SEATS })));
    assert_eq!(rest.len(), SEATS - 1);
}
