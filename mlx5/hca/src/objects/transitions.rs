//! State transitions of queue pairs, and their destruction.

use core::sync::atomic::Ordering;

use mlx5_wire::AsyncEvent;

use crate::objects::create::{LANE_SLOT_BYTES, QPN_TAGS, QpPlace};
use crate::queues::qp::{Transport, by_number};
use crate::requester::connection as packets;
use crate::requester::execute;
use crate::responder::arrive;
use crate::shared::layout::{DATAGRAM, LanePlace, RECEIVES, qp_index};
use crate::{Hca, State};

impl Hca {
    /// Moves a datagram queue pair from INIT to RTR: it receives datagrams with this `qkey`.
    pub fn activate_datagrams(&self, qpn: u32, qkey: u32) {
        let state = &mut *self.state.borrow_mut();
        state.links.has_datagrams = true;
        state.deferred.add_extras();
        if let Some(qp) = by_number(&mut state.queues.qps, qpn) {
            qp.transport = Transport::Datagram { qkey };
            qp.entry()
                .identity
                .store(qp.identity(DATAGRAM | RECEIVES), Ordering::Release);
        }
    }

    /// Moves a queue pair to the error state: every posted WQE is flushed at once, announced or
    /// not.
    pub fn fail_qp(&self, qpn: u32) {
        let state = &mut *self.state.borrow_mut();
        if let Some(qp) = by_number(&mut state.queues.qps, qpn) {
            qp.is_watched = true;
            qp.fail(self);
            execute::announce_all(self, state, qp_index(qpn));
        }
    }

    /// Destroys a queue pair. If the peer is in the middle of a doorbell and does not finish, the
    /// place and the receive queue are not reused: the peer could still take a receive and publish
    /// a message. A number that no queue pair has is ignored.
    pub fn destroy_qp(&self, qpn: u32) {
        let state = &mut *self.state.borrow_mut();
        if let Some(rqn) = self.take_qp(state, qpn) {
            self.give_rq(state, rqn);
        }
    }

    /// Destroys a shared receive queue that no queue pair uses.
    pub fn destroy_srq(&self, srqn: u32) {
        self.give_rq(&mut self.state.borrow_mut(), srqn);
    }

    /// Destroys a queue pair. Returns the number of its own receive queue, for [`Hca::give_rq`].
    fn take_qp(&self, state: &mut State, qpn: u32) -> Option<u32> {
        let index = qp_index(qpn);
        let mut qp = state
            .queues
            .qps
            .get_mut(index)?
            .take_if(|qp| qp.qpn == qpn)?;
        let own_rq = qp.owns_rq().then_some(qp.rqn);
        self.forget_events(|event| {
            event.failed_qp() == Some(qpn) || event == AsyncEvent::QpLastReceive { qpn }
        });
        if self.strict {
            crate::debug::strict::destroyed(&mut state.violations, &qp);
        }
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let peer = qp.remote().map(|r| r.peer.clone());
        let quiet = self.quiesce(&mut state.stuck, peer.iter());
        packets::abandon(&mut state.wire, &qp);
        // The CQEs of messages that arrived return their receives to the driver.
        arrive::drain(self, &mut qp, &mut state.queues.cqs);
        state.hot.remove(index);
        let place = &mut state.qp_places[index];
        *place = QpPlace {
            tag: (place.tag + 1) % QPN_TAGS,
            is_quarantined: !quiet,
            version: qp.version,
        };
        if quiet {
            let LanePlace { first, slots } = qp.lane_place;
            state.lane_area.give(
                first as usize * LANE_SLOT_BYTES,
                slots as usize * LANE_SLOT_BYTES,
            );
        } else {
            state.quarantined += 1;
            if let Some(rq) = state.rqs.get_mut(qp.rqn as usize).and_then(Option::as_mut) {
                rq.is_quarantined = true;
            }
        }
        let is_gone = peer.as_ref().is_some_and(|peer| peer.is_gone());
        if let (false, Some(peer)) = (quiet, peer) {
            state.repair.leaves(*qp, peer);
        } else {
            if is_gone {
                state.repair.peer_died(&self.memory, index, qp.rqn);
            }
            drop(qp);
        }
        self.repair(state);
        state.links.forget_unused();
        own_rq
    }
}
