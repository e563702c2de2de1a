//! The device's side of a completion queue.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5_wire::{
    CQ_DBREC_ARM, CQE_BYTES, CQE128_BYTES, CQE128_OFFSET, CqArm, CqeFormat, CqeOpcode, MAX_CQE,
    MINI_CQES_PER_ARRAY, MiniCqe, OP_OWN_OFFSET, ResponderCqe, TitleCqe, is_solicited,
    mini_array_offset, op_own_with,
};

use crate::types::request::CqMemory;
use crate::types::rule::Rule;

/// The device's side of a completion queue.
///
/// Of the op_own byte of a CQE that a caller passes, only the solicited flag is used; the queue
/// sets opcode, format and owner bit. `write_receive` differs: it sets only the owner bit.
#[derive(Debug)]
pub struct SoftCq {
    /// The CQE of the first entry: its last 64 bytes.
    first: NonNull<u8>,
    /// The two words of the doorbell record: consumer, arm.
    record: NonNull<AtomicU32>,
    /// Number of entries, a power of two, less one.
    mask: u32,
    /// Bytes of an entry, 64 or 128.
    stride: u32,
    compression: bool,
    /// Counter after the entries that are known to be free, and the number of these entries.
    /// `limit - room` is the producer. The free entries are on one lap. The number is 0 after an
    /// overrun of the queue.
    limit: u32,
    room: u32,
    /// The CQE at the producer, and the owner bit of its lap, if there is room.
    next: *mut u8,
    owner: bool,
    /// Counter after the last CQE that was solicited or an error, but at least the producer minus
    /// 2^22. Comparisons are made on 24 bits.
    solicited: u32,
    /// Counter after the CQE of the last event that [`announce`](Self::announce) gave, with the
    /// same minimum.
    announced: u32,
    /// Whether the queue has stopped: nothing is written any more. It stops when a CQE is due and
    /// the queue is full, when strict mode finds a consumer counter that is ahead, and when the
    /// device fails.
    overrun: bool,
    /// Whether strict mode has reported the broken rule of this queue, or is to report none because
    /// the device has failed.
    is_reported: bool,
}

/// The CQ is full, or was full before. On hardware that is fatal to the CQ.
#[derive(Clone, Copy, Debug)]
pub struct Overrun {
    /// Whether this is the first overrun.
    pub(crate) is_first: bool,
}

/// The free entry at the producer of a queue.
pub(crate) struct FreeEntry<'a>(&'a mut SoftCq);

impl FreeEntry<'_> {
    /// Writes the CQE of a receive. `op_own` lacks only the owner bit.
    #[inline(always)]
    pub(crate) fn write_receive(self, cqe: &ResponderCqe, op_own: u8) {
        let Self(cq) = self;
        let words = cqe.emit_words(op_own | u8::from(cq.owner));
        cq.store(|i| words[i]);
        cq.advance();
        if is_solicited(op_own) {
            cq.note_solicited();
        }
    }
}

/// An arm word that no driver writes. It is not 0, because the first command, sequence 0 at
/// consumer 0, is all zeros.
const NOT_ARMED: u32 = u32::MAX;

impl SoftCq {
    /// Makes the queue in `memory`, whose sizes the caller has checked.
    ///
    /// # Safety
    /// The buffer and the record are valid as long as the queue, and the driver accesses them like
    /// a device's queue.
    pub unsafe fn new(memory: &CqMemory) -> Self {
        let cq = Self {
            // SAFETY: the CQE is inside the first entry, which the caller guarantees to be valid.
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

    /// Starts, for tests, as if `counter` CQEs had been written and consumed.
    #[doc(hidden)]
    pub fn start_at(&mut self, counter: u32) {
        (self.limit, self.solicited, self.announced, self.room) = (counter, counter, counter, 0);
    }

    /// Stops writing CQEs, as after an overrun, when the device itself has failed.
    pub(crate) fn end(&mut self) {
        self.is_reported = true;
        self.stop();
    }

    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun
    }

    /// Returns the number of CQEs written since the queue was created, modulo 2^32.
    #[inline(always)]
    pub(crate) fn produced(&self) -> u32 {
        self.limit.wrapping_sub(self.room)
    }

    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.stride as usize
    }

    /// Returns whether compressed sessions may be written.
    pub fn compresses(&self) -> bool {
        self.compression
    }

    /// Returns the number of received bytes that an entry can carry.
    pub fn scatter_room(&self) -> usize {
        if self.stride() == CQE128_BYTES {
            CQE128_OFFSET
        } else {
            CQE_BYTES / 2
        }
    }

    /// Returns the CQE of an entry: its last 64 bytes.
    #[inline(always)]
    fn cqe(&self, counter: u32) -> NonNull<u8> {
        let index = (counter & self.mask) as usize;
        // SAFETY: the entry is inside the buffer, which holds `mask + 1` entries.
        unsafe { self.first.add(index * self.stride()) }
    }

    /// Returns the number of CQEs that were written and not consumed, from the 24 bits of the
    /// record. Larger than the number of entries if the record claims CQEs that were never written.
    fn unconsumed(&self) -> u32 {
        // SAFETY: the record is valid as long as the queue. A driver in Rust accesses it through
        // the same atomic type.
        let record = unsafe { self.record.as_ref() };
        // Acquire: the driver has finished reading the CQEs that it consumed.
        let consumed = u32::from_be(record.load(Ordering::Acquire));
        self.produced().wrapping_sub(consumed) & 0xff_ffff
    }

    /// Returns the number of CQEs that the queue has room for.
    #[must_use]
    pub fn room(&self) -> u32 {
        (self.mask + 1).saturating_sub(self.unconsumed())
    }

    /// Ensures that `count` entries are free at the producer. Without them, the queue has overrun.
    #[inline(always)]
    fn reserve(&mut self, count: u32) -> Result<(), Overrun> {
        if self.room < count {
            self.find_room(count)
        } else {
            Ok(())
        }
    }

    /// Reads the record again. Fails, and stops the queue, if `count` entries are not free.
    #[cold]
    #[inline(never)]
    pub(crate) fn find_room(&mut self, count: u32) -> Result<(), Overrun> {
        let free = (self.mask + 1)
            .checked_sub(self.unconsumed())
            .filter(|free| *free >= count && !self.overrun);
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
        // Keeps both counters so near to the producer that in 24 bits they do not seem ahead of it.
        let near = |mark: u32| producer.wrapping_sub(producer.wrapping_sub(mark).min(MAX_CQE));
        (self.solicited, self.announced) = (near(self.solicited), near(self.announced));
        Ok(())
    }

    fn stop(&mut self) {
        (self.overrun, self.limit, self.room) = (true, self.produced(), 0);
    }

    /// Stores the eight words of the CQE at the producer, the word with the owner bit last. The
    /// caller has called [`reserve`](Self::reserve).
    #[inline(always)]
    fn store(&mut self, word: impl Fn(usize) -> u64) {
        let at = self.next.cast::<u64>();
        // SAFETY: the caller has reserved the CQE. So it is inside the buffer, and the driver has
        // consumed it. CQEs are aligned to 64 bytes.
        unsafe {
            for i in 0..7 {
                at.add(i).write(word(i));
            }
            (*at.add(7).cast::<AtomicU64>()).store(word(7), Ordering::Release);
        }
    }

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

    /// Writes the CQE at the producer, the word with the owner bit last. `entries` is the number of
    /// CQEs that it represents; the caller has [reserved](Self::reserve) them.
    #[inline(always)]
    fn put(
        &mut self,
        mut bytes: [u8; CQE_BYTES],
        opcode: CqeOpcode,
        format: CqeFormat,
        entries: u32,
    ) {
        bytes[OP_OWN_OFFSET] = op_own_with(
            opcode,
            format,
            is_solicited(bytes[OP_OWN_OFFSET]),
            self.owner,
        );
        let words = bytes.as_ptr().cast::<u64>();
        // SAFETY: `words` points to the eight words of `bytes`, and `store` passes numbers below 8.
        self.store(|i| unsafe { words.add(i).read_unaligned() });
        if entries == 1 {
            self.advance();
        } else {
            let producer = self.produced().wrapping_add(entries);
            self.next = self.cqe(producer).as_ptr();
            // A session may end on the next lap, of which no entry is known to be free.
            self.room = self.room.saturating_sub(entries);
            self.limit = producer.wrapping_add(self.room);
        }
        if is_solicited(bytes[OP_OWN_OFFSET])
            || matches!(
                opcode,
                CqeOpcode::RequesterError | CqeOpcode::ResponderError
            )
        {
            self.note_solicited();
        }
    }

    /// Returns, for strict mode, the broken rule of the queue and the wrong counter, once. The
    /// counter is the consumer counter in the record if this is ahead of the CQEs written, or the
    /// producer counter if the queue overran.
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
        // SAFETY: the record is valid as long as the queue. A driver in Rust accesses it through
        // the same atomic type.
        unsafe { self.record.add(CQ_DBREC_ARM).as_ref() }
    }

    /// Returns whether the driver armed the queue and the queue holds a CQE of the armed kind. If
    /// so, disarms the queue.
    pub fn take_event(&mut self) -> bool {
        self.take_due(None).is_some()
    }

    /// Like [`take_event`](Self::take_event), but each event is for one CQE, and each CQE gives one
    /// event. The CQE of an event is the first CQE of the armed kind after the consumer and after
    /// the CQE of the last event. A NIC writes the event when it writes that CQE, and remembers it
    /// as `last_notified_index` of the CQ context.
    pub(crate) fn announce(&mut self) -> bool {
        let due = self.take_due(Some(self.announced));
        self.announced = due.unwrap_or(self.announced);
        due.is_some()
    }

    /// Takes the arm command if a CQE of its kind is after the consumer and after `announced`.
    /// Returns the counter after the first such CQE.
    fn take_due(&self, announced: Option<u32>) -> Option<u32> {
        let word = self.arm_word().load(Ordering::Acquire);
        if word == NOT_ARMED {
            return None;
        }
        let armed = CqArm::from_record(word);
        let producer = self.produced();
        // `unconsumed` is a signed difference of 24 bits, the number of CQEs after the consumer.
        // `new` is the number of these CQEs that are also after the last event.
        let unconsumed = ((producer.wrapping_sub(armed.consumed) << 8) as i32 >> 8).max(0) as u32;
        let new = announced.map_or(unconsumed, |announced| {
            unconsumed.min(producer.wrapping_sub(announced))
        });
        let newest = if armed.solicited_only {
            self.solicited
        } else {
            producer
        };
        if producer.wrapping_sub(newest) >= new {
            return None;
        }
        let is_for = |at: &u32| !armed.solicited_only || self.is_solicited(*at);
        let in_queue = new.min(self.mask + 1);
        let due = (1..=in_queue)
            .rev()
            .map(|back| producer.wrapping_sub(back))
            .find(is_for)
            .map_or(newest, |at| at.wrapping_add(1));
        // A driver in another thread may have armed the queue again meanwhile, for later CQEs.
        self.arm_word()
            .compare_exchange(word, NOT_ARMED, Ordering::AcqRel, Ordering::Relaxed)
            .ok()
            .map(|_| due)
    }

    /// Returns whether CQE `counter`, which is in the queue, is solicited or an error.
    fn is_solicited(&self, counter: u32) -> bool {
        // SAFETY: the byte is inside the CQE, which is valid as long as the queue. The driver may
        // write the byte at the same time; then the old or the new byte is read.
        let op_own = unsafe { self.cqe(counter).add(OP_OWN_OFFSET).read_volatile() };
        let is_error = matches!(
            CqeOpcode::from_op_own(op_own),
            Some(CqeOpcode::RequesterError | CqeOpcode::ResponderError)
        );
        is_solicited(op_own) || is_error
    }

    /// Returns the entry at the producer if it is known to be free. If not,
    /// [`find_room`](Self::find_room) reads the record again.
    #[inline(always)]
    pub(crate) fn known_free(&mut self) -> Option<FreeEntry<'_>> {
        (self.room > 0).then_some(FreeEntry(self))
    }

    /// Writes a CQE.
    #[inline(always)]
    pub fn write(&mut self, bytes: [u8; CQE_BYTES], opcode: CqeOpcode) -> Result<(), Overrun> {
        self.reserve(1)?;
        self.put(bytes, opcode, CqeFormat::Plain, 1);
        Ok(())
    }

    /// Writes a CQE that carries `data`, at most [`scatter_room`](Self::scatter_room) bytes. Its
    /// byte count is the length of `data`.
    pub fn write_scattered(
        &mut self,
        mut bytes: [u8; CQE_BYTES],
        opcode: CqeOpcode,
        data: &[u8],
    ) -> Result<(), Overrun> {
        debug_assert!(
            data.len() <= self.scatter_room()
                && ResponderCqe::parse(&bytes).byte_count as usize == data.len()
        );
        self.reserve(1)?;
        let format = match bytes.get_mut(..data.len()) {
            Some(place) if data.len() <= CQE_BYTES / 2 => {
                place.copy_from_slice(data);
                CqeFormat::Inline32
            }
            _ => {
                let half = data.len().min(self.stride() - CQE128_OFFSET);
                // SAFETY: the entry starts `stride - 64` bytes before its CQE, has room for `half`
                // bytes there, and is free (`reserve`), so the driver does not access it.
                unsafe {
                    self.cqe(self.produced())
                        .sub(self.stride() - CQE_BYTES)
                        .copy_from_nonoverlapping(NonNull::from(data).cast(), half)
                };
                CqeFormat::Inline64
            }
        };
        self.put(bytes, opcode, format, 1);
        Ok(())
    }

    /// Writes the completions of `minis` as a compressed session. `title` has their common fields,
    /// and the WQE counter of the first. A single completion becomes a plain CQE, as on every
    /// device.
    pub fn write_session(
        &mut self,
        mut title: [u8; CQE_BYTES],
        opcode: CqeOpcode,
        minis: &[MiniCqe],
    ) -> Result<(), Overrun> {
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
        for (i, minis) in (0..)
            .step_by(MINI_CQES_PER_ARRAY)
            .zip(minis.chunks(MINI_CQES_PER_ARRAY))
        {
            let mut array = self
                .cqe(self.produced().wrapping_add(mini_array_offset(i)))
                .cast::<[u8; MiniCqe::LEN]>();
            for mini in minis {
                // SAFETY: a chunk has at most 8 mini CQEs, which fill the CQE of a free entry
                // (`reserve`). The title's owner bit, written last, publishes them.
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

#[cfg(test)]
mod tests;
