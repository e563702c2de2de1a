//! Processes that are stopped.

use std::time::Duration;

use super::job::{Job, STALL_TIMEOUT, Said, scale};

const ENDLESS: u64 = u64::MAX;

#[test]
fn a_process_stopped_at_random_moments_delays_nobody_else_and_loses_nothing() {
    let mut job = Job::start("stop", 3, 1, ENDLESS);
    let mut rng = fastrand::Rng::with_seed(11);
    for _ in 0..200 * scale() {
        let stopped = rng.usize(..3);
        std::thread::sleep(Duration::from_micros(rng.u64(..2_000)));
        job.stop(stopped);
        job.wait_for_traffic((stopped + 1) % 3, (stopped + 2) % 3);
        job.resume(stopped);
    }
    for (a, b) in [(0, 1), (1, 2), (2, 0)] {
        job.wait_for_traffic(a, b);
    }
    job.finish();
}

/// Cost of a process's step between two reports: CPU time, so that nothing else on the machine
/// counts.
fn step_ns([before, after]: [&Said; 2]) -> u64 {
    (after.cpu_ns - before.cpu_ns) / (after.rounds - before.rounds)
}

#[test]
fn a_process_stopped_for_too_long_is_given_up_and_connects_again_when_it_goes_on() {
    let mut job = Job::start("stall", 3, 1, ENDLESS);
    let others = [(0, 2), (1, 2)];
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        job.wait_for_traffic(a, b);
    }
    let mut stalled = 0;
    for _ in 0..2 * scale() {
        let [start, _] = job.wait_for_traffic(0, 1);
        std::thread::sleep(STALL_TIMEOUT / 4);
        let [with_all, _] = job.wait_for_traffic(0, 1);
        job.stop(2);
        let [stopped, _] = job.wait_for_traffic(0, 1);
        let over = job.wait_until("for the stopped one to be given up", &others, |said| {
            said.is_over()
        });
        for said in &over {
            assert_eq!(said.disconnected, 0, "{said:?}");
            stalled += said.stalled;
        }
        let [given_up, _] = job.wait_for_traffic(0, 1);
        let (before, after) = (step_ns([&start, &with_all]), step_ns([&stopped, &given_up]));
        assert!(
            after <= 3 * before,
            "a step takes {after} ns with a stopped peer, {before} ns without"
        );
        job.resume(2);
        let its = job.wait_until("for it to notice", &[(2, 0), (2, 1)], |said| said.is_over());
        assert!(its.iter().all(|said| said.stalled == 0), "{its:?}");
        job.connect(&others);
        for (a, b) in others {
            job.wait_for_traffic(a, b);
        }
    }
    assert!(stalled > 0, "calls were outstanding");
    job.finish();
}
