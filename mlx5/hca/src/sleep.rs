//! Sleeping until a poll has something to do.

use core::time::Duration;

use copyrpc_shm::sleep::{self, Sleeper, Watch, Word};

use crate::shared::datagrams::ready_lids;
use crate::{Clock, Hca};

/// Maximum sleep, in ns. The death of a peer that holds a receive of this device wakes no sleeper,
/// so the sleeper checks its peers after this time.
const MAX_SLEEP_NS: u64 = 100_000_000;
/// Maximum sleep, in ns, if the user sets the clock, or if packets cannot wake the sleeper.
const SHORT_SLEEP_NS: u64 = 1_000_000;
/// Minimum sleep, in ns, even if an event is due sooner. A send queue that finds a lane full is due
/// again at once, and would keep this thread busy while the lane's consumer is stopped.
const SHORTEST_SLEEP_NS: u64 = 20_000;

/// Whether a test has removed the maximum sleep of this process.
pub(crate) static SLEEPS_WITHOUT_END: core::sync::atomic::AtomicBool =
    core::sync::atomic::AtomicBool::new(false);

fn longest_ns() -> u64 {
    if SLEEPS_WITHOUT_END.load(core::sync::atomic::Ordering::Relaxed) {
        return u64::MAX;
    }
    MAX_SLEEP_NS
}

/// The condition that ends a sleep: a message in a hot lane, a ready bit, or work for the port.
/// Each check borrows the state of the device only for its own duration.
pub(crate) struct Idle<'a>(pub(crate) &'a Hca);

impl Watch for Idle<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.0.memory.lanes().sleep.0.word());
        let port = &mut self.0.state.borrow_mut().wire.port;
        if let Some(waker) = port.as_mut().and_then(|port| port.waker()) {
            show(waker.word());
        }
    }

    fn arm(&mut self) {
        // A peer may die during the sleep, so the next poll checks the peers.
        self.0.has_chores.set(true);
        let state = &mut *self.0.state.borrow_mut();
        state.polls_to_check = 0;
        if let Some(waker) = state.wire.port.as_mut().and_then(|port| port.waker()) {
            waker.arm();
        }
        // From now on, requesters set ready bits (R1 of docs/shm-protocols.md), and then wake this
        // sleeper (H7 of `shared::layout`).
        state.hot.arm(&state.queues);
    }

    fn look(&mut self, is_told: bool) -> bool {
        let state = &mut *self.0.state.borrow_mut();
        let are_empty = state.hot.deactivate(&state.queues, is_told);
        let has_packets = state.wire.port.as_ref().is_some_and(|port| port.has_work());
        !are_empty || has_packets || state.ready.any() || ready_lids(&self.0.memory).any()
    }

    fn slice(&mut self) -> Duration {
        Duration::from_nanos(self.0.longest_sleep_ns())
    }

    /// Polls all lanes. The next poll does the other due work.
    fn check(&mut self) -> bool {
        self.0.poll_all_lanes();
        true
    }
}

impl Hca {
    /// Makes progress, then calls `then` with a watch. The watch ends a sleep when a poll would
    /// have something to do. Completions that are already in a queue do not end the sleep.
    pub fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.empty_poll();
        then(&mut Idle(self));
    }

    /// Makes progress and sleeps until an armed CQ of this device has a CQE of the armed kind,
    /// until `alarm` has an event, or for `timeout_ns` of real time. Returns whether there is such
    /// a CQE, and disarms its CQ.
    pub fn wait(&self, timeout_ns: Option<u64>, alarm: &mut impl Watch) -> bool {
        let end_ns = timeout_ns.map(|ns| Clock::System.now_ns().saturating_add(ns));
        loop {
            let (mut has_event, mut left_ns) = (false, 0);
            let mut sleep_in = |watch: &mut dyn Watch| {
                has_event = self.take_events();
                left_ns = end_ns.map_or(u64::MAX, |end_ns| {
                    end_ns.saturating_sub(Clock::System.now_ns())
                });
                let longest_ns = self.longest_sleep_ns().min(left_ns);
                if !has_event
                    && longest_ns > 0
                    && !sleep::sleep_once(watch, Duration::from_nanos(longest_ns))
                    && !watch.look(false)
                {
                    self.poll_all_lanes();
                }
            };
            self.empty_poll();
            sleep::join(
                [&mut Idle(self) as &mut dyn Sleeper, &mut *alarm],
                &mut sleep_in,
            );
            if has_event || left_ns == 0 || alarm.look(true) {
                return has_event;
            }
        }
    }

    /// Polls all lanes after a sleep that timed out: R4 of docs/shm-protocols.md (lost events).
    fn poll_all_lanes(&self) {
        self.poll_cold_lanes(&mut self.state.borrow_mut(), usize::MAX);
    }

    /// Disarms the CQs that have a CQE of the kind for which they are armed. Returns whether there
    /// were any.
    fn take_events(&self) -> bool {
        let cqs = &mut self.state.borrow_mut().queues.cqs;
        cqs.iter_mut()
            .flatten()
            .filter_map(|cq| cq.take_event().then_some(()))
            .count()
            > 0
    }

    /// Returns the time in ns that the device can sleep before it must poll by itself. The result
    /// is 0 if an event is scheduled and only polls advance the clock.
    fn longest_sleep_ns(&self) -> u64 {
        let state = &mut *self.state.borrow_mut();
        let mut is_woken = true;
        if let Some(port) = state.wire.port.as_deref_mut() {
            is_woken = port.waker().is_some();
            if port.has_unsent() {
                return SHORTEST_SLEEP_NS;
            }
        }
        match (&self.clock, state.next_event_ns()) {
            (Clock::System, None) if !is_woken => SHORT_SLEEP_NS,
            (Clock::System, None) => longest_ns(),
            (Clock::System, Some(at_ns)) => at_ns
                .saturating_sub(Clock::System.now_ns())
                .clamp(SHORTEST_SLEEP_NS, longest_ns()),
            (Clock::Manual(_), _) | (Clock::Stepping { .. }, None) => SHORT_SLEEP_NS,
            (Clock::Stepping { .. }, Some(_)) => 0,
        }
    }
}
