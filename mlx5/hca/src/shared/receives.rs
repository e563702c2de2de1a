//! Receive queues, from the side of their takers: the linked list of an SRQ, and the ring of a
//! queue pair's own RQ.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::cell::Cell;
use std::rc::Rc;

use mlx5_wire::{DataWords, INVALID_LKEY, NextSegment, SEGMENT, queue_record_index};

use crate::shared::layout::{LINKED, Pop, QUEUE_BYTES, RqEntry, Taking};
use crate::shared::memory::DeviceMemory;

/// For each WQE, the pop count ([`Pop`]) at which its receive was last *accounted for*: a message
/// named it as the receive that it took. A receive that was popped and is not accounted for was
/// taken by a dead process, without a message. Counts are compared as signed 32 bits. So a WQE that
/// is not among the last 2^31 receives of its queue may seem to be accounted for, and is then not
/// returned.
#[derive(Clone)]
pub(crate) struct Taken(Rc<[Cell<u32>]>);

impl Taken {
    pub(crate) fn new(wqes: u16) -> Self {
        // One less than the first pop count.
        Self((0..wqes).map(|_| Cell::new(u32::MAX)).collect())
    }

    pub(crate) fn reset(&self) {
        self.0.iter().for_each(|cell| cell.set(u32::MAX));
    }

    pub(crate) fn wqes(&self) -> usize {
        self.0.len()
    }

    /// Accounts for the receive that a message took. Returns `false` if there is no such WQE.
    #[inline(always)]
    pub(crate) fn account(&self, taking: Taking) -> bool {
        self.0
            .get(usize::from(taking.index()))
            .map(|cell| cell.set(taking.count()))
            .is_some()
    }

    pub(crate) fn is_accounted(&self, index: u16, count: u32) -> bool {
        self.0
            .get(usize::from(index))
            .is_none_or(|cell| cell.get().wrapping_sub(count) as i32 >= 0)
    }
}

/// Clears the intent of a taker that takes no receive. The repair after a peer's death waits until
/// the intents of the living peers are clear.
#[cold]
pub(crate) fn gives_up(intent: &AtomicU64) {
    if intent.load(Ordering::Relaxed) != 0 {
        intent.store(0, Ordering::Release);
    }
}

/// The taker's side of a receive queue. The taker is a requester in another process, or the owner.
#[derive(Clone, Copy, Debug)]
pub struct Receives {
    entry: NonNull<RqEntry>,
    pop: NonNull<Pop>,
    /// WQEs of `stride` bytes, checked to be inside the owner's queue area.
    ring: NonNull<u8>,
    /// Mask of the valid bits of a pop word: an index is below the number of WQEs.
    keeps: u64,
    /// Distance of two pop words between which every WQE is taken once.
    span: u64,
    stride: u32,
    pub(crate) pd: u32,
    pub(crate) is_linked: bool,
}

impl Receives {
    /// A pop word that is never reached: no receive is known to be posted.
    pub(crate) const NONE_KNOWN: u64 = u64::MAX;

    /// Finds receive queue `rqn` of the device that owns `memory`, and checks its whole entry,
    /// once. The result is valid as long as `memory`.
    pub(crate) fn of(memory: &DeviceMemory, rqn: u32) -> Option<Self> {
        let (entry, pop) = memory.rq(rqn)?;
        let wqes = u16::try_from(entry.wqe_cnt.load(Ordering::Acquire))
            .ok()
            .filter(|n| n.is_power_of_two())?;
        let stride = entry.stride.load(Ordering::Relaxed) as usize;
        let offset = usize::try_from(entry.ring.load(Ordering::Relaxed)).ok()?;
        let end = offset.checked_add(stride.checked_mul(wqes.into())?)?;
        if end > QUEUE_BYTES || offset % SEGMENT != 0 || stride % SEGMENT != 0 || stride == 0 {
            return None;
        }
        Some(Self {
            entry: NonNull::from(entry),
            pop: NonNull::from(pop),
            // SAFETY: the offset is inside the queue area.
            ring: unsafe {
                NonNull::from(&memory.control().queues)
                    .cast::<u8>()
                    .add(offset)
            },
            keeps: !0xffff | u64::from(wqes - 1),
            span: u64::from(wqes) * Pop::ONE,
            stride: stride as u32,
            pd: entry.pd.load(Ordering::Relaxed),
            is_linked: entry.kind.load(Ordering::Relaxed) == LINKED,
        })
    }

    #[inline(always)]
    fn words(&self) -> (&RqEntry, &Pop) {
        // SAFETY: `entry` and `pop` point to atomics in a mapping that outlives this value (`of`).
        unsafe { (self.entry.as_ref(), self.pop.as_ref()) }
    }

    /// Takes the next receive. `None` if none is posted.
    ///
    /// `intent` holds the pop word of that receive (H5 of `shared::layout`) from before the pop
    /// until the requester clears the intent.
    pub(crate) fn pop(&self, intent: &AtomicU64) -> Option<Taking> {
        loop {
            let word = self.words().1.word.load(Ordering::Acquire);
            if self.is_posted(word, self.posted_to(word)) {
                if let Some(taking) = self.exchange(word, || intent) {
                    return Some(taking);
                }
            } else if self.words().1.word.load(Ordering::Acquire) == word {
                // If the pop word changed while the record was read, a receive may be posted.
                gives_up(intent);
                return None;
            }
        }
    }

    /// Returns the pop word of the next receive, for [`exchange`](Self::exchange). `None` if no
    /// receive is posted.
    ///
    /// Only this taker uses `known`, which begins as [`NONE_KNOWN`](Self::NONE_KNOWN). Receives
    /// with pop words up to `known` were posted at the last read of the record. They stay posted
    /// until they are taken, so the record is read again only when they are used up.
    #[inline(always)]
    pub(crate) fn next_known(&self, known: &mut u64) -> Option<u64> {
        let word = self.words().1.word.load(Ordering::Acquire);
        if !self.is_posted(word, *known) {
            *known = self.posted_to(word);
        }
        self.is_posted(word, *known).then_some(word)
    }

    /// Takes the posted receive of pop word `word`, if the pop word is unchanged. Also returns
    /// `None` spuriously. After `None`, another attempt or [`gives_up`] must follow. `intent` is a
    /// function, called only for the store, so that the address of the intent is not kept before.
    #[inline(always)]
    pub(crate) fn exchange<'a>(
        &self,
        word: u64,
        intent: impl FnOnce() -> &'a AtomicU64,
    ) -> Option<Taking> {
        let taking = Taking(word & self.keeps);
        let next = Pop::taken(taking.0, self.behind(taking.index()));
        // H5: the intent is set before the pop, so that an owner that finds the pop without a
        // message knows the requester that took the receive.
        intent().store(taking.0.wrapping_add(Pop::ONE), Ordering::Release);
        // H4: if the exchange succeeds, the receive belongs to this requester.
        let pop = &self.words().1.word;
        pop.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire)
            .ok()
            .map(|_| taking)
    }

    /// Returns whether the receive of pop word `word` is posted, if all receives up to pop word
    /// `known` are.
    #[inline(always)]
    fn is_posted(&self, word: u64, known: u64) -> bool {
        // The condition means that 1 to `wqes` receives are posted, from `word` on.
        known.wrapping_sub(word) < self.span
    }

    /// Returns the new value of `known`: receives with pop words up to it are posted now. `word` is
    /// the present pop word or an earlier one.
    #[inline(always)]
    fn posted_to(&self, word: u64) -> u64 {
        let (entry, _) = self.words();
        // Acquire: the owner wrote the WQEs and links below the record before the record.
        let posted = queue_record_index(entry.record.load(Ordering::Acquire));
        // H6. If `returned` counts a receive, the owner had already stored the pop word at which
        // this receive begins the list. So the exchange of a pop word from before that store fails.
        let returned = entry.returned.load(Ordering::Acquire);
        let popped = word & !0xffff;
        // The lower half of a pop word has the lower 16 bits of the count, at bit 16. The sum is
        // computed there, so that its overflow is dropped.
        let available =
            (u32::from(posted).wrapping_add(returned) << 16).wrapping_sub(popped as u32);
        popped.wrapping_add(available.into()).wrapping_sub(1)
    }

    /// Owner: takes receive number `count`. Returns `false` if it is not posted, or not the next.
    pub(crate) fn take(&self, count: u32) -> bool {
        let (entry, pop) = self.words();
        let word = pop.word.load(Ordering::Acquire);
        let (popped, index) = Pop::unpack(word);
        let next = Pop::taken(word, self.behind(index & self.keeps as u16));
        let is_posted = popped == count
            && queue_record_index(entry.record.load(Ordering::Acquire)) != count as u16;
        // H4: if the exchange succeeds, the receive belongs to the owner.
        is_posted
            && pop
                .word
                .compare_exchange(word, next, Ordering::AcqRel, Ordering::Acquire)
                .is_ok()
    }

    /// Returns the WQE that is taken after WQE `index`, which is below `wqes`.
    #[inline(always)]
    fn behind(&self, index: u16) -> u16 {
        let next = if self.is_linked {
            self.link(index)
        } else {
            index + 1
        };
        next & self.keeps as u16
    }

    /// Returns the link in WQE `index`, which is below `wqes`.
    #[inline(always)]
    fn link(&self, index: u16) -> u16 {
        let head = self.link_word(index).load(Ordering::Relaxed);
        let mut segment = [0; NextSegment::LEN];
        segment[..8].copy_from_slice(&head.to_ne_bytes());
        NextSegment::parse(&segment).next_wqe_index
    }

    #[inline(always)]
    fn link_word(&self, index: u16) -> &AtomicU64 {
        // SAFETY: the WQE is inside the ring, 16-aligned, and starts with its next segment. All
        // processes access the link in that segment through atomics.
        unsafe {
            self.ring
                .add(usize::from(index) * self.stride as usize)
                .cast::<AtomicU64>()
                .as_ref()
        }
    }

    /// Returns the data segments of a taken receive, in order.
    pub(crate) fn segments(&self, index: u16) -> impl Iterator<Item = DataWords> + use<> {
        let Self {
            ring,
            keeps,
            is_linked,
            ..
        } = *self;
        let stride = self.stride();
        let start = usize::from(index & keeps as u16) * stride;
        (usize::from(is_linked)..stride / SEGMENT)
            .map(move |i| {
                // SAFETY: the segment is inside the WQE. The queue's owner wrote the WQE before the
                // record, and does not touch it before its completion. Any bytes are a valid
                // segment.
                DataWords::parse(&unsafe {
                    ring.add(start + i * SEGMENT).cast::<[u8; SEGMENT]>().read()
                })
            })
            .take_while(|segment| segment.lkey() != INVALID_LKEY)
    }

    /// Owner: resets the queue, so that nothing is posted and nothing is taken. The caller must
    /// know that no requester uses the queue.
    pub(crate) fn reset(&self) {
        let (entry, pop) = self.words();
        entry.record.store(0, Ordering::Relaxed);
        entry.returned.store(0, Ordering::Relaxed);
        pop.word.store(0, Ordering::Release);
    }

    /// Returns the number of receives posted, according to the doorbell record.
    pub(crate) fn posted(&self) -> u16 {
        queue_record_index(self.words().0.record.load(Ordering::Acquire))
    }

    /// Owner: writes the record of a queue whose WQEs are copied from a driver's.
    pub(crate) fn set_posted(&self, posted: u16) {
        self.words()
            .0
            .record
            .store(mlx5_wire::queue_record(posted), Ordering::Release);
    }

    #[inline(always)]
    pub(crate) fn wqes(&self) -> u16 {
        self.keeps as u16 + 1
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride as usize
    }

    pub(crate) fn wqe(&self, index: u16) -> NonNull<u8> {
        // SAFETY: the WQE is inside the ring.
        unsafe {
            self.ring
                .add(usize::from(index & self.keeps as u16) * self.stride())
        }
    }

    /// Returns the number of receives that can be taken.
    pub(crate) fn available(&self) -> u16 {
        let returned = self.words().0.returned.load(Ordering::Acquire);
        self.posted()
            .wrapping_add(returned as u16)
            .wrapping_sub(self.popped() as u16)
    }

    /// Returns the maximum number of receives posted. One WQE of a linked list is never posted: it
    /// is the end of the list.
    #[must_use]
    pub fn capacity(&self) -> u16 {
        self.wqes() - u16::from(self.is_linked)
    }

    /// Returns the next receive to be taken: its pop count and the index of its WQE.
    #[must_use]
    pub fn head(&self) -> (u32, u16) {
        Pop::unpack(self.words().1.word.load(Ordering::Acquire))
    }

    /// Returns whether WQE `next` follows WQE `index` in memory, so that a NIC can prefetch it.
    #[must_use]
    pub fn are_neighbours(&self, index: u16, next: u16) -> bool {
        (next ^ index.wrapping_add(1)) & self.keeps as u16 == 0
    }

    /// Returns the WQE to which the link of WQE `index` points. The link is not checked.
    #[must_use]
    pub fn successor(&self, index: u16) -> u16 {
        let index = index & self.keeps as u16;
        if self.is_linked {
            self.link(index)
        } else {
            self.behind(index)
        }
    }

    /// Returns the `wqe_counter` in the CQE of a receive. For a list it is the index of the WQE;
    /// for a ring it is the count of receives, which continues past the end of the ring. libmlx5
    /// ignores the field for a ring; UCX requires the count (`uct_ud_mlx5_iface_poll_rx`).
    #[inline(always)]
    pub(crate) fn wqe_counter(&self, taking: Taking) -> u16 {
        if self.is_linked {
            taking.index()
        } else {
            taking.count() as u16
        }
    }

    /// Returns the start of WQE `index`, for reports.
    pub(crate) fn first_bytes(&self, index: u16) -> [u8; SEGMENT] {
        // SAFETY: the WQE is inside the ring, and has at least one segment. Any bytes are valid.
        unsafe { self.wqe(index).cast().read() }
    }

    /// Returns the number of receives taken from the queue since it was made.
    pub(crate) fn popped(&self) -> u32 {
        self.head().0
    }

    /// Owner: puts a receive back at the head of a linked list. The caller must know that no
    /// requester holds the receive.
    pub(crate) fn give_back(&self, index: u16, taken: &Taken) {
        let (entry, pop) = self.words();
        let mut word = pop.word.load(Ordering::Acquire);
        loop {
            let (_, head) = Pop::unpack(word);
            let mut segment = [0; 8];
            segment.copy_from_slice(
                &NextSegment {
                    next_wqe_index: head,
                }
                .emit()[..8],
            );
            self.link_word(index)
                .store(u64::from_ne_bytes(segment), Ordering::Relaxed);
            // H4. The new word was never the pop word before, so no stale exchange succeeds.
            match pop.word.compare_exchange_weak(
                word,
                Pop::with_head(word, index),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    // The old head was not taken with this count, because the next pop with this
                    // count takes `index`. So the old head is accounted for.
                    taken.account(Taking(word & self.keeps));
                    break;
                }
                Err(now) => word = now,
            }
        }
        // H6: the count is raised after the pop word was stored.
        entry.returned.fetch_add(1, Ordering::Release);
    }
}
