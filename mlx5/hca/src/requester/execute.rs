//! The times at which the WQEs of a send queue are taken: at the doorbell, or when they are due.

use std::collections::VecDeque;

use mlx5_wire::FenceMode;

use crate::debug::strict;
use crate::queues::qp::{SoftQp, Transport};
use crate::requester::buffers;
use crate::requester::complete;
use crate::requester::connection as packets;
use crate::requester::plain;
use crate::requester::take::take_wqes;
use crate::requester::timing::Timing;
use crate::shared::layout::qp_index;
use crate::{Hca, State};

/// Executes the new WQEs of queue pair `index`, whose doorbell was just rung.
#[inline(always)]
pub(crate) fn doorbell(hca: &Hca, index: usize) {
    // The state is borrowed again below, so that its address need not be kept across this call.
    let left = plain::rung(hca, &mut hca.state.borrow_mut(), index);
    if let Err(index) = left {
        ring_rest(hca, index);
    }
}

/// Executes the WQEs that [`plain::rung`] left; in strict mode, checks the doorbell first.
#[inline(never)]
fn ring_rest(hca: &Hca, index: usize) {
    let state = &mut *hca.state.borrow_mut();
    if hca.strict && !strict::doorbell(hca, state, index) {
        return announce_all(hca, state, index);
    }
    rung(hca, state, index);
}

/// Executes, or schedules, the WQEs that a doorbell of queue pair `index` announced.
#[inline(never)]
pub(crate) fn rung(hca: &Hca, state: &mut State, index: usize) {
    if matches!(hca.timing, Timing::Immediate) {
        run(hca, state, index, |qp| {
            qp.sq_limit = qp.sq.producer();
            qp.waiting.is_none()
        });
    } else {
        rung_for_later(hca, state, index);
    }
}

#[cold]
fn rung_for_later(hca: &Hca, state: &mut State, index: usize) {
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
        return;
    };
    if hca.checks_buffers {
        buffers::remember(hca, qp, qp.announced(), qp.sq.producer());
    }
    let sends = hca.timing.announce(
        qp,
        hca.membership.lid,
        hca.clock.now_ns(),
        &mut state.deferred,
    );
    hca.sends.set(hca.sends.get() + sends);
}

/// Executes all WQEs up to the record's counter, after a broken rule or in the error state.
#[cold]
pub(crate) fn announce_all(hca: &Hca, state: &mut State, index: usize) {
    run(hca, state, index, |qp| {
        qp.in_flight.announced.clear();
        qp.sq_limit = qp.sq.producer();
        qp.waiting = None;
        true
    });
}

/// Runs the send queues that are due. Returns whether one was due.
#[cold]
pub(crate) fn run_deferred(hca: &Hca, state: &mut State) -> bool {
    let now_ns = hca.clock.now_ns();
    let mut any = false;
    // Queues that schedule themselves again are run by the next poll.
    for _ in 0..state.deferred.len() {
        let Some(qpn) = state.deferred.pop_due(now_ns) else {
            break;
        };
        let index = qp_index(qpn);
        let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
            continue;
        };
        if qp.qpn != qpn {
            continue;
        }
        any = true;
        while let Some(acknowledged) = due(&mut qp.in_flight.acknowledged, |acknowledged| {
            acknowledged.at_ns <= now_ns
        }) {
            complete::show(
                hca,
                qp,
                &mut state.queues.cqs,
                &mut state.violations,
                &acknowledged,
            );
        }
        if let Transport::Wire = qp.transport {
            packets::on_time(hca, state, index, now_ns);
            continue;
        }
        run_due(hca, state, index, now_ns);
    }
    any
}

/// Runs the due WQEs of a send queue: first the waiting WQE, then doorbell by doorbell.
pub(crate) fn run_due(hca: &Hca, state: &mut State, index: usize, now_ns: u64) {
    while let Some(Some(qp)) = state.queues.qps.get_mut(index) {
        if qp.sq_consumer == qp.sq_limit {
            let Some(announced) = due(&mut qp.in_flight.announced, |announced| {
                announced.at_ns <= now_ns
            }) else {
                return;
            };
            qp.sq_limit = announced.end;
            qp.in_flight.acknowledge_ns = announced.acknowledge_ns;
        }
        if qp.waiting.as_ref().is_some_and(|w| w.again_ns > now_ns) {
            return;
        }
        if hca.timing.is_model() {
            end_fence(hca, qp);
        }
        run(hca, state, index, |_| true);
        if state
            .queues
            .qps
            .get(index)
            .and_then(Option::as_ref)
            .is_none_or(|qp| qp.sq_consumer != qp.sq_limit)
        {
            return;
        }
    }
}

/// Ends the fence of the next WQE, if it has one: all READs and atomics before it have returned. If
/// one of them is late because of a retry, its result is placed now.
fn end_fence(hca: &Hca, qp: &mut SoftQp) {
    if qp.sq.ctrl(qp.sq_consumer).fence() == FenceMode::None {
        return;
    }
    for i in 0..qp.in_flight.acknowledged.len() {
        if let Some(landing) = qp.in_flight.acknowledged[i].landing.take() {
            buffers::place(hca, qp, &landing);
        }
    }
}

fn due<T>(queue: &mut VecDeque<T>, is_due: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(is_due) {
        queue.pop_front()
    } else {
        None
    }
}

/// Runs a send queue up to its limit, if the queue pair exists and `begin` returns `true`.
fn run(hca: &Hca, state: &mut State, index: usize, begin: impl FnOnce(&mut SoftQp) -> bool) {
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
        return;
    };
    if !begin(qp) {
        return;
    }
    if let Transport::Wire = qp.transport {
        return packets::run(hca, state, index);
    }
    take_wqes(hca, state, index);
}
