//! Deferred events: a queue ordered by time and, at equal times, by when they were scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Time until a full lane, or one that was skipped, is polled again in virtual time, in ns.
pub(crate) const LANE_RETRY_NS: u64 = 1_000;

/// Send queues to be run again, by QPN.
#[derive(Default)]
pub(crate) struct Deferred {
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    sequence: u64,
    /// Every empty poll has more to do than to take in messages, whether something is deferred or not.
    has_extras: bool,
    /// An empty poll has more to do.
    any: bool,
}

impl Deferred {
    /// Makes room for an event of each of so many send queues, so that scheduling allocates nothing: a send queue has one at most.
    pub(crate) fn reserve(&mut self, send_queues: usize) {
        self.heap.reserve(send_queues);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// From now on every empty poll has more to do.
    pub(crate) fn add_extras(&mut self) {
        (self.has_extras, self.any) = (true, true);
    }

    /// Returns whether an empty poll has more to do than to take in messages.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn schedule(&mut self, at_ns: u64, qpn: u32) {
        self.sequence += 1;
        self.heap.push(Reverse((at_ns, self.sequence, qpn)));
        self.any = true;
    }

    /// Returns the time of the next event.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|&Reverse((at_ns, ..))| at_ns)
    }

    /// Takes the next event that is due.
    pub(crate) fn pop_due(&mut self, now_ns: u64) -> Option<u32> {
        let Reverse((at_ns, _, qpn)) = *self.heap.peek()?;
        if at_ns > now_ns {
            return None;
        }
        self.heap.pop();
        self.any = self.has_extras || !self.heap.is_empty();
        Some(qpn)
    }
}
