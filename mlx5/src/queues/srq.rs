//! Shared receive queue: a linked list of receive WQEs that many queue pairs consume.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::fmt;
use std::rc::Rc;

use mlx5_hca::RqMemory;

use crate::completions::cqe::Cqe;
use crate::config::RqSize;
use crate::error::CreateError;
use crate::mmio;
use crate::ops::Sge;
use crate::pd::PdObject;
use crate::queues::rq::{PostReceiveError, Scatter};
use crate::wire::{NextSegment, SEGMENT, queue_record};

/// The shared receive queue at the device. The queue pairs that use it keep this object alive, and
/// this object keeps its protection domain alive.
pub(crate) struct SrqObject {
    pub(crate) srqn: u32,
    pd: Rc<PdObject>,
}

impl Drop for SrqObject {
    fn drop(&mut self) {
        self.pd.control.queues().destroy_srq(self.srqn);
    }
}

/// A shared receive queue. Messages of any of its queue pairs consume its receives in posting
/// order. The receives may complete in another order; [`complete_receive`](Self::complete_receive)
/// returns the user value of the receive that completed.
///
/// All WQEs are always in one list: the posted WQEs, in the order in which the device will consume
/// them, then the free WQEs. Every WQE contains the index of its successor. The last WQE of the
/// list stays unposted, so the link of a posted WQE never changes while the device may read it.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Srq>();
/// ```
#[doc(alias = "SharedRq")]
pub struct Srq {
    buffer: NonNull<u8>,
    stride: usize,
    scatter: Scatter,
    record: NonNull<AtomicU32>,
    /// Number of receives posted since creation, modulo 2^16, as in the doorbell record.
    counter: u16,
    head: u16,
    tail: u16,
    free: usize,
    receives: Box<[Receive]>,
    /// Number of [`fill`](Self::fill)s, plus 1. A fill posts every WQE except the last of the list.
    round: u64,
    /// The `user` value for which every WQE is already prepared: a fill with this value writes no
    /// WQE. `None` if there is no such value.
    filled_with: Option<u64>,
    object: Rc<SrqObject>,
}

/// The driver's own data about a WQE, outside of the queue's memory.
#[derive(Clone, Copy, Debug)]
struct Receive {
    /// The last value of [`Srq::round`] at which the receive was not posted. The receive is posted
    /// unless this is the current round.
    free_in: u64,
    user: u64,
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
    pub(crate) fn create(pd: &Rc<PdObject>, size: RqSize) -> Result<Self, CreateError> {
        let (srqn, memory) = pd.control.queues().create_srq(pd.pdn, size)?;
        Ok(Self::new(srqn, &memory, size.max_sge, pd))
    }

    pub(crate) fn new(srqn: u32, memory: &RqMemory, max_sge: usize, pd: &Rc<PdObject>) -> Self {
        let (wqe_cnt, stride) = (memory.wqe_cnt as u16, memory.stride as usize);
        let srq = Self {
            buffer: memory.buffer,
            stride,
            scatter: Scatter {
                max_sge,
                segments: stride / SEGMENT - 1,
            },
            record: memory.record,
            counter: 0,
            head: 0,
            tail: wqe_cnt - 1,
            free: usize::from(wqe_cnt) - 1,
            receives: vec![
                Receive {
                    free_in: 1,
                    user: 0
                };
                usize::from(wqe_cnt)
            ]
            .into_boxed_slice(),
            round: 1,
            filled_with: None,
            object: Rc::new(SrqObject {
                srqn,
                pd: Rc::clone(pd),
            }),
        };
        for i in 0..wqe_cnt {
            srq.link(i, (i + 1) & (wqe_cnt - 1));
        }
        srq
    }

    pub(crate) fn object(&self) -> &Rc<SrqObject> {
        &self.object
    }

    /// Returns the number of receives that the queue holds.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.receives.len() - 1
    }

    /// Returns the number of receives that can be posted now.
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
        // SAFETY: the next index is at byte 2 of the WQE's first segment (`wire::NextSegment`),
        // 2-aligned. The memory of the WQEs lives as long as `object`, and this index is accessed
        // only as an atomic.
        unsafe { &*self.wqe(index).add(2).cast::<AtomicU16>() }
    }

    #[inline(always)]
    fn next(&self, index: u16) -> u16 {
        u16::from_be(self.next_word(index).load(Ordering::Relaxed))
            & (self.receives.len() - 1) as u16
    }

    #[inline(always)]
    fn link(&self, index: u16, next: u16) {
        let segment = NextSegment {
            next_wqe_index: next,
        }
        .emit();
        self.next_word(index).store(
            u16::from_ne_bytes([segment[2], segment[3]]),
            Ordering::Relaxed,
        );
    }

    /// Posts one receive into `buffers`. An empty list is legal, for messages without data for this
    /// end (a WRITE with immediate). [`complete_receive`](Self::complete_receive) returns `user`.
    /// The device sees the receive at the next [`ring`](Self::ring).
    ///
    /// # Errors
    /// See [`PostReceiveError`]; nothing was posted.
    #[inline]
    pub fn post(&mut self, buffers: &[Sge], user: u64) -> Result<(), PostReceiveError> {
        if self.free == 0 {
            return Err(PostReceiveError::QueueFull {
                depth: self.depth(),
            });
        }
        let index = self.head;
        // SAFETY: the WQE is free, so the device does not read it. It holds `stride / 16` segments;
        // the first is the link, and the others are the segments of `scatter`.
        unsafe { self.scatter.write(self.wqe(index).add(SEGMENT), buffers) }?;
        self.head = self.next(index);
        self.receives[usize::from(index)] = Receive {
            free_in: self.round - 1,
            user,
        };
        self.filled_with = None;
        self.free -= 1;
        self.counter = self.counter.wrapping_add(1);
        Ok(())
    }

    /// Posts receives without buffers until the queue is full.
    /// [`complete_receive`](Self::complete_receive) returns `user` for each receive. The device
    /// sees the receives at the next [`ring`](Self::ring). If only fills with this value have
    /// posted to the queue, the cost does not depend on the number of receives.
    #[inline]
    pub fn fill(&mut self, user: u64) {
        if self.filled_with != Some(user) {
            self.fill_anew(user);
        }
        self.counter = self.counter.wrapping_add(self.free as u16);
        self.free = 0;
        self.head = self.tail;
        self.round += 1;
        self.receives[usize::from(self.tail)].free_in = self.round;
    }

    #[cold]
    #[inline(never)]
    fn fill_anew(&mut self, user: u64) {
        let mut index = self.head;
        // The loop includes the last WQE of the list, which a later fill posts.
        for _ in 0..=self.free {
            // SAFETY: the segments after the link are inside the WQE, as in `post`. The device does
            // not read the free WQEs, nor the last WQE of the list.
            unsafe { self.scatter.write_none(self.wqe(index).add(SEGMENT)) };
            self.receives[usize::from(index)].user = user;
            index = self.next(index);
        }
        self.filled_with = (self.free == self.depth()).then_some(user);
    }

    /// Makes all posted receives visible to the device (in the doorbell record of the queue; there
    /// is no register to write).
    #[inline]
    pub fn ring(&mut self) {
        // SAFETY: the record lives as long as `object`.
        mmio::ring_record(unsafe { self.record.as_ref() }, queue_record(self.counter));
        self.object.pd.control.receives_posted();
    }

    /// Takes a completion of a receive of this queue, on any of its queue pairs: returns the entry
    /// to the queue, and returns the receive's `user` value. Returns `None`, and changes nothing,
    /// for the completion of a send, or if no such receive is posted. The CQE does not prove that
    /// its receive is of this queue (its SRQN field may hold a user index), so pass only
    /// completions of queue pairs on this queue.
    #[inline]
    pub fn complete_receive(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        if cqe.is_receive() {
            self.complete(cqe.wqe_counter())
        } else {
            None
        }
    }

    /// Frees receive `wqe_counter`, and returns the `user` value of the receive.
    #[inline(always)]
    pub(crate) fn complete(&mut self, wqe_counter: u16) -> Option<u64> {
        let receive = self.receives.get_mut(usize::from(wqe_counter))?;
        if receive.free_in == self.round {
            return None;
        }
        receive.free_in = self.round;
        let user = receive.user;
        self.link(self.tail, wqe_counter);
        self.tail = wqe_counter;
        self.free += 1;
        Some(user)
    }
}
