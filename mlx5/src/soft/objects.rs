//! Creating and destroying the device's objects: what a driver asks the firmware for.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use shm::lane::LaneRx;
use shm::memfd::{Memfd, MemfdRangeError};
use shm::ready::{ARMED, ReadyWords};
use shm::sync::{heavy_barrier, yield_now};

use super::arena::PAGE;
use super::cq::SoftCq;
use super::fabric::{Membership, Peer};
use super::layout::{FOREIGN, LANE_SLOTS, MAX_MRS, MAX_QPS, MAX_SRQS, Message, Pop, QP_INDEX_BITS, QUEUE_BYTES, QpEntry, RECEIVES, VALID};
use super::memory::{DeviceMemory, foreign_memory_reachable};
use super::private::PrivateMemory;
use super::queues::{Remote, SQ_BUFFER, SQ_RECORD, SoftQp};
use super::{Clock, Hca, State, arrive};
use crate::control::{ConnectParts, CqParts, CreateError, MrParts, SqParts, SrqParts, UarParts, check};
use crate::cq::CqConfig;
use crate::device::{DeviceInfo, NullOptions, OpenError, SoftOptions};
use crate::doorbell::BF_BYTES;
use crate::mr::{Access, RegisterError};
use crate::qp::{ConnectError, DeviceKind, QpAddress, QpConfig};
use crate::wire::{CQE_BYTES, CQE128_BYTES, SEGMENT, WQEBB};

const MAX_SEND_WR: u32 = 1 << 15;
const MAX_CQE: u32 = 1 << 22;
const MAX_SRQ_WR: u32 = (1 << 15) - 1;
const MAX_SRQ_SGE: usize = 15;
const MAX_CQS: usize = 1 << 16;
/// Regions below it are reserved.
const FIRST_MR: usize = 2;
/// 16 + 16 + align16(4 + 220) = 256 bytes: the longest inline WRITE that fits one BlueFlame register.
const MAX_INLINE: usize = 220;
/// How long deregistering and destroying wait for a peer in the middle of a copy, in real time whatever the device's clock is: another
/// process is waited for.
const QUIESCE_NS: u64 = 50_000_000;

/// A memory region index in use, or its key's next tag.
#[derive(Clone, Copy, Default)]
pub(crate) struct MrSlot {
    tag: u8,
    state: MrState,
}

#[derive(Clone, Copy, Default)]
enum MrState {
    #[default]
    Free,
    Arena {
        offset: usize,
        bytes: usize,
    },
    Foreign,
    /// Not to be used: keys 0 and 0x100 (`INVALID_LKEY`) would be these indices'.
    Reserved,
}

/// An SRQ's place in the queue area.
pub(crate) struct SrqSlot {
    offset: usize,
    bytes: usize,
    wqe_cnt: u16,
    /// A peer may still pop from it: never used again.
    is_quarantined: bool,
}

pub(crate) fn qp_index(qpn: u32) -> usize {
    qpn as usize & (MAX_QPS - 1)
}

#[inline(always)]
pub(crate) fn ready_words(memory: &DeviceMemory) -> ReadyWords {
    // SAFETY: the lanes segment holds the words for MAX_QPS lanes; views do not outlive the memory they are made from.
    unsafe { ReadyWords::new(NonNull::from(&memory.lanes().ready).cast(), MAX_QPS) }
}

/// Allocates the pages that `object`, a part of `segment`, lies on.
fn commit<T: ?Sized>(segment: &Memfd, object: &T) -> Result<(), MemfdRangeError> {
    let start = core::ptr::from_ref(object).cast::<u8>() as usize - segment.base().as_ptr() as usize;
    let end = start + size_of_val(object);
    segment.commit(start / PAGE * PAGE..end.next_multiple_of(PAGE))
}

fn memory_error(what: &'static str) -> impl Fn(MemfdRangeError) -> CreateError {
    move |e| CreateError::Memory { what, source: io::Error::other(e) }
}

/// The first free index, growing the table up to `max`.
fn free_index<T>(table: &mut Vec<T>, max: usize, is_free: impl Fn(&T) -> bool, empty: impl FnOnce() -> T) -> Option<usize> {
    if let Some(index) = table.iter().position(is_free) {
        return Some(index);
    }
    (table.len() < max).then(|| {
        table.push(empty());
        table.len() - 1
    })
}

impl Hca {
    pub(crate) fn open(options: &SoftOptions, null: Option<&NullOptions>) -> Result<Self, OpenError> {
        let arena_bytes = options.arena_bytes.checked_next_multiple_of(PAGE).unwrap_or(options.arena_bytes);
        let memory =
            DeviceMemory::create(arena_bytes).map_err(|(what, source)| OpenError::Memory { what, source: io::Error::other(source) })?;
        let pages = commit(memory.control_memfd(), &memory.control().header)
            .and_then(|()| commit(memory.control_memfd(), &memory.control().srqs))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().ready))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().pops));
        pages.map_err(|source| OpenError::Memory { what: "the device's tables", source: io::Error::other(source) })?;
        let membership = Membership::join(&options.fabric, &memory)?;
        Ok(Self {
            membership,
            memory,
            dead_peer_timeout_ns: options.dead_peer_timeout_ns,
            clock: options.clock.clone(),
            null: null.copied(),
            state: RefCell::new(State::new(arena_bytes)),
        })
    }

    pub(crate) fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: format!("soft:lid={}", self.membership.lid()),
            transport: self.membership.describe(),
            max_send_wr: MAX_SEND_WR,
            max_cqe: MAX_CQE,
            max_srq_wr: MAX_SRQ_WR,
            max_qp: MAX_QPS as u32,
            max_mr: MAX_MRS as u32,
            dead_peer_timeout_ns: self.dead_peer_timeout_ns,
            quarantined: self.state.borrow().quarantined,
        }
    }

    pub(crate) fn address(&self, qpn: u32) -> QpAddress {
        QpAddress { kind: DeviceKind::Soft, lid: self.membership.lid(), qpn, psn: 0, epoch: self.membership.epoch() }
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
        let cqs = &mut self.state.borrow_mut().cqs;
        let index = free_index(cqs, MAX_CQS, Option::is_none, || None)
            .ok_or(CreateError::Exhausted { what: "completion queue", max: MAX_CQS as u64 })?;
        let parts = CqParts { cqn: index as u32, buffer: cq.buffer(), entries: config.entries, stride: cq.stride(), record: cq.record() };
        cqs[index] = Some(cq);
        Ok(parts)
    }

    pub(crate) fn destroy_cq(&self, cqn: u32) {
        if let Some(cq) = self.state.borrow_mut().cqs.get_mut(cqn as usize) {
            *cq = None;
        }
    }

    pub(crate) fn create_srq(&self, depth: u32, max_sge: usize) -> Result<SrqParts, CreateError> {
        check("the SRQ depth", depth.into(), 1, MAX_SRQ_WR.into())?;
        check("the number of buffers of an SRQ receive", max_sge as u64, 0, MAX_SRQ_SGE as u64)?;
        // One WQE stays unposted, as the end of the list.
        let wqe_cnt = (depth + 1).next_power_of_two();
        let stride = (SEGMENT * (1 + max_sge)).next_power_of_two().max(2 * SEGMENT);
        let bytes = (wqe_cnt as usize * stride).next_multiple_of(PAGE);
        let State { srqs, queue_area, .. } = &mut *self.state.borrow_mut();
        let exhausted = |what, max| CreateError::Exhausted { what, max };
        let index = free_index(srqs, MAX_SRQS, Option::is_none, || None).ok_or(exhausted("shared receive queue", MAX_SRQS as u64))?;
        let offset = queue_area.take(bytes).ok_or(exhausted("bytes for queues", QUEUE_BYTES as u64))?;
        let ring = &self.memory.control().queues[offset / 8..(offset + bytes) / 8];
        commit(self.memory.control_memfd(), ring).map_err(|e| {
            queue_area.give(offset, bytes);
            memory_error("a shared receive queue")(e)
        })?;
        for word in ring {
            word.store(0, Ordering::Relaxed);
        }
        let (entry, pop) = (&self.memory.control().srqs[index], &self.memory.lanes().pops[index]);
        entry.record.store(0, Ordering::Relaxed);
        entry.stride.store(stride as u32, Ordering::Relaxed);
        entry.ring.store(offset as u64, Ordering::Relaxed);
        pop.word.store(Pop::pack(0, 0), Ordering::Relaxed);
        entry.wqe_cnt.store(wqe_cnt, Ordering::Release);
        srqs[index] = Some(SrqSlot { offset, bytes, wqe_cnt: wqe_cnt as u16, is_quarantined: false });
        Ok(SrqParts {
            srqn: index as u32,
            buffer: NonNull::from(ring).cast(),
            wqe_cnt: wqe_cnt as u16,
            stride,
            record: NonNull::from(&entry.record),
        })
    }

    /// All queue pairs on it are gone (they keep it alive); if a peer of one of them may still pop, its place and its ring stay as they are.
    pub(crate) fn destroy_srq(&self, srqn: u32) {
        let State { srqs, queue_area, .. } = &mut *self.state.borrow_mut();
        let Some(slot) = srqs.get_mut(srqn as usize) else { return };
        if let Some(srq) = slot.take_if(|srq| !srq.is_quarantined) {
            self.memory.control().srqs[srqn as usize].wqe_cnt.store(0, Ordering::Release);
            queue_area.give(srq.offset, srq.bytes);
        }
    }

    pub(crate) fn create_qp(&self, pd: u32, send_cq: u32, recv_cq: u32, srqn: u32, config: &QpConfig) -> Result<SqParts, CreateError> {
        check("max_send_wr", config.max_send_wr.into(), 1, MAX_SEND_WR.into())?;
        check("max_inline_data", config.max_inline_data as u64, 0, MAX_INLINE as u64)?;
        // The longest WQE, 220 B inline and an SGE, takes 5; with the NOPs in front of the ring's end it may need 9.
        let wqe_cnt = config.max_send_wr.next_power_of_two().max(16);
        let memory = PrivateMemory::new(SQ_BUFFER + wqe_cnt as usize * WQEBB)
            .map_err(|source| CreateError::Memory { what: "a send queue", source })?;
        let State { qps, qp_generations, srqs, deferred, .. } = &mut *self.state.borrow_mut();
        let srq_wqes = srqs.get(srqn as usize).and_then(Option::as_ref).map_or(1, |s| s.wqe_cnt);
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
        let (entry, lane) = (self.memory.qp(index), self.memory.lane(index));
        commit(self.memory.control_memfd(), entry).map_err(memory_error("a queue pair"))?;
        commit(self.memory.lanes_memfd(), lane).map_err(memory_error("a lane"))?;
        // Generations start at 1, so that no QPN is 0.
        let qpn = u32::from(qp_generations[index] + 1) << QP_INDEX_BITS | index as u32;
        let lanes = self.memory.lanes_memfd().base();
        let at = core::ptr::from_ref(&lane.slots).addr() - lanes.addr().get();
        // SAFETY: inside the segment, reached through its mapping because the slots have padding that no reference may write. No peer has
        // this place: it never had, or `destroy_qp` waited until it was out. Zero bytes are empty slots.
        unsafe { lanes.add(at).write_bytes(0, size_of_val(&lane.slots)) };
        lane.intent.store(0, Ordering::Relaxed);
        entry.peer.store(0, Ordering::Relaxed);
        entry.peer_epoch.store(0, Ordering::Relaxed);
        entry.consumed.store(0, Ordering::Relaxed);
        entry.armed.store(ARMED, Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        entry.srqn.store(srqn, Ordering::Relaxed);
        entry.identity.store(QpEntry::pack_identity(qpn, 0), Ordering::Release);
        let parts = SqParts {
            qpn,
            buffer: memory.at(SQ_BUFFER),
            wqe_cnt: wqe_cnt as u16,
            max_inline: config.max_inline_data,
            record: memory.at(SQ_RECORD),
            uar: UarParts { register: memory.at(0), kind: self.null.unwrap_or_default().register, uar_offset: index * 2 * BF_BYTES },
        };
        deferred.reserve(qps.len());
        // SAFETY: the slots live as long as the device, this is the only consuming end, and the lane was reset above.
        let lane = unsafe { LaneRx::<Message>::new(NonNull::from(&lane.slots).cast(), LANE_SLOTS as u64, 0) };
        qps[index] = Some(Box::new(SoftQp {
            qpn,
            index,
            pd,
            send_cq,
            recv_cq,
            srqn,
            srq_wqes,
            memory,
            sq_mask: wqe_cnt as u16 - 1,
            sq_consumer: 0,
            failed: false,
            waiting: None,
            lane,
            remote: None,
            options: crate::ConnectOptions::default(),
        }));
        Ok(parts)
    }

    /// Maps the peer and lets it in: RESET to RTS in one step, as far as the device is concerned.
    pub(crate) fn connect(&self, parts: &ConnectParts) -> Result<(), ConnectError> {
        let ConnectParts { qpn, remote, options } = parts;
        if self.null.is_some() {
            return Ok(());
        }
        let State { qps, peers, .. } = &mut *self.state.borrow_mut();
        let lid = remote.lid;
        let known = peers.iter().find(|p| p.lid == lid && p.epoch == remote.epoch);
        let peer = match known {
            Some(peer) => Rc::clone(peer),
            None => Rc::new(self.membership.attach(remote)?),
        };
        let own = QpEntry::pack_peer(self.membership.lid(), *qpn);
        let no_such_qp = ConnectError::NoSuchQp { lid, qpn: remote.qpn };
        let Some(connection) = Remote::of(&peer, remote.qpn, own, self.membership.epoch()) else { return Err(no_such_qp) };
        let Some(Some(qp)) = qps.get_mut(qp_index(*qpn)) else { return Err(no_such_qp) };
        qp.options = *options;
        qp.remote = Some(connection);
        if known.is_none() {
            peers.push(peer);
        }
        let entry = self.memory.qp(qp.index);
        entry.peer.store(QpEntry::pack_peer(lid, remote.qpn), Ordering::Relaxed);
        entry.peer_epoch.store(remote.epoch, Ordering::Relaxed);
        // H1
        entry.identity.store(QpEntry::pack_identity(*qpn, RECEIVES), Ordering::Release);
        Ok(())
    }

    /// If the peer is in the middle of something that it may finish much later, the place and the SRQ are not used again: it could still
    /// pop a receive and publish a message.
    pub(crate) fn destroy_qp(&self, qpn: u32) {
        let State { qps, qp_generations, cqs, srqs, hot, peers, stuck, quarantined, .. } = &mut *self.state.borrow_mut();
        let index = qp_index(qpn);
        let Some(mut qp) = qps.get_mut(index).and_then(Option::take) else { return };
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let quiet = self.quiesce(stuck, qp.remote.as_ref().map(|r| &r.peer).into_iter());
        // What has arrived took receives; their CQEs give them back.
        arrive::drain(&self.memory, &mut qp, cqs);
        hot.remove(index);
        qp_generations[index] = if quiet { (qp_generations[index] + 1) % (QUARANTINED - 1) } else { QUARANTINED };
        if !quiet {
            *quarantined += 1;
            if let Some(srq) = srqs.get_mut(qp.srqn as usize).and_then(Option::as_mut) {
                srq.is_quarantined = true;
            }
        }
        drop(qp);
        peers.retain(|p| Rc::strong_count(p) > 1);
    }

    pub(crate) fn alloc_registered(&self, pd: u32, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        let index = begin_register(state, bytes, access)?;
        let no_memory = |source| RegisterError::Memory { bytes, source };
        let full = || no_memory(io::Error::other("the device's arena is full; raise arena_bytes"));
        let size = bytes.checked_next_multiple_of(PAGE).ok_or_else(full)?;
        let offset = state.arena.take(size).ok_or_else(full)?;
        // SAFETY: inside the arena.
        let addr = unsafe { self.memory.arena().base().add(offset) };
        let slot = &mut state.mrs[index];
        let committed = self.memory.arena().commit(offset..offset + size).map_err(|e| no_memory(io::Error::other(e)));
        let published = committed.and_then(|()| self.publish_mr(index, slot.tag, pd, addr, bytes, offset as u64, access));
        match published {
            Ok(_) => slot.state = MrState::Arena { offset, bytes: size },
            Err(_) => state.arena.give(offset, size),
        }
        published
    }

    pub(crate) fn register_foreign(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        let index = begin_register(state, bytes, access)?;
        if access.intersects(Access::REMOTE_READ | Access::REMOTE_WRITE) {
            foreign_memory_reachable().map_err(|reason| RegisterError::Unreachable { reason })?;
        }
        let slot = &mut state.mrs[index];
        let published = self.publish_mr(index, slot.tag, pd, addr, bytes, FOREIGN, access)?;
        slot.state = MrState::Foreign;
        Ok(published)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one table entry")]
    fn publish_mr(
        &self,
        index: usize,
        tag: u8,
        pd: u32,
        addr: NonNull<u8>,
        len: usize,
        offset: u64,
        access: Access,
    ) -> Result<MrParts, RegisterError> {
        let key = (index as u32) << 8 | u32::from(tag);
        let entry = self.memory.mr(key);
        commit(self.memory.control_memfd(), entry).map_err(|e| RegisterError::Memory { bytes: len, source: io::Error::other(e) })?;
        entry.addr.store(addr.as_ptr() as u64, Ordering::Relaxed);
        entry.len.store(len as u64, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        // H2
        entry.key.store(VALID | u64::from(key), Ordering::Release);
        Ok(MrParts { key, addr, len })
    }

    /// Invalidates the key, waits for peers that may be copying under it, and gives the memory back. `false` if one of them does not finish
    /// in time (it may be stopped, and resume): then the region's place stays taken, and calling this again looks again.
    pub(crate) fn try_deregister(&self, key: u32) -> bool {
        let State { mrs, arena, peers, stuck, .. } = &mut *self.state.borrow_mut();
        self.memory.mr(key).key.store(0, Ordering::Release);
        if !self.quiesce(stuck, peers.iter()) {
            return false;
        }
        let slot = &mut mrs[(key >> 8) as usize];
        if let MrState::Arena { offset, bytes } = slot.state {
            // Zero for the next region; pages that cannot be zeroed are not used again.
            if self.memory.arena().release(offset..offset + bytes).is_ok() {
                arena.give(offset, bytes);
            }
        }
        *slot = MrSlot { tag: slot.tag.wrapping_add(1), state: MrState::Free };
        true
    }

    /// Deregisters for good: what cannot be given back is never used again by this device.
    pub(crate) fn deregister(&self, key: u32) {
        if !self.try_deregister(key) {
            self.state.borrow_mut().quarantined += 1;
        }
    }

    /// Waits, for a bounded time, until no peer executes a doorbell that began before now (H3).
    ///
    /// A peer that does not finish is remembered: what it was doing may touch anything that was valid then, so nothing is given back,
    /// and nobody waits for it again, until it has finished that doorbell or is dead.
    fn quiesce<'a>(&self, stuck: &mut Vec<Stuck>, peers: impl Iterator<Item = &'a Rc<Peer>>) -> bool {
        stuck.retain(Stuck::is_stuck);
        let living: Vec<_> = peers.filter(|peer| !peer.is_gone()).collect();
        if !stuck.is_empty() || living.is_empty() {
            return stuck.is_empty();
        }
        if !heavy_barrier() {
            return false;
        }
        let busy = living.into_iter().map(|peer| Stuck { peer: Rc::clone(peer), executing: peer.executing() });
        stuck.extend(busy.filter(|busy| busy.executing % 2 == 1));
        let end_ns = Clock::System.now_ns() + QUIESCE_NS;
        while !stuck.is_empty() && Clock::System.now_ns() < end_ns {
            yield_now();
            stuck.retain(Stuck::is_stuck);
        }
        stuck.is_empty()
    }
}

/// A peer that was executing a doorbell when something was to be taken away.
pub(crate) struct Stuck {
    peer: Rc<Peer>,
    /// The value of its `executing` word then.
    executing: u64,
}

impl Stuck {
    fn is_stuck(&self) -> bool {
        self.peer.executing() == self.executing && !self.peer.is_gone()
    }
}

/// All ones in the 10 generation bits of a QPN.
const QUARANTINED: u16 = (1 << (24 - QP_INDEX_BITS)) - 1;

fn begin_register(state: &mut State, bytes: usize, access: Access) -> Result<usize, RegisterError> {
    if bytes == 0 {
        return Err(RegisterError::Empty);
    }
    if access.contains(Access::REMOTE_WRITE) && !access.contains(Access::LOCAL_WRITE) {
        return Err(RegisterError::RemoteWithoutLocalWrite);
    }
    let is_free = |slot: &MrSlot| matches!(slot.state, MrState::Free);
    if state.mrs.is_empty() {
        state.mrs.resize(FIRST_MR, MrSlot { tag: 0, state: MrState::Reserved });
    }
    free_index(&mut state.mrs, MAX_MRS, is_free, MrSlot::default).ok_or(RegisterError::Exhausted { max: MAX_MRS })
}
