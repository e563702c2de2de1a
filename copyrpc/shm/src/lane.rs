//! A lane: messages from one producer to one consumer, in a power-of-two array of slots whose
//! sequence words count up on every lap.
//!
//! A message is a slot. The producer writes the body and then stores `position + 1` into the slot's
//! sequence word; a slot is full for the consumer's position `p` exactly when the word is `p + 1`.
//! There is no head or tail to share, so in the steady state a message moves one cache line, and a
//! producer stopped or killed at any instruction has either published a whole message or none.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `Slot::seq` | producer | consumer | **L1**: Release store / Acquire load, guards `body` for the consumer |
//! | `consumed` (the user's, anywhere) | consumer | producer | **L2**: Release store / Acquire load, guards `body` for its reuse |
//!
//! **L3**: a protocol in which a reply proves that the slot is free (at most `capacity` unanswered
//! requests) needs no `consumed` word.

use core::{marker::PhantomData, mem::MaybeUninit, ptr::NonNull};

use copyrpc_calls::Tagged;

use crate::cache;
use crate::sync::{AtomicU64, Ordering, UnsafeCell};

/// Distance, in slots, from the next slot to the slot that [`LaneTx::fetch_ahead`] fetches.
const SLOTS_AHEAD: u64 = 3;
/// Distance in bytes from the slot just filled to the slot [`SLOTS_AHEAD`] after the next, in a
/// lane whose slots have one line each.
const BYTES_AHEAD: usize = 64 * (SLOTS_AHEAD as usize + 1);

/// The memory that a producer fetches for a later message: see [`LaneTx::fetch_ahead`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ahead {
    /// Fetches nothing: no other message is under way.
    Nothing,
    /// The slot of the later message.
    Slot,
    /// The line where the slot of the later message is, if each slot has one line and the lane does
    /// not wrap before that slot. This takes the fewest instructions. Near the end of the lane the
    /// line is outside of the lane, and the fetch is wasted: use this for lanes of hundreds of
    /// slots.
    Line,
}

/// A slot: the sequence word and the body, a whole number of 64 B lines. All-zero bytes are an
/// empty slot.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot<T> {
    seq: AtomicU64,
    body: UnsafeCell<MaybeUninit<T>>,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot<[u8; 56]>>() == 64);
    assert!(size_of::<Slot<[u8; 57]>>() == 128);
    assert!(core::mem::offset_of!(Slot<[u64; 7]>, body) == 8);
};

impl<T> Slot<T> {
    /// Makes an empty slot.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            seq: AtomicU64::new(0),
            body: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    /// Returns whether the slot has had no message since it was made or [cleared](Self::clear). The
    /// result does not permit a read of the message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.seq.load(Ordering::Relaxed) == 0
    }

    /// Makes the slot empty again, for another pair of ends; nothing of its message remains.
    ///
    /// # Safety
    /// No thread uses the slot, and the next ends are created after this call.
    pub unsafe fn clear(&self) {
        self.seq.store(0, Ordering::Relaxed);
        self.body.with_mut(|p| {
            // SAFETY: no thread uses the slot (contract of this function); any bytes are a
            // `MaybeUninit`.
            unsafe { p.write_bytes(0, 1) };
        });
    }
}

#[derive(Debug, Clone, Copy)]
struct Slots<T> {
    base: NonNull<Slot<T>>,
    mask: u64,
    _slots: PhantomData<Slot<T>>,
}

impl<T> Slots<T> {
    #[inline(always)]
    fn at(&self, position: u64) -> &Slot<T> {
        // SAFETY: `base` points to `mask + 1` slots that outlive this value (contract of
        // `LaneTx::new` and `LaneRx::new`).
        unsafe { &*self.base.as_ptr().add((position & self.mask) as usize) }
    }

    /// Returns the place of message number `position`: the address of the lane, and the offset of
    /// the message's slot in bytes.
    #[inline(always)]
    fn place(&self, position: u64) -> (usize, usize) {
        (
            self.base.addr().get(),
            (position & self.mask) as usize * size_of::<Slot<T>>(),
        )
    }
}

/// Prefetches, for writing, the line `AHEAD` bytes after a place.
#[inline(always)]
fn fetch<const AHEAD: usize>((base, offset): (usize, usize)) {
    cache::prefetch_to_write::<AHEAD>(base, offset);
}

impl<T> Slots<Tagged<T>> {
    /// Returns message number `position` if it has been published.
    #[inline(always)]
    fn tagged_at(&self, position: u64) -> Option<(u64, Unread<'_, T>)> {
        let slot = self.at(position);
        // L1: pairs with the producer's store.
        if slot.seq.load(Ordering::Acquire) != position.wrapping_add(1) {
            return None;
        }
        // SAFETY: as in `LaneRx::pop`: the sequence word shows that the message is complete.
        let tag = slot
            .body
            .with(|p| unsafe { (&raw const (*p.cast::<Tagged<T>>()).tag).read() });
        Some((tag, Unread { slot }))
    }
}

/// The producing end. Messages are `Copy`: nothing that needs a destructor crosses a process
/// boundary.
#[derive(Debug)]
pub struct LaneTx<T> {
    slots: Slots<T>,
    next: u64,
    /// Positions below this limit may be written. The limit is the last known consumed position
    /// plus the capacity.
    limit: u64,
}

/// A message that is in its slot, and not published yet.
#[derive(Debug)]
#[must_use]
pub struct Filled<'a, T> {
    slot: &'a Slot<T>,
    next: &'a mut u64,
}

/// A message that was taken, and whose payload still lies in its slot. A producer in another
/// process may nevertheless write to the slot.
#[derive(Debug)]
pub struct Unread<'a, T> {
    slot: &'a Slot<Tagged<T>>,
}

impl<T: Copy> Unread<'_, T> {
    /// Returns the payload, by copy.
    #[inline(always)]
    pub fn read(self) -> T {
        // SAFETY: as in `LaneRx::pop`, of which this is the copy of the payload.
        self.slot
            .body
            .with(|p| unsafe { (&raw const (*p.cast::<Tagged<T>>()).payload).read() })
    }

    /// Returns the place of the payload. The payload may be read as long as the producer does not
    /// write to its slot.
    #[inline(always)]
    #[must_use]
    pub fn as_ptr(&self) -> *const T {
        // SAFETY: the code reads nothing; it computes an address inside the slot.
        self.slot
            .body
            .with(|p| unsafe { &raw const (*p.cast::<Tagged<T>>()).payload })
    }
}

/// The consuming end.
#[derive(Debug)]
pub struct LaneRx<T> {
    slots: Slots<T>,
    next: u64,
}

// SAFETY: an end owns its position, and has the only access of its kind to the slots, which the
// sequence words (L1) and `consumed` (L2) hand from end to end.
unsafe impl<T: Send> Send for LaneTx<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for LaneRx<T> {}

impl<T: Copy> LaneTx<T> {
    /// Makes the producing end for the `capacity` slots at `slots`; the first message has number
    /// `position`.
    ///
    /// # Safety
    /// - `slots` points to `capacity` (a power of two) slots that stay mapped as long as this value
    ///   lives.
    /// - This value is the only producing end of these slots. Both ends start at the same
    ///   `position`, and no slot holds a sequence word in `position + 1 ..= position + capacity`.
    /// - [`publish`](Self::publish) is called only when the slot of [`position`](Self::position) is
    ///   known to be consumed: [`has_room`](Self::has_room) returned `true`, or a protocol such as
    ///   L3 implies it.
    #[must_use]
    pub unsafe fn new(slots: NonNull<Slot<T>>, capacity: u64, position: u64) -> Self {
        debug_assert!(capacity.is_power_of_two());
        let slots = Slots {
            base: slots,
            mask: capacity - 1,
            _slots: PhantomData,
        };
        Self {
            slots,
            next: position,
            limit: position.wrapping_add(capacity),
        }
    }

    /// Returns the number of the next message.
    #[must_use]
    #[inline(always)]
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Returns whether one more message fits. Reads `consumed` (L2) only when the room that its
    /// last value showed is used up; ignores a value that no consumer position can have.
    #[inline(always)]
    pub fn has_room(&mut self, consumed: &AtomicU64) -> bool {
        if self.next != self.limit {
            return true;
        }
        let capacity = self.slots.mask + 1;
        // L2: the consumer's reads of all slots below `consumed` happened before this load.
        let consumed = consumed.load(Ordering::Acquire);
        let advance = consumed.wrapping_sub(self.limit.wrapping_sub(capacity));
        if advance == 0 || advance > capacity {
            return false;
        }
        self.limit = consumed.wrapping_add(capacity);
        true
    }

    /// Writes and publishes one message. There must be room, see [`new`](Self::new).
    #[inline(always)]
    pub fn publish(&mut self, body: T) {
        self.fill(body).publish();
    }

    /// Writes one message. There must be room, as for [`publish`](Self::publish). If the result is
    /// dropped, the next message takes its place.
    #[inline(always)]
    pub fn fill(&mut self, body: T) -> Filled<'_, T> {
        let Self { slots, next, .. } = self;
        let slot = slots.at(*next);
        slot.body.with_mut(|p| {
            // SAFETY: the slot is consumed and this is its only producer (contract of `new`), so no
            // other thread accesses the body.
            unsafe { (*p).write(body) };
        });
        Filled { slot, next }
    }
}

impl<T> Filled<'_, T> {
    /// Publishes the message.
    #[inline(always)]
    pub fn publish(self) {
        *self.next = self.next.wrapping_add(1);
        // L1: publishes the message.
        self.slot.seq.store(*self.next, Ordering::Release);
    }
}

impl<T: Copy> LaneTx<Tagged<T>> {
    /// Like [`publish`](Self::publish), for a message that is written directly to its slot. Then
    /// fetches the memory that `ahead` names.
    #[inline(always)]
    pub fn publish_tagged(&mut self, tag: u64, payload: T, ahead: Ahead) {
        let (position, next) = (self.next, self.next.wrapping_add(1));
        let (slot, place) = (self.slots.at(position), self.slots.place(position));
        slot.body.with_mut(|p| {
            let p = p.cast::<Tagged<T>>();
            // SAFETY: as in `fill`. The payload is written first: nothing is written between the
            // read of its source and the write to its slot, so the compiler copies it only once.
            unsafe {
                (&raw mut (*p).payload).write(payload);
                (&raw mut (*p).tag).write(tag);
            }
        });
        self.next = next;
        // L1: publishes the message.
        slot.seq.store(next, Ordering::Release);
        match ahead {
            Ahead::Nothing => {}
            Ahead::Slot => fetch::<0>(self.slots.place(position.wrapping_add(1 + SLOTS_AHEAD))),
            Ahead::Line => fetch::<BYTES_AHEAD>(place),
        }
    }
}

impl<T> LaneTx<T> {
    /// Writes a message and does not publish it, for models: the state after a producer was killed
    /// in [`publish`](Self::publish).
    #[cfg(loom)]
    pub fn publish_half(&self, body: T) {
        // SAFETY: as in `fill`.
        self.slots
            .at(self.next)
            .body
            .with_mut(|p| unsafe { *p = MaybeUninit::new(body) });
    }

    /// Fetches the slot of a message that will be published soon: the consumer has read that slot,
    /// so its line is in another cache. For a producer that has several messages under way: with
    /// one message at a time, the fetch would only add a transfer of the line.
    #[inline(always)]
    pub fn fetch_ahead(&self) {
        fetch::<0>(self.slots.place(self.next.wrapping_add(SLOTS_AHEAD)));
    }
}

impl<T: Copy> LaneRx<T> {
    /// Makes the consuming end for the `capacity` slots at `slots`; the first message has number
    /// `position`.
    ///
    /// # Safety
    /// Like [`LaneTx::new`], for the consuming end; and every bit pattern that the producer may
    /// write must be a valid `T` (a peer in another process is not trusted: use types that are
    /// `FromBytes`).
    #[must_use]
    pub unsafe fn new(slots: NonNull<Slot<T>>, capacity: u64, position: u64) -> Self {
        debug_assert!(capacity.is_power_of_two());
        Self {
            slots: Slots {
                base: slots,
                mask: capacity - 1,
                _slots: PhantomData,
            },
            next: position,
        }
    }

    /// Returns the number of the next message.
    #[must_use]
    #[inline(always)]
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Returns whether a message waits.
    #[must_use]
    #[inline(always)]
    pub fn is_ready(&self) -> bool {
        self.is_ready_at(self.next)
    }

    /// Returns whether message number `position`, which is at most `capacity` after the next
    /// message, has been published.
    #[must_use]
    #[inline(always)]
    pub fn is_ready_at(&self, position: u64) -> bool {
        // L1: pairs with the producer's store.
        self.slots.at(position).seq.load(Ordering::Acquire) == position.wrapping_add(1)
    }

    /// Takes the next message, by copy: later writes of the producer to the slot do not change the
    /// copy.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<T> {
        let slot = self.slots.at(self.next);
        let next = self.next.wrapping_add(1);
        // L1: pairs with the producer's store.
        if slot.seq.load(Ordering::Acquire) != next {
            return None;
        }
        let body = slot.body.with(|p| {
            // SAFETY: the sequence word (L1) shows that the producer has finished this slot. The
            // producer does not reuse the slot before it knows that this end has passed it.
            unsafe { (*p).assume_init_read() }
        });
        self.next = next;
        Some(body)
    }
}

impl<T: Copy> LaneRx<Tagged<T>> {
    /// Like [`pop`](Self::pop), but returns only the tag, and the payload unread.
    #[inline(always)]
    pub fn pop_tagged(&mut self) -> Option<(u64, Unread<'_, T>)> {
        let next = self.next.wrapping_add(1);
        let message = self.slots.tagged_at(self.next)?;
        self.next = next;
        Some(message)
    }

    /// Takes up to `budget` messages as [`pop_tagged`](Self::pop_tagged) does, and calls `f` with
    /// each, and with whether it is the first. Returns the number of messages taken.
    #[inline(always)]
    pub fn pop_each(
        &mut self,
        budget: usize,
        mut f: impl FnMut(bool, u64, Unread<'_, T>),
    ) -> usize {
        // These local copies stay in registers, whatever `f` writes.
        let (slots, first) = (self.slots, self.next);
        let mut position = first;
        for _ in 0..budget {
            let next = position.wrapping_add(1);
            let Some((tag, message)) = slots.tagged_at(position) else {
                break;
            };
            self.next = next;
            f(position == first, tag, message);
            position = next;
        }
        position.wrapping_sub(first) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;

    fn slots(n: usize) -> Box<[Slot<u64>]> {
        (0..n).map(|_| Slot::empty()).collect()
    }

    #[cfg(not(loom))]
    #[test]
    fn full_lane_refuses_until_consumed_is_published_at_any_start() {
        for start in [0u64, 1, 7, u64::from(u32::MAX), u64::MAX - 3] {
            let mut s = slots(4);
            let base = NonNull::from(&mut *s).cast();
            let consumed = AtomicU64::new(start);
            // SAFETY: the four slots outlive both ends, and have no other end.
            let (mut tx, mut rx) =
                unsafe { (LaneTx::new(base, 4, start), LaneRx::new(base, 4, start)) };
            for round in 0..50u64 {
                let mut sent = 0;
                while tx.has_room(&consumed) {
                    tx.publish(round * 4 + sent);
                    sent += 1;
                }
                assert_eq!(sent, 4);
                for i in 0..4 {
                    assert_eq!(rx.pop(), Some(round * 4 + i));
                }
                assert_eq!(rx.pop(), None);
                assert!(
                    !tx.has_room(&consumed),
                    "room without a published consumer position"
                );
                consumed.store(rx.position(), Ordering::Release);
            }
        }
    }

    #[cfg(not(loom))]
    #[test]
    fn a_message_that_is_only_filled_in_is_none_and_the_next_takes_its_place() {
        let mut s = slots(2);
        let base = NonNull::from(&mut *s).cast();
        // SAFETY: the two slots outlive both ends, and have no other end.
        let (mut tx, mut rx) = unsafe { (LaneTx::new(base, 2, 0), LaneRx::new(base, 2, 0)) };
        let _unpublished = tx.fill(1);
        assert_eq!((tx.position(), rx.pop()), (0, None));
        tx.fill(2).publish();
        assert_eq!((tx.position(), rx.pop(), rx.pop()), (1, Some(2), None));
    }

    #[cfg(not(loom))]
    #[test]
    fn impossible_consumed_position_gives_no_room() {
        let mut s = slots(2);
        let base = NonNull::from(&mut *s).cast();
        let consumed = AtomicU64::new(0);
        // SAFETY: the two slots outlive this end, and have no other producer.
        let mut tx = unsafe { LaneTx::new(base, 2, 0) };
        tx.publish(1);
        tx.publish(2);
        for garbage in [3u64, 100, u64::MAX, 1 << 63] {
            consumed.store(garbage, Ordering::Release);
            assert!(!tx.has_room(&consumed), "{garbage}");
        }
        consumed.store(2, Ordering::Release);
        assert!(tx.has_room(&consumed));
    }

    #[cfg(loom)]
    #[test]
    fn loom_messages_arrive_whole_and_in_order_across_a_lap() {
        loom::model(|| {
            let slots: &'static mut [Slot<u64>] = Box::leak(slots(2));
            let base = NonNull::from(&mut *slots).cast();
            let first = u64::from(crate::sync::FIRST);
            let consumed = loom::sync::Arc::new(AtomicU64::new(first));
            // SAFETY: the slots are leaked, and have only these two ends.
            let (mut tx, mut rx) =
                unsafe { (LaneTx::new(base, 2, first), LaneRx::new(base, 2, first)) };
            let c = consumed.clone();
            let producer = loom::thread::spawn(move || {
                for i in 0..3u64 {
                    while !tx.has_room(&c) {
                        crate::sync::yield_now();
                    }
                    tx.publish(i);
                }
            });
            for i in 0..3u64 {
                let got = loop {
                    if let Some(v) = rx.pop() {
                        break v;
                    }
                    crate::sync::yield_now();
                };
                assert_eq!(got, i);
                consumed.store(rx.position(), Ordering::Release);
            }
            producer.join().unwrap();
        });
    }
}
