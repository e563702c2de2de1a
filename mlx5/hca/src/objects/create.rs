//! Creating and destroying objects: the commands that a driver sends to the firmware.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use copyrpc_shm::lane::{LaneRx, Slot};
use copyrpc_shm::ready::ARMED;
use copyrpc_shm::sync::FIRST;
use mlx5_wire::{
    Access, AsyncEvent, CQE_BYTES, CQE128_BYTES, ConnectOptions, MAX_CQE, MAX_RECV_SGE,
    MAX_RECV_WR, MAX_SEND_WR, SEGMENT, Service, WQEBB, Writes,
};

use crate::debug::faults::Injector;
use crate::error::{CreateError, check, exhausted};
use crate::queues::cq::SoftCq;
use crate::queues::in_flight::InFlight;
use crate::queues::mirror::Mirror;
use crate::queues::qp::{Mode, SoftQp, SqPlace, Transport};
use crate::responder::arrive;
use crate::shared::arena::free_index;
use crate::shared::layout::{
    DATAGRAM, LANE_SLOTS, LanePlace, MAX_QPS, MIN_LANE_SLOTS, Message, QP_INDEX_BITS,
};
use crate::shared::memory::{commit, memory_error};
use crate::shared::mr_cache::{Lookups, MrCache};
use crate::shared::receives::Receives;
use crate::types::request::{CqMemory, QpMemory, Receives as Source, RqMemory, SqMemory};
use crate::types::watch::QpWatch;
use crate::{Hca, Queues, State};

const MAX_CQS: usize = 1 << 16;
pub(crate) const LANE_SLOT_BYTES: usize = size_of::<Slot<Message>>();
/// Longest receive WQE, in bytes.
const MAX_RECV_STRIDE: u32 = 1024;
/// Number of values of the upper 10 bits of a QPN that are used: neither all zeros nor all ones.
pub(crate) const QPN_TAGS: u16 = (1 << (24 - QP_INDEX_BITS)) - 2;

/// A place that queue pairs use one after another.
#[derive(Clone, Copy)]
pub(crate) struct QpPlace {
    /// Upper bits of the number of the next queue pair, less one.
    pub(crate) tag: u16,
    /// Whether a peer may still use the place, so that the place is never reused.
    pub(crate) is_quarantined: bool,
    /// Value of [`SoftQp::version`] of the last queue pair in this place.
    pub(crate) version: u32,
}

fn require(
    is_legal: bool,
    what: &'static str,
    value: impl Into<u64>,
    legal: &'static str,
) -> Result<(), CreateError> {
    let value = value.into();
    is_legal
        .then_some(())
        .ok_or(CreateError::Illegal { what, value, legal })
}

/// Checks that a number of entries or bytes is in `min..=max`, and is a power of two.
fn check_size(what: &'static str, value: u32, min: u32, max: u32) -> Result<(), CreateError> {
    check(what, value, min..=max)?;
    require(value.is_power_of_two(), what, value, "a power of two")
}

fn check_alignment(what: &'static str, at: NonNull<u8>, to: usize) -> Result<(), CreateError> {
    let addr = at.addr().get();
    require(addr % to == 0, what, addr as u64, "an aligned address")
}

fn check_rq(memory: &RqMemory) -> Result<(), CreateError> {
    let (wqe_cnt, stride) = (memory.wqe_cnt, memory.stride);
    check_size("the WQEs of a receive queue", wqe_cnt, 1, 1 << 15)?;
    let least = SEGMENT as u32;
    check_size("the bytes of a receive WQE", stride, least, MAX_RECV_STRIDE)?;
    check_alignment("a receive queue's buffer", memory.buffer, SEGMENT)?;
    check_alignment("a doorbell record", memory.record.cast(), 4)
}

/// Publishes a reset queue pair: it is not connected, nothing has arrived, and it does not receive.
pub(crate) fn publish_reset(qp: &mut SoftQp) {
    qp.version = qp.version.wrapping_add(1);
    qp.generation = qp.version;
    (qp.terms, qp.has_reported) = (None, false);
    let entry = qp.entry();
    entry.terms.store(0, Ordering::Relaxed);
    entry.generation.store(qp.generation, Ordering::Relaxed);
    entry.peer.store(0, Ordering::Relaxed);
    entry.peer_epoch.store(0, Ordering::Relaxed);
    entry.acks.consumed.store(0, Ordering::Relaxed);
    entry.acks.answered.store(0, Ordering::Relaxed);
    entry.armed.store(ARMED, Ordering::Relaxed);
    entry.lane.store(qp.lane_place.pack(), Ordering::Relaxed);
    // H1 of `shared::layout`: stored after the entry's other fields.
    entry.identity.store(
        qp.identity(if qp.is_datagram() { DATAGRAM } else { 0 }),
        Ordering::Release,
    );
}

impl Hca {
    /// Makes a protection domain. Returns its number, which repeats after 2^32 calls.
    #[must_use]
    pub fn alloc_pd(&self) -> u32 {
        let mut state = self.state.borrow_mut();
        let pd = state.next_pd;
        state.next_pd = pd.wrapping_add(1);
        pd
    }

    /// Makes a completion queue. Returns its number.
    ///
    /// # Errors
    /// A size outside the limits, or a misaligned address.
    ///
    /// # Safety
    /// The memory stays valid until [`destroy_cq`](Self::destroy_cq), and its driver accesses it
    /// like a device's queue.
    pub unsafe fn create_cq(&self, memory: &CqMemory) -> Result<u32, CreateError> {
        check_size("the number of CQ entries", memory.entries, 1, MAX_CQE)?;
        check_alignment("a completion queue's buffer", memory.buffer, CQE_BYTES)?;
        check_alignment("a doorbell record", memory.record.cast(), 8)?;
        let bytes = memory.cqe_bytes;
        let is_legal = [CQE_BYTES, CQE128_BYTES].contains(&(bytes as usize));
        require(is_legal, "the size of a CQE", bytes, "64 or 128")?;
        // SAFETY: guaranteed by the caller.
        let cq = unsafe { SoftCq::new(memory) };
        let cqs = &mut self.state.borrow_mut().queues.cqs;
        let index = free_index(cqs, MAX_CQS, Option::is_none, || None)
            .ok_or(exhausted("completion queue", MAX_CQS))?;
        cqs[index] = Some(cq);
        Ok(index as u32)
    }

    /// Destroys a completion queue that no queue pair uses.
    pub fn destroy_cq(&self, cqn: u32) {
        let state = &mut *self.state.borrow_mut();
        let cq = state.queues.cqs.get_mut(cqn as usize);
        if let Some(cq) = cq.and_then(Option::take) {
            state.produced = state.produced.wrapping_add(cq.produced());
            self.forget_events(|event| event == AsyncEvent::CqError { cqn });
        }
    }

    /// Finds a place for a queue pair, and `lane_slots` or more slots for its lane. Returns the
    /// index of the place, and the place of the slots. The pages of both are committed.
    fn free_qp(
        &self,
        state: &mut State,
        lane_slots: u32,
    ) -> Result<(usize, LanePlace), CreateError> {
        let State {
            queues: Queues { qps, .. },
            qp_places,
            lane_area,
            first_tag,
            ..
        } = state;
        let free =
            |(qp, place): (&Option<Box<SoftQp>>, &QpPlace)| qp.is_none() && !place.is_quarantined;
        let index = match qps.iter().zip(qp_places.iter()).position(free) {
            Some(index) => index,
            None if qps.len() < MAX_QPS => {
                qps.push(None);
                qp_places.push(QpPlace {
                    tag: *first_tag,
                    is_quarantined: false,
                    version: FIRST,
                });
                qps.len() - 1
            }
            None => return Err(exhausted("queue pair", MAX_QPS)),
        };
        commit(&self.memory.control_memfd, self.memory.qp(index))
            .map_err(memory_error("a queue pair"))?;
        commit(&self.memory.lanes_memfd, self.memory.lane(index))
            .map_err(memory_error("a lane"))?;
        let slots = lane_slots.next_power_of_two().max(MIN_LANE_SLOTS as u32);
        let at = lane_area
            .take_aligned(slots as usize * LANE_SLOT_BYTES, LANE_SLOT_BYTES)
            .ok_or(exhausted("lane", MAX_QPS))?;
        let lane_place = LanePlace {
            first: (at / LANE_SLOT_BYTES) as u32,
            slots,
        };
        let committed = &self.memory.lanes().slots[lane_place.range()];
        commit(&self.memory.lanes_memfd, committed).map_err(|error| {
            lane_area.give(at, slots as usize * LANE_SLOT_BYTES);
            memory_error("a lane")(error)
        })?;
        Ok((index, lane_place))
    }

    /// Makes a shared receive queue in the driver's memory: posted WQEs are copied into memory that
    /// peers map. Returns the number of the queue.
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    ///
    /// # Safety
    /// The memory stays valid until [`destroy_srq`](Self::destroy_srq), and its driver accesses it
    /// like a device's queue.
    pub unsafe fn create_srq(&self, pd: u32, memory: &RqMemory) -> Result<u32, CreateError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy_rq(&mut self.state.borrow_mut(), pd, memory, true) }
    }

    /// Makes a receive queue whose posted WQEs are copied from the driver's memory.
    ///
    /// # Safety
    /// The memory stays valid as long as the queue, and its driver accesses it like a device's
    /// queue.
    unsafe fn copy_rq(
        &self,
        state: &mut State,
        pd: u32,
        memory: &RqMemory,
        is_linked: bool,
    ) -> Result<u32, CreateError> {
        check_rq(memory)?;
        let RqMemory {
            buffer,
            wqe_cnt,
            stride,
            record,
        } = *memory;
        // SAFETY: the caller guarantees that the memory is valid. `check_rq` has checked its
        // alignment, and `place_rq` makes a queue of the same size. The mirror of a shared queue is
        // polled from now on, because a driver may post there at once. The mirror of a queue pair's
        // own queue is polled from INIT on.
        let mirror = unsafe { Mirror::new(buffer, stride as usize, record, is_linked) };
        self.place_rq(state, pd, (wqe_cnt, stride), is_linked, Some(mirror))
            .map(|(rqn, _)| rqn)
    }

    /// Makes a receive queue in memory that peers map. Returns its number and its zeroed memory. It
    /// is either shared (`is_shared`), and then every WQE starts with its next segment; or it
    /// belongs to one queue pair ([`Receives::OwnInReach`](crate::Receives::OwnInReach)).
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    pub fn create_rq(
        &self,
        pd: u32,
        depth: u32,
        max_sge: usize,
        is_shared: bool,
    ) -> Result<(u32, RqMemory), CreateError> {
        check("the depth of a receive queue", depth, 1..=MAX_RECV_WR)?;
        check(
            "the number of buffers of a receive",
            max_sge,
            0..=MAX_RECV_SGE,
        )?;
        // One WQE of a list stays unposted, as its end.
        let wqe_cnt = (depth + u32::from(is_shared)).next_power_of_two();
        let segments = max_sge + usize::from(is_shared);
        let stride = (SEGMENT * segments).next_power_of_two().max(if is_shared {
            2 * SEGMENT
        } else {
            SEGMENT
        });
        self.place_rq(
            &mut self.state.borrow_mut(),
            pd,
            (wqe_cnt, stride as u32),
            is_shared,
            None,
        )
    }

    /// Makes a queue pair, in the state RESET. Returns its number.
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    ///
    /// # Safety
    /// The memory stays valid until [`destroy_qp`](Self::destroy_qp), and its driver accesses it
    /// like a device's queues.
    pub unsafe fn create_qp(&self, memory: &QpMemory) -> Result<u32, CreateError> {
        let sq = memory.sq;
        check("lane_slots", memory.lane_slots, 1..=LANE_SLOTS)?;
        // A queue pair that never sends gets one WQEBB, so that masks are valid.
        let wqe_cnt = sq.wqe_cnt.max(1);
        check_size("the WQEBBs of a send queue", wqe_cnt, 1, MAX_SEND_WR)?;
        check_alignment("a send queue's buffer", sq.buffer, WQEBB)?;
        check_alignment("a doorbell record", sq.record.cast(), 4)?;
        let state = &mut *self.state.borrow_mut();
        let (rqn, is_new) = match &memory.receives {
            Source::Shared(srqn) => (*srqn, false),
            Source::OwnInReach(rqn) => (*rqn, false),
            // SAFETY: guaranteed by the caller.
            Source::Own(rq) => (unsafe { self.copy_rq(state, memory.pd, rq, false) }?, true),
            Source::None => (
                self.place_rq(state, memory.pd, (1, SEGMENT as u32), false, None)?
                    .0,
                true,
            ),
        };
        // SAFETY: guaranteed by the caller.
        let place = unsafe { SqPlace::new(&SqMemory { wqe_cnt, ..sq }) };
        let result = self.place_qp(state, memory, rqn, place).map(|qp| qp.qpn);
        if result.is_err() && is_new {
            self.give_rq(state, rqn);
        }
        result
    }

    pub(crate) fn first_mode(&self, injector: Option<&Injector>) -> Mode {
        match (injector, self.is_port_up.get()) {
            (None, true) => self.mode,
            _ => Mode::Exceptional,
        }
    }

    fn qpn(&self, index: usize, tag: u16) -> u32 {
        let upper = if self.port.is_some() {
            self.lid()
        } else {
            tag + 1
        };
        u32::from(upper) << QP_INDEX_BITS | index as u32
    }

    /// Empties the lane of queue pair `index`, whose slots are at `place`. Returns the consuming
    /// end of the lane.
    ///
    /// # Safety
    /// The lane is committed, no peer accesses it, and it has no other consuming end any more.
    pub(crate) unsafe fn clear_lane(&self, index: usize, place: LanePlace) -> LaneRx<Message> {
        let slots = self.memory.lane_slots(place);
        // SAFETY: guaranteed by the caller. Zero bytes are empty slots.
        unsafe {
            self.memory
                .clear_lanes(slots.cast(), place.slots as usize * LANE_SLOT_BYTES)
        };
        self.memory.lane(index).intent.store(0, Ordering::Relaxed);
        // SAFETY: the slots live as long as the device, and are zeroed: both ends start at position
        // 0. The caller guarantees that this is the only consuming end. Any bytes are a valid
        // `Message`.
        unsafe { LaneRx::new(slots, place.slots.into(), 0) }
    }

    /// Makes a queue pair on existing queues, in the state RESET.
    fn place_qp<'a>(
        &self,
        state: &'a mut State,
        memory: &QpMemory,
        rqn: u32,
        sq: SqPlace,
    ) -> Result<&'a mut SoftQp, CreateError> {
        let no_rq = CreateError::Illegal {
            what: "the receive queue",
            value: rqn.into(),
            legal: "one of this device",
        };
        let Some(rq) = state.rqs.get(rqn as usize).and_then(Option::as_ref) else {
            return Err(no_rq);
        };
        let taken = rq.taken.clone();
        let Some(receives) = Receives::of(&self.memory, rqn) else {
            return Err(no_rq);
        };
        let is_datagram = memory.service == Service::Datagram;
        let (index, lane_place) = self.free_qp(state, memory.lane_slots)?;
        let QpPlace { tag, version, .. } = state.qp_places[index];
        let entry = self.memory.qp(index);
        // SAFETY: `free_qp` has committed the lane, whose last consuming end was dropped. No peer
        // accesses this place or these slots: no peer ever did, or `destroy_qp` has waited for the
        // peer.
        let lane = unsafe { self.clear_lane(index, lane_place) };
        // Room for the queue pair's events is reserved here, so that scheduling allocates nothing.
        let count = state.queues.qps.len();
        state.deferred.reserve(count);
        let later = if self.timing.is_immediate() {
            0
        } else {
            sq.capacity() as usize
        };
        let qpn = self.qpn(index, tag);
        let scatters = memory.scatter_to_cqe && !is_datagram;
        let is_compact = scatters
            || matches!(state.queues.cqs.get(memory.recv_cq as usize), Some(Some(cq)) if cq.compresses());
        let qp = state.queues.qps[index].insert(Box::new(SoftQp {
            qpn,
            writes: Writes::of(qpn),
            index,
            entry: NonNull::from(entry),
            generation: version,
            version,
            pd: memory.pd,
            send_cq: memory.send_cq,
            recv_cq: memory.recv_cq,
            rqn,
            scatters,
            is_compact,
            flushed: 0,
            answered: 0,
            receives,
            taken,
            sq,
            source: MrCache::none(),
            lookups: Lookups::new(),
            user_index: memory.user_index.unwrap_or(rqn),
            sq_consumer: 0,
            sq_limit: 0,
            mode: self.first_mode(state.queues.injector.as_deref()),
            waiting: None,
            lane,
            lane_place,
            ack_mask: arrive::ack_mask(lane_place.slots),
            transport: if is_datagram {
                Transport::Datagram { qkey: 0 }
            } else {
                Transport::Unconnected
            },
            is_unreliable: memory.service == Service::Unreliable,
            access: Access::empty(),
            options: ConnectOptions::default(),
            terms: None,
            has_reported: false,
            is_watched: false,
            in_flight: InFlight::with_capacity(later, self.checks_buffers),
            next_payload: 0,
            watch: QpWatch::default(),
        }));
        entry.pd.store(memory.pd, Ordering::Relaxed);
        entry.rqn.store(rqn, Ordering::Relaxed);
        publish_reset(qp);
        if self.strict {
            crate::debug::strict::poison_register(qp);
        }
        Ok(qp)
    }
}
