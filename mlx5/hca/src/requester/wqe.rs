//! The WQE at the head of a send queue: its place and length, its outcome if it is not executed,
//! and the time of its next attempt.

use mlx5_wire::{CtrlWords, Opcode, Syndrome};

use crate::Hca;
use crate::debug::faults::{Fate, Injector};
use crate::deferred::LANE_RETRY_NS;
use crate::queues::qp::{SoftQp, Transport, Waiting, blocks};
use crate::types::outcome::{Outcome, WaitFor};
use crate::types::vendor::{Limit, Malformed};

/// Time between two requests to a peer that does not answer, in ns.
const PEER_RETRY_NS: u64 = 1_000_000;
const RNR_RETRY_WITHOUT_END: u8 = 7;
/// Returns the time of the next attempt at a WQE, or the syndrome if it may not wait longer.
#[cold]
pub(crate) fn wait(
    hca: &Hca,
    qp: &mut SoftQp,
    reason: WaitFor,
    fault_ns: u64,
) -> Result<u64, Syndrome> {
    let now_ns = hca.clock.now_ns();
    let is_gone = qp
        .remote()
        .map_or(matches!(qp.transport, Transport::NoPeer), |r| {
            r.peer.is_gone()
        });
    let waiting = match &mut qp.waiting {
        Some(waiting) if waiting.reason == reason => waiting,
        // First attempt, or the reason changed: the wait starts now.
        slot => {
            let rnr_left = slot
                .as_ref()
                .map_or(qp.options.rnr_retry, |waiting| waiting.rnr_left);
            slot.insert(Waiting {
                reason,
                since_ns: now_ns,
                again_ns: now_ns,
                rnr_left,
            })
        }
    };
    waiting.again_ns = match reason {
        // In a simulation, a retry that is due at once would stop the clock.
        WaitFor::Room | WaitFor::Copies(_) if hca.has_exact_lanes => {
            now_ns.saturating_add(LANE_RETRY_NS)
        }
        WaitFor::Room | WaitFor::Copies(_) => now_ns,
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
            let patience = if is_gone {
                patience.min(hca.dead_peer_timeout_ns)
            } else {
                patience
            };
            let end_ns = waiting.since_ns.saturating_add(patience);
            if now_ns >= end_ns {
                return Err(Syndrome::TransportRetryExceeded);
            }
            end_ns.min(now_ns.saturating_add(PEER_RETRY_NS))
        }
    };
    Ok(waiting.again_ns)
}

/// Returns the outcome of a WQE that is not executed: it is flushed, broke a rule of strict mode,
/// gets a fault, or the port is down. Returns `None` for a normal WQE, which the caller executes.
#[cold]
pub(crate) fn exceptional_outcome(
    hca: &Hca,
    qp: &mut SoftQp,
    injector: &mut Option<Box<Injector>>,
    ctrl: CtrlWords,
) -> Option<Outcome> {
    if qp.has_failed() {
        return Some(Outcome::Fail(Syndrome::WorkRequestFlushed, 0));
    }
    if let Some(rule) = qp.watch.broken.take() {
        return Some(Outcome::Fail(Syndrome::LocalQpOperation, rule as u8));
    }
    // A port that is down does not stop datagrams here: they are lost in `datagrams::send`.
    let is_cut_off = !hca.is_port_up.get() && !qp.is_datagram();
    let Some(injector) = injector else {
        return is_cut_off.then_some(Outcome::Wait(WaitFor::Peer));
    };
    let opcode = Opcode::from_repr(ctrl.opcode());
    let fate = if qp.waiting.is_none() && opcode != Some(Opcode::Nop) {
        injector.fate(qp, opcode.is_some_and(Opcode::takes_receive))
    } else {
        Fate::Normal
    };
    match fate {
        Fate::Normal if is_cut_off || injector.dropped_peers(qp) => {
            Some(Outcome::Wait(WaitFor::Peer))
        }
        Fate::Normal => None,
        Fate::Delayed => Some(Outcome::Wait(WaitFor::Fault)),
        Fate::Lost => Some(Outcome::Done(0)),
        Fate::NotReady => Some(Outcome::Wait(WaitFor::Receive)),
        Fate::Fails(syndrome) => Some(Limit::OnPurpose.fails(syndrome)),
    }
}

/// Checks the place and the length of the WQE at the head of the SQ.
#[inline(always)]
pub(crate) fn check_place(qp: &SoftQp, ctrl: CtrlWords) -> Result<(), Malformed> {
    let outstanding = qp.sq_limit.wrapping_sub(qp.sq_consumer);
    let is_legal =
        ctrl.names(qp.sq_consumer, qp.qpn) && ctrl.ds() != 0 && blocks(ctrl.ds()) <= outstanding;
    if is_legal {
        Ok(())
    } else {
        Err(Malformed::Control)
    }
}
