//! The send queue: a ring of 64-byte WQE basic blocks, and the one path by which an operation becomes a WQE in it.

use core::ptr::NonNull;

use crate::control::SqParts;
use crate::doorbell::{BF_BYTES, Doorbell};
use crate::ops::{MAX_MESSAGE_BYTES, Operation, Payload, Segments};
use crate::wire::{CtrlSegment, FenceMode, Opcode, SEGMENT, WQEBB};

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
    /// The address of an atomic is not a multiple of 8.
    #[error("an atomic at {addr:#x}; the address must be a multiple of 8")]
    AtomicMisaligned {
        /// Remote address asked for.
        addr: u64,
    },
    /// The result of an atomic is 8 bytes long.
    #[error("{bytes} bytes for the result of an atomic, which is 8 bytes long")]
    AtomicResult {
        /// Bytes of the SGE.
        bytes: u32,
    },
}

/// What the driver remembers of a WQE until it completes, at the index of its first WQEBB.
#[derive(Clone, Copy, Default)]
struct Posted {
    user: u64,
    /// Producer counter behind the WQE.
    end: u16,
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

impl Signal {
    /// The same, and the operation starts only when the READs and atomics before it are complete.
    #[must_use]
    #[inline(always)]
    pub const fn fence(self) -> Flags {
        Flags { signal: self, fence: true, solicited: false }
    }

    /// The same, and the peer's completion, if the operation gives it one, is solicited.
    #[must_use]
    #[inline(always)]
    pub const fn solicited(self) -> Flags {
        Flags { signal: self, fence: false, solicited: true }
    }
}

/// How a post is to run and complete. A [`Signal`] is one, with neither of the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// When it gives a CQE.
    pub signal: Signal,
    /// It starts only when the READs and atomics before it are complete (`IBV_SEND_FENCE`): it may then send what they brought.
    pub fence: bool,
    /// The peer's completion is solicited (`IBV_SEND_SOLICITED`): it wakes who waits for solicited completions only. It says nothing on
    /// operations that give the peer no completion.
    pub solicited: bool,
}

impl From<Signal> for Flags {
    #[inline(always)]
    fn from(signal: Signal) -> Self {
        Self { signal, fence: false, solicited: false }
    }
}

/// The send queue. Counters are 16-bit WQEBB counts, as on the wire.
pub(crate) struct SendQueue {
    buffer: NonNull<u8>,
    mask: u16,
    max_inline: usize,
    qpn: u32,
    /// WQEBBs written.
    producer: u16,
    /// WQEBBs the device has finished with, as far as its CQEs told.
    consumer: u16,
    /// WQEBBs the device was told of.
    rung: u16,
    /// First WQEBB of the last WQE.
    last: u16,
    /// WQEBBs since the last WQE that gives a CQE.
    unsignaled: u16,
    posted: Box<[Posted]>,
    doorbell: Doorbell,
}

impl SendQueue {
    pub(crate) fn new(parts: &SqParts, doorbell: Doorbell) -> Self {
        debug_assert!(parts.wqe_cnt.is_power_of_two());
        Self {
            buffer: parts.buffer,
            mask: parts.wqe_cnt - 1,
            max_inline: parts.max_inline,
            qpn: parts.qpn,
            producer: 0,
            consumer: 0,
            rung: 0,
            last: 0,
            unsignaled: 0,
            posted: vec![Posted::default(); usize::from(parts.wqe_cnt)].into_boxed_slice(),
            doorbell,
        }
    }

    pub(crate) fn capacity(&self) -> u16 {
        self.mask + 1
    }

    pub(crate) fn max_inline(&self) -> usize {
        self.max_inline
    }

    #[inline(always)]
    fn place(&self, counter: u16) -> *mut u8 {
        // SAFETY: the buffer holds `mask + 1` WQEBBs.
        unsafe { self.buffer.as_ptr().add(usize::from(counter & self.mask) * WQEBB) }
    }

    /// Builds the WQE of `op` in the ring. The device learns of it with [`ring`](Self::ring).
    #[inline(always)]
    pub(crate) fn push<O: Operation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        let flags = flags.into();
        op.check()?;
        let payload = op.payload();
        if payload.inline_bytes() > self.max_inline {
            return Err(PostError::InlineTooLong { bytes: payload.inline_bytes(), max: self.max_inline });
        }
        if payload.bytes() > MAX_MESSAGE_BYTES {
            return Err(PostError::MessageTooLong { bytes: payload.bytes() });
        }
        let ds = 1 + op.header_segments() + payload.segments();
        let blocks = ds.div_ceil(WQEBB / SEGMENT) as u16;
        let to_end = self.capacity() - (self.producer & self.mask);
        let padding = if blocks > to_end { to_end } else { 0 };
        let free = self.capacity() - self.producer.wrapping_sub(self.consumer);
        if blocks + padding > free {
            return Err(PostError::QueueFull {
                needed: usize::from(blocks + padding),
                free: usize::from(free),
                capacity: usize::from(self.capacity()),
            });
        }
        for _ in 0..padding {
            self.push_nop();
        }
        self.unsignaled += blocks + padding;
        let signaled = flags.signal == Signal::Always || self.unsignaled > self.mask / 4;
        if signaled {
            self.unsignaled = 0;
        }
        self.write(O::OPCODE, ds, signaled, flags, op.imm(), |out| {
            op.emit_header(out);
            payload.emit(out);
        });
        self.commit(blocks, user);
        Ok(())
    }

    /// A WQE never wraps: the end of the ring is filled with one-block NOPs.
    #[cold]
    fn push_nop(&mut self) {
        self.write(Opcode::Nop, 1, false, Signal::Reclaim.into(), 0, |_| {});
        self.commit(1, 0);
    }

    #[inline(always)]
    fn write(&mut self, opcode: Opcode, ds: usize, signaled: bool, flags: Flags, imm: u32, body: impl FnOnce(&mut Segments)) {
        let ctrl = CtrlSegment {
            opcode: opcode as u8,
            wqe_index: self.producer,
            qpn: self.qpn,
            ds: ds as u8,
            signaled,
            fence: if flags.fence { FenceMode::SmallAndFence } else { FenceMode::None },
            solicited: flags.solicited,
            imm,
        };
        // SAFETY: `push` found `ds` segments of contiguous free room at the producer.
        let mut out = unsafe { Segments::new(self.place(self.producer)) };
        out.put(&ctrl.emit());
        body(&mut out);
    }

    #[inline(always)]
    fn commit(&mut self, blocks: u16, user: u64) {
        self.last = self.producer;
        self.producer = self.producer.wrapping_add(blocks);
        self.posted[usize::from(self.last & self.mask)] = Posted { user, end: self.producer };
    }

    /// Tells the device of everything pushed since the last call; through BlueFlame if that is a single WQE.
    #[inline(always)]
    pub(crate) fn ring(&mut self) {
        if self.rung == self.producer {
            return;
        }
        let bytes = usize::from(self.producer.wrapping_sub(self.last)) * WQEBB;
        let whole = if self.last == self.rung && bytes <= BF_BYTES { bytes } else { 0 };
        self.rung = self.producer;
        // SAFETY: the last WQE starts at `last` and is contiguous for `bytes`.
        unsafe { self.doorbell.ring(self.producer, self.place(self.last), whole) };
    }

    /// A CQE named `wqe_counter`: that WQE and all before it are finished. Returns what its poster attached; `None` if no such WQE is
    /// outstanding.
    #[inline(always)]
    pub(crate) fn complete(&mut self, wqe_counter: u16) -> Option<u64> {
        let outstanding = self.producer.wrapping_sub(self.consumer);
        if wqe_counter.wrapping_sub(self.consumer) >= outstanding {
            return None;
        }
        let posted = self.posted[usize::from(wqe_counter & self.mask)];
        self.consumer = posted.end;
        Some(posted.user)
    }
}
