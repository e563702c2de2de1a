//! Receives: the WQE of both kinds of receive queue, and the receive queue of one queue pair.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;

use mlx5_hca::RqMemory;

use crate::mmio;
use crate::ops::{Payload, Segments, Sge};
use crate::wire::{DataSegment, MAX_MESSAGE_BYTES, SEGMENT, queue_record};

/// The reason why a receive was not posted. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostReceiveError {
    /// All entries are posted; retry after completions have returned entries.
    #[error(
        "receive queue full: all {depth} entries are posted or not yet returned with `complete_receive`"
    )]
    QueueFull {
        /// Number of receives that the queue holds.
        depth: usize,
    },
    /// More buffers than the queue was created for.
    #[error("{count} buffers in one receive; this queue takes at most {max}")]
    TooManySges {
        /// The requested number of buffers.
        count: usize,
        /// Maximum number of buffers of a receive.
        max: usize,
    },
    /// The queue pair does not have its own receive queue.
    #[error("this queue pair takes its receives from a shared receive queue: post them there")]
    Shared,
    /// A queue pair in RESET has no receives.
    #[error("the queue pair is in state Reset; receives may be posted from Init on")]
    WrongState,
    /// The buffers hold more than the longest message.
    #[error("buffers of {bytes} bytes in one receive; the longest message is {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Length of all buffers together, in bytes.
        bytes: u64,
    },
}

/// The part of a receive WQE that lists the message's buffers: data segments, and a terminator if
/// there is room for more.
#[derive(Clone, Copy)]
pub(crate) struct Scatter {
    pub(crate) max_sge: usize,
    /// Number of 16-byte segments for which the WQE has room, at least `max_sge`.
    pub(crate) segments: usize,
}

impl Scatter {
    /// Writes `buffers` to `at`. Empty buffers are left out: on the wire a length of 0 means 2^31
    /// bytes.
    ///
    /// # Safety
    /// `at` is valid for writes of `segments` segments, and the device does not read them now.
    #[inline(always)]
    pub(crate) unsafe fn write(self, at: *mut u8, buffers: &[Sge]) -> Result<(), PostReceiveError> {
        if buffers.len() > self.max_sge {
            return Err(PostReceiveError::TooManySges {
                count: buffers.len(),
                max: self.max_sge,
            });
        }
        let bytes = buffers.iter().map(Payload::bytes).sum();
        if bytes > MAX_MESSAGE_BYTES {
            return Err(PostReceiveError::TooLong { bytes });
        }
        // SAFETY: the caller guarantees `segments` segments. At most `max_sge` data segments are
        // written, and the terminator only if `segments` is larger than their number.
        let mut out = unsafe { Segments::new(at) };
        let mut used = 0;
        for sge in buffers {
            sge.emit(&mut out);
            used += sge.segments();
        }
        if used < self.segments {
            out.put(&DataSegment::TERMINATOR.emit());
        }
        Ok(())
    }

    /// Writes a receive without buffers to `at`.
    ///
    /// # Safety
    /// See [`write`](Self::write).
    #[inline(always)]
    pub(crate) unsafe fn write_none(self, at: *mut u8) {
        if self.segments > 0 {
            // SAFETY: one segment is written, and the caller guarantees `segments`, at least one.
            unsafe { Segments::new(at) }.put(&DataSegment::TERMINATOR.emit());
        }
    }
}

/// The receive queue of one queue pair: a ring of receives that the device consumes, and completes,
/// in posting order.
///
/// The queue pair holds this queue and its memory, so the memory outlives this queue.
pub(crate) struct ReceiveQueue {
    buffer: NonNull<u8>,
    stride: usize,
    scatter: Scatter,
    record: NonNull<AtomicU32>,
    mask: u16,
    /// Number of receives posted, modulo 2^16, as in the doorbell record.
    producer: u16,
    consumer: u16,
    /// The `user` values, by WQE.
    users: Box<[u64]>,
}

impl ReceiveQueue {
    pub(crate) fn new(memory: &RqMemory, max_sge: usize) -> Self {
        let (wqe_cnt, stride) = (memory.wqe_cnt, memory.stride as usize);
        debug_assert!(wqe_cnt.is_power_of_two() && stride.is_power_of_two() && stride >= SEGMENT);
        Self {
            buffer: memory.buffer,
            stride,
            scatter: Scatter {
                max_sge,
                segments: stride / SEGMENT,
            },
            record: memory.record,
            mask: wqe_cnt as u16 - 1,
            producer: 0,
            consumer: 0,
            users: vec![0; wqe_cnt as usize].into_boxed_slice(),
        }
    }

    pub(crate) fn depth(&self) -> usize {
        self.users.len()
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> usize {
        self.depth() - usize::from(self.producer.wrapping_sub(self.consumer))
    }

    /// Posts a receive into `buffers`, in this order; a message without data needs no buffer. The
    /// device sees the receive at the next [`ring`](Self::ring).
    #[inline]
    pub(crate) fn post(&mut self, buffers: &[Sge], user: u64) -> Result<(), PostReceiveError> {
        if self.free() == 0 {
            return Err(PostReceiveError::QueueFull {
                depth: self.depth(),
            });
        }
        let index = usize::from(self.producer & self.mask);
        // SAFETY: the buffer holds `mask + 1` WQEs of `stride` bytes, and this WQE is free: the
        // device does not read it any more.
        unsafe {
            self.scatter
                .write(self.buffer.as_ptr().add(index * self.stride), buffers)
        }?;
        self.users[index] = user;
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }

    /// Makes all posted receives visible to the device.
    #[inline]
    pub(crate) fn ring(&mut self) {
        // SAFETY: the record lives as long as the queue pair's memory.
        mmio::ring_record(unsafe { self.record.as_ref() }, queue_record(self.producer));
    }

    /// Takes a completion: frees the oldest posted receive, which a device completes first, and
    /// returns its `user` value. `wqe_counter` is the counter of a successful CQE: a count of
    /// receives, or the index in the ring. Pass `None` for an error: no document states that the
    /// CQE of a flushed receive contains its counter, and libmlx5 does not read it either. Returns
    /// `None`, and changes nothing, if the counter belongs to a different receive, or if no receive
    /// is posted.
    #[inline]
    pub(crate) fn complete(&mut self, wqe_counter: Option<u16>) -> Option<u64> {
        let is_other =
            wqe_counter.is_some_and(|counter| (counter ^ self.consumer) & self.mask != 0);
        if is_other || self.consumer == self.producer {
            return None;
        }
        let user = self.users[usize::from(self.consumer & self.mask)];
        self.consumer = self.consumer.wrapping_add(1);
        Some(user)
    }
}
