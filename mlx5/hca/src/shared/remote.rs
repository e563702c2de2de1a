//! The other end of a connected queue pair, in the memory of its device.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::cell::Cell;
use std::rc::Rc;

use copyrpc_shm::lane::LaneTx;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::region::owner_may_be_gone;
use copyrpc_shm::sync::LightBarrier;
use mlx5_wire::Access;

use crate::shared::layout::{
    Acks, AtomicRequest, DATAGRAM, LanePlace, Message, QpEntry, RECEIVES, RIGHTS, Taking, allows,
    qp_index,
};
use crate::shared::memory::{Keyed, ready_words};
use crate::shared::mr_cache::{Lookups, MrCache};
use crate::shared::peer::Peer;
use crate::shared::receives::{Receives, gives_up};
use crate::types::terms::{self, Terms, may_violate};

/// An identity word that no connected queue pair has, because it has the flag [`DATAGRAM`]. (A
/// destroyed queue pair has the word 0.)
const UNVERIFIED: u64 = u64::MAX;

/// The other end of a connected queue pair. Its pointers lead into the memory of the device `peer`,
/// which stays mapped as long as `peer` exists.
pub(crate) struct Remote {
    pub(crate) peer: Rc<Peer>,
    pub(crate) index: usize,
    pub(crate) rqn: u32,
    entry: NonNull<QpEntry>,
    intent: NonNull<AtomicU64>,
    atomic: NonNull<AtomicRequest>,
    /// Copy of the pointer [`Peer::word`], the life word of the peer.
    life: NonNull<AtomicU32>,
    /// Number of atomics that the peer was asked to execute.
    pub(crate) atomics: u32,
    /// Whether the last atomic that the peer was asked to execute is at the head of the SQ, and has
    /// no answer yet.
    pub(crate) is_asking: bool,
    pub(crate) receives: Receives,
    /// Argument `known` of [`Receives::next_known`].
    known_receives: u64,
    /// The region that the last plain WRITE wrote to.
    pub(crate) target: MrCache,
    /// Last identity word that grants WRITEs and that [`verify`](Self::verify) accepted;
    /// [`UNVERIFIED`] before.
    verified: Cell<u64>,
    pub(crate) qpn: u32,
    /// Expected values of the peer's `generation`, `peer` and `peer_epoch` words, while the peer's
    /// queue pair is connected to this queue pair.
    pub(crate) generation: u32,
    own: u64,
    own_epoch: u64,
    /// Value of [`Peer::copies`] when this end stopped waiting for the peer to copy further
    /// receives, because the peer's owner had stopped; 0 before that.
    pub(crate) stopped_at: Cell<u64>,
    pub(crate) pd: u32,
    /// Terms of this end of the connection, if its driver has set them.
    pub(crate) terms: Option<Terms>,
    /// READs and atomics of the present doorbell, counted while the terms of the two ends differ:
    /// their number; the `sq_limit` of that doorbell; the counter of the last WQE that was counted.
    pub(crate) reads: (u32, u16, u16),
    pub(crate) lane: LaneTx<Message>,
    ready: ReadyWords,
    /// Position in the lane up to which messages were announced.
    announced: u64,
}

impl Remote {
    /// Reads and checks the entries of queue pair `qpn` of `peer`, to which `own` will be
    /// connected. Returns `None` if there is no such queue pair.
    pub(crate) fn of(peer: &Rc<Peer>, qpn: u32, own: u64, own_epoch: u64) -> Option<Self> {
        let index = qp_index(qpn);
        let memory = &peer.memory;
        let entry = memory.qp(index);
        // H1 of `shared::layout`: the other fields are read after this identity.
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
            target: MrCache::none(),
            verified: Cell::new(UNVERIFIED),
            qpn,
            generation: entry.generation.load(Ordering::Relaxed),
            atomic: NonNull::from(&lane.atomic),
            life: peer.word,
            atomics: 0,
            is_asking: false,
            own,
            own_epoch,
            stopped_at: Cell::new(0),
            pd: entry.pd.load(Ordering::Relaxed),
            terms: None,
            reads: (0, 0, 0),
            // SAFETY: the slots live as long as `peer`. This is their only producing end while the
            // `peer` word of the peer's entry is `own`, which is checked before every message. A
            // queue pair's lane is cleared when it is made or reset, so both ends start at position
            // 0. `has_room` is checked before every publish.
            lane: unsafe { LaneTx::new(memory.lane_slots(place), place.slots.into(), 0) },
            ready: ready_words(memory),
            announced: 0,
            peer: Rc::clone(peer),
        })
    }

    #[inline(always)]
    fn entry(&self) -> &QpEntry {
        // SAFETY: the entry is in the memory of `peer`, which stays mapped, and is made of atomics.
        unsafe { self.entry.as_ref() }
    }

    #[inline(always)]
    fn intent(&self) -> &AtomicU64 {
        // SAFETY: the intent is an atomic in the memory of `peer`, which stays mapped.
        unsafe { self.intent.as_ref() }
    }

    /// Returns the rights that the peer's queue pair grants: its identity, with [`RECEIVES`] and
    /// its [`RIGHTS`]. Without [`RECEIVES`] if the [`terms`](Self::expected) of the two ends
    /// differ. Returns 0 unless the peer lives, and its queue pair is connected to this queue pair
    /// and receives. The rights hold until the end of the present doorbell, because a peer that
    /// destroys its queue pair waits for the doorbell (H3).
    #[inline(always)]
    pub(crate) fn granted(&self) -> u64 {
        // H1. While this word is unchanged, so are the words next to it.
        let identity = self.entry().identity.load(Ordering::Acquire);
        if self.is_gone() {
            return 0;
        }
        if identity == self.verified.get() {
            identity
        } else {
            self.verify(identity)
        }
    }

    /// Returns whether the rights that [`granted`](Self::granted) returns include WRITE.
    #[inline(always)]
    pub(crate) fn grants_writes(&self) -> bool {
        let identity = self.entry().identity.load(Ordering::Acquire);
        !self.is_gone()
            && (identity == self.verified.get()
                || allows(self.verify(identity), Access::REMOTE_WRITE))
    }

    #[inline(always)]
    fn is_gone(&self) -> bool {
        // SAFETY: `life` points to an atomic that `peer` keeps alive.
        let life = unsafe { self.life.as_ref() }.load(Ordering::Acquire);
        owner_may_be_gone(life) && self.peer.is_gone()
    }

    /// Computes [`granted`](Self::granted) for a new identity word, from the words next to it.
    #[cold]
    #[inline(never)]
    fn verify(&self, identity: u64) -> u64 {
        let entry = self.entry();
        let is_connected = QpEntry::pack_identity(0, self.qpn, RECEIVES)
            == identity & (u64::from(u32::MAX) & !RIGHTS)
            && entry.generation.load(Ordering::Relaxed) == self.generation
            && entry.peer.load(Ordering::Relaxed) == self.own
            && entry.peer_epoch.load(Ordering::Relaxed) == self.own_epoch;
        if !is_connected {
            return 0;
        }
        let terms = self.terms.map(|terms| terms.sent()).zip(self.expected());
        if terms.is_some_and(|(sent, expected)| may_violate(sent, expected)) {
            return identity & !RECEIVES;
        }
        if allows(identity, Access::REMOTE_WRITE) {
            self.verified.set(identity);
        }
        identity
    }

    /// Returns the terms that the peer's end of the connection expects, if its driver has set them.
    pub(crate) fn expected(&self) -> Option<terms::Values> {
        terms::unpack(self.entry().terms.load(Ordering::Relaxed))
    }

    /// Returns whether the peer's queue pair was reset since this queue pair was connected to it.
    pub(crate) fn was_reset(&self) -> bool {
        let is_there = QpEntry::qpn(self.entry().identity.load(Ordering::Acquire)) == self.qpn;
        is_there && self.entry().generation.load(Ordering::Relaxed) != self.generation
    }

    #[inline(always)]
    pub(crate) fn has_room(&mut self) -> bool {
        // SAFETY: the entry is in the memory of `peer`, which stays mapped. L2 of
        // docs/shm-protocols.md: below `consumed`, the messages were copied out.
        let consumed = unsafe { &self.entry.as_ref().acks.consumed };
        self.lane.has_room(consumed)
    }

    pub(crate) fn acks(&self) -> &Acks {
        &self.entry().acks
    }

    /// Returns the request for an atomic that the peer's owner is to execute.
    pub(crate) fn atomic_request(&self) -> &AtomicRequest {
        // SAFETY: the request is made of atomics in the memory of `peer`, which stays mapped.
        unsafe { self.atomic.as_ref() }
    }

    /// Looks up the region of the key in `bytes` and caches it. Returns `false` if the WRITE is
    /// refused, the region is not mapped here, or no look-up is left in `lookups`.
    #[cold]
    #[inline(never)]
    pub(crate) fn look_up_target(&mut self, lookups: &mut Lookups, bytes: Keyed) -> bool {
        if !lookups.take() {
            return false;
        }
        let found = MrCache::of_peer(&self.peer.memory, bytes, self.pd).ok();
        found.map(|found| self.target = found).is_some()
    }

    /// Takes the next receive of the peer. `None` if none is posted. [`publish`](Self::publish)
    /// must follow.
    pub(crate) fn take_receive(&self) -> Option<Taking> {
        self.receives.pop(self.intent())
    }

    /// Takes the next receive of the peer, without reading the peer's record while receives are
    /// left that are known to be posted. Also returns `None` if another requester took the receive
    /// meanwhile. After `None`, [`take_receive`](Self::take_receive) or
    /// [`takes_no_receive`](Self::takes_no_receive) must follow.
    #[inline(always)]
    pub(crate) fn take_known_receive(&mut self) -> Option<Taking> {
        let word = self.receives.next_known(&mut self.known_receives)?;
        self.receives.exchange(word, || self.intent())
    }

    /// Gives up the last attempt to take a receive.
    pub(crate) fn takes_no_receive(&self) {
        gives_up(self.intent());
    }

    /// Publishes a message, and clears the intent of the receive that it took, if any. The caller
    /// has checked [`has_room`](Self::has_room).
    #[inline(always)]
    pub(crate) fn publish(&mut self, message: Message) {
        self.lane.publish(message);
        self.note_published();
    }

    /// Clears the intent, because the message that took the last receive was published.
    #[inline(always)]
    pub(crate) fn note_published(&mut self) {
        // H5: the intent is cleared after the slot was published.
        self.intent().store(0, Ordering::Release);
    }

    /// Announces the messages of this doorbell to the peer if it is not polling the lane.
    #[inline(always)]
    pub(crate) fn announce(&mut self, barrier: LightBarrier) {
        if self.lane.position() != self.announced {
            self.announced = self.lane.position();
            if self
                .ready
                .notify_if_armed_behind(barrier, self.index, &self.entry().armed)
            {
                self.peer.memory.wake();
            }
        }
    }
}
