//! Deferred events, ordered by time; events of the same time, by the order of scheduling.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Time, in ns of the device's clock, after which a full lane (the queue of a peer's arrived
/// messages) is tried again, and a lane that a fault skipped is polled again.
pub(crate) const LANE_RETRY_NS: u64 = 1_000;

/// Scheduled runs of send queues. Each entry of the heap has the time of the run, a sequence number
/// and the QPN.
#[derive(Default)]
pub(crate) struct Deferred {
    heap: BinaryHeap<Reverse<(u64, u64, u32)>>,
    sequence: u64,
    /// Whether every empty poll has more to do than to take messages.
    has_extras: bool,
    /// Whether the next empty poll has more to do: `has_extras`, or an event is scheduled.
    any: bool,
}

impl Deferred {
    /// Makes room for one event of each send queue, so that scheduling allocates nothing while no
    /// send queue has a second event.
    pub(crate) fn reserve(&mut self, send_queues: usize) {
        self.heap.reserve(send_queues);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// Makes every empty poll do more than take messages, from now on.
    pub(crate) fn add_extras(&mut self) {
        (self.has_extras, self.any) = (true, true);
    }

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

    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.heap.peek().map(|&Reverse((at_ns, ..))| at_ns)
    }

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
