//! Ring geometry, and the only types that access ring memory.
//!
//! A position is a `u64` that only grows; its offset in the ring is `position % size`. Both ends of
//! a connection have rings of one size and start each direction at the same position, so a batch is
//! written to the peer's receive ring at the offset that it has in the local send ring (invariant
//! P1 of docs/copyrpc-protocol.md).

use std::marker::PhantomData;
use std::ptr::NonNull;

use copyrpc_calls::Arrival;
use copyrpc_shm::cache::{copy, prefetch};

use crate::wire::{self, ALIGNMENT};

/// Smallest ring that connections may use. Tests of the flow control explore rings down to
/// [`RingSize::CORE_MIN`].
pub const MIN_RING_SIZE: u64 = 4 << 10;
/// Largest ring. In a larger ring, call ids could run out before credit does.
pub const MAX_RING_SIZE: u64 = 256 << 20;
/// Default size of a ring.
pub const DEFAULT_RING_SIZE: u64 = 1 << 20;

/// A legal ring size, and the limits that follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize(u64);

impl RingSize {
    /// Smallest ring for which the flow-control rules hold.
    pub const CORE_MIN: u64 = 2 << 10;

    /// Makes a ring size, in bytes: a power of two from [`RingSize::CORE_MIN`] to
    /// [`MAX_RING_SIZE`]. Returns `None` for other numbers. Connections need
    /// [`RingSize::for_connection`].
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= Self::CORE_MIN && bytes <= MAX_RING_SIZE {
            Some(Self(bytes))
        } else {
            None
        }
    }

    /// Makes a ring size for a connection, in bytes: a power of two from [`MIN_RING_SIZE`] to
    /// [`MAX_RING_SIZE`]. Returns `None` for other numbers.
    #[must_use]
    pub const fn for_connection(bytes: u64) -> Option<Self> {
        if bytes < MIN_RING_SIZE {
            None
        } else {
            Self::new(bytes)
        }
    }

    /// Returns the size in bytes.
    #[must_use]
    #[inline]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the offset of a position in the ring.
    #[must_use]
    #[inline]
    pub const fn offset(self, position: u64) -> u64 {
        position & (self.0 - 1)
    }

    /// Returns the number of bytes from a position to the end of the ring. At offset 0, this is the
    /// size of the ring.
    #[must_use]
    pub const fn to_end(self, position: u64) -> u64 {
        self.0 - self.offset(position)
    }

    /// Returns the maximum length of a padded request: 1/8 ring (invariant L1).
    #[must_use]
    pub const fn max_message(self) -> u64 {
        self.0 / 8
    }

    /// Returns the maximum request payload in bytes.
    #[must_use]
    pub const fn max_payload(self) -> u64 {
        self.max_message() - wire::HEADER_SIZE as u64
    }

    /// Returns the maximum credit that one side may have granted and that has not been returned:
    /// 1/4 ring (invariant R1).
    #[must_use]
    pub const fn max_reservation(self) -> u64 {
        self.0 / 4
    }

    /// Returns the maximum internal allowance of one call, which is the number of bytes reserved
    /// for its response and for the metadata of a batch: 3/16 ring (invariant L2).
    #[must_use]
    pub const fn max_internal_allowance(self) -> u64 {
        self.0 / 4 - self.0 / 16
    }

    /// Returns the maximum response allowance of one call, in payload bytes.
    #[must_use]
    pub const fn max_response_allowance(self) -> u64 {
        wire::response_capacity(self.max_internal_allowance())
    }
}

/// Memory of one ring. A NIC or a peer may read and write the memory at any time, so no safe slice
/// of it exists: bytes are copied in and out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingView {
    base: NonNull<u8>,
    size: RingSize,
}

impl RingView {
    /// Views `size` bytes at `base` as a ring.
    ///
    /// # Safety
    /// The memory must be valid for reads and writes for as long as this view or a copy of it is
    /// used, and no reference to a byte of it may be alive when a view writes that byte.
    pub(crate) const unsafe fn new(base: NonNull<u8>, size: RingSize) -> Self {
        Self { base, size }
    }

    pub(crate) const fn size(&self) -> RingSize {
        self.size
    }

    #[cfg(test)]
    pub(crate) fn copy_in(&self, position: u64, bytes: &[u8]) {
        let target = self.range(position, bytes.len());
        // SAFETY: `range` checked that the target lies in the memory that the caller of `new`
        // guaranteed; `bytes` is other memory, because no reference to the target is alive.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) }
    }

    /// Returns the address of the block of 32 bytes at `position`, a multiple of 32. No such block
    /// crosses the end of the ring.
    #[inline(always)]
    fn block(&self, position: u64) -> NonNull<u8> {
        let offset = position & (self.size.bytes() - ALIGNMENT);
        // SAFETY: the size is a power of two of at least 32, so the 32 bytes at `offset` are inside
        // the one object that the caller of `new` guaranteed.
        unsafe { self.base.add(offset as usize) }
    }

    #[inline(always)]
    pub(crate) fn write_block(&self, position: u64, bytes: &[u8; ALIGNMENT as usize]) {
        // SAFETY: `block` returns the address of 32 writable bytes; `bytes` is other memory,
        // because no reference to the ring's bytes is alive.
        unsafe {
            self.block(position)
                .cast::<[u8; ALIGNMENT as usize]>()
                .write_unaligned(*bytes)
        }
    }

    #[inline(always)]
    pub(crate) const fn lap(&self, position: u64) -> Lap {
        let start = position - self.size.offset(position);
        Lap {
            zero: self.base.as_ptr().wrapping_sub(start as usize),
        }
    }

    /// Copies `N` bytes at `position` out of the ring, once, so that the copy can be validated and
    /// used.
    #[cfg(test)]
    pub(crate) fn copy_out<const N: usize>(&self, position: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let source = self.range(position, N);
        // SAFETY: as in `copy_in`, with the direction reversed.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), N) }
        bytes
    }

    /// Returns the received bytes of a payload in this ring.
    #[inline]
    pub(crate) fn bytes(&self, payload: Payload) -> RecvBytes<'_> {
        RecvBytes {
            base: self.range(payload.position, payload.len as usize),
            len: payload.len as usize,
            ring: PhantomData,
        }
    }

    /// Like [`RingView::bytes`], but takes the address of the payload.
    ///
    /// # Safety
    /// `len` bytes from `base` must be inside the ring.
    #[inline(always)]
    pub(crate) const unsafe fn bytes_at(&self, base: NonNull<u8>, len: u32) -> RecvBytes<'_> {
        RecvBytes {
            base,
            len: len as usize,
            ring: PhantomData,
        }
    }

    /// Makes the cache fetch the byte that is `ahead` bytes after the block at `position`. The
    /// address may be beyond the end of the ring: a prefetch never faults.
    #[inline(always)]
    pub(crate) fn prefetch(&self, position: u64, ahead: u64) {
        prefetch(self.block(position).addr().get() + ahead as usize);
    }

    #[inline]
    fn range(&self, position: u64, len: usize) -> NonNull<u8> {
        let offset = self.size.offset(position);
        if offset + len as u64 > self.size.bytes() {
            crosses_end(len, offset, self.size.bytes());
        }
        // SAFETY: offset + len <= size, so the address is inside the one object that the caller of
        // `new` guaranteed.
        unsafe { self.base.add(offset as usize) }
    }
}

/// A lap: one pass of positions through a ring, from its start to its end. This type finds the byte
/// at a position of its lap by one addition, and checks nothing. A [`RingView`] takes positions of
/// any lap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lap {
    /// The address of the byte at position `p` of this lap, minus `p`.
    zero: *mut u8,
}

impl Lap {
    /// Returns the address of the byte at `position`.
    ///
    /// # Safety
    /// The position must be on this lap, or be its end.
    #[inline(always)]
    pub(crate) const unsafe fn at(self, position: u64) -> NonNull<u8> {
        // SAFETY: the address is in the object that the caller of `RingView::new` guaranteed, or at
        // its end, so it is not null.
        unsafe { NonNull::new_unchecked(self.zero.wrapping_add(position as usize)) }
    }

    /// Copies a message into the ring.
    ///
    /// # Safety
    /// All bytes of the message must be on this lap.
    #[inline(always)]
    pub(crate) unsafe fn write_message(
        self,
        position: u64,
        header: &[u8; wire::HEADER_SIZE],
        payload: &[u8],
    ) {
        // SAFETY: the target lies in the memory that the caller of `RingView::new` guaranteed; the
        // bytes are other memory, because no reference to the target is alive; the payload's place
        // begins inside or at the end of the lap.
        unsafe {
            let target = self.at(position);
            target
                .cast::<[u8; wire::HEADER_SIZE]>()
                .write_unaligned(*header);
            copy(
                target.as_ptr().add(wire::HEADER_SIZE),
                payload.as_ptr(),
                payload.len(),
            );
        }
    }
}

#[cold]
#[expect(clippy::panic, reason = "a bug of this crate, before it harms memory")]
fn crosses_end(len: usize, offset: u64, ring: u64) -> ! {
    panic!("{len} bytes at offset {offset} cross the end of a ring of {ring} bytes");
}

/// The place of a validated payload in the receive ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Payload {
    position: u64,
    len: u32,
}

impl Payload {
    pub(crate) const EMPTY: Self = Self {
        position: 0,
        len: 0,
    };

    /// Returns the payload of a message whose header is at `message`. The caller has checked that
    /// the message ends before the ring does.
    pub(crate) const fn of_message(message: u64, len: u32) -> Self {
        Self {
            position: message + wire::HEADER_SIZE as u64,
            len,
        }
    }

    pub(crate) const fn message(&self) -> u64 {
        self.position - wire::HEADER_SIZE as u64
    }

    pub(crate) const fn len(&self) -> usize {
        self.len as usize
    }
}

/// Received bytes, still in the receive ring (zero copy).
///
/// A correct peer does not write these bytes while this value exists, but the memory is open to the
/// peer's NIC, so there is no safe `&[u8]`: copy the bytes out, then validate the copy.
#[derive(Clone, Copy, Debug)]
pub struct RecvBytes<'a> {
    base: NonNull<u8>,
    len: usize,
    ring: PhantomData<&'a RingView>,
}

impl<'a> RecvBytes<'a> {
    pub(crate) const fn empty() -> Self {
        Self {
            base: NonNull::dangling(),
            len: 0,
            ring: PhantomData,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first `target.len()` bytes, or all if there are fewer. Returns the number of
    /// copied bytes.
    #[inline]
    pub fn copy_to(&self, target: &mut [u8]) -> usize {
        let len = self.len.min(target.len());
        // SAFETY: `base` has `len` readable bytes; `target` is other memory, and has room for them.
        unsafe { copy(target.as_mut_ptr(), self.base.as_ptr(), len) }
        len
    }

    /// Returns a copy of all bytes.
    #[must_use]
    #[inline]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        // SAFETY: `base` has `len` readable bytes, and the vector, which is other memory, has room
        // for them.
        unsafe {
            copy(bytes.as_mut_ptr(), self.base.as_ptr(), self.len);
            bytes.set_len(self.len);
        }
        bytes
    }

    /// Returns a copy of the first bytes as a `T`; `None` if there are fewer bytes than a `T` has.
    #[must_use]
    pub fn read<T: zerocopy::FromBytes + zerocopy::IntoBytes>(&self) -> Option<T> {
        if self.len < size_of::<T>() {
            return None;
        }
        let mut value = T::new_zeroed();
        self.copy_to(value.as_mut_bytes());
        Some(value)
    }

    /// Returns the bytes in place.
    ///
    /// # Safety
    /// The peer must be trusted not to write to this process's receive ring outside the protocol
    /// for as long as the slice is used.
    #[must_use]
    pub const unsafe fn as_slice(&self) -> &'a [u8] {
        // SAFETY: `base` has `len` readable bytes for 'a; the caller vouches for the peer.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Arrival<Vec<u8>> for RecvBytes<'_> {
    fn into_reply(self) -> Vec<u8> {
        self.to_vec()
    }

    #[inline(always)]
    fn overwrite(self, reply: &mut Vec<u8>) {
        reply.resize(self.len, 0);
        self.copy_to(reply);
    }
}

const _: () = assert!(RingSize::CORE_MIN / 16 % ALIGNMENT == 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn with_ring(test: impl FnOnce(RingView)) {
        let mut memory = vec![0xa5_u8; 2 << 10];
        let base = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` has the ring's size, outlives the view and is not accessed meanwhile.
        test(unsafe { RingView::new(base, RingSize::new(2 << 10).unwrap()) });
    }

    #[test]
    fn only_powers_of_two_in_range_are_ring_sizes() {
        for bad in [
            0,
            1,
            1 << 10,
            3 << 10,
            4095,
            4097,
            MAX_RING_SIZE * 2,
            u64::MAX,
        ] {
            assert_eq!(RingSize::new(bad), None);
        }
        assert_eq!(RingSize::new(4096).unwrap().max_payload(), 500);
        assert_eq!(RingSize::new(4096).unwrap().max_response_allowance(), 724);
    }

    #[test]
    fn bytes_written_at_a_position_are_read_at_the_same_offset_of_any_lap() {
        with_ring(|ring| {
            ring.copy_in(5 * 2048 + 64, &[1, 2, 3, 4]);
            assert_eq!(ring.copy_out(64 + 2048), [1, 2, 3, 4, 0xa5]);
            let payload = Payload::of_message(64 - 12, 4);
            assert_eq!(ring.bytes(payload).to_vec(), [1, 2, 3, 4]);
            assert_eq!(ring.bytes(payload).read::<u32>(), Some(0x0403_0201));
            assert_eq!(ring.bytes(payload).read::<u64>(), None);
            let mut short = [0; 3];
            assert_eq!(ring.bytes(payload).copy_to(&mut short), 3);
            assert_eq!(short, [1, 2, 3]);
        });
    }

    #[test]
    #[should_panic(expected = "cross the end")]
    fn a_copy_across_the_ring_end_is_stopped() {
        with_ring(|ring| ring.copy_in(2048 - 2, &[0; 3]));
    }
}
