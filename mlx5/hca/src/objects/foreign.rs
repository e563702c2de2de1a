//! Support for drivers that do not announce doorbells: polls their doorbell records, and makes the
//! state transitions that their kernel half requests.

use core::sync::atomic::Ordering;
use std::rc::Rc;

use mlx5_wire::{Access, ConnectOptions};

use crate::queues::cq::SoftCq;
use crate::queues::in_flight::InFlight;
use crate::queues::mirror::Mirror;
use crate::queues::qp::{SoftQp, Transport, by_number};
use crate::requester::connection as packets;
use crate::requester::execute;
use crate::shared::layout::QpEntry;
use crate::shared::remote::Remote;
use crate::{Hca, Queues, State};

impl Hca {
    /// Executes all posted WQEs, takes arrived messages, and retries due work. Returns whether it
    /// did something or has scheduled work; then the caller should call it again soon.
    pub fn poll(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let mut any = false;
        for rq in state.rqs.iter_mut().flatten() {
            any |= rq.refresh();
        }
        let copies = &self.memory.control().header.copies;
        // H9 of `shared::layout`: stored after the receives were copied. The word has one writer.
        copies.store(copies.load(Ordering::Relaxed) + 1, Ordering::Release);
        for index in 0..state.queues.qps.len() {
            any |= self.poll_records(&mut state, index);
        }
        drop(state);
        any | self.empty_poll() | !self.state.borrow().deferred.is_empty()
    }

    /// Polls the doorbell record of queue pair `index`. Returns whether it has new WQEs.
    fn poll_records(&self, state: &mut State, index: usize) -> bool {
        let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
            return false;
        };
        if qp.sq_consumer == 0 && qp.lane.position() == 0 {
            self.follow(qp);
        }
        let producer = qp.sq.producer();
        if !qp.is_watched || producer == qp.announced() {
            return false;
        }
        if u32::from(producer.wrapping_sub(qp.sq_consumer)) > qp.sq.capacity() {
            // No driver posts more than its queue holds, so the content of the queue is invalid.
            qp.is_watched = false;
            qp.break_down(self);
            return true;
        }
        self.executing(|| execute::rung(self, state, index));
        true
    }

    /// Reconnects to a peer that was reset. If both ends are reset and connected again, the end
    /// that connects first finds the old state of the other end. So until something is sent or
    /// received, the connection follows the peer's queue pair number, as on a NIC.
    fn follow(&self, qp: &mut SoftQp) {
        let own = QpEntry::pack_peer(qp.qpn, qp.generation);
        let Transport::Connected(remote) = &mut qp.transport else {
            return;
        };
        // A connection whose lane was used is kept: a pending atomic is still the WQE at the head,
        // and the peer may have executed it.
        if remote.lane.position() != 0 || !remote.was_reset() {
            return;
        }
        let (peer, qpn) = (Rc::clone(&remote.peer), remote.qpn);
        let Some(new) = Remote::of(&peer, qpn, own, self.membership.epoch) else {
            return;
        };
        **remote = new;
        remote.terms = qp.terms;
        qp.version = qp.version.wrapping_add(1);
        let (entry, generation) = (self.memory.qp(qp.index), remote.generation);
        entry
            .peer
            .store(QpEntry::pack_peer(qpn, generation), Ordering::Relaxed);
        if self.memory.receives(qp.index) {
            // H1 of `shared::layout`: stored after the entry's other fields.
            entry
                .identity
                .store(qp.connected_identity(), Ordering::Release);
        }
    }

    pub(crate) fn with_qp<R>(&self, qpn: u32, f: impl FnOnce(&mut SoftQp) -> R) -> Option<R> {
        by_number(&mut self.state.borrow_mut().queues.qps, qpn).map(f)
    }

    /// Moves a queue pair from RESET to INIT: from now on the device polls the receive queue of the
    /// queue pair, if it is not shared.
    pub fn initialize(&self, qpn: u32) {
        let Some((rqn, true)) = self.with_qp(qpn, |qp| (qp.rqn, qp.owns_rq())) else {
            return;
        };
        if let Some(Some(rq)) = self.state.borrow_mut().rqs.get_mut(rqn as usize) {
            rq.mirror.iter_mut().for_each(Mirror::start);
        }
    }

    /// Moves a queue pair to RTS, or changes its options there: from now on the device polls its
    /// send queue. If `options.timeout` is 0, a WQE waits for its peer forever. This end sets the
    /// RNR timer; on a NIC the responder sets it.
    pub fn start_sending(&self, qpn: u32, options: &ConnectOptions) {
        self.with_qp(qpn, |qp| {
            qp.options = *options;
            qp.is_watched = true;
        });
    }

    /// Changes the rights of the peer of a connected queue pair in RTR or RTS, from the peer's next
    /// doorbell on. Does nothing in other states.
    pub fn allow(&self, qpn: u32, access: Access) {
        self.with_qp(qpn, |qp| {
            qp.access = access;
            if self.memory.receives(qp.index) {
                // H1
                qp.entry()
                    .identity
                    .store(qp.connected_identity(), Ordering::Release);
            }
        });
    }

    /// Returns whether the queue pair is in the error state.
    #[must_use]
    pub fn has_failed(&self, qpn: u32) -> bool {
        self.with_qp(qpn, |qp| qp.has_failed()).unwrap_or(false)
    }

    /// Moves a queue pair back to RESET, under the same number. Neither of its queues is polled any
    /// more, so the driver may then set its records to 0 and remove the queue pair's CQEs. Returns
    /// `false` if the peer does not finish its doorbell within 50 ms; the queue pair is in the
    /// error state then.
    pub fn reset_qp(&self, qpn: u32) -> bool {
        let state = &mut *self.state.borrow_mut();
        let State {
            queues: Queues { qps, .. },
            rqs,
            stuck,
            hot,
            ..
        } = state;
        let Some(qp) = by_number(qps, qpn) else {
            return true;
        };
        let index = qp.index;
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let peer = qp.remote().map(|r| r.peer.clone());
        if !self.quiesce(stuck, peer.iter()) {
            qp.fail(self);
            return false;
        }
        hot.remove(index);
        packets::abandon(&mut state.wire, qp);
        // The messages in the lane took receives of a shared queue. Their CQEs return these
        // receives to the driver, as when a queue pair is destroyed.
        crate::responder::arrive::drain(self, qp, &mut state.queues.cqs);
        // SAFETY: the lane was committed when the queue pair was made, `quiesce` has waited for the
        // peer, and the result replaces the lane's consuming end.
        qp.lane = unsafe { self.clear_lane(index, qp.lane_place) };
        (qp.sq_consumer, qp.sq_limit, qp.flushed, qp.answered) = (0, 0, 0, 0);
        (qp.mode, qp.is_watched) = (self.first_mode(state.queues.injector.as_deref()), false);
        qp.waiting = None;
        qp.in_flight = InFlight::with_capacity(0, false);
        qp.transport = if qp.is_datagram() {
            Transport::Datagram { qkey: 0 }
        } else {
            Transport::Unconnected
        };
        if let (true, Some(Some(rq))) = (qp.owns_rq(), rqs.get_mut(qp.rqn as usize)) {
            rq.receives.reset();
            rq.taken.reset();
            rq.mirror.iter_mut().for_each(Mirror::reset);
        }
        crate::objects::create::publish_reset(qp);
        state.links.forget_unused();
        true
    }

    /// Returns whether completion queue `cqn` had no room for a CQE. Such a queue gets no further
    /// CQEs, and its queue pairs fail.
    #[must_use]
    pub fn has_overrun(&self, cqn: u32) -> bool {
        self.with_cq(cqn, |cq| cq.has_overrun()).unwrap_or(false)
    }

    /// Returns whether the driver armed completion queue `cqn`, and the queue has a completion of
    /// the armed kind. If so, disarms the queue. A completion gives one event: if the driver arms
    /// the queue again without polling, the completion of the last event gives no further event.
    #[must_use]
    pub fn take_event(&self, cqn: u32) -> bool {
        self.with_cq(cqn, SoftCq::announce).unwrap_or(false)
    }
}
