//! Clients that come and go, in seats that are few.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod support;

use std::cell::Cell;

use shm::clients::{JoinError, Patrol, Seats};
use shm::region::Region;
use shm::sync::{AtomicU64, Ordering};
use support::Scratch;

const SEATS: usize = 3;
/// Passes to one that looks for the dead.
const PASSES: usize = 256;

#[test]
fn a_million_clients_that_leave_or_die_use_up_neither_seats_nor_generations() {
    const CLIENTS: u32 = 1_000_000;
    let scratch = Scratch::new("seats");
    let region = Region::create(&scratch.dir(), "r", 1, Seats::bytes(SEATS), |_| {}).unwrap();
    // SAFETY: the region has that many bytes, zeroed, page aligned, and outlives the view.
    let seats = unsafe { Seats::new(region.view().base(), SEATS) };
    // In the middle, the generation of the first seat starts again at 0.
    let first = u64::from(0u32.wrapping_sub(CLIENTS / 2)) << 32;
    // SAFETY: the word of the first seat, which nobody uses yet.
    unsafe { region.view().at::<AtomicU64>(64).unwrap().as_ref() }.store(first, Ordering::Relaxed);
    // One stays, in the second seat.
    let leaves = seats.join(region.lock_file()).unwrap();
    let stays = seats.join(region.lock_file()).unwrap();
    seats.leave(leaves);
    let (mut patrol, clock) = (Patrol::default(), Cell::new(0));
    let now = || {
        clock.set(clock.get() + 1_000_000);
        clock.get()
    };
    assert!(patrol.is_due(&seats));
    patrol.pass(&seats, region.lock_file(), now, |_, _| {});
    let mut last = [None; SEATS];
    for client in 0..CLIENTS {
        let session = seats.join(region.lock_file()).unwrap();
        let (seat, generation) = (session.seat(), session.generation());
        assert!(seat != stays.seat() && seats.holds(&session));
        assert_ne!(last[seat].replace(generation), Some(generation));
        let dies = client % 64 == 0;
        if dies {
            drop(session);
        } else {
            seats.leave(session);
        }
        let mut buried = vec![];
        for _ in 0..if dies { PASSES } else { 1 } {
            if patrol.is_due(&seats) {
                patrol.pass(&seats, region.lock_file(), now, |seat, generation| buried.push((seat, generation)));
            }
        }
        assert_eq!(buried, [(seat, generation)], "client {client}");
    }
    assert!(seats.holds(&stays));
    let rest: Vec<_> = (1..SEATS).map(|_| seats.join(region.lock_file()).unwrap()).collect();
    assert!(matches!(seats.join(region.lock_file()), Err(JoinError::Full { max_clients: SEATS })));
    println!("{CLIENTS} clients came and went, {} seats free after", rest.len());
}
