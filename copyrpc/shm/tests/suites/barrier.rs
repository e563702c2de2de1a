//! The heavy barrier reaches every processor that runs a thread of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use copyrpc_shm::sync::heavy_barrier;
use copyrpc_testing::helpers::alone;

const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the processors that this thread may run on.
fn processors() -> Vec<usize> {
    // SAFETY: all zeroes are a set, and the kernel writes no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set),
            0
        );
        set
    };
    // SAFETY: the number is inside the set.
    (0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect()
}

/// Moves this thread to a processor.
fn move_to(cpu: usize) {
    // SAFETY: all zeroes are a set, the number is inside it, and the kernel reads no more than its
    // size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        assert_eq!(
            libc::sched_setaffinity(0, size_of_val(&set), &raw const set),
            0
        );
    }
}

/// Returns the number of interrupts that other processors sent to this processor (function call
/// interrupts), from the line of /proc/interrupts with a number for each processor.
fn calls_to(cpu: usize) -> u64 {
    let text = std::fs::read_to_string("/proc/interrupts").unwrap();
    let line = text
        .lines()
        .find(|line| line.ends_with("Function call interrupts"))
        .expect("a line of function call interrupts");
    line.split_whitespace()
        .nth(1 + cpu)
        .unwrap()
        .parse()
        .unwrap()
}

fn spin_for(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// A process registers for barriers after it ran on a processor that has been idle since. Linux
/// then leaves that processor out of barriers for all registered processes, until it has run
/// another process: on a processor that is never idle this test cannot fail, and on others it does
/// in one process of many.
#[test]
#[ignore = "needs two processors and /proc/interrupts"]
fn the_barrier_reaches_a_processor_that_idled_while_the_process_registered() {
    alone(
        "barrier::the_barrier_reaches_a_processor_that_idled_while_the_process_registered",
        50,
        register_and_count,
    );
}

fn register_and_count() {
    const BURST: u64 = 50;
    let [here, .., there] = processors()[..] else {
        panic!("one processor only")
    };
    move_to(there);
    spin_for(Duration::from_millis(2));
    move_to(here);
    spin_for(Duration::from_millis(2));
    assert!(heavy_barrier(), "no membarrier(2)");
    let shared = Arc::new((AtomicBool::new(false), AtomicU64::new(0)));
    let theirs = Arc::clone(&shared);
    let other = std::thread::spawn(move || {
        let (is_over, turns) = &*theirs;
        move_to(there);
        while !is_over.load(Ordering::Relaxed) {
            turns.fetch_add(1, Ordering::Relaxed);
        }
    });
    let (is_over, turns) = &*shared;
    let runs = || {
        let (start, before) = (Instant::now(), turns.load(Ordering::Relaxed));
        while turns.load(Ordering::Relaxed) == before {
            if start.elapsed() > Duration::from_micros(200) {
                return false;
            }
        }
        true
    };
    let start = Instant::now();
    while turns.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < PATIENCE, "the other thread does not run");
    }
    // Repeats bursts of barriers until the other thread ran during a whole burst.
    let reached = loop {
        let before = calls_to(there);
        let ran = (0..BURST)
            .filter(|_| runs() && heavy_barrier() && runs())
            .count();
        if ran as u64 == BURST {
            break calls_to(there) - before;
        }
        assert!(start.elapsed() < PATIENCE, "the other thread hardly runs");
    };
    is_over.store(true, Ordering::Relaxed);
    other.join().unwrap();
    assert!(
        reached >= BURST / 2,
        "{reached} of {BURST} barriers reached the other processor"
    );
}
