//! The send queue: a ring of 64-byte WQE basic blocks, and the one path by which an operation becomes a WQE in it.

use core::mem::MaybeUninit;
use core::ptr::NonNull;

use crate::control::SqParts;
use crate::doorbell::{BF_BYTES, Doorbell};
use crate::ops::{MAX_MESSAGE_BYTES, Operation, Payload, Segments};
use crate::wire::{CtrlSegment, Opcode, SEGMENT, WQEBB};

/// Why an operation was not posted. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// Retry after polling the send CQ.
    #[error("send queue full: {needed} of {capacity} WQEBBs needed, {free} free; poll the send CQ and retry")]
    QueueFull {
        /// WQEBBs the operation needs, padding at the end of the ring included.
        needed: usize,
        /// WQEBBs free.
        free: usize,
        /// WQEBBs of the queue.
        capacity: usize,
    },
    /// The QP cannot send; connect it, or create a new one after an error.
    #[error("the queue pair is in state {0:?}; posting needs ReadyToSend")]
    WrongState(crate::QpState),
    /// More inline bytes than the QP was created for.
    #[error("{bytes} inline bytes; this queue pair takes at most {max}: use an SGE, or create it with a larger max_inline_data")]
    InlineTooLong {
        /// Bytes asked for.
        bytes: usize,
        /// The QP's limit.
        max: usize,
    },
    /// The message is longer than any device sends.
    #[error("a message of {bytes} bytes; the longest is {MAX_MESSAGE_BYTES}")]
    MessageTooLong {
        /// Bytes asked for.
        bytes: u64,
    },
}

/// What the driver remembers of a WQE until it completes, at the index of its first WQEBB.
#[derive(Clone, Copy, Default)]
struct Posted {
    user: u64,
    /// Producer counter behind the WQE.
    end: u32,
    /// Not a NOP that fills the ring's end, which nobody posted.
    is_operation: bool,
}

/// How a post is to complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// A CQE for this operation.
    Always,
    /// A CQE on failure, and on success when the queue needs one to reclaim its entries: at least one in a quarter of its depth, so a
    /// queue never fills up with work whose completion nobody announces.
    Reclaim,
}

/// WQEs that go through BlueFlame together; see [`BlueflameBatch`](crate::BlueflameBatch).
#[repr(align(64))]
pub(crate) struct BlueflameBuffer(pub(crate) [MaybeUninit<u8>; BF_BYTES]);

/// The send queue. Counters are WQEBB counts; their low 16 bits are those on the wire.
pub(crate) struct SendQueue {
    buffer: NonNull<u8>,
    /// WQEBBs - 1.
    mask: u32,
    max_inline: usize,
    qpn: u32,
    /// WQEBBs written.
    producer: u32,
    /// WQEBBs at the producer that are known to be free and contiguous; there may be more ([`make_room`](Self::make_room)).
    room: u32,
    /// WQEBBs since the last WQE that gives a CQE.
    unsignaled: u32,
    /// First WQEBB of the last WQE.
    last: u32,
    /// WQEBBs the device was told of.
    rung: u32,
    /// WQEBBs the device has finished with, as far as its CQEs told.
    consumer: u32,
    /// `mask + 1` of them.
    posted: Box<[Posted]>,
    doorbell: Doorbell,
}

impl SendQueue {
    pub(crate) fn new(parts: &SqParts, doorbell: Doorbell) -> Self {
        debug_assert!(parts.wqe_cnt.is_power_of_two());
        let wqe_cnt = u32::from(parts.wqe_cnt);
        Self {
            buffer: parts.buffer,
            mask: wqe_cnt - 1,
            max_inline: parts.max_inline,
            qpn: parts.qpn,
            producer: 0,
            room: wqe_cnt,
            unsignaled: 0,
            last: 0,
            rung: 0,
            consumer: 0,
            posted: vec![Posted::default(); usize::from(parts.wqe_cnt)].into_boxed_slice(),
            doorbell,
        }
    }

    pub(crate) fn capacity(&self) -> u16 {
        (self.mask + 1) as u16
    }

    pub(crate) fn max_inline(&self) -> usize {
        self.max_inline
    }

    #[inline(always)]
    fn place(&self, counter: u32) -> *mut u8 {
        // SAFETY: the buffer holds `mask + 1` WQEBBs.
        unsafe { self.buffer.as_ptr().add((counter & self.mask) as usize * WQEBB) }
    }

    #[inline(always)]
    fn posted(&mut self, counter: u32) -> &mut Posted {
        // SAFETY: the table holds `mask + 1` entries.
        unsafe { self.posted.get_unchecked_mut((counter & self.mask) as usize) }
    }

    /// Builds the WQE of `op` in the ring. The device learns of it with [`ring`](Self::ring).
    #[inline(always)]
    pub(crate) fn push<O: Operation>(&mut self, op: &O, signal: Signal, user: u64) -> Result<(), PostError> {
        let payload = op.payload();
        if payload.inline_bytes() > self.max_inline {
            return Err(PostError::InlineTooLong { bytes: payload.inline_bytes(), max: self.max_inline });
        }
        if payload.bytes() > MAX_MESSAGE_BYTES {
            return Err(PostError::MessageTooLong { bytes: payload.bytes() });
        }
        let ds = 1 + op.header_segments() + payload.segments();
        let blocks = ds.div_ceil(WQEBB / SEGMENT) as u32;
        if blocks > self.room {
            self.make_room(blocks)?;
        }
        self.unsignaled += blocks;
        let signaled = signal == Signal::Always || self.unsignaled > self.mask / 4;
        if signaled {
            self.unsignaled = 0;
        }
        self.write(O::OPCODE, ds, signaled, op.imm(), |out| {
            op.emit_header(out);
            payload.emit(out);
        });
        self.commit(blocks, user, true);
        Ok(())
    }

    /// Looks how many WQEBBs are free by now. A WQE never wraps: if the end of the ring is too near, it is filled with one-block NOPs.
    #[cold]
    fn make_room(&mut self, blocks: u32) -> Result<(), PostError> {
        let to_end = self.mask + 1 - (self.producer & self.mask);
        let free = self.mask + 1 - self.producer.wrapping_sub(self.consumer);
        let padding = if blocks > to_end { to_end } else { 0 };
        if blocks + padding > free {
            let [needed, free, capacity] = [blocks + padding, free, self.mask + 1].map(|n| n as usize);
            return Err(PostError::QueueFull { needed, free, capacity });
        }
        self.room = to_end.min(free);
        for _ in 0..padding {
            self.write(Opcode::Nop, 1, false, 0, |_| {});
            self.commit(1, 0, false);
        }
        if padding > 0 {
            self.unsignaled += padding;
            self.room = free - padding;
        }
        Ok(())
    }

    #[inline(always)]
    fn write(&mut self, opcode: Opcode, ds: usize, signaled: bool, imm: u32, body: impl FnOnce(&mut Segments)) {
        let ctrl =
            CtrlSegment { opcode: opcode as u8, wqe_index: self.producer as u16, qpn: self.qpn, ds: ds as u8, signaled, imm };
        // SAFETY: `make_room` found `ds` segments of contiguous free room at the producer.
        let mut out = unsafe { Segments::new(self.place(self.producer)) };
        out.put(&ctrl.emit());
        body(&mut out);
    }

    #[inline(always)]
    fn commit(&mut self, blocks: u32, user: u64, is_operation: bool) {
        let first = self.producer;
        let end = first.wrapping_add(blocks);
        self.last = first;
        self.producer = end;
        self.room -= blocks;
        *self.posted(first) = Posted { user, end, is_operation };
    }

    /// Tells the device of everything pushed since the last call; through BlueFlame if that is a single WQE.
    #[inline(always)]
    pub(crate) fn ring(&mut self) {
        let bytes = if self.last == self.rung { self.last_bytes() } else { 0 };
        self.ring_last(bytes);
    }

    /// The same with 8 bytes to the register.
    #[inline(always)]
    pub(crate) fn ring_doorbell(&mut self) {
        self.ring_last(0);
    }

    /// The same with the whole last WQE through BlueFlame.
    #[inline(always)]
    pub(crate) fn ring_doorbell_bf(&mut self) {
        self.ring_last(self.last_bytes());
    }

    /// Bytes of the last WQE, if it fits BlueFlame, else 0.
    #[inline(always)]
    fn last_bytes(&self) -> usize {
        let bytes = self.producer.wrapping_sub(self.last) as usize * WQEBB;
        if bytes <= BF_BYTES { bytes } else { 0 }
    }

    #[inline(always)]
    fn ring_last(&mut self, bytes: usize) {
        if self.rung == self.producer {
            return;
        }
        self.rung = self.producer;
        // SAFETY: the last WQE starts at `last` and is contiguous for `bytes`.
        unsafe { self.doorbell.ring(self.producer as u16, self.place(self.last), bytes) };
    }

    /// WQEBBs the device was not told of yet.
    pub(crate) fn pending(&self) -> u32 {
        self.producer.wrapping_sub(self.rung)
    }

    /// Adds what was pushed behind the first `from` pending WQEBBs to `buffer`, at the same places. `false` if it does not fit.
    pub(crate) fn copy_pending(&self, from: u32, buffer: &mut BlueflameBuffer) -> bool {
        let blocks = self.pending();
        if blocks as usize * WQEBB > BF_BYTES {
            return false;
        }
        for i in from..blocks {
            let to = buffer.0[i as usize * WQEBB..].as_mut_ptr();
            // SAFETY: a WQEBB of the ring, and room for one in the buffer (above); the ring is not the buffer.
            unsafe { to.cast::<u8>().copy_from_nonoverlapping(self.place(self.rung.wrapping_add(i)), WQEBB) };
        }
        true
    }

    /// Tells the device of everything pending, of which `buffer` is a copy ([`copy_pending`](Self::copy_pending)).
    pub(crate) fn ring_buffer(&mut self, buffer: &BlueflameBuffer) {
        let bytes = self.pending() as usize * WQEBB;
        self.rung = self.producer;
        // SAFETY: `copy_pending` filled `bytes` of the buffer, which is aligned.
        unsafe { self.doorbell.ring(self.producer as u16, buffer.0.as_ptr().cast(), bytes) };
    }

    /// A CQE named `wqe_counter`: that WQE and all before it are finished. Returns what its poster attached; `None` if no such operation
    /// is outstanding.
    #[inline(always)]
    pub(crate) fn complete(&mut self, wqe_counter: u16) -> Option<u64> {
        let posted = self.retire(wqe_counter)?;
        posted.is_operation.then_some(posted.user)
    }

    /// The same, for every operation it finishes, in posting order. Returns how many there were.
    pub(crate) fn complete_each(&mut self, wqe_counter: u16, mut each: impl FnMut(u64)) -> usize {
        let mut at = self.consumer;
        if self.retire(wqe_counter).is_none() {
            return 0;
        }
        // Entries stay as they are until something is pushed, which `each` cannot do.
        let mut operations = 0;
        while at != self.consumer {
            let posted = *self.posted(at);
            at = posted.end;
            if posted.is_operation {
                operations += 1;
                each(posted.user);
            }
        }
        operations
    }

    /// Frees the WQE at `wqe_counter` and all before it. A counter that is not the first of an outstanding WQE changes nothing: at any other
    /// place of the table `end` is from an earlier lap, so not ahead of the consumer.
    #[inline(always)]
    fn retire(&mut self, wqe_counter: u16) -> Option<Posted> {
        let outstanding = self.producer.wrapping_sub(self.consumer);
        let ahead = u32::from(wqe_counter.wrapping_sub(self.consumer as u16));
        let posted = *self.posted(wqe_counter.into());
        if ahead >= outstanding || posted.end.wrapping_sub(self.consumer).wrapping_sub(1) >= outstanding {
            return None;
        }
        self.consumer = posted.end;
        Some(posted)
    }
}
