//! What becomes of the receives of a queue pair in the error state: those of its own queue are flushed, those of a shared one stay.

use core::sync::atomic::AtomicU64;

use super::cq::SoftCq;
use super::queues::SoftQp;
use super::trace::What;
use super::{Hca, State};
use crate::wire::{CqeOpcode, ErrorCqe, Syndrome};

/// Flushes what is posted in `qp`'s own receive queue.
#[cold]
pub(crate) fn flush_receives(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    if !qp.owns_rq {
        return;
    }
    // The peer takes no more: the identity says that this queue pair does not receive. What it is taking now it will publish. The lane's
    // intent is the peer's to write; nobody asks for ours.
    while let Some(taking) = qp.receives.pop(&AtomicU64::new(0)) {
        if let Some(trace) = &hca.trace {
            trace.record(What::Flushed, qp.qpn, taking.index, 0, 0);
        }
        let cqe = ErrorCqe {
            raw_syndrome: Syndrome::WorkRequestFlushed as u8,
            vendor_syndrome: 0,
            wqe_opcode: 0,
            qpn: qp.qpn,
            wqe_counter: taking.index,
        };
        if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
            // An overrun CQ tells nobody anything more.
            let _ = cq.write(cqe.emit(), CqeOpcode::ResponderError);
        }
    }
}

/// Flushes what was posted to the receive queues of failed queue pairs since.
#[cold]
pub(crate) fn flush_failed(hca: &Hca, state: &mut State) {
    let State { qps, cqs, .. } = state;
    let mut any = false;
    for qp in qps.iter_mut().flatten().filter(|qp| qp.failed && qp.owns_rq) {
        any = true;
        flush_receives(hca, qp, cqs);
    }
    hca.has_failed.set(any);
}
