//! Sleeping until something happens, and waking who sleeps.

use core::sync::atomic::{AtomicU32, Ordering};

use shm::sync::heavy_barrier;

use super::arrive::Arrivals;
use super::{Clock, Hca, State};

/// How often a sleeper looks by itself, in ns: for the timers of the device, and where the system has no membarrier(2).
const LONGEST_SLEEP_NS: u64 = 1_000_000;

/// Wakes who waits on `word`, in whatever process.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the address is valid; the kernel only looks for sleepers on it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

fn futex_wait(word: &AtomicU32, expected: u32, timeout_ns: u64) {
    let timeout = libc::timespec { tv_sec: (timeout_ns / 1_000_000_000) as _, tv_nsec: (timeout_ns % 1_000_000_000) as _ };
    // SAFETY: both addresses are valid for the call. Any return is only a reason to look again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout) };
}

impl Hca {
    /// Makes progress and sleeps until an armed CQ of this device has a CQE that it was armed for, or `timeout_ns` have passed in real time.
    /// Returns whether there is one; it disarms those CQs.
    pub(crate) fn wait(&self, timeout_ns: Option<u64>) -> bool {
        let end_ns = timeout_ns.map(|ns| Clock::System.now_ns().saturating_add(ns));
        loop {
            self.empty_poll();
            let state = &mut *self.state.borrow_mut();
            if state.cqs.iter_mut().flatten().filter_map(|cq| cq.take_event().then_some(())).count() > 0 {
                return true;
            }
            let now_ns = Clock::System.now_ns();
            if end_ns.is_some_and(|end_ns| now_ns >= end_ns) {
                return false;
            }
            let longest = end_ns.map_or(LONGEST_SLEEP_NS, |end_ns| LONGEST_SLEEP_NS.min(end_ns - now_ns));
            self.sleep(state, longest);
        }
    }

    fn sleep(&self, state: &mut State, longest_ns: u64) {
        let sleep = &self.memory.lanes().sleep;
        let wakes = sleep.wakes.load(Ordering::Acquire);
        sleep.sleeping.store(1, Ordering::Relaxed);
        let State { qps, cqs, hot, injector, .. } = state;
        // H7, R1: from here on a requester sees the flags, or its message is seen now.
        let ready = super::objects::ready_words(&self.memory);
        if hot.arm_all(&Arrivals { hca: self, qps, cqs, injector }) && heavy_barrier() && !ready.any() {
            futex_wait(&sleep.wakes, wakes, longest_ns);
        }
        sleep.sleeping.store(0, Ordering::Relaxed);
    }
}
