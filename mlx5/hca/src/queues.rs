//! The device's side of a queue pair.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::cell::Cell;
use std::rc::Rc;

use mlx5_wire::{Access, BLUEFLAME_BYTES, ConnectOptions, SEGMENT, WQEBB, Writes, queue_record_index};
use shm::lane::{LaneRx, LaneTx};
use shm::ready::ReadyWords;
use shm::region::owner_may_be_gone;
use shm::sync::LightBarrier;

use super::Hca;
use super::fabric::Peer;
use super::layout::{AtomicRequest, DATAGRAM, LanePlace, Message, QpEntry, RECEIVES, RIGHTS, Taking, Told, allows, qp_index};
use super::memory::ready_words;
use super::outcome::WaitFor;
use super::reach::{Looks, Reach};
use super::receive::{Receives, Taken, gives_up};
use super::request::SqMemory;
use super::under_way::UnderWay;
use super::watch::QpWatch;

/// A BlueFlame register: two halves.
pub const REGISTER_BYTES: usize = 2 * BLUEFLAME_BYTES;

/// The place of a send queue.
pub(crate) struct SqPlace {
    buffer: NonNull<u8>,
    record: NonNull<AtomicU32>,
    /// Bytes, less those of the last WQEBB.
    mask: usize,
    /// The BlueFlame register, where it can be read.
    pub(crate) register: Option<NonNull<u8>>,
}

impl SqPlace {
    /// The queue in `memory`; its WQEBBs are a power of two.
    ///
    /// # Safety
    /// All of it is valid as long as the result.
    pub(crate) unsafe fn new(memory: &SqMemory) -> Self {
        let SqMemory { buffer, wqe_cnt, record, register } = *memory;
        Self { buffer, record, mask: (wqe_cnt as usize - 1) * WQEBB, register }
    }

    /// The producer counter in the doorbell record.
    #[inline(always)]
    pub(crate) fn producer(&self) -> u16 {
        // SAFETY: valid as long as the queue pair; a driver of this crate accesses it through the same atomic type.
        let record = unsafe { self.record.as_ref() };
        queue_record_index(record.load(Ordering::Acquire))
    }

    /// The WQEBB of a counter.
    #[inline(always)]
    pub(crate) fn wqebb(&self, counter: u16) -> NonNull<u8> {
        // SAFETY: inside the buffer, where a WQEBB begins.
        unsafe { self.buffer.add((usize::from(counter) * WQEBB) & self.mask) }
    }

    /// WQEBBs from that of `counter` to the end of the buffer.
    #[inline(always)]
    pub(crate) fn to_end(&self, counter: u16) -> u16 {
        ((!(usize::from(counter) * WQEBB) & self.mask) / WQEBB) as u16 + 1
    }

    /// WQEBBs.
    pub(crate) fn capacity(&self) -> u32 {
        (self.mask / WQEBB) as u32 + 1
    }
}

/// A queue pair, as the device sees it.
pub(crate) struct SoftQp {
    pub(crate) qpn: u32,
    /// Its WRITEs.
    pub(crate) writes: Writes,
    pub(crate) index: usize,
    /// The part that its peer reads, in the memory of its device.
    pub(crate) entry: NonNull<QpEntry>,
    /// [`QpEntry::generation`].
    pub(crate) generation: u32,
    /// Number of changes of its place, modulo 2^32.
    pub(crate) version: u32,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) rqn: u32,
    /// Whether the receive queue is this queue pair's alone, and is flushed with it.
    pub(crate) owns_rq: bool,
    /// Receives flushed by an error.
    pub(crate) flushed: u32,
    /// Messages of its lane that took no receive: atomics.
    pub(crate) answered: u32,
    /// Short received data goes into the CQE.
    pub(crate) scatters: bool,
    /// It does, or its receive CQ has compressed sessions.
    pub(crate) is_compact: bool,
    pub(crate) receives: Receives,
    pub(crate) taken: Taken,
    pub(crate) sq: SqPlace,
    /// The region that its last plain WRITE read from.
    pub(crate) source: Reach,
    pub(crate) looks: Looks,
    /// User index of its CQEs. The number of its receive queue unless a driver gave another.
    pub(crate) user_index: u32,
    /// WQEBBs executed.
    pub(crate) sq_consumer: u16,
    /// WQEBBs that may be executed by now: those of the doorbells whose time has come.
    pub(crate) sq_limit: u16,
    pub(crate) failed: bool,
    pub(crate) mode: Mode,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) lane: LaneRx<Message>,
    pub(crate) lane_place: LanePlace,
    /// The requester is told how far the lane is consumed where none of these bits is set in the position: a power of two, less one.
    pub(crate) told_every: u64,
    /// Behind the last payload, where the next one goes if they go to a ring. For prefetching only.
    pub(crate) next_payload: u64,
    pub(crate) transport: Transport,
    /// Rights of its connected peer, whatever regions allow.
    pub(crate) access: Access,
    pub(crate) options: ConnectOptions,
    /// Its doorbells are found by looking at the record: another driver's, which may send.
    pub(crate) is_watched: bool,
    /// The send queue has WQEBBs.
    pub(crate) has_sq: bool,
    /// Work that its timing delays.
    pub(crate) under_way: UnderWay,
    /// State of strict mode.
    pub(crate) watch: QpWatch,
}

/// How the WQEs of a send queue are run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// In immediate time, neither strict nor traced: those that are [`plain`](super::plain) as such.
    Plain,
    /// All in the same way.
    Ordinary,
    /// It failed, broke a rule, or there are faults to make.
    Odd,
}

/// The target of a queue pair's messages.
pub(crate) enum Transport {
    /// Reliable connection.
    Connected(Box<Remote>),
    /// The same, before it is connected.
    Unconnected,
    /// Connected to a queue pair that does not exist.
    Nowhere,
    /// Unreliable datagrams; receives those that bring this Q_Key.
    Datagram { qkey: u32 },
}

/// A stopped SQ.
pub(crate) struct Waiting {
    pub(crate) reason: WaitFor,
    pub(crate) since_ns: u64,
    /// When it is tried again.
    pub(crate) again_ns: u64,
    /// RNR retries left; 7 is without end.
    pub(crate) rnr_left: u8,
}

/// An identity word that no connected queue pair has: it names one of datagrams. 0 would be that of one that is gone.
const UNVERIFIED: u64 = u64::MAX;

/// The other end of a connected queue pair. Its pointers go into the memory of `peer`, which it keeps mapped.
pub(crate) struct Remote {
    pub(crate) peer: Rc<Peer>,
    pub(crate) index: usize,
    pub(crate) rqn: u32,
    entry: NonNull<QpEntry>,
    intent: NonNull<AtomicU64>,
    atomic: NonNull<AtomicRequest>,
    /// [`Peer::life_word`], at hand.
    life: NonNull<AtomicU32>,
    /// Atomics that the peer was asked to execute.
    pub(crate) atomics: u32,
    /// The last of them is the WQE at the head of the SQ, and not known to be answered.
    pub(crate) is_asking: bool,
    pub(crate) receives: Receives,
    /// Up to where they are known to be posted ([`Receives::next_known`]).
    known_receives: u64,
    /// The region that the last plain WRITE wrote to.
    target: Reach,
    /// The identity word under which the words beside it were found to name this queue pair, if it grants WRITEs; before that [`UNVERIFIED`].
    verified: Cell<u64>,
    qpn: u32,
    /// Expected values of the peer's `generation`, `peer` and `peer_epoch` words, while it is connected to this queue pair.
    generation: u32,
    own: u64,
    own_epoch: u64,
    pub(crate) pd: u32,
    pub(crate) lane: LaneTx<Message>,
    ready: ReadyWords,
    /// Position of the lane when the ready bit was last considered.
    announced: u64,
}

impl Remote {
    /// Reads what a requester must know of queue pair `qpn` of `peer`, which is to be connected to `own`; everything is checked here, once.
    /// `None` if there is no such queue pair.
    pub(crate) fn of(peer: &Rc<Peer>, qpn: u32, own: u64, own_epoch: u64) -> Option<Self> {
        let index = qp_index(qpn);
        let memory = &peer.memory;
        let entry = memory.qp(index);
        // H1
        let identity = entry.identity.load(Ordering::Acquire);
        if QpEntry::qpn(identity) != qpn || identity & DATAGRAM != 0 {
            return None;
        }
        let rqn = entry.rqn.load(Ordering::Relaxed);
        let receives = Receives::of(memory, rqn)?;
        let lane = memory.lane(index);
        let place = LanePlace::unpack(entry.lane.load(Ordering::Relaxed))?;
        Some(Self {
            index,
            rqn,
            entry: NonNull::from(entry),
            intent: NonNull::from(&lane.intent),
            receives,
            known_receives: Receives::NONE_KNOWN,
            target: Reach::none(),
            verified: Cell::new(UNVERIFIED),
            qpn,
            generation: entry.generation.load(Ordering::Relaxed),
            atomic: NonNull::from(&lane.atomic),
            life: peer.life_word(),
            atomics: 0,
            is_asking: false,
            own,
            own_epoch,
            pd: entry.pd.load(Ordering::Relaxed),
            // SAFETY: the slots live as long as `peer`; they are this queue pair's alone once the peer's `peer` word names it, which is
            // checked before every message, and `has_room` before every publish.
            lane: unsafe { LaneTx::new(memory.lane_slots(place), place.slots.into(), 0) },
            ready: ready_words(memory),
            announced: 0,
            peer: Rc::clone(peer),
        })
    }

    #[inline(always)]
    fn entry(&self) -> &QpEntry {
        // SAFETY: in the memory of `peer`; it is made of atomics.
        unsafe { self.entry.as_ref() }
    }

    /// Returns its queue pair number.
    pub(crate) fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Returns the generation: which of the queue pairs that have had the number.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    #[inline(always)]
    fn intent(&self) -> &AtomicU64 {
        // SAFETY: an atomic in the memory of `peer`.
        unsafe { self.intent.as_ref() }
    }

    /// Returns what the peer's queue pair permits this one: its identity, with [`RECEIVES`] and its [`RIGHTS`]. Returns 0 unless the peer
    /// lives, and its queue pair is connected to this one and receives. Valid until the end of the present doorbell: a destroyer of a
    /// queue pair waits for it (H3).
    #[inline(always)]
    pub(crate) fn granted(&self) -> u64 {
        // H1. While this word is the same, so are the words beside it.
        let identity = self.entry().identity.load(Ordering::Acquire);
        if self.is_gone() {
            return 0;
        }
        if identity == self.verified.get() { identity } else { self.verify(identity) }
    }

    /// Returns whether [`granted`](Self::granted) has the right to WRITE.
    #[inline(always)]
    pub(crate) fn grants_writes(&self) -> bool {
        let identity = self.entry().identity.load(Ordering::Acquire);
        !self.is_gone() && (identity == self.verified.get() || allows(self.verify(identity), Access::REMOTE_WRITE))
    }

    /// Returns whether the peer is gone.
    #[inline(always)]
    fn is_gone(&self) -> bool {
        // SAFETY: `peer` keeps it.
        let life = unsafe { self.life.as_ref() }.load(Ordering::Acquire);
        owner_may_be_gone(life) && self.peer.is_gone()
    }

    /// Does [`granted`](Self::granted) for an identity word that is new: looks at the words beside it.
    #[cold]
    #[inline(never)]
    fn verify(&self, identity: u64) -> u64 {
        let entry = self.entry();
        let is_connected = QpEntry::pack_identity(0, self.qpn, RECEIVES) == identity & (u64::from(u32::MAX) & !RIGHTS)
            && entry.generation.load(Ordering::Relaxed) == self.generation
            && entry.peer.load(Ordering::Relaxed) == self.own
            && entry.peer_epoch.load(Ordering::Relaxed) == self.own_epoch;
        if !is_connected {
            return 0;
        }
        if allows(identity, Access::REMOTE_WRITE) {
            self.verified.set(identity);
        }
        identity
    }

    /// Returns whether the peer's queue pair has been reset since it was connected to, and is a queue pair still.
    pub(crate) fn was_reset(&self) -> bool {
        let is_there = QpEntry::qpn(self.entry().identity.load(Ordering::Acquire)) == self.qpn;
        is_there && self.entry().generation.load(Ordering::Relaxed) != self.generation
    }

    /// Returns whether one more message fits into the lane.
    #[inline(always)]
    pub(crate) fn has_room(&mut self) -> bool {
        // SAFETY: an atomic in the memory of `peer`. L2.
        let consumed = unsafe { &self.entry.as_ref().told.consumed };
        self.lane.has_room(consumed)
    }

    /// Returns the words that the peer's owner writes for this requester.
    pub(crate) fn told(&self) -> &Told {
        &self.entry().told
    }

    /// Returns the place of the atomic that the peer's owner is to execute.
    pub(crate) fn atomic_request(&self) -> &AtomicRequest {
        // SAFETY: atomics in the memory of `peer`.
        unsafe { self.atomic.as_ref() }
    }

    /// Returns where a WRITE of `len` bytes, at least one, to `addr` under `rkey` goes; `None` unless it is inside the region of the last one.
    #[inline(always)]
    pub(crate) fn find_target(&self, rkey: u32, addr: u64, len: u64) -> Option<NonNull<u8>> {
        self.target.find(rkey, addr, len)
    }

    /// Looks up another region than that of the last one. Returns `false` if the WRITE is refused, the region is not mapped here, or this was the last
    /// of the `looks`.
    #[cold]
    #[inline(never)]
    pub(crate) fn look_for_target(&mut self, looks: &mut Looks, rkey: u32, addr: u64, len: u64) -> bool {
        if !looks.may_look() {
            return false;
        }
        let found = Reach::of_peer(&self.peer.memory, rkey, addr, len, Access::REMOTE_WRITE, self.pd).ok();
        found.map(|found| self.target = found).is_some()
    }

    /// Takes the next receive of the peer. `None` if none is posted. To be followed by [`publish`](Self::publish).
    pub(crate) fn take_receive(&self) -> Option<Taking> {
        self.receives.pop(self.intent())
    }

    /// Does the same without a look at the peer's record as long as receives are left that the last look found; `None` also if another requester
    /// took one meanwhile; then [`take_receive`](Self::take_receive) or [`takes_no_receive`](Self::takes_no_receive) must follow.
    #[inline(always)]
    pub(crate) fn take_known_receive(&mut self) -> Option<Taking> {
        let word = self.receives.next_known(&mut self.known_receives)?;
        self.receives.exchange(word, || self.intent())
    }

    /// Forgets the last attempt to take a receive.
    pub(crate) fn takes_no_receive(&self) {
        gives_up(self.intent());
    }

    /// Publishes the message that took the last receive; there is room.
    #[inline(always)]
    pub(crate) fn publish(&mut self, message: Message) {
        self.lane.publish(message);
        self.note_published();
    }

    /// Notes that the message that took the last receive was published.
    #[inline(always)]
    pub(crate) fn note_published(&mut self) {
        // H5
        self.intent().store(0, Ordering::Release);
    }

    /// Tells the peer's owner about this doorbell's messages if it is not polling the lane.
    #[inline(always)]
    pub(crate) fn announce(&mut self, barrier: LightBarrier) {
        if self.lane.position() != self.announced {
            self.announced = self.lane.position();
            if self.ready.notify_if_armed_behind(barrier, self.index, &self.entry().armed) {
                self.peer.memory.wake();
            }
        }
    }
}

impl SoftQp {
    /// Returns the part that its peer reads.
    #[inline(always)]
    pub(crate) fn entry(&self) -> &QpEntry {
        // SAFETY: in the memory of its device, where it is as long as that; it is made of atomics.
        unsafe { self.entry.as_ref() }
    }

    /// Returns its identity word once it is connected and receives.
    pub(crate) fn connected_identity(&self) -> u64 {
        self.identity(RECEIVES | u64::from(self.access.bits()) & RIGHTS)
    }

    /// Returns its identity word with `flags`.
    pub(crate) fn identity(&self, flags: u64) -> u64 {
        QpEntry::pack_identity(self.version, self.qpn, flags)
    }

    pub(crate) fn is_datagram(&self) -> bool {
        matches!(self.transport, Transport::Datagram { .. })
    }

    /// Returns the connected peer.
    #[inline(always)]
    pub(crate) fn remote(&self) -> Option<&Remote> {
        match &self.transport {
            Transport::Connected(remote) => Some(remote),
            Transport::Unconnected | Transport::Datagram { .. } | Transport::Nowhere => None,
        }
    }

    /// Returns the connected peer.
    #[inline(always)]
    pub(crate) fn remote_mut(&mut self) -> Option<&mut Remote> {
        match &mut self.transport {
            Transport::Connected(remote) => Some(remote),
            Transport::Unconnected | Transport::Datagram { .. } | Transport::Nowhere => None,
        }
    }

    /// Returns the producer counter in the doorbell record.
    pub(crate) fn sq_producer(&self) -> u16 {
        self.sq.producer()
    }

    /// Returns the WQEBB of a counter.
    #[inline(always)]
    pub(crate) fn wqebb(&self, counter: u16) -> NonNull<u8> {
        self.sq.wqebb(counter)
    }

    /// The queue pair goes to the error state: its own operations are flushed, and its peer's are not answered any more.
    #[cold]
    pub(crate) fn fail(&mut self, hca: &Hca) {
        if !core::mem::replace(&mut self.failed, true) {
            hca.failed.borrow_mut().push((self.index, self.generation));
        }
        self.mode = Mode::Odd;
        hca.has_chores.set(true);
        self.entry().identity.store(self.identity(0), Ordering::Release);
    }
}

/// Returns the start of a WQE.
pub(crate) fn head(bytes: &[u8]) -> [u8; SEGMENT] {
    bytes.first_chunk().copied().unwrap_or([0; SEGMENT])
}

/// WQEBBs of a WQE of `ds` segments; none of one that is malformed. Who passes over it takes one.
#[inline(always)]
pub(crate) fn blocks(ds: u8) -> u16 {
    (u16::from(ds) + 3) >> 2
}

/// Returns the first `len` bytes of the WQE at `counter`, 1,024 at most; it may wrap.
pub(crate) fn bytes_of(qp: &SoftQp, counter: u16, len: usize) -> [u8; 16 * WQEBB] {
    let mut bytes = [0; 16 * WQEBB];
    for (block, out) in bytes.chunks_mut(WQEBB).take(len.div_ceil(WQEBB)).enumerate() {
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
        out.copy_from_slice(&unsafe { qp.wqebb(counter.wrapping_add(block as u16)).cast::<[u8; WQEBB]>().read() });
    }
    bytes
}
