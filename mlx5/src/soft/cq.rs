//! The device's side of a completion queue.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::private::PrivateMemory;
use crate::wire::{CQE_BYTES, CqeOpcode, OP_OWN_OFFSET, op_own};

/// A completion queue, as the device sees it.
pub(crate) struct SoftCq {
    pub(crate) memory: PrivateMemory,
    pub(crate) log_entries: u32,
    pub(crate) producer: u32,
    /// A CQE was due while the queue was full; nothing is written any more.
    pub(crate) overrun: bool,
}

/// The CQ is full, or was: on hardware that is fatal to it.
pub(crate) struct Overrun;

/// Where the doorbell record and the CQEs are in a completion queue's private memory.
pub(crate) const CQ_RECORD: usize = 0;
pub(crate) const CQ_BUFFER: usize = 4096;

impl SoftCq {
    fn cqe(&self, index: u32) -> NonNull<u8> {
        self.memory.at(CQ_BUFFER + index as usize * CQE_BYTES)
    }

    /// Writes a CQE: body first, then the 8 bytes that end with the owner bit.
    #[inline(always)]
    pub(crate) fn write(&mut self, mut bytes: [u8; CQE_BYTES], opcode: CqeOpcode) -> Result<(), Overrun> {
        // SAFETY: inside the private memory; the driver accesses it through the same atomic type.
        let record = unsafe { self.memory.at::<AtomicU32>(CQ_RECORD).as_ref() };
        let entries = 1u32 << self.log_entries;
        // The record has 24 bits. Acquire: the driver has finished reading what it passed.
        let consumed = u32::from_be(record.load(Ordering::Acquire));
        if self.overrun || self.producer.wrapping_sub(consumed) & 0xff_ffff >= entries {
            self.overrun = true;
            return Err(Overrun);
        }
        bytes[OP_OWN_OFFSET] = op_own(opcode, (self.producer >> self.log_entries) & 1 != 0);
        let at = self.cqe(self.producer & (entries - 1)).cast::<u64>();
        // SAFETY: the entry is inside the buffer, 64-aligned, and the driver is done with it (above).
        unsafe {
            let words = bytes.as_ptr().cast::<u64>();
            for i in 0..7 {
                at.add(i).write(words.add(i).read_unaligned());
            }
            at.add(7).cast::<AtomicU64>().as_ref().store(words.add(7).read_unaligned(), Ordering::Release);
        }
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }
}
