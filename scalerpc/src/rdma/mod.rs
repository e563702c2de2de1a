//! The binding to `mlx5`: each client and server has a reliable-connected queue pair, to which the
//! operations of the core are posted.
//!
//! [`exchange`] has the records by which two ends connect, `port` the part of a device that both
//! ends need, `server` and `client` the ends.

mod client;
pub mod exchange;
mod port;
mod server;

use std::sync::atomic::{AtomicU64, Ordering};

use copyrpc_shm::cache::copy;
use mlx5::{ConnectOptions, Mr, PostError};
pub use mlx5_rendezvous::SetupError;

pub use client::{PendingClient, RdmaClient};
pub use server::{PendingPeer, RdmaServer};

use crate::protocol::Memory;
use crate::protocol::wire::HEADER_BYTES;

/// Maximum number of WQEs that share a doorbell.
const DOORBELL_BATCH: usize = 16;
/// Maximum number of completions that one step takes.
const COMPLETION_BATCH: usize = 32;
/// Maximum bytes of a message that is carried in its WQE.
const MAX_INLINE_BYTES: usize = 60;

/// Interval in ns at which a server probes each client, and at which a client probes its server
/// while one of its slots waits for the server (S20 of docs/scalerpc.md).
const PROBE_NS: u64 = 1_000_000_000;

/// Options of the queues of an end.
#[derive(Clone, Debug)]
#[doc(alias = "RcQpConfig")]
pub struct RdmaOptions {
    /// Retries, timeouts, the RNR timer, MTU, service level, addresses.
    pub connect: ConnectOptions,
    /// WQEBBs of each send queue, 16 to the device's maximum. Default 128.
    pub send_queue_size: u32,
    /// Entries of a server's completion queue, 1 to the device's maximum. The number bounds the
    /// server's operations under way. A client's completion queue is as large as its send queue
    /// needs. Default 4096.
    pub cq_size: u32,
    /// Whether a client sleeps: then responses and events are WRITEs with immediate, for which the
    /// client posts receives, whose completions end the sleep of [`RdmaClient::wait`]. Servers
    /// ignore this option. Default: no.
    pub sleeps: bool,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            connect: ConnectOptions::default(),
            send_queue_size: 128,
            cq_size: 4096,
            sleeps: false,
        }
    }
}

/// Returns whether the error is a full send queue, which drains by itself: the operation is posted
/// later. Any other refusal means that the queue pair is broken.
const fn is_full(error: &PostError) -> bool {
    matches!(error, PostError::QueueFull { .. })
}

impl Memory for Mr {
    fn len(&self) -> usize {
        Self::len(self)
    }

    #[inline]
    fn load(&self, offset: usize) -> u64 {
        word(self, offset).map_or(0, |word| u64::from_le(word.load(Ordering::Acquire)))
    }

    #[inline(always)]
    fn find(&self, runs: &[usize], stride: usize, count: usize) -> Option<(usize, usize)> {
        // A call costs as much as a short search, so a short search is inlined.
        if runs.len().wrapping_mul(count) <= 16 {
            find(self, runs, stride, count)
        } else {
            find_in_many(self, runs, stride, count)
        }
    }

    #[inline(always)]
    fn each(
        &self,
        first: usize,
        stride: usize,
        from: usize,
        count: usize,
        mut f: impl FnMut(usize, u64) -> bool,
    ) {
        let last = count
            .wrapping_sub(1)
            .checked_mul(stride)
            .and_then(|bytes| bytes.checked_add(first));
        let (Some(last), Some(end)) = (last, Self::len(self).checked_sub(8)) else {
            return;
        };
        if from >= count || first % 8 != 0 || stride % 8 != 0 || last > end {
            return;
        }
        let mut at = self.as_ptr().as_ptr().wrapping_add(first + from * stride);
        for nth in from..count {
            // SAFETY: word `nth` is not after word `count - 1`, which is inside the region. It is
            // aligned: `first` and `stride` are multiples of 8, and regions begin at a page. Its
            // lifetime and the concurrent accesses are as in `word`.
            let place = unsafe { AtomicU64::from_ptr(at.cast()) };
            let word = u64::from_le(place.load(Ordering::Acquire));
            if word != 0 && f(nth, word) {
                place.store(0, Ordering::Release);
            }
            at = at.wrapping_add(stride);
        }
    }

    #[inline]
    fn store(&self, offset: usize, value: u64) {
        if let Some(word) = word(self, offset) {
            word.store(value.to_le(), Ordering::Release);
        }
    }

    #[inline]
    fn exchange(&self, offset: usize, old: u64, new: u64) -> bool {
        let exchange = |word: &AtomicU64| {
            word.compare_exchange(
                old.to_le(),
                new.to_le(),
                Ordering::AcqRel,
                Ordering::Acquire,
            )
            .is_ok()
        };
        word(self, offset).is_some_and(exchange)
    }

    #[inline]
    fn read(&self, offset: usize, into: &mut [u8]) {
        if Self::len(self)
            .checked_sub(into.len())
            .is_none_or(|last| offset > last)
        {
            return into.fill(0);
        }
        // SAFETY: the bytes are inside the region. No Rust reference to the region's memory exists,
        // so `into` does not lie in it. Peers may write the bytes meanwhile, and any value of them
        // is valid.
        unsafe {
            copy(
                into.as_mut_ptr(),
                self.as_ptr().as_ptr().add(offset),
                into.len(),
            )
        };
    }

    #[inline]
    fn header(&self, offset: usize) -> Option<[u8; HEADER_BYTES]> {
        if offset > Self::len(self).checked_sub(HEADER_BYTES)? {
            return None;
        }
        // SAFETY: the header is inside the region. Peers may write the header meanwhile, and any
        // bytes are a valid array.
        Some(unsafe {
            self.as_ptr()
                .as_ptr()
                .add(offset)
                .cast::<[u8; HEADER_BYTES]>()
                .read()
        })
    }

    #[inline]
    fn write(&self, offset: usize, from: &[u8]) {
        // The only error is a range outside of the region, where nothing has to be written.
        let _in_range = Self::write(self, offset, from);
    }

    #[inline]
    fn put_message(
        &self,
        trailer_at: usize,
        header: &[u8; HEADER_BYTES],
        payload: &[u8],
        trailer: u64,
    ) {
        let Some(word) = word(self, trailer_at) else {
            return;
        };
        let Some(start) = trailer_at.checked_sub(HEADER_BYTES + payload.len()) else {
            return;
        };
        let at = self.as_ptr().as_ptr().wrapping_add(start);
        // SAFETY: the bytes from `start` to the word have the length of the header and the payload.
        // They are inside the region, because the word is inside it and `start` has not
        // underflowed. No Rust reference to the memory of the region exists, so neither header nor
        // payload lies in it.
        unsafe {
            at.copy_from_nonoverlapping(header.as_ptr(), HEADER_BYTES);
            copy(at.add(HEADER_BYTES), payload.as_ptr(), payload.len());
        }
        word.store(trailer.to_le(), Ordering::Release);
    }
}

/// [`Memory::find`] in a function of its own, so that its loop has all registers.
#[inline(never)]
fn find_in_many(
    region: &Mr,
    runs: &[usize],
    stride: usize,
    count: usize,
) -> Option<(usize, usize)> {
    find(region, runs, stride, count)
}

#[inline(always)]
fn find(region: &Mr, runs: &[usize], stride: usize, count: usize) -> Option<(usize, usize)> {
    if count == 0 || count > 64 || stride % 8 != 0 || stride > usize::MAX / 128 {
        return None;
    }
    let last_first = region.len().checked_sub((count - 1) * stride + 8)?;
    for (run, first) in runs.iter().enumerate() {
        // The lowest bits of an offset that is no multiple of 8 become the highest.
        if first.rotate_right(3) > last_first / 8 {
            continue;
        }
        let (mut left, mut at) = (count, region.as_ptr().as_ptr().wrapping_add(*first));
        // SAFETY: all words of the run are inside the region, because its last word is. They are
        // aligned: `first` and `stride` are multiples of 8, and regions begin at a page.
        unsafe {
            // Most words are 0, so four words are tested at a time.
            while left >= 4 && is_four_empty(at, stride) {
                (left, at) = (left - 4, at.wrapping_add(4 * stride));
            }
            while left > 0 {
                if load(at) != 0 {
                    return Some((run, count - left));
                }
                (left, at) = (left - 1, at.wrapping_add(stride));
            }
        }
    }
    None
}

/// Loads a word of a region.
///
/// # Safety
/// The word is inside the region, and aligned.
#[inline(always)]
unsafe fn load(at: *mut u8) -> u64 {
    // SAFETY: the caller guarantees that the word is inside the region and aligned; its lifetime
    // and the concurrent accesses are as in `word`.
    unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Relaxed)
}

/// Returns whether four words are 0.
///
/// # Safety
/// Each of the four words, at `at` and `stride` bytes apart, is inside the region, and aligned.
#[inline(always)]
unsafe fn is_four_empty(at: *mut u8, stride: usize) -> bool {
    let third = at.wrapping_add(2 * stride);
    // SAFETY: the caller guarantees that each of the four words is inside the region and aligned.
    unsafe {
        load(at) | load(at.wrapping_add(stride)) | load(third) | load(third.wrapping_add(stride))
            == 0
    }
}

/// Returns the word at `offset`, or `None` if the region has no word there.
#[inline]
fn word(region: &Mr, offset: usize) -> Option<&AtomicU64> {
    // Whole words only: a last word of fewer than 8 bytes is left out.
    if offset % 8 != 0 || offset >= region.len() & !7 {
        return None;
    }
    // SAFETY: the word is inside the region, whose memory lives as long as the region, and is
    // aligned, because regions begin at a page. The device and peers access the word as shared
    // memory; this process accesses it by atomics and copies only, and makes no other reference to
    // it.
    Some(unsafe { AtomicU64::from_ptr(region.as_ptr().as_ptr().add(offset).cast()) })
}

#[cfg(test)]
mod tests {
    use mlx5::{Access, Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    #[test]
    fn find_and_each_see_every_word_they_are_asked_for_and_none_outside_of_the_region() {
        let device = DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(LocalFabric::new()),
            ..SoftOptions::default()
        });
        let device = Device::open(device).unwrap();
        let port = port::Port::on(
            &device,
            device.create_cq(16).unwrap(),
            &RdmaOptions::default(),
        )
        .unwrap();
        let region = port.alloc(4096, Access::LOCAL_WRITE).unwrap();
        let end = Mr::len(&region);
        assert_eq!(region.find(&[56], 64, 7), None);
        for nth in (0..7).rev() {
            region.store(56 + 64 * nth, 1 << 63);
            assert_eq!(region.find(&[56], 64, 7), Some((0, nth)));
            assert_eq!(region.find(&[56], 64, nth), None, "the one behind the last");
            assert_eq!(
                region.find(&[0, 8, 56], 64, 7),
                Some((2, nth)),
                "the run that has it"
            );
        }
        region.store(end - 8, 1);
        assert_eq!(
            (
                region.find(&[end - 72], 64, 2),
                region.find(&[end - 8], 8, 1)
            ),
            (Some((0, 1)), Some((0, 0)))
        );
        for (first, stride, count) in [
            (end - 8, 8, 2),
            (end, 8, 1),
            (end - 8, usize::MAX / 8 * 8, 2),
            (end - 12, 8, 1),
            (end - 16, 4, 3),
        ] {
            assert_eq!(
                region.find(&[first], stride, count),
                None,
                "{first} {stride} {count}"
            );
        }
        let each = |first, stride, from, count| {
            let mut seen = Vec::new();
            region.each(first, stride, from, count, |nth, word| {
                seen.push((nth, word));
                false
            });
            seen
        };
        assert_eq!(
            each(56, 64, 2, 5),
            [(2, 1 << 63), (3, 1 << 63), (4, 1 << 63)]
        );
        assert_eq!(
            (each(end - 72, 64, 0, 2), each(end - 8, 8, 0, 1)),
            (vec![(1, 1)], vec![(0, 1)])
        );
        for (first, stride, from, count) in [
            (end - 8, 8, 0, 2),
            (end, 8, 0, 1),
            (end - 12, 8, 0, 1),
            (end - 16, 4, 0, 3),
            (0, usize::MAX / 8 * 8, 1, 2),
            (usize::MAX - 7, 8, 0, 2),
            (56, 64, 0, 0),
            (56, 64, 3, 3),
        ] {
            assert_eq!(
                each(first, stride, from, count),
                [],
                "{first} {stride} {from} {count}"
            );
        }
    }
}
