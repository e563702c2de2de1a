//! Takes WQEs off a send queue, in order, and completes them on its send CQ.
//!
//! All work happens in the caller's thread, in posting order, without help from the target's CPU. A
//! WQE that cannot run yet stops only its own send queue, and is tried again on a later empty poll.

use std::collections::VecDeque;

use mlx5_wire::{CtrlWords, FenceMode, SEGMENT, WQEBB};

use crate::debug::strict;
use crate::packets::run as packets;
use crate::queues::qp::{Mode, SoftQp, Transport, blocks};
use crate::requester::buffers;
use crate::requester::complete::{self, Completions};
use crate::requester::operations::execute;
use crate::requester::outcome::Outcome;
use crate::requester::plain;
use crate::requester::timing::Timing;
use crate::requester::wqe::{exceptional_outcome, wait, wqe_bytes};
use crate::shared::layout::qp_index;
use crate::shared::links::Links;
use crate::{Hca, Queues, State};

/// Longest WQE, in bytes: `ds` has 6 bits.
const MAX_WQE: usize = 16 * WQEBB;

/// Executes the new WQEs of queue pair `index`, whose register was just written.
#[inline(always)]
pub(crate) fn doorbell(hca: &Hca, index: usize) {
    // The state is borrowed again below, so that its address need not be kept across this call.
    let left = plain::rung(hca, &mut hca.state.borrow_mut(), index);
    if let Err(index) = left {
        ring_rest(hca, index);
    }
}

/// Executes the WQEs that [`plain::rung`] left, in strict mode after checking the doorbell.
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

/// Schedules the WQEs of a doorbell that are not executed at once.
#[cold]
fn rung_for_later(hca: &Hca, state: &mut State, index: usize) {
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
        return;
    };
    let from = qp
        .in_flight
        .announced
        .back()
        .map_or(qp.sq_limit, |last| last.end);
    if hca.strict {
        buffers::remember(hca, qp, from, qp.sq.producer());
    }
    let sends = hca.timing.announce(
        qp,
        hca.membership.lid,
        hca.clock.now_ns(),
        &mut state.deferred,
    );
    hca.sends.set(hca.sends.get() + sends);
}

/// Executes all WQEs up to the record, whatever their time, for a queue pair that broke a rule or
/// is in the error state.
#[cold]
pub(crate) fn announce_all(hca: &Hca, state: &mut State, index: usize) {
    run(hca, state, index, |qp| {
        qp.in_flight.announced.clear();
        qp.sq_limit = qp.sq.producer();
        qp.waiting = None;
        true
    });
}

/// Runs the send queues whose time has come. Returns whether one was due.
#[cold]
pub(crate) fn run_deferred(hca: &Hca, state: &mut State) -> bool {
    let now_ns = hca.clock.now_ns();
    let mut any = false;
    // Queues that schedule themselves again are left for the next poll.
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
        if let Transport::Wire(_) = qp.transport {
            packets::on_time(hca, state, index, now_ns);
            continue;
        }
        run_due(hca, state, index, now_ns);
    }
    any
}

/// Runs the due WQEs of a send queue: first the waiting one, then the announced ones, doorbell by
/// doorbell.
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
/// a retry made one late, its result is placed now.
fn end_fence(hca: &Hca, qp: &mut SoftQp) {
    // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the
    // completion.
    let head = unsafe { qp.sq.wqebb(qp.sq_consumer).cast::<[u8; SEGMENT]>().read() };
    if CtrlWords::parse(&head).fence() == FenceMode::None {
        return;
    }
    for i in 0..qp.in_flight.acknowledged.len() {
        if let Some(landing) = qp.in_flight.acknowledged[i].landing.take() {
            buffers::land(hca, qp, &landing);
        }
    }
}

/// Takes the first entry of `queue` if it is due.
fn due<T>(queue: &mut VecDeque<T>, is_due: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(is_due) {
        queue.pop_front()
    } else {
        None
    }
}

/// Runs a send queue up to its limit, if the queue pair exists and `begin` returns `true`.
fn run(hca: &Hca, state: &mut State, index: usize, begin: impl FnOnce(&mut SoftQp) -> bool) {
    let State {
        queues: Queues { qps, cqs, injector },
        deferred,
        links,
        violations,
        touched,
        ..
    } = state;
    let Some(Some(qp)) = qps.get_mut(index) else {
        return;
    };
    let qp = &mut **qp;
    if !begin(qp) {
        return;
    }
    let granted = match &qp.transport {
        Transport::Connected(remote) => remote.granted(),
        Transport::Wire(_) => return packets::run(hca, state, index),
        _ => 0,
    };
    while qp.sq_consumer != qp.sq_limit {
        let at = qp.sq.wqebb(qp.sq_consumer);
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and
        // the completion.
        let head = unsafe { at.cast::<[u8; SEGMENT]>().read() };
        let ctrl = CtrlWords::parse(&head);
        let outcome = match if qp.mode >= Mode::Exceptional {
            exceptional_outcome(hca, qp, injector, ctrl)
        } else {
            None
        } {
            None => match wqe_bytes(qp, at, ctrl) {
                Ok(Some(wqe)) => {
                    // SAFETY: the WQE is in the SQ's memory, which `qp` holds and the driver does
                    // not touch until completion.
                    let wqe = unsafe { wqe.as_ref() };
                    execute(hca, links, qp, ctrl, wqe, granted)
                }
                Ok(None) => execute_wrapped(hca, links, qp, ctrl, granted),
                Err(what) => what.into(),
            },
            Some(outcome) => outcome,
        };
        let (syndrome, vendor) = match outcome {
            Outcome::Done(byte_count) => {
                qp.waiting = None;
                let next = qp.sq_consumer.wrapping_add(blocks(ctrl.ds()));
                if hca.is_watched || ctrl.signaled() {
                    if hca.is_watched {
                        Completions {
                            hca,
                            cqs,
                            deferred,
                            violations,
                            touched,
                        }
                        .succeed(qp, ctrl, byte_count);
                    } else {
                        complete::succeed(hca, qp, cqs, ctrl, byte_count);
                    }
                    if ctrl.signaled() {
                        qp.watch.reported = next;
                    }
                }
                qp.sq_consumer = next;
                continue;
            }
            Outcome::Fail(syndrome, vendor) => (syndrome, vendor),
            // Of connections by packets only.
            Outcome::Later => break,
            Outcome::Wait(reason) => {
                let fault_ns = injector.as_ref().map_or(0, |i| i.delay_ns());
                match wait(hca, qp, reason, fault_ns) {
                    Ok(at_ns) => {
                        deferred.schedule(at_ns, qp.qpn);
                        break;
                    }
                    Err(syndrome) => (syndrome, 0),
                }
            }
        };
        Completions {
            hca,
            cqs,
            deferred,
            violations,
            touched,
        }
        .fail(qp, ctrl, syndrome, vendor);
    }
    match &mut qp.transport {
        Transport::Connected(remote) => remote.announce(hca.barrier),
        Transport::Datagram { .. } => links.flush_packets(),
        _ => {}
    }
}

/// Executes a WQE that wraps. A driver may let a WQE wrap; the device reads it in two parts.
#[cold]
fn execute_wrapped(
    hca: &Hca,
    links: &mut Links,
    qp: &mut SoftQp,
    ctrl: CtrlWords,
    granted: u64,
) -> Outcome {
    let mut whole = [0; MAX_WQE];
    let bytes = usize::from(ctrl.ds()) * SEGMENT;
    for (block, out) in (0..).zip(whole[..bytes].chunks_mut(WQEBB)) {
        // SAFETY: inside the SQ; the driver does not touch it until completion.
        unsafe {
            out.as_mut_ptr().copy_from_nonoverlapping(
                qp.sq.wqebb(qp.sq_consumer.wrapping_add(block)).as_ptr(),
                out.len(),
            )
        };
    }
    execute(hca, links, qp, ctrl, &whole[..bytes], granted)
}
