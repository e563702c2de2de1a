//! Creating and destroying the device's objects: what a driver asks the firmware for.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use shm::lane::{LaneRx, Slot};
use shm::memfd::{Memfd, MemfdRangeError};
use shm::ready::{ARMED, ReadyWords};
use shm::sync::light_barrier;

use super::arena::PAGE;
use super::cq::SoftCq;
use super::execute::LANE_RETRY_NS;
use super::fabric::{MAX_LID, Membership};
use super::faults;
use super::layout::{DATAGRAM, LANE_SLOTS, LanePlace, MAX_MRS, MAX_QPS, MIN_LANE_SLOTS, Message, QP_INDEX_BITS, QpEntry, RECEIVES};
use super::memory::DeviceMemory;
use super::private::PrivateMemory;
use super::queues::{REGISTER_BYTES, Remote, SQ_BUFFER, SoftQp, SqPlace, Transport};
use super::receive::{MAX_RECV_SGE, MAX_RECV_WR, Receives};
use super::strict::QpWatch;
use super::timing::UnderWay;
use super::trace::Trace;
use super::{Hca, State, arrive, execute};
use crate::address::QpAddress;
use crate::control::{self, ConnectParts, CqParts, CreateError, QpParts, QpRequest, RqParts, SqParts, SrqParts, UarParts, check};
use crate::cq::CqConfig;
use crate::device::{DeviceInfo, NullOptions, OpenError, SoftOptions};
use crate::hca::{MAX_SEAT, Port};
use crate::mr::Access;
use crate::qp::ConnectError;
use crate::wire::{CQE_BYTES, CQE128_BYTES, WQEBB};

pub(crate) const MAX_SEND_WR: u32 = 1 << 15;
pub(crate) const MAX_CQE: u32 = 1 << 22;
const MAX_CQS: usize = 1 << 16;
pub(crate) const LANE_SLOT_BYTES: usize = size_of::<Slot<Message>>();
/// 16 + 16 + align16(4 + 220) = 256 bytes: the longest inline WRITE that fits one BlueFlame register.
const MAX_INLINE: usize = 220;
/// All ones in the 10 generation bits of a QPN.
const QUARANTINED: u16 = (1 << (24 - QP_INDEX_BITS)) - 1;

pub(crate) fn qp_index(qpn: u32) -> usize {
    qpn as usize & (MAX_QPS - 1)
}

#[inline(always)]
pub(crate) fn ready_words(memory: &DeviceMemory) -> ReadyWords {
    // SAFETY: the lanes segment holds the words for MAX_QPS lanes; views do not outlive the memory they are made from.
    unsafe { ReadyWords::new(NonNull::from(&memory.lanes().ready).cast(), MAX_QPS) }
}

/// Allocates the pages that `object`, a part of `segment`, lies on.
pub(crate) fn commit<T: ?Sized>(segment: &Memfd, object: &T) -> Result<(), MemfdRangeError> {
    let start = core::ptr::from_ref(object).cast::<u8>() as usize - segment.base().as_ptr() as usize;
    let end = start + size_of_val(object);
    segment.commit(start / PAGE * PAGE..end.next_multiple_of(PAGE))
}

pub(crate) fn memory_error(what: &'static str) -> impl Fn(MemfdRangeError) -> CreateError {
    move |e| CreateError::Memory { what, source: io::Error::other(e) }
}

/// The first free index, growing the table up to `max`.
pub(crate) fn free_index<T>(table: &mut Vec<T>, max: usize, is_free: impl Fn(&T) -> bool, empty: impl FnOnce() -> T) -> Option<usize> {
    if let Some(index) = table.iter().position(is_free) {
        return Some(index);
    }
    (table.len() < max).then(|| {
        table.push(empty());
        table.len() - 1
    })
}

/// The generation of the next queue pair in a place.
pub(crate) fn next_generation(generation: u16) -> u16 {
    (generation + 1) % (QUARANTINED - 1)
}

/// A queue pair to be placed on existing queues.
pub(crate) struct QpPlace {
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) rqn: u32,
    pub(crate) owns_rq: bool,
    pub(crate) is_datagram: bool,
    pub(crate) scatters: bool,
    pub(crate) user_index: u32,
    /// Messages that may wait in its lane, [`QpConfig::lane_slots`](crate::QpConfig::lane_slots).
    pub(crate) lane_slots: u32,
    pub(crate) sq: SqPlace,
}

/// Nobody is connected to the queue pair, nothing has come, and it does not receive.
pub(crate) fn publish_reset(entry: &QpEntry, qp: &SoftQp) {
    entry.peer.store(0, Ordering::Relaxed);
    entry.peer_epoch.store(0, Ordering::Relaxed);
    entry.told.consumed.store(0, Ordering::Relaxed);
    entry.told.answered.store(0, Ordering::Relaxed);
    entry.armed.store(ARMED, Ordering::Relaxed);
    entry.lane.store(qp.lane_place.pack(), Ordering::Relaxed);
    // H1
    entry.identity.store(qp.identity(if qp.is_datagram() { DATAGRAM } else { 0 }), Ordering::Release);
}

impl Hca {
    pub(crate) fn open(options: &SoftOptions, null: Option<&NullOptions>) -> Result<Self, OpenError> {
        Self::join(options, null, None)
    }

    /// `hosted`: the port that it is one seat of, if its queues are another driver's.
    pub(crate) fn join(options: &SoftOptions, null: Option<&NullOptions>, hosted: Option<Port>) -> Result<Self, OpenError> {
        let arena_bytes = options.arena_bytes.checked_next_multiple_of(PAGE).unwrap_or(options.arena_bytes);
        let memory =
            DeviceMemory::create(arena_bytes).map_err(|(what, source)| OpenError::Memory { what, source: io::Error::other(source) })?;
        let pages = commit(memory.control_memfd(), &memory.control().header)
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().ready))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().datagram_ready))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().sleep));
        pages.map_err(|source| OpenError::Memory { what: "the device's tables", source: io::Error::other(source) })?;
        // 0 stands for a free entry: so that the key 0 names none.
        memory.mr(0).key.store(u32::MAX, Ordering::Relaxed);
        // The first one in a process registers it with the kernel, which in a process of several threads waits for all CPUs: up to seconds on
        // a busy machine. Not in the first doorbell, then, where a peer would take this process for a stopped one.
        light_barrier();
        let membership = Membership::join(&options.fabric, &memory, if hosted.is_some() { MAX_SEAT } else { MAX_LID })?;
        Ok(Self {
            membership,
            memory,
            dead_peer_timeout_ns: options.dead_peer_timeout_ns,
            clock: options.clock.clone(),
            timing: options.timing.clone(),
            strict: options.strict,
            trace: options.trace.then(|| Trace::new(options.clock.clone())),
            is_watched: options.trace || !options.timing.is_immediate(),
            has_exact_lanes: options.trace || options.timing.is_model(),
            has_extras: options.strict || options.trace || options.timing.is_model(),
            null: null.copied(),
            hosted,
            has_failed: Cell::new(false),
            rnr_naks: Cell::new(0),
            state: RefCell::new(State::new(arena_bytes, &options.faults)),
        })
    }

    pub(crate) fn info(&self) -> DeviceInfo {
        let state = self.state.borrow();
        DeviceInfo {
            name: format!("soft:lid={}", self.membership.lid()),
            transport: self.membership.describe(),
            max_send_wr: MAX_SEND_WR,
            max_recv_wr: MAX_RECV_WR,
            max_recv_sge: MAX_RECV_SGE as u32,
            max_inline_data: MAX_INLINE as u32,
            max_cqe: MAX_CQE,
            max_srq_wr: MAX_RECV_WR,
            max_qp: MAX_QPS as u32,
            max_mr: MAX_MRS as u32,
            has_atomics: true,
            dead_peer_timeout_ns: self.dead_peer_timeout_ns,
            numa_node: None,
            modes: faults::modes(self, state.injector.as_deref()),
            quarantined: state.quarantined,
            violations: state.violations.len() as u64,
            rnr_naks: Some(self.rnr_naks.get()),
        }
    }

    pub(crate) fn address(&self, qpn: u32) -> QpAddress {
        QpAddress::soft(self.membership.lid(), qpn, self.membership.epoch())
    }

    /// The hash over everything this device completed so far.
    pub(crate) fn trace_hash(&self) -> Option<u64> {
        self.trace.as_ref().map(Trace::hash)
    }

    /// When the device has something to do by itself.
    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        // A lane that was passed over on purpose.
        let is_ready = self.has_exact_lanes && ready_words(&self.memory).any();
        let again_ns = is_ready.then(|| self.clock.now_ns().saturating_add(LANE_RETRY_NS));
        [self.state.borrow().deferred.next_ns(), again_ns].into_iter().flatten().min()
    }

    pub(crate) fn alloc_pd(&self) -> u32 {
        let mut state = self.state.borrow_mut();
        state.next_pd += 1;
        state.next_pd - 1
    }

    pub(crate) fn create_cq(&self, config: &CqConfig) -> Result<CqParts, CreateError> {
        check("the number of CQ entries", config.entries.into(), 1, MAX_CQE.into())?;
        let bytes = config.cqe_bytes as usize;
        if ![CQE_BYTES, CQE128_BYTES].contains(&bytes) {
            return Err(CreateError::Illegal { what: "the size of a CQE", value: bytes as u64, legal: "64 or 128" });
        }
        let config = CqConfig { entries: config.entries.next_power_of_two(), ..*config };
        let cq = SoftCq::new(&config).map_err(|source| CreateError::Memory { what: "a completion queue", source })?;
        let (buffer, stride, record) = (cq.buffer(), cq.stride(), cq.record());
        Ok(CqParts { cqn: self.place_cq(cq)?, buffer, entries: config.entries, stride, record })
    }

    /// A number for a completion queue.
    pub(crate) fn place_cq(&self, cq: SoftCq) -> Result<u32, CreateError> {
        let cqs = &mut self.state.borrow_mut().cqs;
        let index = free_index(cqs, MAX_CQS, Option::is_none, || None)
            .ok_or(CreateError::Exhausted { what: "completion queue", max: MAX_CQS as u64 })?;
        cqs[index] = Some(cq);
        Ok(index as u32)
    }

    pub(crate) fn destroy_cq(&self, cqn: u32) {
        let State { cqs, produced, .. } = &mut *self.state.borrow_mut();
        if let Some(cq) = cqs.get_mut(cqn as usize).and_then(Option::take) {
            *produced = produced.wrapping_add(cq.produced());
        }
    }

    /// A place for a queue pair with at least so many slots in its lane, its pages committed: the index, and where the slots are.
    fn free_qp(&self, state: &mut State, lane_slots: u32) -> Result<(usize, LanePlace), CreateError> {
        let State { qps, qp_generations, lane_area, .. } = state;
        let free = |(qp, generation): (&Option<Box<SoftQp>>, &u16)| qp.is_none() && *generation != QUARANTINED;
        let index = match qps.iter().zip(qp_generations.iter()).position(free) {
            Some(index) => index,
            None if qps.len() < MAX_QPS => {
                qps.push(None);
                qp_generations.push(0);
                qps.len() - 1
            }
            None => return Err(CreateError::Exhausted { what: "queue pair", max: MAX_QPS as u64 }),
        };
        commit(self.memory.control_memfd(), self.memory.qp(index)).map_err(memory_error("a queue pair"))?;
        commit(self.memory.lanes_memfd(), self.memory.lane(index)).map_err(memory_error("a lane"))?;
        let slots = lane_slots.next_power_of_two().max(MIN_LANE_SLOTS as u32);
        let at = lane_area
            .take_aligned(slots as usize * LANE_SLOT_BYTES, LANE_SLOT_BYTES)
            .ok_or(CreateError::Exhausted { what: "lane", max: MAX_QPS as u64 })?;
        let lane_place = LanePlace { first: (at / LANE_SLOT_BYTES) as u32, slots };
        commit(self.memory.lanes_memfd(), &self.memory.lanes().slots[lane_place.range()]).map_err(|error| {
            lane_area.give(at, slots as usize * LANE_SLOT_BYTES);
            memory_error("a lane")(error)
        })?;
        Ok((index, lane_place))
    }

    pub(crate) fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        let (depth, max_sge) = match request.receives {
            control::Receives::Shared(srqn) => return Ok(QpParts { sq: self.create_qp_on(request, srqn, false)?, rq: None }),
            control::Receives::Own { depth, max_sge } => (depth, max_sge),
        };
        let SrqParts { srqn, buffer, wqe_cnt, stride, record } = self.create_rq(request.pd, depth, max_sge, false)?;
        let sq = self.create_qp_on(request, srqn, true).inspect_err(|_| self.destroy_rq(srqn))?;
        Ok(QpParts { sq, rq: Some(RqParts { buffer, wqe_cnt, stride, record }) })
    }

    /// A queue pair that takes from receive queue `rqn`; `owns_rq`: alone.
    pub(crate) fn create_qp_on(&self, request: &QpRequest<'_>, rqn: u32, owns_rq: bool) -> Result<SqParts, CreateError> {
        let config = request.config;
        check("max_send_wr", config.max_send_wr.into(), 1, MAX_SEND_WR.into())?;
        check("max_inline_data", config.max_inline_data as u64, 0, MAX_INLINE as u64)?;
        check("lane_slots", config.lane_slots.into(), 1, LANE_SLOTS as u64)?;
        // The longest WQE, 220 B inline and an SGE, takes 5; with the NOPs in front of the ring's end it may need 9.
        let wqe_cnt = config.max_send_wr.next_power_of_two().max(16);
        let memory = PrivateMemory::new(SQ_BUFFER + wqe_cnt as usize * WQEBB, REGISTER_BYTES)
            .map_err(|source| CreateError::Memory { what: "a send queue", source })?;
        let half = Rc::new(Cell::new(memory.at(0).as_ptr()));
        let kind = self.null.unwrap_or_default().register;
        let place = QpPlace {
            pd: request.pd,
            send_cq: request.send_cq,
            recv_cq: request.recv_cq,
            rqn,
            owns_rq,
            is_datagram: request.is_datagram,
            scatters: config.scatter_to_cqe && !request.is_datagram,
            user_index: rqn,
            lane_slots: config.lane_slots,
            sq: SqPlace::own(memory, wqe_cnt as u16),
        };
        let state = &mut *self.state.borrow_mut();
        let qp = self.place_qp(state, place)?;
        Ok(SqParts {
            qpn: qp.qpn,
            buffer: qp.sq.buffer(),
            wqe_cnt: wqe_cnt as u16,
            max_inline: config.max_inline_data,
            has_atomics: true,
            record: qp.sq.record(),
            uar: UarParts { half, kind, uar_offset: qp.index * REGISTER_BYTES },
        })
    }

    /// The number of queue pair `index`. Generations start at 1, so that no QPN is 0.
    fn qpn(&self, index: usize, generation: u16) -> u32 {
        let upper = if self.hosted.is_some() { self.lid() } else { generation + 1 };
        u32::from(upper) << QP_INDEX_BITS | index as u32
    }

    /// Empties the lane of queue pair `index`, which is at `place`.
    ///
    /// # Safety
    /// It is committed and no peer accesses it.
    pub(crate) unsafe fn clear_lane(&self, index: usize, place: LanePlace) -> LaneRx<Message> {
        let slots = self.memory.lane_slots(place);
        // SAFETY: the caller's. Zero bytes are empty slots.
        unsafe { self.memory.clear_lanes(slots.cast(), place.slots as usize * LANE_SLOT_BYTES) };
        self.memory.lane(index).intent.store(0, Ordering::Relaxed);
        // SAFETY: the slots live as long as the device, this is the only consuming end, and they are empty.
        unsafe { LaneRx::new(slots, place.slots.into(), 0) }
    }

    /// A queue pair on existing queues, in the state RESET.
    pub(super) fn place_qp<'a>(&self, state: &'a mut State, place: QpPlace) -> Result<&'a mut SoftQp, CreateError> {
        let no_rq = CreateError::Illegal { what: "the receive queue", value: place.rqn.into(), legal: "one of this device" };
        let Some(rq) = state.rqs.get(place.rqn as usize).and_then(Option::as_ref) else { return Err(no_rq) };
        let taken = rq.taken.clone();
        let Some(receives) = Receives::of(&self.memory, place.rqn) else { return Err(no_rq) };
        let (index, lane_place) = self.free_qp(state, place.lane_slots)?;
        let generation = state.qp_generations[index];
        let entry = self.memory.qp(index);
        // SAFETY: committed by `free_qp`. No peer has this place, nor these slots: it never had, or `destroy_qp` waited until it was out.
        let lane = unsafe { self.clear_lane(index, lane_place) };
        // So that nothing is allocated when they have to wait.
        let count = state.qps.len();
        state.deferred.reserve(count);
        let later = if self.timing.is_immediate() { 0 } else { place.sq.capacity() as usize };
        let qp = state.qps[index].insert(Box::new(SoftQp {
            qpn: self.qpn(index, generation),
            index,
            generation,
            pd: place.pd,
            send_cq: place.send_cq,
            recv_cq: place.recv_cq,
            rqn: place.rqn,
            owns_rq: place.owns_rq,
            scatters: place.scatters,
            flushed: 0,
            answered: 0,
            receives,
            taken,
            sq: place.sq,
            user_index: place.user_index,
            sq_consumer: 0,
            sq_limit: 0,
            failed: false,
            is_odd: state.injector.is_some(),
            waiting: None,
            lane,
            lane_place,
            transport: if place.is_datagram { Transport::Datagram { qkey: 0 } } else { Transport::Connected(None) },
            access: Access::empty(),
            options: crate::ConnectOptions::default(),
            is_watched: false,
            has_sq: true,
            under_way: UnderWay::with_capacity(later, self.strict),
            next_payload: 0,
            watch: QpWatch::default(),
        }));
        entry.pd.store(place.pd, Ordering::Relaxed);
        entry.rqn.store(place.rqn, Ordering::Relaxed);
        publish_reset(entry, qp);
        if self.strict {
            super::strict::poison_register(qp);
        }
        Ok(qp)
    }

    /// Maps the peer and lets it in: RTR, as far as the device is concerned. That it may not send before RTS is the driver's to see to.
    /// The peer is allowed `access` then.
    pub(crate) fn connect(&self, parts: &ConnectParts, access: Access) -> Result<(), ConnectError> {
        let ConnectParts { qpn, remote, options } = parts;
        if self.null.is_some() {
            return Ok(());
        }
        let State { qps, links, .. } = &mut *self.state.borrow_mut();
        let peer = links.peer(self, remote)?;
        let no_such_qp = ConnectError::NoSuchQp { lid: remote.lid, qpn: remote.qpn };
        let connection = qps.get_mut(qp_index(*qpn)).and_then(Option::as_mut).and_then(|qp| {
            let own = QpEntry::pack_peer(self.membership.lid(), *qpn, qp.generation);
            Some((Remote::of(&peer, remote.qpn, own, self.membership.epoch())?, qp))
        });
        drop(peer);
        let Some((connection, qp)) = connection else {
            links.forget_unused();
            return Err(no_such_qp);
        };
        (qp.options, qp.access) = (*options, access);
        let entry = self.memory.qp(qp.index);
        entry.peer.store(QpEntry::pack_peer(remote.lid, remote.qpn, connection.generation()), Ordering::Relaxed);
        qp.transport = Transport::Connected(Some(Box::new(connection)));
        entry.peer_epoch.store(remote.epoch, Ordering::Relaxed);
        // H1
        entry.identity.store(qp.connected_identity(), Ordering::Release);
        Ok(())
    }

    /// A datagram queue pair receives from now on what brings `qkey`.
    pub(crate) fn activate_datagrams(&self, qpn: u32, qkey: u32) {
        let State { qps, links, .. } = &mut *self.state.borrow_mut();
        links.has_datagrams |= self.null.is_none();
        if let Some(Some(qp)) = qps.get_mut(qp_index(qpn)) {
            qp.transport = Transport::Datagram { qkey };
            self.memory.qp(qp.index).identity.store(qp.identity(DATAGRAM | RECEIVES), Ordering::Release);
        }
    }

    /// To the error state: everything posted is flushed at once, whatever its time.
    pub(crate) fn fail_qp(&self, qpn: u32) {
        let state = &mut *self.state.borrow_mut();
        let index = qp_index(qpn);
        if let Some(Some(qp)) = state.qps.get_mut(index).filter(|qp| qp.as_ref().is_some_and(|qp| qp.qpn == qpn)) {
            qp.fail(self);
            execute::announce_all(self, state, index);
        }
    }

    /// If the peer is in the middle of something that it may finish much later, the place and the receive queue are not used again: it could
    /// still take a receive and publish a message.
    pub(crate) fn destroy_qp(&self, qpn: u32) {
        if let Some(rqn) = self.take_qp(qpn) {
            self.destroy_rq(rqn);
        }
    }

    /// Destroys it, but not the receive queue of its own, whose number this returns.
    fn take_qp(&self, qpn: u32) -> Option<u32> {
        let state = &mut *self.state.borrow_mut();
        let index = qp_index(qpn);
        let mut qp = state.qps.get_mut(index).and_then(Option::take)?;
        let own_rq = qp.owns_rq.then_some(qp.rqn);
        if self.strict {
            super::strict::destroyed(&mut state.violations, &qp);
        }
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let peer = qp.remote().map(|r| r.peer.clone());
        let quiet = self.quiesce(&mut state.stuck, peer.iter());
        // What has arrived took receives; their CQEs give them back.
        arrive::drain(self, &mut qp, &mut state.cqs);
        state.hot.remove(index);
        state.qp_generations[index] = if quiet { next_generation(state.qp_generations[index]) } else { QUARANTINED };
        if quiet {
            let LanePlace { first, slots } = qp.lane_place;
            state.lane_area.give(first as usize * LANE_SLOT_BYTES, slots as usize * LANE_SLOT_BYTES);
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
