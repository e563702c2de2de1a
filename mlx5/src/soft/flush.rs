//! What becomes of the receives of a queue pair in the error state: those of its own queue are flushed, those of a shared one stay.

use super::cq::SoftCq;
use super::queues::SoftQp;
use super::{Hca, State, arrive};
use crate::wire::{CqeOpcode, ErrorCqe, Syndrome};

/// Flushes what is posted in the receive queues of failed queue pairs, and what is posted to them from then on. Returns whether there was
/// something.
#[cold]
pub(crate) fn flush_failed(hca: &Hca, state: &mut State) -> bool {
    let State { qps, cqs, .. } = state;
    let (mut any, mut flushed) = (false, false);
    for qp in qps.iter_mut().flatten().filter(|qp| qp.failed && qp.owns_rq) {
        any = true;
        flushed |= flush_receives(hca, qp, cqs);
    }
    hca.has_failed.set(any);
    flushed
}

/// Receives complete in the order in which they are taken. So a receive that the peer took comes first, even if it has not told of it yet: it
/// will soon, or is dead, and then that receive is flushed too.
fn flush_receives(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) -> bool {
    // Before the lane is looked at: the dead publish no more.
    let is_peer_gone = qp.remote().is_some_and(|r| r.peer.is_gone());
    let before = qp.lane.position();
    arrive::drain(hca, qp, cqs);
    let mut flushed = qp.lane.position() != before;
    loop {
        // Datagrams take their receives here, and complete them at once.
        let next = if qp.is_datagram() { qp.receives.popped() } else { (qp.lane.position() as u32).wrapping_add(qp.flushed) };
        if qp.receives.popped() == next {
            if !qp.receives.take(next) {
                return flushed;
            }
        } else if !is_peer_gone {
            return flushed;
        }
        flushed = true;
        qp.flushed = qp.flushed.wrapping_add(1);
        let index = next as u16 & (qp.taken.wqes() as u16).wrapping_sub(1);
        qp.taken.account(index, next);
        let cqe = ErrorCqe {
            raw_syndrome: Syndrome::WorkRequestFlushed as u8,
            vendor_syndrome: 0,
            wqe_opcode: 0,
            qpn: qp.qpn,
            wqe_counter: index,
        };
        if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
            // An overrun CQ tells nobody anything more.
            let _ = cq.write(cqe.emit(), CqeOpcode::ResponderError);
        }
    }
}
