//! Links with a past, for tests of counters that wrap.

use crate::link::{Calls, Link, LinkConfig};
use crate::ring::RingView;
use crate::wire::FlowWords;

/// The past of a connection when it begins, in addition to its positions. The past is empty, except
/// in tests of wrapping counters. Everything in it is settled: nothing is outstanding. The peer's
/// past is the same with the directions exchanged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Past {
    pub(crate) sent: Traffic,
    pub(crate) received: Traffic,
    /// Slots of this end's calls, all free.
    pub(crate) slots: u32,
    pub(crate) generation: u32,
    pub(crate) heartbeat: u32,
}

/// The traffic in one direction: sent, taken and answered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) batches: u64,
    /// Credit of the calls in bytes: a multiple of 32.
    pub(crate) credit: u64,
    pub(crate) requests: u64,
}

impl<U> Link<U> {
    pub(crate) fn with_past(
        send: RingView,
        recv: RingView,
        config: &LinkConfig,
        past: &Past,
    ) -> Self {
        let Past {
            sent,
            received,
            slots,
            generation,
            heartbeat,
        } = *past;
        let mut link = Self::new(send, recv, config);
        link.reservation.skip(received.credit);
        link.credit.skip(sent.credit);
        let told = FlowWords {
            consumer_pos: config.recv_start,
            credit: link.reservation.granted(),
            batches_received: received.batches,
        };
        let heard = FlowWords {
            consumer_pos: config.send_start,
            credit: link.credit.granted(),
            batches_received: sent.batches,
        };
        link.tx.skip(sent.batches);
        link.rx.skip(told, received.requests);
        link.calls = Calls::with_generations(slots, generation);
        link.told_by_batch.credit = told.credit;
        (link.heard_by_batch, link.heard_by_read, link.last_read) = (heard, heard, heard);
        link.backoff.skip(received.batches);
        (link.heartbeat, link.heard_heartbeat) = (heartbeat, heartbeat);
        link.stats.batches_sent = sent.batches.wrapping_neg();
        link.stats.batches_received = received.batches.wrapping_neg();
        link
    }
}
