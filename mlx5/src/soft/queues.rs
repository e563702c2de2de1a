//! The device's side of a queue pair.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::rc::Rc;

use shm::lane::{LaneRx, LaneTx};
use shm::ready::ReadyWords;

use super::fabric::Peer;
use super::layout::{LANE_SLOTS, Message, Pop, QUEUE_BYTES, QpEntry, RECEIVES, SrqEntry};
use super::objects::{qp_index, ready_words};
use super::private::PrivateMemory;
use crate::doorbell::BF_BYTES;
use crate::qp::ConnectOptions;
use crate::wire::{NextSegment, SEGMENT, WQEBB, queue_record_index};

/// Where things are in a queue pair's private memory: the BlueFlame register, the doorbell record, the SQ.
pub(crate) const SQ_RECORD: usize = 2 * BF_BYTES;
pub(crate) const SQ_BUFFER: usize = 4096;

/// A queue pair, as the device sees it.
pub(crate) struct SoftQp {
    pub(crate) qpn: u32,
    pub(crate) index: usize,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srqn: u32,
    /// WQEs of that SRQ, to bound what peers name.
    pub(crate) srq_wqes: u16,
    pub(crate) memory: PrivateMemory,
    pub(crate) sq_mask: u16,
    /// WQEBBs executed.
    pub(crate) sq_consumer: u16,
    pub(crate) failed: bool,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) lane: LaneRx<Message>,
    pub(crate) remote: Option<Remote>,
    pub(crate) options: ConnectOptions,
}

/// Why the WQE at the head of an SQ has not run yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitFor {
    /// The peer does not answer: it is gone, or its queue pair is not connected to this one.
    Peer,
    /// The peer has no receive posted.
    Receive,
    /// The peer has not looked at its lane for 128 messages.
    Room,
}

/// A stopped SQ.
pub(crate) struct Waiting {
    pub(crate) reason: WaitFor,
    pub(crate) since_ns: u64,
    /// RNR retries left; 7 is without end.
    pub(crate) rnr_left: u8,
}

/// The other end of a connected queue pair. Its pointers go into the memory of `peer`, which it keeps mapped.
pub(crate) struct Remote {
    pub(crate) peer: Rc<Peer>,
    pub(crate) index: usize,
    entry: NonNull<QpEntry>,
    intent: NonNull<AtomicU64>,
    srq: NonNull<SrqEntry>,
    pop: NonNull<Pop>,
    /// Start of the SRQ's ring; `srq_wqes` of `srq_stride` bytes, checked to lie inside the peer's queue area.
    ring: NonNull<u8>,
    /// A power of two.
    srq_wqes: u16,
    srq_stride: usize,
    /// What its `identity`, `peer` and `peer_epoch` words say while it is connected to this queue pair and receives.
    identity: u64,
    own: u64,
    own_epoch: u64,
    pub(crate) pd: u32,
    pub(crate) lane: LaneTx<Message>,
    pub(crate) ready: ReadyWords,
    /// A message was published since the ready bit was last considered.
    pub(crate) published: bool,
}

impl Remote {
    /// Reads what a requester must know of queue pair `qpn` of `peer`, which is to be connected to `own`; everything is checked here, once.
    /// `None` if there is no such queue pair.
    pub(crate) fn of(peer: &Rc<Peer>, qpn: u32, own: u64, own_epoch: u64) -> Option<Self> {
        let index = qp_index(qpn);
        let memory = &peer.memory;
        let entry = memory.qp(index);
        // H1
        if entry.identity.load(Ordering::Acquire) & !RECEIVES != QpEntry::pack_identity(qpn, 0) {
            return None;
        }
        let (srq, pop) = memory.srq(entry.srqn.load(Ordering::Relaxed))?;
        let srq_wqes = u16::try_from(srq.wqe_cnt.load(Ordering::Acquire)).ok().filter(|n| n.is_power_of_two())?;
        let srq_stride = srq.stride.load(Ordering::Relaxed) as usize;
        let offset = usize::try_from(srq.ring.load(Ordering::Relaxed)).ok()?;
        let end = offset.checked_add(srq_stride.checked_mul(srq_wqes.into())?)?;
        if end > QUEUE_BYTES || offset % SEGMENT != 0 || srq_stride % SEGMENT != 0 || srq_stride == 0 {
            return None;
        }
        let lane = memory.lane(index);
        Some(Self {
            index,
            entry: NonNull::from(entry),
            intent: NonNull::from(&lane.intent),
            srq: NonNull::from(srq),
            pop: NonNull::from(pop),
            // SAFETY: the offset is inside the queue area.
            ring: unsafe { NonNull::from(&memory.control().queues).cast::<u8>().add(offset) },
            srq_wqes,
            srq_stride,
            identity: QpEntry::pack_identity(qpn, RECEIVES),
            own,
            own_epoch,
            pd: entry.pd.load(Ordering::Relaxed),
            // SAFETY: the slots live as long as `peer`; they are this queue pair's alone once the peer's `peer` word names it, which is
            // checked before every message, and `has_room` before every publish.
            lane: unsafe { LaneTx::new(NonNull::from(&lane.slots).cast(), LANE_SLOTS as u64, 0) },
            ready: ready_words(memory),
            published: false,
            peer: Rc::clone(peer),
        })
    }

    #[inline(always)]
    pub(crate) fn entry(&self) -> &QpEntry {
        // SAFETY: in the memory of `peer`; it is made of atomics.
        unsafe { self.entry.as_ref() }
    }

    /// Whether the peer lives, and its queue pair is connected to this one and receives.
    #[inline(always)]
    pub(crate) fn answers(&self) -> bool {
        let entry = self.entry();
        // H1, and that nobody else took that place since.
        !self.peer.is_gone()
            && entry.identity.load(Ordering::Acquire) == self.identity
            && entry.peer.load(Ordering::Relaxed) == self.own
            && entry.peer_epoch.load(Ordering::Relaxed) == self.own_epoch
    }

    /// Takes the next receive of the peer's SRQ: its pop count and WQE index. `None` if none is posted.
    ///
    /// The intent it leaves behind is cleared by [`delivered`](Self::delivered).
    #[inline(always)]
    pub(crate) fn pop_receive(&self) -> Option<(u32, u16)> {
        // SAFETY: all three are atomics in the memory of `peer`.
        let (srq, pop, intent) = unsafe { (self.srq.as_ref(), self.pop.as_ref(), self.intent.as_ref()) };
        let mut word = pop.word.load(Ordering::Acquire);
        loop {
            let (count, index) = Pop::unpack(word);
            // Acquire: the WQEs and links below the record.
            let posted = queue_record_index(srq.record.load(Ordering::Acquire));
            if (posted.wrapping_sub(count as u16) as i16) <= 0 {
                intent.store(0, Ordering::Release);
                return None;
            }
            let index = index & (self.srq_wqes - 1);
            let next = self.link(index) & (self.srq_wqes - 1);
            // H5: before the pop, so that whoever finds the pop without a message knows whose it was.
            intent.store(u64::from(count) + 1, Ordering::Release);
            // H4
            match pop.word.compare_exchange_weak(word, Pop::pack(count.wrapping_add(1), next), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((count, index)),
                Err(now) => word = now,
            }
        }
    }

    /// The message that took the last popped receive is published.
    #[inline(always)]
    pub(crate) fn delivered(&mut self) {
        // SAFETY: an atomic in the memory of `peer`. H5.
        unsafe { self.intent.as_ref() }.store(0, Ordering::Release);
        self.published = true;
    }

    /// The link in the SRQ's WQE `index`, which is below `srq_wqes`.
    #[inline(always)]
    fn link(&self, index: u16) -> u16 {
        // SAFETY: the WQE is inside the ring, 16-aligned, and starts with its next segment; the owner writes it through atomics.
        let head = unsafe { self.ring.add(usize::from(index) * self.srq_stride).cast::<AtomicU64>().as_ref() }.load(Ordering::Relaxed);
        let mut segment = [0; NextSegment::LEN];
        segment[..8].copy_from_slice(&head.to_ne_bytes());
        NextSegment::parse(&segment).next_wqe_index
    }
}

impl SoftQp {
    /// The producer counter in the doorbell record.
    #[inline(always)]
    pub(crate) fn sq_producer(&self) -> u16 {
        // SAFETY: inside the private memory; the driver accesses it through the same atomic type.
        let record = unsafe { self.memory.at::<AtomicU32>(SQ_RECORD).as_ref() };
        queue_record_index(record.load(Ordering::Acquire))
    }

    /// The WQEBB of a counter.
    #[inline(always)]
    pub(crate) fn wqebb(&self, counter: u16) -> NonNull<u8> {
        self.memory.at(SQ_BUFFER + usize::from(counter & self.sq_mask) * WQEBB)
    }
}
