//! The owner's side of lanes: turns the messages that peers wrote there into CQEs in the owner's
//! completion queues.

use core::sync::atomic::{AtomicU32, Ordering};

use copyrpc_shm::cache::prefetch;
use copyrpc_shm::ready::{HotSet, Lanes};

use crate::queues::cq::SoftCq;
use crate::queues::qp::SoftQp;
use crate::responder::compact;
use crate::responder::deliver::{Sender, deliver, trace};
use crate::shared::layout::LANE_SLOTS;
use crate::{Hca, Queues, State};

/// Bytes of a cache line.
const LINE: u64 = 64;

/// Maximum interval, in messages, at which the owner stores its position in the lane for the
/// requester. The interval is a quarter of the lane if that is less.
const CONSUMED_EVERY: u32 = 16;

/// Returns [`SoftQp::ack_mask`] for a lane of this number of slots.
pub(crate) fn ack_mask(slots: u32) -> u64 {
    u64::from((slots / 4).min(CONSUMED_EVERY) - 1)
}

/// Makes one bounded pass over the hot lanes. Returns the number of messages taken. `IS_PLAIN` is
/// as in [`Queues::take`].
#[inline(always)]
pub(crate) fn pass<const IS_PLAIN: bool>(hca: &Hca, state: &mut State) -> usize {
    let State {
        queues,
        hot,
        ready,
        polls_to_check,
        ..
    } = state;
    let now_ns = || {
        hca.count_polls(polls_to_check, HotSet::PASSES_PER_CLOCK);
        hca.clock.now_ns()
    };
    hot.pass(
        ready,
        queues,
        |queues, lane, budget| queues.take::<IS_PLAIN>(hca, lane, budget),
        now_ns,
    )
}

/// Takes all messages in the lanes whose ready bits are set, in the order of the lanes. The lanes
/// stay armed, so that every message sets a bit.
#[cold]
pub(crate) fn exact_pass(hca: &Hca, state: &mut State) -> usize {
    hca.count_polls(&mut state.polls_to_check, 1);
    let (ready, queues) = (&state.ready, &mut state.queues);
    let mut taken = 0;
    ready.drain(|lane| {
        taken += queues.take::<false>(hca, lane, LANE_SLOTS);
        if queues.is_ready(lane) {
            // A fault skipped this lane, so its bit is set again.
            ready.notify(lane);
        }
    });
    taken
}

/// Takes all messages in one queue pair's lane. Their number is at most the number of slots,
/// whatever the peer writes meanwhile.
pub(crate) fn drain(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else {
        return;
    };
    for _ in 0..LANE_SLOTS {
        let Some(message) = qp.lane.pop() else { break };
        trace(hca, qp, &message);
        deliver(hca, qp, cq, message, Sender::Connected);
    }
    // L2 of docs/shm-protocols.md: the position is stored after the messages were copied out.
    qp.entry()
        .acks
        .consumed
        .store(qp.lane.position(), Ordering::Release);
}

impl Queues {
    /// Takes up to `budget` messages of a lane. With `IS_PLAIN` there is neither a trace nor a
    /// fault to make.
    #[inline(always)]
    fn take<const IS_PLAIN: bool>(&mut self, hca: &Hca, lane: usize, budget: usize) -> usize {
        let Self { qps, cqs, injector } = self;
        let Some(Some(qp)) = qps.get_mut(lane) else {
            return 0;
        };
        if !IS_PLAIN
            && injector
                .as_mut()
                .is_some_and(|injector| injector.passes_over())
        {
            // A skipped lane counts as having messages, so that it stays hot.
            return usize::from(qp.lane.is_ready());
        }
        let qp = &mut **qp;
        let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else {
            return 0;
        };
        if qp.is_compact {
            return compact::visit(hca, qp, cq, budget);
        }
        let mut taken = 0;
        while taken < budget {
            let Some(message) = qp.lane.pop() else {
                // The peer writes the payload before the message. So the lines of the payload are
                // fetched together with the message's line, and not after it.
                if taken == 0 {
                    prefetch(qp.next_payload as usize);
                    prefetch(qp.next_payload.wrapping_add(LINE) as usize);
                }
                break;
            };
            qp.next_payload = message.payload.wrapping_add(message.byte_count.into());
            if !IS_PLAIN {
                trace(hca, qp, &message);
            }
            deliver(hca, qp, cq, message, Sender::Connected);
            taken += 1;
            if qp.lane.position() & qp.ack_mask == 0 {
                // L2, as in `drain`.
                qp.entry()
                    .acks
                    .consumed
                    .store(qp.lane.position(), Ordering::Release);
            }
        }
        taken
    }
}

impl Lanes for Queues {
    fn is_ready(&self, lane: usize) -> bool {
        matches!(self.qps.get(lane), Some(Some(qp)) if qp.lane.is_ready())
    }

    fn armed(&self, lane: usize) -> Option<&AtomicU32> {
        let qp = self.qps.get(lane)?.as_ref()?;
        Some(&qp.entry().armed)
    }
}
