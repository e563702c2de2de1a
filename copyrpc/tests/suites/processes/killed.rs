//! Processes that are killed, and started again.

use std::time::Duration;

use super::job::{Job, scale};

const ENDLESS: u64 = u64::MAX;

/// Returns the pairs with `dead`, as the living nodes report them.
fn with(dead: usize) -> Vec<(usize, usize)> {
    (0..3)
        .filter(|node| *node != dead)
        .map(|node| (node, dead))
        .collect()
}

#[test]
fn calls_to_a_killed_process_end_the_others_go_on_and_its_successor_is_connected_to() {
    let mut job = Job::start("kill", 3, 1, ENDLESS);
    let mut rng = fastrand::Rng::with_seed(5);
    let mut ended = 0;
    for round in 0..12 * scale() {
        let dead = rng.usize(..3);
        for (a, b) in with(dead) {
            job.wait_for_traffic(a, b);
        }
        std::thread::sleep(Duration::from_micros(rng.u64(..2_000)));
        // In every third round, the process was stopped before it is killed.
        if round % 3 == 0 {
            job.stop(dead);
        }
        job.kill(dead);
        let over = job.wait_until("for the death to be noticed", &with(dead), |said| {
            said.is_over()
        });
        for said in &over {
            assert_eq!(said.stalled, 0, "{said:?}");
            ended += said.disconnected;
        }
        job.wait_for_traffic((dead + 1) % 3, (dead + 2) % 3);
        job.restart(dead);
        job.connect(&with(dead));
    }
    assert!(ended > 0, "calls were outstanding");
    for (a, b) in [(0, 1), (1, 2), (2, 0)] {
        job.wait_for_traffic(a, b);
    }
    job.finish();
}

/// The child has the memory, the files and the file locks of the dead process, but no part in its
/// connections.
#[test]
fn a_child_that_a_killed_process_forked_keeps_no_connection_alive() {
    let mut job = Job::start("fork", 3, 1, ENDLESS);
    let child = job.fork(2);
    for (a, b) in with(2) {
        job.wait_for_traffic(a, b);
    }
    job.kill(2);
    job.wait_until("for the death to be noticed", &with(2), |said| {
        said.is_over() && said.stalled == 0
    });
    // SAFETY: kill(2) with no signal.
    assert_eq!(unsafe { libc::kill(child, 0) }, 0, "the child lives");
    job.restart(2);
    job.connect(&with(2));
    for (a, b) in with(2) {
        job.wait_for_traffic(a, b);
    }
    job.finish();
}
