//! Creating and destroying objects: the commands that a driver sends to the firmware.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};
use std::io;

use copyrpc_shm::lane::{LaneRx, Slot};
use copyrpc_shm::ready::ARMED;
use copyrpc_shm::sync::{FIRST, LightBarrier};
use mlx5_wire::{
    Access, AsyncEvent, CQE_BYTES, CQE128_BYTES, ConnectOptions, MAX_CQE, MAX_RECV_SGE,
    MAX_RECV_WR, MAX_SEND_WR, SEGMENT, Service, WQEBB, Writes,
};

use crate::debug::faults::{self, Injector};
use crate::debug::trace::Trace;
use crate::deferred::LANE_RETRY_NS;
use crate::error::{ConnectError, CreateError, OpenError, check};
use crate::options::SoftOptions;
use crate::packets::port::WirePort;
use crate::packets::{Wire, send_queue as packets};
use crate::queues::cq::SoftCq;
use crate::queues::in_flight::InFlight;
use crate::queues::mirror::Mirror;
use crate::queues::qp::{Mode, SoftQp, SqPlace, Transport, by_number};
use crate::random::Random;
use crate::requester::execute;
use crate::responder::arrive;
use crate::shared::arena::{PAGE, free_index};
use crate::shared::fabric::Membership;
use crate::shared::layout::{
    DATAGRAM, LANE_SLOTS, LanePlace, MAX_QPS, MIN_LANE_SLOTS, Message, QP_INDEX_BITS, QpEntry,
    RECEIVES, qp_index,
};
use crate::shared::memory::{DeviceMemory, commit, memory_error, ready_words};
use crate::shared::mr_cache::{Lookups, MrCache};
use crate::shared::receives::Receives;
use crate::shared::remote::Remote;
use crate::types::request::{Address, CqMemory, QpMemory, Receives as Source, RqMemory, SqMemory};
use crate::types::watch::QpWatch;
use crate::{DeviceInfo, Hca, Queues, State};

const MAX_CQS: usize = 1 << 16;
pub(crate) const LANE_SLOT_BYTES: usize = size_of::<Slot<Message>>();
/// Longest receive WQE, in bytes.
const MAX_RECV_STRIDE: u32 = 1024;
/// Values of the upper 10 bits of a QPN: neither all zeros nor all ones.
pub(crate) const QPN_TAGS: u16 = (1 << (24 - QP_INDEX_BITS)) - 2;

/// A place for queue pairs, in the state in which the last queue pair left it.
#[derive(Clone, Copy)]
pub(crate) struct QpPlace {
    /// Upper bits of the number of the next queue pair, less one.
    pub(crate) tag: u16,
    /// Whether a peer may still use it, so that it is never reused.
    pub(crate) is_quarantined: bool,
    /// [`SoftQp::version`].
    pub(crate) version: u32,
}

fn check_power_of_two(what: &'static str, value: u32) -> Result<(), CreateError> {
    let is_legal = value.is_power_of_two();
    if is_legal {
        Ok(())
    } else {
        Err(CreateError::Illegal {
            what,
            value: value.into(),
            legal: "a power of two",
        })
    }
}

fn check_alignment(what: &'static str, at: NonNull<u8>, to: usize) -> Result<(), CreateError> {
    let is_legal = at.addr().get() % to == 0;
    if is_legal {
        Ok(())
    } else {
        Err(CreateError::Illegal {
            what,
            value: at.addr().get() as u64,
            legal: "an aligned address",
        })
    }
}

/// Checks the sizes and the address of a receive queue in the driver's memory.
fn check_rq(memory: &RqMemory) -> Result<(), CreateError> {
    check(
        "the WQEs of a receive queue",
        memory.wqe_cnt.into(),
        1,
        1 << 15,
    )?;
    check_power_of_two("the WQEs of a receive queue", memory.wqe_cnt)?;
    check(
        "the bytes of a receive WQE",
        memory.stride.into(),
        SEGMENT as u64,
        MAX_RECV_STRIDE.into(),
    )?;
    check_power_of_two("the bytes of a receive WQE", memory.stride)?;
    check_alignment("a receive queue's buffer", memory.buffer, SEGMENT)?;
    check_alignment("a doorbell record", memory.record.cast(), 4)
}

/// Publishes a reset queue pair: it is not connected, nothing has arrived, and it does not receive.
pub(crate) fn publish_reset(qp: &mut SoftQp) {
    qp.version = qp.version.wrapping_add(1);
    qp.generation = qp.version;
    let entry = qp.entry();
    entry.generation.store(qp.generation, Ordering::Relaxed);
    entry.peer.store(0, Ordering::Relaxed);
    entry.peer_epoch.store(0, Ordering::Relaxed);
    entry.acks.consumed.store(0, Ordering::Relaxed);
    entry.acks.answered.store(0, Ordering::Relaxed);
    entry.armed.store(ARMED, Ordering::Relaxed);
    entry.lane.store(qp.lane_place.pack(), Ordering::Relaxed);
    // H1
    entry.identity.store(
        qp.identity(if qp.is_datagram() { DATAGRAM } else { 0 }),
        Ordering::Release,
    );
}

/// Joins the fabric and opens the port for packets. A virtual function whose UDP port is taken, by
/// a device of another fabric, user or kind, is left for the next one.
fn join(
    options: &SoftOptions,
    memory: &DeviceMemory,
) -> Result<(Membership, Option<Box<Wire>>), OpenError> {
    let port = options.port.as_ref();
    let Some(roce) = &options.roce else {
        return Ok((
            Membership::join(&options.fabric, memory, port, None, true)?,
            None,
        ));
    };
    if !options.timing.is_immediate() {
        return Err(OpenError::WireInModel);
    }
    let (mut behind, mut taken) = (0, None);
    loop {
        let membership = match (
            Membership::join(
                &options.fabric,
                memory,
                port,
                Some(behind),
                !roce.sends_packets_only(),
            ),
            taken,
        ) {
            (Err(OpenError::NoFreeLid(_)), Some(taken)) => return Err(taken),
            (joined, _) => joined?,
        };
        // A random number that only this user's processes learn.
        match WirePort::open(
            roce,
            port.map(|_| membership.lid),
            memory.ids()[2].token,
            (membership.seed, &options.clock),
        ) {
            Err(error) if port.is_some() && error.is_taken() => {
                (behind, taken) = (membership.lid, Some(error))
            }
            port => {
                let mut port = port?;
                port.traffic = options.counters.and_then(<[_]>::first);
                return Ok((membership, Some(Box::new(Wire::new(port)))));
            }
        }
    }
}

impl Hca {
    /// Opens a device, which joins its fabric.
    ///
    /// See [`OpenError`]. [`OpenError::NoFreeLid`] if all LIDs are taken, or all
    /// [`MAX_VF`](crate::MAX_VF) virtual functions of the port. Nothing is left behind.
    pub fn open(options: &SoftOptions) -> Result<Self, OpenError> {
        let arena_bytes = options
            .arena_bytes
            .checked_next_multiple_of(PAGE)
            .unwrap_or(options.arena_bytes);
        let memory =
            DeviceMemory::create(arena_bytes).map_err(|(what, source)| OpenError::Memory {
                what,
                source: io::Error::other(source),
            })?;
        let pages = commit(memory.control_memfd(), &memory.control().header)
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().ready))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().datagram_ready))
            .and_then(|()| commit(memory.lanes_memfd(), &memory.lanes().sleep));
        pages.map_err(|source| OpenError::Memory {
            what: "the device's tables",
            source: io::Error::other(source),
        })?;
        // The stamp 0 marks a free entry. So the key 0 must not match it.
        memory.mr(0).stamp.store(u64::MAX, Ordering::Relaxed);
        // The first barrier in a process registers it with the kernel, which waits for all CPUs if
        // the process has several threads: up to seconds on a busy machine. So it is not done in
        // the first doorbell, where a peer would consider this process stopped.
        let barrier = LightBarrier::of_process();
        memory
            .control()
            .header
            .has_fences
            .store(barrier.is_fence().into(), Ordering::Relaxed);
        let (membership, wire) = join(options, &memory)?;
        let random = &mut Random::new(membership.seed);
        let mut state = State::new(arena_bytes, &options.faults, ready_words(&memory), random);
        let is_plain = options.timing.is_immediate()
            && !options.strict
            && !options.trace
            && options.counters.is_none();
        let counters = options
            .counters
            .filter(|_| wire.as_ref().is_none_or(|wire| !wire.port.is_for_all));
        if !is_plain || wire.is_some() || options.clock.steps() || state.queues.injector.is_some() {
            state.deferred.add_extras();
        }
        let sends_packets = wire.is_some();
        state.wire = wire;
        Ok(Self {
            membership,
            memory,
            dead_peer_timeout_ns: options.dead_peer_timeout_ns,
            clock: options.clock.clone(),
            timing: options.timing.clone(),
            strict: options.strict,
            barrier,
            mode: if is_plain {
                Mode::Plain
            } else {
                Mode::Ordinary
            },
            trace: options.trace.then(|| Trace::new(options.clock.clone())),
            is_watched: options.trace || !options.timing.is_immediate() || counters.is_some(),
            counters,
            has_exact_lanes: options.trace || options.timing.is_model(),
            port: options.port,
            has_chores: Cell::new(false),
            failed: RefCell::default(),
            is_port_up: Cell::new(true),
            sends_packets,
            events: RefCell::default(),
            rnr_naks: Cell::new(0),
            compressed: Cell::new(0),
            sends: Cell::new(0),
            registrations: Cell::new(FIRST),
            state: RefCell::new(state),
        })
    }

    /// Returns the device's description, and its counters so far.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        let state = self.state.borrow();
        let name = format!("soft:lid={}", self.membership.lid);
        let modes = faults::modes(self, state.queues.injector.as_deref());
        DeviceInfo {
            dead_peer_timeout_ns: self.dead_peer_timeout_ns,
            quarantined: state.quarantined,
            violations: state.violations.len() as u64,
            rnr_naks: Some(self.rnr_naks.get()),
            packets: state.wire.as_ref().map(|wire| wire.port.counters),
            ..DeviceInfo::with_limits_of_formats(name, self.membership.describe(), modes)
        }
    }

    /// Returns the number of receive completions that were written into compressed sessions.
    #[must_use]
    pub fn compressed(&self) -> u64 {
        self.compressed.get()
    }

    /// Returns the address at which peers reach a queue pair.
    #[must_use]
    pub fn address(&self, qpn: u32) -> Address {
        Address {
            lid: self.membership.lid,
            qpn,
            epoch: self.membership.epoch,
        }
    }

    /// Returns the hash over all events of this device so far. `None` if it is not traced.
    #[must_use]
    pub fn trace_hash(&self) -> Option<u64> {
        self.trace.as_ref().map(Trace::hash)
    }

    /// Returns the time of the next event that the device has to handle by itself, a retry or a
    /// delayed operation, in ns of its clock.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        // A lane with a fault was skipped.
        let is_ready = self.has_exact_lanes && ready_words(&self.memory).any();
        let again_ns = is_ready.then(|| self.clock.now_ns().saturating_add(LANE_RETRY_NS));
        [self.state.borrow().next_event_ns(), again_ns]
            .into_iter()
            .flatten()
            .min()
    }

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
        check(
            "the number of CQ entries",
            memory.entries.into(),
            1,
            MAX_CQE.into(),
        )?;
        check_power_of_two("the number of CQ entries", memory.entries)?;
        check_alignment("a completion queue's buffer", memory.buffer, CQE_BYTES)?;
        check_alignment("a doorbell record", memory.record.cast(), 8)?;
        if ![CQE_BYTES, CQE128_BYTES].contains(&(memory.cqe_bytes as usize)) {
            return Err(CreateError::Illegal {
                what: "the size of a CQE",
                value: memory.cqe_bytes.into(),
                legal: "64 or 128",
            });
        }
        // SAFETY: guaranteed by the caller.
        let cq = unsafe { SoftCq::new(memory) };
        let cqs = &mut self.state.borrow_mut().queues.cqs;
        let index =
            free_index(cqs, MAX_CQS, Option::is_none, || None).ok_or(CreateError::Exhausted {
                what: "completion queue",
                max: MAX_CQS as u64,
            })?;
        cqs[index] = Some(cq);
        Ok(index as u32)
    }

    /// Destroys a completion queue that no queue pair uses.
    pub fn destroy_cq(&self, cqn: u32) {
        let State {
            queues: Queues { cqs, .. },
            produced,
            ..
        } = &mut *self.state.borrow_mut();
        if let Some(cq) = cqs.get_mut(cqn as usize).and_then(Option::take) {
            *produced = produced.wrapping_add(cq.produced());
            self.forget_events(|event| event == AsyncEvent::CqError { cqn });
        }
    }

    /// Returns a place for a queue pair with at least `lane_slots` slots in its lane, its pages
    /// committed: the index, and the place of the slots.
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
            None => {
                return Err(CreateError::Exhausted {
                    what: "queue pair",
                    max: MAX_QPS as u64,
                });
            }
        };
        commit(self.memory.control_memfd(), self.memory.qp(index))
            .map_err(memory_error("a queue pair"))?;
        commit(self.memory.lanes_memfd(), self.memory.lane(index))
            .map_err(memory_error("a lane"))?;
        let slots = lane_slots.next_power_of_two().max(MIN_LANE_SLOTS as u32);
        let at = lane_area
            .take_aligned(slots as usize * LANE_SLOT_BYTES, LANE_SLOT_BYTES)
            .ok_or(CreateError::Exhausted {
                what: "lane",
                max: MAX_QPS as u64,
            })?;
        let lane_place = LanePlace {
            first: (at / LANE_SLOT_BYTES) as u32,
            slots,
        };
        commit(
            self.memory.lanes_memfd(),
            &self.memory.lanes().slots[lane_place.range()],
        )
        .map_err(|error| {
            lane_area.give(at, slots as usize * LANE_SLOT_BYTES);
            memory_error("a lane")(error)
        })?;
        Ok((index, lane_place))
    }

    /// Makes a shared receive queue in the driver's memory, from which posted WQEs are copied.
    /// Returns its number.
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    ///
    /// # Safety
    /// Like [`create_cq`](Self::create_cq).
    pub unsafe fn create_srq(&self, pd: u32, memory: &RqMemory) -> Result<u32, CreateError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.copy_rq(&mut self.state.borrow_mut(), pd, memory, true) }
    }

    /// Makes a receive queue whose WQEs are copied from the driver's.
    ///
    /// # Safety
    /// Like [`create_cq`](Self::create_cq).
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
        // SAFETY: guaranteed by the caller. A driver may post to a shared queue at once, to a queue
        // pair's own queue from INIT on.
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
        check(
            "the depth of a receive queue",
            depth.into(),
            1,
            MAX_RECV_WR.into(),
        )?;
        check(
            "the number of buffers of a receive",
            max_sge as u64,
            0,
            MAX_RECV_SGE.into(),
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
    /// Like [`create_cq`](Self::create_cq).
    pub unsafe fn create_qp(&self, memory: &QpMemory) -> Result<u32, CreateError> {
        let sq = memory.sq;
        check(
            "the WQEBBs of a send queue",
            sq.wqe_cnt.into(),
            0,
            MAX_SEND_WR.into(),
        )?;
        check("lane_slots", memory.lane_slots.into(), 1, LANE_SLOTS as u64)?;
        // A queue pair that never sends gets one WQEBB, so that masks are valid.
        let wqe_cnt = sq.wqe_cnt.max(1);
        check_power_of_two("the WQEBBs of a send queue", wqe_cnt)?;
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

    /// Returns the mode of a new queue pair.
    pub(crate) fn first_mode(&self, injector: Option<&Injector>) -> Mode {
        match (injector, self.is_port_up.get()) {
            (None, true) => self.mode,
            _ => Mode::Exceptional,
        }
    }

    /// Returns the number of queue pair `index`.
    fn qpn(&self, index: usize, tag: u16) -> u32 {
        let upper = if self.port.is_some() {
            self.lid()
        } else {
            tag + 1
        };
        u32::from(upper) << QP_INDEX_BITS | index as u32
    }

    /// Empties the lane of queue pair `index`, which is at `place`.
    ///
    /// # Safety
    /// The lane is committed and no peer accesses it.
    pub(crate) unsafe fn clear_lane(&self, index: usize, place: LanePlace) -> LaneRx<Message> {
        let slots = self.memory.lane_slots(place);
        // SAFETY: guaranteed by the caller. Zero bytes are empty slots.
        unsafe {
            self.memory
                .clear_lanes(slots.cast(), place.slots as usize * LANE_SLOT_BYTES)
        };
        self.memory.lane(index).intent.store(0, Ordering::Relaxed);
        // SAFETY: the slots live as long as the device, this is the only consuming end, and they
        // are empty.
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
        // SAFETY: committed by `free_qp`. No peer has this place or these slots: no peer ever had
        // them, or `destroy_qp` waited for it.
        let lane = unsafe { self.clear_lane(index, lane_place) };
        // Reserved here, so that scheduling allocates nothing.
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
            is_watched: false,
            in_flight: InFlight::with_capacity(later, self.strict),
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

    /// INIT to RTR: maps the peer's segments and grants it `access`. The driver must not post sends
    /// before RTS.
    ///
    /// # Errors
    /// See [`ConnectError`]; nothing has changed.
    pub fn connect(
        &self,
        qpn: u32,
        remote: &Address,
        options: &ConnectOptions,
        access: Access,
    ) -> Result<(), ConnectError> {
        let State {
            queues: Queues { qps, .. },
            links,
            ..
        } = &mut *self.state.borrow_mut();
        let peer = links.peer(&self.membership, remote)?;
        let no_such_qp = ConnectError::NoSuchQp {
            lid: remote.lid,
            qpn: remote.qpn,
        };
        let connection = by_number(qps, qpn).and_then(|qp| {
            let own = QpEntry::pack_peer(qpn, qp.generation);
            let remote = Remote::of(&peer, remote.qpn, own, self.membership.epoch)?;
            Some((remote, qp))
        });
        drop(peer);
        let Some((connection, qp)) = connection else {
            links.forget_unused();
            return Err(no_such_qp);
        };
        (qp.options, qp.access) = (*options, access);
        qp.version = qp.version.wrapping_add(1);
        let entry = self.memory.qp(qp.index);
        entry.peer.store(
            QpEntry::pack_peer(remote.qpn, connection.generation()),
            Ordering::Relaxed,
        );
        qp.transport = Transport::Connected(Box::new(connection));
        entry.peer_epoch.store(remote.epoch, Ordering::Relaxed);
        // H1
        entry
            .identity
            .store(qp.connected_identity(), Ordering::Release);
        Ok(())
    }

    /// INIT to RTR of a datagram queue pair: it receives datagrams with this `qkey`.
    pub fn activate_datagrams(&self, qpn: u32, qkey: u32) {
        let State {
            queues: Queues { qps, .. },
            links,
            deferred,
            ..
        } = &mut *self.state.borrow_mut();
        links.has_datagrams = true;
        deferred.add_extras();
        if let Some(qp) = by_number(qps, qpn) {
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
    /// a message. A number that names no queue pair is ignored.
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

    /// Destroys a queue pair. Returns the number of its own receive queue, which the caller
    /// destroys.
    fn take_qp(&self, state: &mut State, qpn: u32) -> Option<u32> {
        let index = qp_index(qpn);
        let mut qp = state
            .queues
            .qps
            .get_mut(index)?
            .take_if(|qp| qp.qpn == qpn)?;
        let own_rq = qp.owns_rq().then_some(qp.rqn);
        self.forget_events(|event| event == AsyncEvent::QpFatal { qpn });
        if self.strict {
            crate::debug::strict::destroyed(&mut state.violations, &qp);
        }
        self.memory.qp(index).identity.store(0, Ordering::Release);
        let peer = qp.remote().map(|r| r.peer.clone());
        let quiet = self.quiesce(&mut state.stuck, peer.iter());
        packets::abandon(state.wire.as_deref_mut(), &qp);
        // Arrived messages took receives; their CQEs return them.
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
