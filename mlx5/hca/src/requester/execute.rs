//! Takes WQEs off a send queue, in order, and completes them on its send CQ.
//!
//! All work happens in the caller's thread, in posting order, without help from the target's CPU. A WQE that cannot run yet stops only its
//! own send queue, and is tried again on a later empty poll.

use core::ptr::NonNull;
use std::collections::VecDeque;

use mlx5_wire::{CtrlWords, FenceMode, Opcode, SEGMENT, Syndrome, WQEBB};

use crate::debug::faults::{Fate, Injector};
use crate::debug::strict;
use crate::deferred::LANE_RETRY_NS;
use crate::queues::qp::{Mode, SoftQp, Waiting, blocks};
use crate::requester::buffers;
use crate::requester::complete::{self, Completions};
use crate::requester::data::takes_receive;
use crate::requester::operations::execute;
use crate::requester::outcome::{Limit, Malformed, Outcome, WaitFor};
use crate::requester::plain;
use crate::requester::timing::Timing;
use crate::shared::layout::qp_index;
use crate::shared::links::Links;
use crate::shared::remote::Remote;
use crate::{Hca, Queues, State};

/// Time between two requests to a peer that does not answer, in ns.
const PEER_RETRY_NS: u64 = 1_000_000;
/// The RNR retry count that means "without limit".
const RNR_RETRY_WITHOUT_END: u8 = 7;
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
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else { return };
    let from = qp.in_flight.announced.back().map_or(qp.sq_limit, |last| last.end);
    if hca.strict {
        buffers::remember(hca, qp, from, qp.sq.producer());
    }
    let sends = hca.timing.announce(qp, hca.membership.lid, hca.clock.now_ns(), &mut state.deferred);
    hca.sends.set(hca.sends.get() + sends);
}

/// Executes all WQEs up to the record, whatever their time, for a queue pair that broke a rule or is in the error state.
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
        let Some(qpn) = state.deferred.pop_due(now_ns) else { break };
        let index = qp_index(qpn);
        let Some(Some(qp)) = state.queues.qps.get_mut(index) else { continue };
        if qp.qpn != qpn {
            continue;
        }
        any = true;
        while let Some(acknowledged) = due(&mut qp.in_flight.acknowledged, |acknowledged| acknowledged.at_ns <= now_ns) {
            complete::show(hca, qp, &mut state.queues.cqs, &mut state.violations, &acknowledged);
        }
        run_due(hca, state, index, now_ns);
    }
    any
}

/// Runs the due WQEs of a send queue: first the waiting one, then the announced ones, doorbell by doorbell.
pub(crate) fn run_due(hca: &Hca, state: &mut State, index: usize, now_ns: u64) {
    while let Some(Some(qp)) = state.queues.qps.get_mut(index) {
        if qp.sq_consumer == qp.sq_limit {
            let Some(announced) = due(&mut qp.in_flight.announced, |announced| announced.at_ns <= now_ns) else { return };
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
        if state.queues.qps.get(index).and_then(Option::as_ref).is_none_or(|qp| qp.sq_consumer != qp.sq_limit) {
            return;
        }
    }
}

/// Ends the fence of the next WQE, if it has one: all READs and atomics before it have returned. If a retry made one late, its result is
/// placed now.
fn end_fence(hca: &Hca, qp: &mut SoftQp) {
    // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
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
    if queue.front().is_some_and(is_due) { queue.pop_front() } else { None }
}

/// Runs a send queue up to its limit, if the queue pair exists and `begin` returns `true`.
fn run(hca: &Hca, state: &mut State, index: usize, begin: impl FnOnce(&mut SoftQp) -> bool) {
    let State { queues: Queues { qps, cqs, injector }, deferred, links, violations, touched, .. } = state;
    let Some(Some(qp)) = qps.get_mut(index) else { return };
    let qp = &mut **qp;
    if !begin(qp) {
        return;
    }
    let granted = qp.remote().map_or(0, Remote::granted);
    while qp.sq_consumer != qp.sq_limit {
        let at = qp.sq.wqebb(qp.sq_consumer);
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
        let head = unsafe { at.cast::<[u8; SEGMENT]>().read() };
        let ctrl = CtrlWords::parse(&head);
        let outcome = match if qp.mode >= Mode::Exceptional { exceptional_outcome(hca, qp, injector, ctrl) } else { None } {
            None => match wqe_bytes(qp, at, ctrl) {
                Ok(Some(wqe)) => {
                    // SAFETY: the WQE is in the SQ's memory, which `qp` holds and the driver does not touch until completion.
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
                        Completions { hca, cqs, deferred, violations, touched }.succeed(qp, ctrl, byte_count);
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
        Completions { hca, cqs, deferred, violations, touched }.fail(qp, ctrl, syndrome, vendor);
    }
    if let Some(remote) = qp.remote_mut() {
        remote.announce(hca.barrier);
    }
}

/// Decides how long a WQE may wait, and when to try it again.
#[cold]
fn wait(hca: &Hca, qp: &mut SoftQp, reason: WaitFor, fault_ns: u64) -> Result<u64, Syndrome> {
    let now_ns = hca.clock.now_ns();
    let is_gone = qp.remote().is_none_or(|r| r.peer.is_gone());
    let waiting = match &mut qp.waiting {
        Some(waiting) if waiting.reason == reason => waiting,
        // First attempt, or the reason changed: the wait starts now.
        slot => slot.insert(Waiting { reason, since_ns: now_ns, again_ns: now_ns, rnr_left: qp.options.rnr_retry }),
    };
    waiting.again_ns = match reason {
        // The clock of a stepper would never pass an event that is always due again.
        WaitFor::Room if hca.has_exact_lanes => now_ns.saturating_add(LANE_RETRY_NS),
        WaitFor::Room => now_ns,
        WaitFor::Answer if !is_gone => now_ns,
        WaitFor::Fault => now_ns.saturating_add(fault_ns),
        WaitFor::Receive => {
            hca.rnr_naks.set(hca.rnr_naks.get() + 1);
            match waiting.rnr_left {
                0 => return Err(Syndrome::RnrRetryExceeded),
                RNR_RETRY_WITHOUT_END => {}
                _ => waiting.rnr_left -= 1,
            }
            now_ns.saturating_add(qp.options.rnr_timer_ns.max(1))
        }
        WaitFor::Peer | WaitFor::Answer => {
            let patience = qp.options.transport_timeout_ns();
            let patience = if is_gone { patience.min(hca.dead_peer_timeout_ns) } else { patience };
            let end_ns = waiting.since_ns.saturating_add(patience);
            if now_ns >= end_ns {
                return Err(Syndrome::TransportRetryExceeded);
            }
            end_ns.min(now_ns.saturating_add(PEER_RETRY_NS))
        }
    };
    Ok(waiting.again_ns)
}

/// Returns the outcome of a WQE that is flushed or malformed, or gets a fault. Returns `None` if the WQE is to be executed normally.
#[cold]
fn exceptional_outcome(hca: &Hca, qp: &mut SoftQp, injector: &mut Option<Box<Injector>>, ctrl: CtrlWords) -> Option<Outcome> {
    if qp.has_failed() {
        return Some(Outcome::Fail(Syndrome::WorkRequestFlushed, 0));
    }
    if let Some(rule) = qp.watch.broken.take() {
        return Some(Outcome::Fail(Syndrome::LocalQpOperation, rule.vendor()));
    }
    // Datagrams are lost where they are sent.
    let is_cut_off = !hca.is_port_up.get() && !qp.is_datagram();
    let Some(injector) = injector else { return is_cut_off.then_some(Outcome::Wait(WaitFor::Peer)) };
    let is_first = qp.waiting.is_none() && ctrl.opcode() != Opcode::Nop as u8;
    let fate = if is_first { injector.fate(qp, Opcode::from_wire(ctrl.opcode()).is_some_and(takes_receive)) } else { Fate::Normal };
    match fate {
        Fate::Normal if is_cut_off || injector.dropped_peers(qp) => Some(Outcome::Wait(WaitFor::Peer)),
        Fate::Normal => None,
        Fate::Delayed => Some(Outcome::Wait(WaitFor::Fault)),
        Fate::Lost => Some(Outcome::Done(0)),
        Fate::NotReady => Some(Outcome::Wait(WaitFor::Receive)),
        Fate::Fails(syndrome) => Some(Limit::OnPurpose.fails(syndrome)),
    }
}

/// Returns the bytes of the WQE at the head of the SQ, which is at `at`; `None` if it wraps.
#[inline(always)]
fn wqe_bytes(qp: &SoftQp, at: NonNull<u8>, ctrl: CtrlWords) -> Result<Option<NonNull<[u8]>>, Malformed> {
    let outstanding = qp.sq_limit.wrapping_sub(qp.sq_consumer);
    let (ds, blocks) = (usize::from(ctrl.ds()), blocks(ctrl.ds()));
    if !ctrl.names(qp.sq_consumer, qp.qpn) || ds == 0 || blocks > outstanding {
        return Err(Malformed::Control);
    }
    let to_end = qp.sq.capacity() - (u32::from(qp.sq_consumer) & (qp.sq.capacity() - 1));
    if blocks > 1 && u32::from(blocks) > to_end {
        return Ok(None);
    }
    Ok(Some(NonNull::slice_from_raw_parts(at, ds * SEGMENT)))
}

/// Executes a WQE that wraps. A driver may let a WQE wrap; the device reads it in two parts.
#[cold]
fn execute_wrapped(hca: &Hca, links: &mut Links, qp: &mut SoftQp, ctrl: CtrlWords, granted: u64) -> Outcome {
    let mut whole = [0; MAX_WQE];
    let bytes = usize::from(ctrl.ds()) * SEGMENT;
    for (block, out) in (0..).zip(whole[..bytes].chunks_mut(WQEBB)) {
        // SAFETY: inside the SQ; the driver does not touch it until completion.
        unsafe { out.as_mut_ptr().copy_from_nonoverlapping(qp.sq.wqebb(qp.sq_consumer.wrapping_add(block)).as_ptr(), out.len()) };
    }
    execute(hca, links, qp, ctrl, &whole[..bytes], granted)
}
