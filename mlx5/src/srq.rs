//! Shared receive queue: a linked list of receive WQEs that many queue pairs take from.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::fmt;
use std::rc::Rc;

use crate::cqe::Cqe;
use crate::error::CreateError;
use crate::mmio;
use crate::ops::Sge;
use crate::parts::SrqParts;
use crate::pd::PdObject;
use crate::rq::{PostReceiveError, Scatter};
use crate::wire::{NextSegment, SEGMENT, queue_record};

/// The device's object, kept alive by the queue pairs that take from it; it keeps its domain.
pub(crate) struct SrqObject {
    pub(crate) srqn: u32,
    pd: Rc<PdObject>,
}

impl Drop for SrqObject {
    fn drop(&mut self) {
        self.pd.control.destroy_srq(self.srqn);
    }
}

/// A shared receive queue. Its receives are taken in the order in which they were posted, by messages of any of its queue pairs, and may complete
/// in another: [`complete_receive`](Self::complete_receive) tells which one it was.
///
/// All WQEs are always in one list: the posted ones, in the order in which the device will take them, then the free ones. Every WQE
/// names its successor. The last of the list stays unposted, so the link of a posted WQE never changes under the device.
///
/// It stays in its thread:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Srq>();
/// ```
pub struct Srq {
    buffer: NonNull<u8>,
    stride: usize,
    scatter: Scatter,
    record: NonNull<AtomicU32>,
    /// Receives posted since creation, as in the doorbell record.
    counter: u16,
    /// Next WQE to post.
    head: u16,
    /// Last WQE of the list.
    tail: u16,
    free: usize,
    /// By WQE index: what the poster attached, while posted.
    users: Box<[Option<u64>]>,
    object: Rc<SrqObject>,
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Srq")
            .field("srqn", &self.object.srqn)
            .field("depth", &self.depth())
            .field("free", &self.free)
            .finish_non_exhaustive()
    }
}

impl Srq {
    pub(crate) fn create(pd: &Rc<PdObject>, depth: u32, max_sge: usize) -> Result<Self, CreateError> {
        Ok(Self::new(&pd.control.create_srq(pd.pdn, depth, max_sge)?, max_sge, pd))
    }

    /// The queue over what the device of `pd` made.
    pub(crate) fn new(parts: &SrqParts, max_sge: usize, pd: &Rc<PdObject>) -> Self {
        let &SrqParts { srqn, buffer, wqe_cnt, stride, record } = parts;
        let srq = Self {
            buffer,
            stride,
            scatter: Scatter { max_sge, segments: stride / SEGMENT - 1 },
            record,
            counter: 0,
            head: 0,
            tail: wqe_cnt - 1,
            free: usize::from(wqe_cnt) - 1,
            users: vec![None; usize::from(wqe_cnt)].into_boxed_slice(),
            object: Rc::new(SrqObject { srqn, pd: Rc::clone(pd) }),
        };
        for i in 0..wqe_cnt {
            srq.link(i, (i + 1) & (wqe_cnt - 1));
        }
        srq
    }

    pub(crate) fn object(&self) -> &Rc<SrqObject> {
        &self.object
    }

    /// Receives the queue holds.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.users.len() - 1
    }

    /// Receives that can be posted now.
    #[must_use]
    #[inline]
    pub fn free(&self) -> usize {
        self.free
    }

    #[inline(always)]
    fn wqe(&self, index: u16) -> *mut u8 {
        // SAFETY: indices are below the number of WQEs, each of `stride` bytes.
        unsafe { self.buffer.as_ptr().add(usize::from(index) * self.stride) }
    }

    #[inline(always)]
    fn next_word(&self, index: u16) -> &AtomicU16 {
        // SAFETY: the next index is at byte 2 of the WQE's first segment (`wire::NextSegment`), 2-aligned, and lives as long as `object`.
        unsafe { &*self.wqe(index).add(2).cast::<AtomicU16>() }
    }

    #[inline(always)]
    fn next(&self, index: u16) -> u16 {
        u16::from_be(self.next_word(index).load(Ordering::Relaxed)) & (self.users.len() - 1) as u16
    }

    #[inline(always)]
    fn link(&self, index: u16, next: u16) {
        let segment = NextSegment { next_wqe_index: next }.emit();
        self.next_word(index).store(u16::from_ne_bytes([segment[2], segment[3]]), Ordering::Relaxed);
    }

    /// Posts one receive into `buffers`; none is legal for messages that bring no data here (a WRITE with immediate). `user` comes
    /// back from [`complete_receive`](Self::complete_receive). The device sees it at the next [`ring`](Self::ring).
    ///
    /// # Errors
    /// See [`PostReceiveError`]; nothing was posted.
    #[inline]
    pub fn post(&mut self, buffers: &[Sge], user: u64) -> Result<(), PostReceiveError> {
        if self.free == 0 {
            return Err(PostReceiveError::QueueFull { depth: self.depth() });
        }
        let index = self.head;
        // SAFETY: the WQE is free (the device does not read it) and holds `stride / 16` segments, the first being the link.
        unsafe { self.scatter.write(self.wqe(index).add(SEGMENT), buffers) }?;
        self.head = self.next(index);
        self.users[usize::from(index)] = Some(user);
        self.free -= 1;
        self.counter = self.counter.wrapping_add(1);
        Ok(())
    }

    /// Makes the receives posted so far visible to the device (its doorbell record; there is no register to write).
    #[inline]
    pub fn ring(&mut self) {
        // SAFETY: the record lives as long as `object`.
        mmio::ring_record(unsafe { self.record.as_ref() }, queue_record(self.counter));
    }

    /// Takes a completion of a receive of this queue, on whichever queue pair's message took it: returns the entry to the queue and gives back
    /// what its poster attached. `None`, and no change, if it is the completion of a send, or no such receive is posted. Which of several
    /// shared queues a receive is of, no CQE says: only those of queue pairs on this one are to be given here.
    #[inline]
    pub fn complete_receive(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        if cqe.is_receive() { self.complete(cqe.wqe_counter()) } else { None }
    }

    /// Receive `wqe_counter` is complete.
    #[inline(always)]
    pub(crate) fn complete(&mut self, wqe_counter: u16) -> Option<u64> {
        let user = self.users.get_mut(usize::from(wqe_counter))?.take()?;
        self.link(self.tail, wqe_counter);
        self.tail = wqe_counter;
        self.free += 1;
        Some(user)
    }
}
