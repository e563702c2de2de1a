//! Completion of a WQE: its CQE is written at once, or when the acknowledgement arrives.

use mlx5_wire::{CQE_BYTES, CqeOpcode, CtrlWords, ErrorCqe, Opcode, RequesterCqe, Syndrome};

use crate::Hca;
use crate::debug::trace::What;
use crate::deferred::Deferred;
use crate::queues::cq::{Overrun, SoftCq};
use crate::queues::in_flight::{Acknowledged, InFlight};
use crate::queues::qp::{SoftQp, blocks};
use crate::requester::{buffers, traffic};
use crate::types::outcome::End;
use crate::types::rule::Violation;

/// LID in `touched` that means every device, because a datagram may have changed any device.
pub(crate) const EVERY_LID: u16 = 0;

fn success(user_index: u32, ctrl: CtrlWords, byte_count: u32) -> [u8; CQE_BYTES] {
    RequesterCqe {
        wqe_opcode: ctrl.opcode(),
        qpn: ctrl.qpn(),
        wqe_counter: ctrl.wqe_index(),
        byte_count,
        user_index,
    }
    .emit()
}

/// Writes the CQE of a signaled WQE that succeeded, for devices without `Hca::is_watched`.
#[inline(always)]
pub(crate) fn write_success(
    cqs: &mut [Option<SoftCq>],
    send_cq: u32,
    user_index: u32,
    ctrl: CtrlWords,
    byte_count: u32,
) -> Result<(), Overrun> {
    let Some(Some(cq)) = cqs.get_mut(send_cq as usize) else {
        return Ok(());
    };
    cq.write(success(user_index, ctrl, byte_count), CqeOpcode::Requester)
}

/// The parts of a device that the completions of a send queue need.
pub(crate) struct Completions<'a> {
    pub(crate) hca: &'a Hca,
    pub(crate) cqs: &'a mut [Option<SoftCq>],
    pub(crate) deferred: &'a mut Deferred,
    pub(crate) violations: &'a mut Vec<Violation>,
    pub(crate) touched: &'a mut Vec<u16>,
}

impl Completions<'_> {
    /// Completes a WQE that was taken. It gets a CQE if it is signaled or failed. If it failed, the
    /// queue pair goes to the error state, in which it neither sends nor receives.
    pub(crate) fn complete(&mut self, qp: &mut SoftQp, ctrl: CtrlWords, end: End) {
        match end {
            End::Done(byte_count) | End::Message(byte_count) => {
                if self.hca.is_watched {
                    self.succeed(qp, ctrl, byte_count);
                } else if ctrl.signaled() {
                    let (cq, user_index) = (qp.send_cq, qp.user_index);
                    let written = write_success(self.cqs, cq, user_index, ctrl, byte_count);
                    qp.wrote_send(self.hca, written);
                }
                if ctrl.signaled() {
                    qp.watch.reported = ctrl.wqe_index().wrapping_add(blocks(ctrl.ds()));
                }
            }
            End::Failed(syndrome, vendor) => self.fail(qp, ctrl, syndrome, vendor),
        }
    }

    /// Completes a WQE that succeeded, on a device that records results (`Hca::is_watched`).
    #[cold]
    fn succeed(&mut self, qp: &mut SoftQp, ctrl: CtrlWords, byte_count: u32) {
        if self.hca.counters.is_some() {
            traffic::count(self.hca, qp, ctrl);
        }
        let cqe = ctrl
            .signaled()
            .then(|| success(qp.user_index, ctrl, byte_count));
        self.executed(qp, ctrl, cqe, CqeOpcode::Requester);
    }

    #[cold]
    fn fail(&mut self, qp: &mut SoftQp, ctrl: CtrlWords, syndrome: Syndrome, vendor: u8) {
        qp.waiting = None;
        qp.fail(self.hca);
        let cqe = ErrorCqe {
            raw_syndrome: syndrome as u8,
            vendor_syndrome: vendor,
            wqe_opcode: ctrl.opcode(),
            qpn: qp.qpn,
            wqe_counter: ctrl.wqe_index(),
            user_index: qp.user_index,
        };
        self.executed(qp, ctrl, Some(cqe.emit()), CqeOpcode::RequesterError);
    }

    /// Finishes a WQE. Its CQE becomes visible in order, when the peer's acknowledgement arrives.
    fn executed(
        &mut self,
        qp: &mut SoftQp,
        ctrl: CtrlWords,
        cqe: Option<[u8; CQE_BYTES]>,
        opcode: CqeOpcode,
    ) {
        if let Some(trace) = &self.hca.trace {
            trace.record(
                What::Executed,
                qp.qpn,
                ctrl.wqe_index(),
                ctrl.opcode().into(),
                opcode as u64,
            );
        }
        if self.hca.has_exact_lanes {
            touch(self.touched, qp, ctrl);
        }
        let is_held = self.hca.timing.is_model() && opcode == CqeOpcode::Requester;
        let landing = if is_held {
            buffers::hold(self.hca, qp, ctrl.wqe_index())
        } else {
            None
        };
        if cqe.is_none() && landing.is_none() {
            return;
        }
        let InFlight {
            acknowledge_ns,
            acknowledged,
            ..
        } = &mut qp.in_flight;
        // An acknowledgement is not shown before the previous ones, even if its own time is
        // earlier, because only the oldest in the queue is polled.
        let at_ns = self.hca.clock.now_ns().saturating_add(*acknowledge_ns);
        let is_now = *acknowledge_ns == 0 && acknowledged.is_empty();
        let new = Acknowledged {
            at_ns,
            cqe: cqe.map(|cqe| (cqe, opcode)),
            landing,
        };
        if is_now {
            return show(self.hca, qp, self.cqs, self.violations, &new);
        }
        acknowledged.push_back(new);
        self.deferred.schedule(at_ns, qp.qpn);
    }
}

/// Records, for a simulation, the device whose memory or queues a WQE changed.
fn touch(touched: &mut Vec<u16>, qp: &SoftQp, ctrl: CtrlWords) {
    let lid = match Opcode::from_repr(ctrl.opcode()) {
        None | Some(Opcode::Nop | Opcode::RdmaRead) => return,
        Some(_) if qp.is_datagram() => EVERY_LID,
        Some(_) => qp.remote().map_or(EVERY_LID, |r| r.peer.lid),
    };
    if !touched.contains(&lid) {
        touched.push(lid);
    }
}

/// Places a result in its buffer, and writes the CQE of a send queue.
#[cold]
pub(crate) fn show(
    hca: &Hca,
    qp: &mut SoftQp,
    cqs: &mut [Option<SoftCq>],
    violations: &mut Vec<Violation>,
    what: &Acknowledged,
) {
    if let Some(landing) = &what.landing {
        buffers::place(hca, qp, landing);
    }
    let Some((cqe, opcode)) = what.cqe else {
        return;
    };
    let RequesterCqe {
        wqe_counter,
        byte_count,
        ..
    } = RequesterCqe::parse(&cqe);
    if let Some(trace) = &hca.trace {
        let status = if opcode == CqeOpcode::Requester {
            byte_count
        } else {
            ErrorCqe::parse(&cqe).raw_syndrome.into()
        };
        trace.record(
            What::Completed,
            qp.qpn,
            wqe_counter,
            opcode as u64,
            status.into(),
        );
    }
    if !qp.in_flight.sources.is_empty() {
        buffers::release(
            hca,
            qp,
            wqe_counter,
            opcode == CqeOpcode::Requester,
            violations,
        );
    }
    if let Some(Some(cq)) = cqs.get_mut(qp.send_cq as usize) {
        qp.wrote_send(hca, cq.write(cqe, opcode));
    }
}
