//! Flushes queue pairs in the error state: the waiting sends of the queue pair, and the receives of
//! its own queue. Receives of a shared queue stay, and an event reports that the queue pair takes no
//! more of them.

use mlx5_wire::{AsyncEvent, Syndrome};

use crate::debug::trace::What;
use crate::queues::cq::SoftCq;
use crate::queues::qp::{SoftQp, Transport};
use crate::requester::{connection, execute};
use crate::responder::arrive;
use crate::responder::deliver::fail_receive;
use crate::shared::layout::Taking;
use crate::{Hca, Queues, State};

/// Flushes the waiting sends of failed queue pairs, and the receives in their own receive queues,
/// including receives that are posted later. Returns whether anything was flushed.
#[cold]
pub(crate) fn flush_failed(hca: &Hca, state: &mut State) -> bool {
    let mut flushed = false;
    let mut failed = hca.failed.take();
    failed.retain(|&(index, generation)| {
        let is_same = |qp: &&mut Box<SoftQp>| qp.has_failed() && qp.generation == generation;
        let Some(qp) = state
            .queues
            .qps
            .get_mut(index)
            .and_then(Option::as_mut)
            .filter(is_same)
        else {
            return false;
        };
        let owns_rq = qp.owns_rq();
        if let Transport::Wire = qp.transport {
            connection::run(hca, state, index);
            flush_open(hca, state, index);
        } else if qp.waiting.take().is_some() {
            flushed = true;
            execute::run_due(hca, state, index, hca.clock.now_ns());
        }
        let Queues { qps, cqs, .. } = &mut state.queues;
        let Some(Some(qp)) = qps.get_mut(index) else {
            return false;
        };
        if owns_rq {
            flushed |= flush_receives(hca, qp, cqs);
            return true;
        }
        // A peer in the middle of a doorbell may still take receives of the shared queue.
        let peer = qp.remote().map(|remote| remote.peer.clone());
        let is_quiet = hca.quiesce(&mut state.stuck, peer.iter());
        if is_quiet {
            let before = qp.lane.position();
            report_last_receive(hca, qp, cqs);
            flushed |= qp.lane.position() != before;
        }
        !is_quiet
    });
    // Queue pairs that failed during these flushes are added to the list.
    let others = hca.failed.replace(failed);
    let mut all = hca.failed.borrow_mut();
    all.extend(others);
    hca.has_chores.set(!all.is_empty());
    flushed
}

/// Completes the receives that a queue pair has taken from its shared queue, and reports that these
/// were the last ones. A completion queue that has ended gets no completions, so there is no report.
fn report_last_receive(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    arrive::drain(hca, qp, cqs);
    let cq = cqs.get(qp.recv_cq as usize).and_then(Option::as_ref);
    if cq.is_some_and(|cq| !cq.has_overrun()) {
        hca.report(AsyncEvent::QpLastReceive { qpn: qp.qpn });
    }
}

/// Flushes the receive of a message of which not all packets have arrived.
fn flush_open(hca: &Hca, state: &mut State, index: usize) {
    let Queues { qps, cqs, .. } = &mut state.queues;
    let Some((qp, connection, _)) = state.wire.parts(qps, index) else {
        return;
    };
    let cq = cqs.get_mut(qp.recv_cq as usize);
    if let (Some(taking), Some(Some(cq))) = (connection.open.take(), cq) {
        fail_receive(hca, qp, cq, taking, (Syndrome::WorkRequestFlushed as u8, 0));
    }
}

/// Flushes receives of a queue pair's own queue. Receives complete in the order in which they are
/// taken. So while a living peer has taken a receive and not published its message yet, no later
/// receive is flushed. If the peer is dead, that receive is flushed too.
fn flush_receives(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) -> bool {
    // The state of the peer is read before the lane: a peer that is gone publishes no message after
    // this read, so `drain` takes all its messages.
    let is_peer_gone = qp.remote().is_some_and(|r| r.peer.is_gone());
    let before = qp.lane.position();
    arrive::drain(hca, qp, cqs);
    let mut flushed = qp.lane.position() != before;
    loop {
        // `next` is the number of the oldest receive that is not complete. This process itself
        // takes the receives for datagrams and packets, and completes each before it takes the
        // next.
        let announced = (qp.lane.position() as u32).wrapping_sub(qp.answered);
        let next = if qp.takes_receives() {
            qp.receives.popped()
        } else {
            announced.wrapping_add(qp.flushed)
        };
        if qp.receives.popped() == next {
            if !qp.receives.take(next) {
                return flushed;
            }
        } else if !is_peer_gone
            || qp.receives.popped().wrapping_sub(next) as usize > qp.taken.wqes()
        {
            // The peer has not published the message of this receive yet, or `popped` is corrupt.
            return flushed;
        }
        flushed = true;
        qp.flushed = qp.flushed.wrapping_add(1);
        let index = next as u16 & (qp.taken.wqes() as u16).wrapping_sub(1);
        let taking = Taking::new(next, index);
        if let Some(trace) = &hca.trace {
            trace.record(What::Flushed, qp.qpn, index, 0, 0);
        }
        if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
            fail_receive(hca, qp, cq, taking, (Syndrome::WorkRequestFlushed as u8, 0));
        }
    }
}
