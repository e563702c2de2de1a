//! The send queue: a ring of 64-byte WQE basic blocks, and the one path on which an operation
//! becomes a WQE in it.

use core::ptr::NonNull;

use mlx5_hca::SqMemory;

use crate::ops::{Operation, Payload, PostError, Segments};
use crate::provider::parts::QpParts;
use crate::queues::doorbell::Doorbell;
use crate::wire::{
    BLUEFLAME_BYTES, CtrlSegment, CtrlWords, FenceMode, MAX_MESSAGE_BYTES, Opcode, SEGMENT, WQEBB,
};

/// The condition for the CQE of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Gives a CQE for this operation.
    Always,
    /// Gives a CQE on failure. On success, gives a CQE only if the queue needs one to reclaim its
    /// entries: at least one CQE for each quarter of the queue's depth, or for each 8 WQEBBs if a
    /// quarter has fewer. So the queue never fills up with work that no completion will release.
    #[doc(alias = "SIGNAL_INTERVAL")]
    Reclaim,
}

impl Signal {
    /// Adds the fence: the operation starts only when the READs and atomics before it are complete.
    #[must_use]
    #[inline(always)]
    pub const fn fence(self) -> Flags {
        Flags {
            signal: self,
            fence: true,
            solicited: false,
        }
    }

    /// Marks the peer's completion, if the operation gives it one, as solicited.
    #[must_use]
    #[inline(always)]
    pub const fn solicited(self) -> Flags {
        Flags {
            signal: self,
            fence: false,
            solicited: true,
        }
    }
}

/// Options of a post. A [`Signal`] converts to flags without fence and without solicited
/// completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// The condition for the operation's CQE.
    pub signal: Signal,
    /// Whether the operation starts only when the READs and atomics before it are complete
    /// (`IBV_SEND_FENCE`): then it may send the bytes that they returned.
    pub fence: bool,
    /// Whether the peer's completion is solicited (`IBV_SEND_SOLICITED`): such a completion wakes a
    /// peer that waits for solicited completions only. The option has no effect on operations that
    /// give the peer no completion.
    pub solicited: bool,
}

impl From<Signal> for Flags {
    #[inline(always)]
    fn from(signal: Signal) -> Self {
        Self {
            signal,
            fence: false,
            solicited: false,
        }
    }
}

/// The send queue. Counters are 16-bit WQEBB counts, as on the wire.
pub(crate) struct SendQueue {
    /// Address of the next WQE, if there is [`room`](Self::room).
    head: *mut u8,
    /// Address of the next WQE's `user` value.
    user: *mut u64,
    /// Number of WQEBBs that may be written at `head` without a check: they are free and
    /// contiguous, and none of their WQEs has to give a CQE. When they are used up,
    /// [`make_room`](Self::make_room) checks.
    room: u32,
    qpn: u32,
    /// Number of WQEBBs written, modulo 2^16.
    producer: u16,
    /// Number of WQEBBs announced to the device, modulo 2^16.
    rung: u16,
    max_inline: u16,
    has_atomics: bool,
    /// Whether operations may be pushed. There is no room while the queue is closed.
    is_open: bool,
    mask: u16,
    /// Maximum number of consecutive WQEBBs without a CQE. In the smallest queue, of 16 WQEBBs,
    /// this is 7, so 9 remain: room for the longest WQE and the NOPs before it.
    silent: u16,
    last: *mut u8,
    /// Number of WQEBBs that the device has finished, as its CQEs report.
    consumer: u16,
    /// Counter up to which WQEBBs need no CQE. A WQE that ends after this counter is signaled.
    signal_by: u16,
    buffer: NonNull<u8>,
    /// Table of `mask + 1` values of `user`. The value of a WQE is at the index of the WQE's first
    /// WQEBB.
    users: NonNull<u64>,
    doorbell: Doorbell,
}

impl SendQueue {
    pub(crate) fn new(parts: &QpParts, doorbell: Doorbell) -> Self {
        let SqMemory {
            buffer, wqe_cnt, ..
        } = parts.sq;
        debug_assert!(wqe_cnt.is_power_of_two() && wqe_cnt <= 1 << 15);
        let users: Box<[u64]> = vec![0; wqe_cnt as usize].into_boxed_slice();
        // The field `user` points into the table too, so the queue owns the table as a pointer, not
        // as a box.
        let users = NonNull::from(Box::leak(users)).cast();
        let mask = wqe_cnt as u16 - 1;
        let silent = (mask / 4).max(7);
        Self {
            head: buffer.as_ptr(),
            user: users.as_ptr(),
            room: 0,
            qpn: parts.qpn,
            producer: 0,
            rung: 0,
            // The limit is the length of the longest WQE, which has 63 segments.
            max_inline: parts.max_inline.min(63 * SEGMENT) as u16,
            has_atomics: parts.has_atomics,
            is_open: true,
            mask,
            silent,
            last: buffer.as_ptr(),
            consumer: 0,
            signal_by: silent,
            buffer,
            users,
            doorbell,
        }
    }

    pub(crate) fn capacity(&self) -> u16 {
        self.mask + 1
    }

    pub(crate) fn max_inline(&self) -> usize {
        self.max_inline.into()
    }

    /// Opens the queue, or closes it. [`push`](Self::push) on a closed queue fails; the error it
    /// returns does not state the reason.
    pub(crate) fn set_open(&mut self, is_open: bool) {
        self.is_open = is_open;
        self.room = 0;
    }

    #[cfg(test)]
    pub(crate) fn doorbell(&mut self) -> &mut Doorbell {
        &mut self.doorbell
    }

    #[inline(always)]
    fn place(&self, counter: u16) -> *mut u8 {
        // SAFETY: the buffer holds `mask + 1` WQEBBs, and the index is at most `mask`.
        unsafe {
            self.buffer
                .as_ptr()
                .add(usize::from(counter & self.mask) * WQEBB)
        }
    }

    /// Builds the WQE of `op` in the ring. [`ring`](Self::ring) announces it to the device.
    #[inline(always)]
    pub(crate) fn push<O: Operation>(
        &mut self,
        op: &O,
        flags: impl Into<Flags>,
        user: u64,
    ) -> Result<(), PostError> {
        let flags = flags.into();
        op.check()?;
        if const {
            matches!(
                O::OPCODE,
                Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd
            )
        } && !self.has_atomics
        {
            return Err(PostError::NoAtomics);
        }
        let payload = op.payload();
        if payload.inline_bytes() > self.max_inline() {
            return Err(PostError::InlineTooLong {
                bytes: payload.inline_bytes(),
                max: self.max_inline(),
            });
        }
        if payload.bytes() > MAX_MESSAGE_BYTES {
            return Err(PostError::MessageTooLong {
                bytes: payload.bytes(),
            });
        }
        let ds = 1 + size_of::<O::Header>() / SEGMENT + payload.segments();
        let blocks = ds.div_ceil(WQEBB / SEGMENT) as u16;
        let mut signaled = flags.signal == Signal::Always;
        self.room = match self.room.checked_sub(blocks.into()) {
            Some(rest) => rest,
            None => {
                signaled |= self.make_room(blocks)?;
                self.room - u32::from(blocks)
            }
        };
        if flags.signal == Signal::Always {
            self.signal_by = self.producer.wrapping_add(blocks + self.silent);
        }
        let head = self.head;
        let mut out = self.start(O::OPCODE, ds, signaled, flags, op.imm());
        out.put(&op.header());
        payload.emit(&mut out);
        self.finish(head, blocks, user);
        Ok(())
    }

    /// Pushes the WQE of `op` like [`push`](Self::push), and announces all pushed WQEs.
    #[inline(always)]
    pub(crate) fn push_and_ring<O: Operation>(
        &mut self,
        op: &O,
        flags: impl Into<Flags>,
        user: u64,
    ) -> Result<(), PostError> {
        self.push(op, flags, user)?;
        self.announce_pending(self.pending());
        Ok(())
    }

    /// Counts the free WQEBBs again. At the ring's end, continues at its beginning. Returns whether
    /// the next WQE, of `blocks` WQEBBs, must give a CQE. A WQE never wraps: if it does not fit
    /// before the ring's end, one-block NOPs fill the rest.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self, blocks: u16) -> Result<bool, PostError> {
        let to_end = self.capacity() - (self.producer & self.mask);
        let free = self.capacity() - self.producer.wrapping_sub(self.consumer);
        let padding = if blocks > to_end { to_end } else { 0 };
        if blocks + padding > free || !self.is_open {
            let [needed, free, capacity] =
                [blocks + padding, free, self.capacity()].map(usize::from);
            return Err(PostError::QueueFull {
                needed,
                free,
                capacity,
            });
        }
        for _ in 0..padding {
            self.enter();
            let head = self.head;
            self.start(Opcode::Nop, 1, false, Signal::Reclaim.into(), 0);
            self.finish(head, 1, 0);
        }
        self.enter();
        let contiguous = if padding > 0 {
            free - padding
        } else {
            to_end.min(free)
        };
        // The NOPs may have passed `signal_by`; then this WQE must give a CQE.
        let silent_left = (self.signal_by.wrapping_sub(self.producer) as i16).max(0) as u16;
        if blocks <= silent_left {
            self.room = contiguous.min(silent_left).into();
            return Ok(false);
        }
        let until_next = blocks + self.silent;
        self.signal_by = self.producer.wrapping_add(until_next);
        self.room = contiguous.min(until_next).into();
        Ok(true)
    }

    fn enter(&mut self) {
        self.head = self.place(self.producer);
        self.user = self.user_place(self.producer);
    }

    /// Writes the control segment of a WQE of `ds` segments at `head`, where the caller has found
    /// room. Returns the place of the segments after the control segment.
    #[inline(always)]
    fn start(&self, opcode: Opcode, ds: usize, signaled: bool, flags: Flags, imm: u32) -> Segments {
        let ctrl = CtrlSegment {
            opcode: opcode as u8,
            wqe_index: self.producer,
            qpn: self.qpn,
            ds: ds as u8,
            signaled,
            fence: if flags.fence {
                FenceMode::SmallAndFence
            } else {
                FenceMode::None
            },
            solicited: flags.solicited,
            imm,
        };
        // SAFETY: `make_room` found contiguous free room at `head`, at least for the `ds` segments
        // of this WQE.
        let mut out = unsafe { Segments::new(self.head) };
        out.put(&ctrl.emit());
        out
    }

    /// Advances the queue past the WQE that was written at `head`. The fields are stored after the
    /// WQE, so that a `ring` that follows at once finds their values in processor registers.
    #[inline(always)]
    fn finish(&mut self, head: *mut u8, blocks: u16, user: u64) {
        // SAFETY: `make_room` found at least `blocks` WQEBBs of contiguous free room at `head`, and
        // the same number of values at `user`.
        unsafe {
            self.user.write(user);
            self.user = self.user.add(blocks.into());
            self.head = head.add(usize::from(blocks) * WQEBB);
        }
        self.producer = self.producer.wrapping_add(blocks);
        self.last = head;
    }

    /// Announces all WQEs pushed since the last call: through BlueFlame if there is a single one of
    /// at most 256 bytes, else with 8 bytes.
    #[inline(always)]
    pub(crate) fn ring(&mut self) {
        let pending = self.pending();
        if pending != 0 {
            self.announce_pending(pending);
        }
    }

    #[inline(always)]
    fn announce_pending(&mut self, pending: u16) {
        let bytes = self.last_bytes();
        self.announce(if usize::from(pending) * WQEBB == bytes {
            bytes
        } else {
            0
        });
    }

    #[inline(always)]
    pub(crate) fn last_bytes(&self) -> usize {
        self.head.addr() - self.last.addr()
    }

    /// Announces all pushed WQEs: with `bytes` bytes of the last WQE through BlueFlame, or with a
    /// store of 8 bytes to the register if `bytes` is 0 or too large.
    #[inline(always)]
    pub(crate) fn ring_with(&mut self, bytes: usize) {
        if self.rung != self.producer {
            self.announce(bytes);
        }
    }

    #[inline(always)]
    fn announce(&mut self, bytes: usize) {
        self.rung = self.producer;
        // SAFETY: the last WQE starts at `last`, which is a WQEBB and so aligned to 64. It is
        // contiguous for `bytes` bytes, or for its first 8 if `bytes` is 0.
        unsafe { self.doorbell.ring(self.producer, self.last, bytes) };
    }

    #[inline(always)]
    pub(crate) fn pending(&self) -> u16 {
        self.producer.wrapping_sub(self.rung)
    }

    /// Announces all pushed WQEs: through BlueFlame if they are contiguous and have at most 256
    /// bytes, else with 8 bytes. Returns whether several WQEs were announced through BlueFlame.
    pub(crate) fn ring_batch(&mut self) -> bool {
        let (pending, first) = (self.pending(), self.rung);
        let bytes = usize::from(pending) * WQEBB;
        if pending == 0
            || pending > self.capacity() - (first & self.mask)
            || bytes > BLUEFLAME_BYTES
        {
            self.ring_with(0);
            return false;
        }
        self.rung = self.producer;
        // SAFETY: the WQEs from `first` on are contiguous for `bytes` bytes, as checked above, and
        // start at a WQEBB, which is aligned to 64.
        unsafe { self.doorbell.ring(self.producer, self.place(first), bytes) };
        bytes > self.last_bytes()
    }

    /// Finishes the WQE at `wqe_counter`, which a CQE reports, and all WQEs before it. Returns the
    /// `user` value of this WQE's operation; `None` if no such operation is outstanding.
    #[inline(always)]
    pub(crate) fn complete(&mut self, wqe_counter: u16) -> Option<u64> {
        let is_operation = self.retire(wqe_counter)?;
        is_operation.then_some(self.user_of(wqe_counter))
    }

    /// Like [`complete`](Self::complete), but passes the `user` values of all operations that the
    /// CQE finishes to `each`, in posting order. Returns the number of these operations.
    pub(crate) fn complete_each(&mut self, wqe_counter: u16, mut each: impl FnMut(u64)) -> usize {
        let first = self.consumer;
        if self.retire(wqe_counter).is_none() {
            return 0;
        }
        // The finished WQEs can still be read: only a push changes WQEs, and `each` cannot push.
        let finished = self.consumer.wrapping_sub(first);
        let (mut done, mut operations) = (0, 0);
        while done < finished {
            let at = first.wrapping_add(done);
            let (ctrl, blocks) = self.wqe(at);
            done += blocks;
            if ctrl.opcode() != Opcode::Nop as u8 {
                operations += 1;
                each(self.user_of(at));
            }
        }
        operations
    }

    #[inline(always)]
    fn user_place(&self, counter: u16) -> *mut u64 {
        // SAFETY: the table holds `mask + 1` values, and the index is at most `mask`.
        unsafe { self.users.as_ptr().add(usize::from(counter & self.mask)) }
    }

    #[inline(always)]
    fn user_of(&self, counter: u16) -> u64 {
        // SAFETY: the value is in the table, which `new` initialised.
        unsafe { self.user_place(counter).read() }
    }

    /// Returns the control segment at `counter`, and the number of WQEBBs of that WQE.
    #[inline(always)]
    fn wqe(&self, counter: u16) -> (CtrlWords, u16) {
        // SAFETY: the segment is inside the ring. The maker of the queue has initialised the ring,
        // and the device only reads it.
        let ctrl = CtrlWords::parse(&unsafe { self.place(counter).cast::<[u8; SEGMENT]>().read() });
        // Every WQE has at least one segment. At a place after the producer `ds` may be 0, which
        // counts as the longest WQE.
        let blocks = u16::from(ctrl.ds().wrapping_sub(1) & 0x3f) / (WQEBB / SEGMENT) as u16 + 1;
        (ctrl, blocks)
    }

    /// Frees the WQE at `wqe_counter` and all before it. Returns whether that WQE is an operation,
    /// and not a NOP at the ring's end. Returns `None`, and changes nothing, if no WQE with that
    /// counter is outstanding.
    #[inline(always)]
    fn retire(&mut self, wqe_counter: u16) -> Option<bool> {
        let (ctrl, blocks) = self.wqe(wqe_counter);
        let consumer = wqe_counter.wrapping_add(blocks);
        let finished = consumer.wrapping_sub(self.consumer);
        let outstanding = self.producer.wrapping_sub(self.consumer);
        // If the WQE begins before the consumer, `finished` is less than `blocks`.
        if ctrl.wqe_index() != wqe_counter || finished < blocks || finished > outstanding {
            return None;
        }
        self.consumer = consumer;
        Some(ctrl.opcode() != Opcode::Nop as u8)
    }
}

impl Drop for SendQueue {
    fn drop(&mut self) {
        let users = NonNull::slice_from_raw_parts(self.users, usize::from(self.capacity()));
        // SAFETY: `users` is the slice that `new` leaked, and it is freed only here.
        drop(unsafe { Box::from_raw(users.as_ptr()) });
    }
}
