//! Sleeping until something happens, and waking who sleeps.

use core::time::Duration;

use shm::ready::HotSet;
use shm::sleep::Watch;

use super::arrive::Arrivals;
use super::{Clock, Hca, State, datagram};

/// How often a sleeper looks by itself, in ns: for peers that died with one of its receives, which wake nobody. In this crate's own tests never,
/// so that a lost wake-up is a hang and not a delay.
const LONGEST_SLEEP_NS: u64 = if cfg!(test) { u64::MAX } else { 100_000_000 };
/// The same where it cannot know when it has something to do, because somebody else moves its clock.
const SHORT_SLEEP_NS: u64 = 1_000_000;
/// What is due sooner is slept for all the same: a full lane is tried again at once, and its consumer may be stopped.
const SHORTEST_SLEEP_NS: u64 = 20_000;

/// What ends a sleep: anything to be taken from a lane, or announced by a ready bit.
struct Idle<'a> {
    hot: &'a mut HotSet,
    arrivals: Arrivals<'a>,
}

impl Watch for Idle<'_> {
    fn arm(&mut self) {
        self.hot.arm(&self.arrivals);
    }

    fn look(&mut self, is_told: bool) -> bool {
        let memory = &self.arrivals.hca.memory;
        !self.hot.cool(&self.arrivals, is_told) || super::objects::ready_words(memory).any() || datagram::any_ready(memory)
    }
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
        let State { qps, cqs, hot, injector, .. } = state;
        // H7, R1
        let mut idle = Idle { hot, arrivals: Arrivals { hca: self, qps, cqs, injector } };
        self.memory.lanes().sleep.0.sleep(Duration::from_nanos(longest_ns), &mut idle);
    }
}
