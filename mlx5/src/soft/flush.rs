//! What becomes of the receives of a queue pair in the error state: those of its own queue are flushed, those of a shared one stay.
//!
//! A receive queue completes in order, so nothing is flushed before everything that was taken by then has completed: the peer may have
//! taken a receive, in a doorbell that began while this queue pair still received, and publish its message later.

use core::sync::atomic::AtomicU64;

use shm::sync::heavy_barrier;

use super::cq::SoftCq;
use super::queues::SoftQp;
use super::{Hca, State, arrive};
use crate::wire::{CqeOpcode, ErrorCqe, Syndrome};

/// How far the end of a queue pair's own receive queue is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Nothing was done yet.
    NotBegun,
    /// The peer executes a doorbell that may take receives: the value of its `executing` word.
    Awaits(u64),
    /// Nobody takes receives any more.
    Begun,
}

/// Flushes what is posted in the own receive queues of failed queue pairs. Returns whether there was something.
#[cold]
pub(crate) fn flush_failed(hca: &Hca, state: &mut State) -> bool {
    let State { qps, cqs, .. } = state;
    let (mut any, mut flushed) = (false, false);
    for qp in qps.iter_mut().flatten().filter(|qp| qp.failed && qp.owns_rq) {
        any = true;
        if qp.flush != Flush::Begun && is_quiet(qp) {
            qp.flush = Flush::Begun;
            flushed = true;
            arrive::drain(hca, qp, cqs);
            flush_lost(qp, cqs);
        }
        while qp.flush == Flush::Begun {
            let Some(taking) = qp.receives.pop(&AtomicU64::new(0)) else { break };
            flushed = true;
            flush_one(qp, cqs, taking.count, taking.index);
        }
    }
    hca.has_failed.set(any);
    flushed
}

/// Whether whoever might have seen this queue pair receive is done with it (H3). It does not receive since it failed.
fn is_quiet(qp: &mut SoftQp) -> bool {
    let Some(peer) = qp.remote().map(|remote| &remote.peer).filter(|peer| !peer.is_gone()) else { return true };
    let executing = match qp.flush {
        Flush::Begun => return true,
        Flush::Awaits(executing) => executing,
        Flush::NotBegun => {
            // Without membarrier(2) this is a full fence, and so is the other half.
            let _ = heavy_barrier();
            peer.executing()
        }
    };
    let is_busy = executing % 2 == 1 && peer.executing() == executing;
    qp.flush = Flush::Awaits(executing);
    !is_busy
}

/// A connected peer that died with a receive took it and told nobody: it is the next one to complete.
fn flush_lost(qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    if qp.is_datagram() {
        // Those are taken by their owner.
        return;
    }
    // Every receive taken gave one message.
    let (told, taken) = (qp.lane.position() as u32, qp.receives.taken());
    for count in (0..taken.wrapping_sub(told)).map(|i| told.wrapping_add(i)) {
        flush_one(qp, cqs, count, count as u16 & (qp.taken.wqes() - 1) as u16);
    }
}

fn flush_one(qp: &mut SoftQp, cqs: &mut [Option<SoftCq>], count: u32, index: u16) {
    qp.taken.account(index, count);
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
