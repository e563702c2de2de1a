//! Receive queues that a driver, such as libmlx5, keeps in its own memory. Each receive is copied,
//! WQE by WQE, into the queue that peers map, so that peers take it without help from this process.
//! The device owns a WQE from its posting to its completion. So the WQE does not change meanwhile,
//! and its copy is not overwritten while a peer may read it.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5_wire::queue_record_index;

use crate::shared::receives::Receives;

/// A driver's receive queue in its own memory.
pub(crate) struct Mirror {
    buffer: NonNull<u8>,
    stride: usize,
    record: NonNull<AtomicU32>,
    /// Number of receives copied, modulo 2^16.
    copied: u16,
    /// Index of the WQE that is posted next.
    next: u16,
    /// Whether the queue is polled.
    is_on: bool,
}

impl Mirror {
    /// Makes the mirror of the queue at `buffer`, in WQEs of `stride` bytes, counted in `record`.
    ///
    /// # Safety
    /// Buffer and record are valid as long as the result. `buffer` is 8-aligned. Its WQEs have the
    /// number and the stride of the WQEs in the queue to which they are copied.
    pub(crate) unsafe fn new(
        buffer: NonNull<u8>,
        stride: usize,
        record: NonNull<AtomicU32>,
        is_on: bool,
    ) -> Self {
        Self {
            buffer,
            stride,
            record,
            copied: 0,
            next: 0,
            is_on,
        }
    }

    pub(crate) fn start(&mut self) {
        self.is_on = true;
    }

    pub(crate) fn reset(&mut self) {
        *self = Self {
            copied: 0,
            next: 0,
            is_on: false,
            ..*self
        };
    }

    /// Copies the receives posted since the last call. Returns whether it copied any receives.
    pub(crate) fn copy(&mut self, to: &Receives) -> bool {
        if !self.is_on {
            return false;
        }
        // SAFETY: the record is valid as long as this value. Acquire: the driver wrote the WQEs
        // before the record.
        let posted = queue_record_index(unsafe { self.record.as_ref() }.load(Ordering::Acquire));
        let new = posted.wrapping_sub(self.copied);
        // A driver never posts more receives than there are WQEs. A record with more is ignored.
        if new == 0 || new > to.wqes() {
            return false;
        }
        for _ in 0..new {
            let index = self.next & (to.wqes() - 1);
            let from = usize::from(index) * self.stride;
            for (word, to) in to.wqe_words(index).iter().enumerate() {
                // SAFETY: the word is inside WQE `index` of the driver's buffer, and is 8-aligned.
                // The driver wrote the WQE before the record, and does not touch it now.
                to.store(
                    unsafe { self.buffer.add(from).cast::<u64>().add(word).read() },
                    Ordering::Relaxed,
                );
            }
            self.next = to.successor(index);
        }
        self.copied = posted;
        to.set_posted(posted);
        true
    }
}

impl Receives {
    /// Returns the words of WQE `index`. Only the owner writes them.
    fn wqe_words(&self, index: u16) -> &[AtomicU64] {
        let at = self.wqe(index).cast::<AtomicU64>();
        // SAFETY: the words belong to a WQE of the ring, which is 16-aligned. Its owner and its
        // peers access them as atomics.
        unsafe { core::slice::from_raw_parts(at.as_ptr(), self.stride() / size_of::<u64>()) }
    }
}
