//! The device's side of a completion queue.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5_wire::{
    CQ_DBREC_ARM, CQE_BYTES, CQE128_BYTES, CQE128_OFFSET, CqArm, CqeFormat, CqeOpcode, MINI_CQES_PER_ARRAY, MiniCqe, OP_OWN_OFFSET,
    ResponderCqe, TitleCqe, is_solicited, mini_array_offset, op_own_with,
};

use super::request::CqMemory;
use super::rule::Rule;

/// A completion queue, as the device sees it.
///
/// The CQEs given to it say in op_own only whether they are solicited; opcode, format and owner bit are filled in here.
#[derive(Debug)]
pub struct SoftCq {
    /// The first entry's CQE: its last 64 bytes.
    first: NonNull<u8>,
    /// The two words of the doorbell record: consumer, arm.
    record: NonNull<AtomicU32>,
    /// Entries - 1; they are a power of two.
    mask: u32,
    /// Bytes of an entry, 64 or 128.
    stride: u32,
    compression: bool,
    /// Producer, which counts CQEs, behind the entries that are known to be free, and how many these are. They are on one lap, and none once the
    /// queue has overrun.
    limit: u32,
    room: u32,
    /// The CQE at the producer, and the owner bit of its lap, if there is room.
    next: *mut u8,
    owner: bool,
    /// Producer behind the last CQE that was solicited or an error.
    solicited: u32,
    /// Producer when the last event was sent to another driver.
    announced: u32,
    /// A CQE was due while the queue was full; nothing is written any more.
    overrun: bool,
    /// Strict mode has said so.
    is_reported: bool,
}

/// The CQ is full, or was: on hardware that is fatal to it.
#[derive(Clone, Copy, Debug)]
pub struct Overrun {
    /// It was not before.
    pub(crate) is_first: bool,
}

/// An arm word that no driver writes: the first command, sequence 0 at consumer 0, is all zeros.
const NOT_ARMED: u32 = u32::MAX;

impl SoftCq {
    /// The queue in `memory`, whose sizes the caller has checked.
    ///
    /// # Safety
    /// It is valid as long as the queue.
    pub unsafe fn new(memory: &CqMemory) -> Self {
        let cq = Self {
            // SAFETY: inside the first entry.
            first: unsafe { memory.buffer.add(memory.cqe_bytes as usize - CQE_BYTES) },
            record: memory.record.cast(),
            mask: memory.entries - 1,
            stride: memory.cqe_bytes,
            compression: memory.compression,
            limit: 0,
            room: 0,
            next: core::ptr::null_mut(),
            owner: false,
            solicited: 0,
            announced: 0,
            overrun: false,
            is_reported: false,
        };
        cq.arm_word().store(NOT_ARMED, Ordering::Relaxed);
        cq
    }

    /// For tests: makes it as if `counter` CQEs had been written already.
    #[doc(hidden)]
    pub fn start_at(&mut self, counter: u32) {
        (self.limit, self.solicited, self.room) = (counter, counter, 0);
    }

    /// It gets no more CQEs, as after an overrun, but by no fault of its driver.
    pub(crate) fn end(&mut self) {
        self.is_reported = true;
        self.stop();
    }

    /// Returns whether it had no room for a CQE. It gets no more then.
    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun
    }

    /// CQEs written so far, modulo 2^32.
    #[inline(always)]
    pub(crate) fn produced(&self) -> u32 {
        self.limit.wrapping_sub(self.room)
    }

    /// Returns the number of bytes of an entry.
    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.stride as usize
    }

    /// Returns whether sessions may be written.
    pub fn compresses(&self) -> bool {
        self.compression
    }

    /// Received bytes that an entry can carry.
    pub fn scatter_room(&self) -> usize {
        if self.stride() == CQE128_BYTES { CQE128_OFFSET } else { CQE_BYTES / 2 }
    }

    /// Returns the CQE of an entry: its last 64 bytes.
    #[inline(always)]
    fn cqe(&self, counter: u32) -> NonNull<u8> {
        let index = (counter & self.mask) as usize;
        // SAFETY: inside the buffer, which holds that many entries.
        unsafe { self.first.add(index * self.stride()) }
    }

    /// CQEs written and not consumed, as the record says, which has 24 bits: more than there are entries if it claims more than was written.
    fn unconsumed(&self) -> u32 {
        // SAFETY: valid as long as the queue; a driver of this crate accesses it through the same atomic type.
        let record = unsafe { self.record.as_ref() };
        // Acquire: the driver has finished reading what it passed.
        let consumed = u32::from_be(record.load(Ordering::Acquire));
        self.produced().wrapping_sub(consumed) & 0xff_ffff
    }

    /// Finds `count` free entries at the producer; if there are fewer, this was the last attempt.
    #[inline(always)]
    fn reserve(&mut self, count: u32) -> Result<(), Overrun> {
        if self.room < count { self.find_room(count) } else { Ok(()) }
    }

    /// Looks how many entries are free by now.
    #[cold]
    #[inline(never)]
    fn find_room(&mut self, count: u32) -> Result<(), Overrun> {
        let free = (self.mask + 1).checked_sub(self.unconsumed()).filter(|free| *free >= count && !self.overrun);
        let Some(free) = free else {
            let is_first = !self.overrun;
            self.stop();
            return Err(Overrun { is_first });
        };
        let producer = self.produced();
        self.room = free.min(self.mask + 1 - (producer & self.mask));
        self.limit = producer.wrapping_add(self.room);
        self.next = self.cqe(producer).as_ptr();
        self.owner = producer & (self.mask + 1) != 0;
        Ok(())
    }

    /// Writes no more.
    fn stop(&mut self) {
        (self.overrun, self.limit, self.room) = (true, self.produced(), 0);
    }

    /// Stores the eight words of the CQE at the producer, which is free ([`reserve`](Self::reserve)): the one with the owner bit is last.
    #[inline(always)]
    fn store(&mut self, word: impl Fn(usize) -> u64) {
        let at = self.next.cast::<u64>();
        // SAFETY: the CQE is inside the buffer, 64-aligned, and the driver is done with it.
        unsafe {
            for i in 0..7 {
                at.add(i).write(word(i));
            }
            (*at.add(7).cast::<AtomicU64>()).store(word(7), Ordering::Release);
        }
    }

    /// Goes on to the next entry.
    #[inline(always)]
    fn advance(&mut self) {
        self.room -= 1;
        self.next = self.next.wrapping_add(self.stride());
    }

    /// Notes that the last CQE was solicited or an error.
    #[cold]
    #[inline(never)]
    fn note_solicited(&mut self) {
        self.solicited = self.produced();
    }

    /// Writes the CQE at the producer: body first, then the 8 bytes that end with the owner bit.
    #[inline(always)]
    fn put(&mut self, mut bytes: [u8; CQE_BYTES], opcode: CqeOpcode, format: CqeFormat, entries: u32) {
        bytes[OP_OWN_OFFSET] = op_own_with(opcode, format, is_solicited(bytes[OP_OWN_OFFSET]), self.owner);
        let words = bytes.as_ptr().cast::<u64>();
        // SAFETY: `bytes` has eight words.
        self.store(|i| unsafe { words.add(i).read_unaligned() });
        if entries == 1 {
            self.advance();
        } else {
            let producer = self.produced().wrapping_add(entries);
            self.next = self.cqe(producer).as_ptr();
            // A session may end on the next lap.
            self.room = self.room.saturating_sub(entries);
            self.limit = producer.wrapping_add(self.room);
        }
        if is_solicited(bytes[OP_OWN_OFFSET]) || matches!(opcode, CqeOpcode::RequesterError | CqeOpcode::ResponderError) {
            self.note_solicited();
        }
    }

    /// Strict mode: the rule broken here, once, and the counter to blame: a consumer record that claims CQEs which were never written, or the
    /// producer of a queue that overran.
    pub(crate) fn broken_rule(&mut self) -> Option<(u32, Rule)> {
        if self.is_reported {
            return None;
        }
        let unconsumed = self.unconsumed();
        let consumed = self.produced().wrapping_sub(unconsumed) & 0xff_ffff;
        let is_ahead = unconsumed > self.mask + 1;
        let broken = match (is_ahead, self.overrun) {
            (true, _) => Some((consumed, Rule::ConsumerAhead)),
            (false, true) => Some((self.produced() & 0xff_ffff, Rule::CompletionOverrun)),
            (false, false) => None,
        };
        self.is_reported = broken.is_some();
        if is_ahead {
            self.stop();
        }
        broken
    }

    fn arm_word(&self) -> &AtomicU32 {
        // SAFETY: valid as long as the queue; a driver of this crate accesses it through the same atomic type.
        unsafe { self.record.add(CQ_DBREC_ARM).as_ref() }
    }

    /// Returns whether the driver armed the queue and it holds a CQE that it was armed for. Disarms it then.
    pub fn take_event(&mut self) -> bool {
        self.take_event_behind(None)
    }

    /// Like [`take_event`](Self::take_event), but a CQE that was there at the last event gives no other event, whatever was consumed: a
    /// NIC remembers it as `last_notified_index` of the CQ context.
    pub(crate) fn announce(&mut self) -> bool {
        let is_new = self.take_event_behind(Some(self.announced));
        if is_new {
            self.announced = self.produced();
        }
        is_new
    }

    fn take_event_behind(&self, announced: Option<u32>) -> bool {
        let word = self.arm_word().load(Ordering::Acquire);
        let armed = CqArm::from_record(word);
        let newest = if armed.solicited_only { self.solicited } else { self.produced() };
        // A 24-bit difference, signed.
        let behind = newest.wrapping_sub(armed.consumed) << 8;
        let is_new = announced.is_none_or(|announced| newest.wrapping_sub(announced) as i32 > 0);
        let is_due = word != NOT_ARMED && behind as i32 > 0 && is_new;
        // A driver of another thread may have armed it again, for what it has not seen yet.
        is_due && self.arm_word().compare_exchange(word, NOT_ARMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Writes the CQE of a receive; `op_own` lacks the owner bit only.
    #[inline(always)]
    pub(crate) fn write_receive(&mut self, cqe: &ResponderCqe, op_own: u8) -> Result<(), Overrun> {
        self.reserve(1)?;
        let words = cqe.emit_words(op_own | u8::from(self.owner));
        self.store(|i| words[i]);
        self.advance();
        if is_solicited(op_own) {
            self.note_solicited();
        }
        Ok(())
    }

    /// Writes a CQE.
    #[inline(always)]
    pub fn write(&mut self, bytes: [u8; CQE_BYTES], opcode: CqeOpcode) -> Result<(), Overrun> {
        self.reserve(1)?;
        self.put(bytes, opcode, CqeFormat::Plain, 1);
        Ok(())
    }

    /// Writes a CQE that carries `data`, at most [`scatter_room`](Self::scatter_room) bytes; its byte count is theirs.
    pub fn write_scattered(&mut self, mut bytes: [u8; CQE_BYTES], opcode: CqeOpcode, data: &[u8]) -> Result<(), Overrun> {
        debug_assert!(data.len() <= self.scatter_room() && ResponderCqe::parse(&bytes).byte_count as usize == data.len());
        self.reserve(1)?;
        let format = match bytes.get_mut(..data.len()) {
            Some(place) if data.len() <= CQE_BYTES / 2 => {
                place.copy_from_slice(data);
                CqeFormat::Inline32
            }
            _ => {
                let half = data.len().min(self.stride() - CQE128_OFFSET);
                // SAFETY: the entry, not its CQE, starts `stride - 64` bytes before the CQE; free as in `put`.
                unsafe {
                    self.cqe(self.produced()).sub(self.stride() - CQE_BYTES).copy_from_nonoverlapping(NonNull::from(data).cast(), half)
                };
                CqeFormat::Inline64
            }
        };
        self.put(bytes, opcode, format, 1);
        Ok(())
    }

    /// Writes the completions of `minis` as a compressed session; what they have in common is `title`'s, and so is the WQE counter of the
    /// first. A single one is no session on any device and becomes a plain CQE.
    pub fn write_session(&mut self, mut title: [u8; CQE_BYTES], opcode: CqeOpcode, minis: &[MiniCqe]) -> Result<(), Overrun> {
        let wqe_counter = ResponderCqe::parse(&title).wqe_counter;
        match minis {
            [] => return Ok(()),
            [only] if opcode == CqeOpcode::Requester => only.expand_send(&mut title),
            [only] => only.expand_receive(&mut title, wqe_counter),
            _ => {}
        }
        let count = u32::try_from(minis.len()).unwrap_or(u32::MAX >> 1);
        self.reserve(count)?;
        if count == 1 {
            self.put(title, opcode, CqeFormat::Plain, 1);
            return Ok(());
        }
        for (i, minis) in (0..).step_by(MINI_CQES_PER_ARRAY).zip(minis.chunks(MINI_CQES_PER_ARRAY)) {
            let mut array = self.cqe(self.produced().wrapping_add(mini_array_offset(i))).cast::<[u8; MiniCqe::LEN]>();
            for mini in minis {
                // SAFETY: 8 of these fill a CQE of an entry that is free (above); the title's owner bit, written last, publishes them.
                unsafe {
                    array.write(mini.emit());
                    array = array.add(1);
                }
            }
        }
        TitleCqe { count, wqe_counter }.emit_into(&mut title);
        self.put(title, opcode, CqeFormat::Compressed, count);
        Ok(())
    }
}
