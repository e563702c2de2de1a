//! Sleeping until something happens, and waking who sleeps.

use core::sync::atomic::{AtomicU32, Ordering};

use shm::sync::heavy_barrier;

use super::arrive::Arrivals;
use super::{Clock, Hca, State, datagram};

/// How often a sleeper looks by itself, in ns: for peers that died with one of its receives, which wake nobody. In this crate's own tests never,
/// so that a lost wake-up is a hang and not a delay.
const LONGEST_SLEEP_NS: u64 = if cfg!(test) { u64::MAX } else { 100_000_000 };
/// The same where it cannot know when it has something to do, because somebody else moves its clock; and where the system has no membarrier(2),
/// so that a wake-up may be missed.
const SHORT_SLEEP_NS: u64 = 1_000_000;
/// What is due sooner is slept for all the same: a full lane is tried again at once, and its consumer may be stopped.
const SHORTEST_SLEEP_NS: u64 = 20_000;

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
            let left_ns = end_ns.map_or(u64::MAX, |end_ns| end_ns - now_ns);
            let longest_ns = match (&self.clock, state.deferred.next_ns()) {
                (Clock::System, None) => LONGEST_SLEEP_NS,
                (Clock::System, Some(at_ns)) => at_ns.saturating_sub(now_ns).clamp(SHORTEST_SLEEP_NS, LONGEST_SLEEP_NS),
                (Clock::Manual(_), _) | (Clock::Stepping { .. }, None) => SHORT_SLEEP_NS,
                // Polls alone bring this clock there.
                (Clock::Stepping { .. }, Some(_)) => continue,
            };
            // Somebody may die meanwhile.
            state.polls_to_patrol = 1;
            self.sleep(state, longest_ns.min(left_ns));
        }
    }

    /// Sleeps, with no look at the world before it, as if what is sent now had been sent right after the last look.
    #[cfg(test)]
    pub(crate) fn sleep_at_once(&self) {
        self.sleep(&mut self.state.borrow_mut(), u64::MAX);
    }

    fn sleep(&self, state: &mut State, longest_ns: u64) {
        let sleep = &self.memory.lanes().sleep;
        let wakes = sleep.wakes.load(Ordering::Acquire);
        sleep.sleeping.store(1, Ordering::Relaxed);
        let State { qps, cqs, hot, injector, .. } = state;
        // H7, R1: `arm_all` has the barrier. From there on who sends sees the flags, or what it sent is seen below.
        let ready = super::objects::ready_words(&self.memory);
        let is_idle = hot.arm_all(&Arrivals { hca: self, qps, cqs, injector });
        if is_idle && !ready.any() && !datagram::any_ready(&self.memory) {
            futex_wait(&sleep.wakes, wakes, longest_ns);
        } else if !heavy_barrier() {
            // Without membarrier(2) the lanes stay hot, so that a message in one would not wake us.
            futex_wait(&sleep.wakes, wakes, longest_ns.min(SHORT_SLEEP_NS));
        }
        sleep.sleeping.store(0, Ordering::Relaxed);
    }
}
