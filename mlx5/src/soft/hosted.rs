//! The device below another driver: its queues are where that driver says, and its doorbells are found by looking.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::rc::Rc;

use super::cq::SoftCq;
use super::layout::{LANE_SLOTS, QpEntry};
use super::memory::foreign_memory_reachable;
use super::mirror::Mirror;
use super::objects::{MAX_CQE, MAX_SEND_WR, QpPlace, qp_index};
use super::queues::{Remote, SoftQp, SqPlace, Transport};
use super::timing::UnderWay;
use super::{Hca, State, execute, seat_of};
use crate::address::QpAddress;
use crate::control::{ConnectParts, CreateError, check};
use crate::cq::CqConfig;
use crate::hca::{CqMemory, QpMemory, Receives, RqMemory, Service};
use crate::mr::{Access, RegisterError};
use crate::qp::ConnectOptions;
use crate::wire::{CQE_BYTES, CQE128_BYTES, SEGMENT, WQEBB};

/// Longest receive WQE, in bytes.
const MAX_RECV_STRIDE: u32 = 1024;

fn check_power_of_two(what: &'static str, value: u32) -> Result<(), CreateError> {
    let is_legal = value.is_power_of_two();
    if is_legal { Ok(()) } else { Err(CreateError::Illegal { what, value: value.into(), legal: "a power of two" }) }
}

fn check_alignment(what: &'static str, at: NonNull<u8>, to: usize) -> Result<(), CreateError> {
    let is_legal = at.addr().get() % to == 0;
    if is_legal { Ok(()) } else { Err(CreateError::Illegal { what, value: at.addr().get() as u64, legal: "an aligned address" }) }
}

impl Hca {
    /// Looks at everything that another driver may have posted; then as [`empty_poll`](Self::empty_poll). Returns whether anything was done, or
    /// waits for something that comes by itself.
    pub(crate) fn look(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        let mut any = false;
        for rq in state.rqs.iter_mut().flatten() {
            any |= rq.refresh();
        }
        for index in 0..state.qps.len() {
            any |= self.look_at(state, index);
        }
        any | self.progress(state) | !state.deferred.is_empty()
    }

    /// Whether queue pair `index` has rung.
    fn look_at(&self, state: &mut State, index: usize) -> bool {
        let Some(Some(qp)) = state.qps.get_mut(index) else { return false };
        if qp.sq_consumer == 0 && qp.lane.position() == 0 {
            self.follow(qp);
        }
        let told = qp.under_way.announced.back().map_or(qp.sq_limit, |last| last.end);
        let producer = qp.sq_producer();
        if !qp.is_watched || producer == told {
            return false;
        }
        if u32::from(producer.wrapping_sub(qp.sq_consumer)) > qp.sq.capacity() {
            // No driver posts more than there is room for; what is there is not to be read.
            qp.is_watched = false;
            qp.fail(self);
            return true;
        }
        self.executing(|| execute::rung(self, state, index));
        true
    }

    /// Two ends that are both reset and connected again may do so in any order: the first finds the other as it was before. As long as nothing
    /// was sent or received its connection is to whatever the other end becomes, as that of a NIC, which knows its peer by its number alone.
    fn follow(&self, qp: &mut SoftQp) {
        let own = QpEntry::pack_peer(self.lid(), qp.qpn, qp.generation);
        let Transport::Connected(Some(remote)) = &mut qp.transport else { return };
        // An atomic that was asked for is still the WQE at the head, and may have been executed.
        if remote.lane.position() != 0 || !remote.was_reset() {
            return;
        }
        let (peer, qpn) = (Rc::clone(&remote.peer), remote.qpn());
        let Some(new) = Remote::of(&peer, qpn, own, self.membership.epoch()) else { return };
        self.memory.qp(qp.index).peer.store(QpEntry::pack_peer(peer.lid, qpn, new.generation()), Ordering::Release);
        **remote = new;
    }

    /// # Safety
    /// As [`hca::Hca::create_cq`](crate::hca::Hca::create_cq).
    pub(crate) unsafe fn create_cq_at(&self, memory: &CqMemory) -> Result<u32, CreateError> {
        let CqMemory { buffer, entries, cqe_bytes, compression, record } = *memory;
        check("the number of CQ entries", entries.into(), 1, MAX_CQE.into())?;
        check_power_of_two("the number of CQ entries", entries)?;
        check_alignment("a completion queue's buffer", buffer, CQE_BYTES)?;
        check_alignment("a doorbell record", record.cast(), 8)?;
        if ![CQE_BYTES, CQE128_BYTES].contains(&(cqe_bytes as usize)) {
            return Err(CreateError::Illegal { what: "the size of a CQE", value: cqe_bytes.into(), legal: "64 or 128" });
        }
        // SAFETY: the caller's.
        let cq = unsafe { SoftCq::elsewhere(buffer, record.cast(), &CqConfig { entries, cqe_bytes, compression }) };
        self.place_cq(cq)
    }

    /// What is posted in another driver's receive queue.
    ///
    /// # Safety
    /// As [`hca::Hca::create_srq`](crate::hca::Hca::create_srq).
    unsafe fn create_rq_at(&self, state: &mut State, pd: u32, memory: &RqMemory, is_linked: bool) -> Result<u32, CreateError> {
        let RqMemory { buffer, wqe_cnt, stride, record } = *memory;
        check("the WQEs of a receive queue", wqe_cnt.into(), 1, 1 << 15)?;
        check_power_of_two("the WQEs of a receive queue", wqe_cnt)?;
        check("the bytes of a receive WQE", stride.into(), SEGMENT as u64, MAX_RECV_STRIDE.into())?;
        check_power_of_two("the bytes of a receive WQE", stride)?;
        check_alignment("a receive queue's buffer", buffer, SEGMENT)?;
        check_alignment("a doorbell record", record.cast(), 4)?;
        // SAFETY: the caller's. Receives may be posted to a shared queue at once, to a queue pair's own from INIT on.
        let mirror = unsafe { Mirror::new(buffer, stride as usize, record, is_linked) };
        self.place_rq(state, pd, (wqe_cnt, stride as usize), is_linked, Some(mirror)).map(|parts| parts.srqn)
    }

    /// # Safety
    /// As [`hca::Hca::create_srq`](crate::hca::Hca::create_srq).
    pub(crate) unsafe fn create_srq_at(&self, pd: u32, memory: &RqMemory) -> Result<u32, CreateError> {
        // SAFETY: the caller's.
        unsafe { self.create_rq_at(&mut self.state.borrow_mut(), pd, memory, true) }
    }

    /// # Safety
    /// As [`hca::Hca::create_qp`](crate::hca::Hca::create_qp).
    pub(crate) unsafe fn create_qp_at(&self, memory: &QpMemory) -> Result<u32, CreateError> {
        let sq = memory.sq;
        check("the WQEBBs of a send queue", sq.wqe_cnt.into(), 0, MAX_SEND_WR.into())?;
        // A queue of none is one that nobody looks at.
        let wqe_cnt = sq.wqe_cnt.max(1);
        check_power_of_two("the WQEBBs of a send queue", wqe_cnt)?;
        check_alignment("a send queue's buffer", sq.buffer, WQEBB)?;
        check_alignment("a doorbell record", sq.record.cast(), 4)?;
        let is_datagram = memory.service == Service::Datagram;
        let rqn = match &memory.receives {
            Receives::Shared(srqn) => *srqn,
            // SAFETY: the caller's.
            Receives::Own(rq) => unsafe { self.create_rq_at(&mut self.state.borrow_mut(), memory.pd, rq, false) }?,
            Receives::None => self.place_rq(&mut self.state.borrow_mut(), memory.pd, (1, SEGMENT), false, None)?.srqn,
        };
        let owns_rq = !matches!(memory.receives, Receives::Shared(_));
        let place = QpPlace {
            pd: memory.pd,
            send_cq: memory.send_cq,
            recv_cq: memory.recv_cq,
            rqn,
            owns_rq,
            is_datagram,
            scatters: memory.scatter_to_cqe && !is_datagram,
            user_index: memory.user_index,
            lane_slots: LANE_SLOTS as u32,
            // SAFETY: the caller's.
            sq: unsafe { SqPlace::elsewhere(sq.buffer, sq.record, wqe_cnt as u16) },
        };
        let result = self.place_qp(&mut self.state.borrow_mut(), place).map(|qp| {
            qp.has_sq = sq.wqe_cnt > 0;
            qp.qpn
        });
        if result.is_err() && owns_rq {
            self.destroy_rq(rqn);
        }
        result
    }

    /// Does `f` to queue pair `qpn`, if there is one.
    fn with_qp<R>(&self, qpn: u32, f: impl FnOnce(&mut SoftQp) -> R) -> Option<R> {
        let qps = &mut self.state.borrow_mut().qps;
        qps.get_mut(qp_index(qpn)).and_then(Option::as_deref_mut).filter(|qp| qp.qpn == qpn).map(f)
    }

    /// RESET to INIT: receives are looked at.
    pub(crate) fn initialize(&self, qpn: u32) {
        let Some((rqn, true)) = self.with_qp(qpn, |qp| (qp.rqn, qp.owns_rq)) else { return };
        if let Some(Some(rq)) = self.state.borrow_mut().rqs.get_mut(rqn as usize) {
            rq.mirror.iter_mut().for_each(Mirror::start);
        }
    }

    /// RTR to RTS: sends are looked at.
    pub(crate) fn start_sending(&self, qpn: u32, options: &ConnectOptions) {
        self.with_qp(qpn, |qp| {
            qp.options = *options;
            qp.is_watched = qp.has_sq;
        });
    }

    /// Connects to whoever has the number, or to nobody.
    pub(crate) fn connect_to(&self, qpn: u32, remote_qpn: u32, access: Access) {
        let lid = seat_of(remote_qpn);
        let peer = self.state.borrow_mut().links.peer_of_lid(self, lid);
        let remote = peer.map(|peer| QpAddress::soft(lid, remote_qpn, peer.epoch));
        let options = ConnectOptions::default();
        let is_connected = remote.is_some_and(|remote| self.connect(&ConnectParts { qpn, remote, options }, access).is_ok());
        if !is_connected {
            self.with_qp(qpn, |qp| qp.transport = Transport::Nowhere);
        }
    }

    /// What a queue pair that receives allows its peer from now on.
    pub(crate) fn allow(&self, qpn: u32, access: Access) {
        self.with_qp(qpn, |qp| {
            qp.access = access;
            if self.memory.receives(qp.index) {
                // H1
                self.memory.qp(qp.index).identity.store(qp.connected_identity(), Ordering::Release);
            }
        });
    }

    /// As [`fail_qp`](Self::fail_qp), with what was posted and not looked at yet.
    pub(crate) fn fail_hosted(&self, qpn: u32) {
        self.with_qp(qpn, |qp| qp.is_watched = qp.has_sq);
        self.fail_qp(qpn);
    }

    pub(crate) fn has_failed(&self, qpn: u32) -> bool {
        self.with_qp(qpn, |qp| qp.failed).unwrap_or(false)
    }

    /// Back to RESET, under the same number. `false` if the peer does not finish what it is doing there.
    pub(crate) fn reset_qp(&self, qpn: u32) -> bool {
        let state = &mut *self.state.borrow_mut();
        let State { qps, rqs, stuck, hot, qp_generations, .. } = state;
        let index = qp_index(qpn);
        let Some(qp) = qps.get_mut(index).and_then(Option::as_mut).filter(|qp| qp.qpn == qpn) else { return true };
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let peer = qp.remote().map(|r| r.peer.clone());
        if !self.quiesce(stuck, peer.iter()) {
            qp.fail(self);
            return false;
        }
        hot.remove(index);
        // What is in the lane took receives of a shared queue; they are given back as those of a destroyed queue pair are.
        super::arrive::drain(self, qp, &mut state.cqs);
        qp_generations[index] = super::objects::next_generation(qp_generations[index]);
        // SAFETY: committed when it was made; the peer was waited for.
        qp.lane = unsafe { self.clear_lane(index, qp.lane_place) };
        qp.generation = qp_generations[index];
        (qp.sq_consumer, qp.sq_limit, qp.flushed, qp.answered) = (0, 0, 0, 0);
        (qp.failed, qp.is_odd, qp.is_watched) = (false, state.injector.is_some(), false);
        qp.waiting = None;
        qp.under_way = UnderWay::with_capacity(0, false);
        qp.transport = if qp.is_datagram() { Transport::Datagram { qkey: 0 } } else { Transport::Connected(None) };
        if let (true, Some(Some(rq))) = (qp.owns_rq, rqs.get_mut(qp.rqn as usize)) {
            rq.receives.reset();
            rq.taken.reset();
            rq.mirror.iter_mut().for_each(Mirror::reset);
        }
        super::objects::publish_reset(self.memory.qp(index), qp);
        state.links.forget_unused();
        true
    }

    pub(crate) fn has_overrun(&self, cqn: u32) -> bool {
        self.state.borrow().cqs.get(cqn as usize).and_then(Option::as_ref).is_some_and(SoftCq::has_overrun)
    }

    pub(crate) fn take_cq_event(&self, cqn: u32) -> bool {
        self.state.borrow_mut().cqs.get_mut(cqn as usize).and_then(Option::as_mut).is_some_and(SoftCq::announce)
    }

    /// Registers memory that only its process, and the kernel's copy, reach. Atomics are executed by this device.
    pub(crate) fn register_hosted(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<u32, RegisterError> {
        foreign_memory_reachable().map_err(|reason| RegisterError::Unreachable { reason })?;
        self.place_foreign(pd, addr, bytes, access).map(|parts| parts.key)
    }
}
