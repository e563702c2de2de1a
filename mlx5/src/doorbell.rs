//! The one place that tells the device about new WQEs, and owns the order in which it must learn of them.
//!
//! The order (PRM "Posting a Work Request to Work Queue"; the same as rdma-core's mlx5 provider):
//! 1. the WQEs are stored to the SQ;
//! 2. barrier: they are visible to the device before the record;
//! 3. the doorbell record gets the new producer counter (in WQEBBs, big-endian);
//! 4. barrier: the record is visible before the register write, else the device may read an old counter and stop;
//! 5. the BlueFlame register gets the whole WQE (one WQE of at most the register's size) or the first 8 bytes of the last control
//!    segment, at the half of the register that was not used last time;
//! 6. on a soft device, the hook: "a store to this register just happened".
//!
//! A soft device's register is ordinary memory that is read by the storing thread itself, in step 6, so both barriers order the
//! compiler only; the copy is made of plain stores (a non-temporal copy into ordinary memory costs a hundred times as much).

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};
use std::rc::Rc;

use crate::control::{Control, UarParts};
use crate::wire::queue_record;

/// Half of a 512-byte BlueFlame register, also the longest WQE that fits it.
pub(crate) const BF_BYTES: usize = 256;

/// A QP's doorbell: its record and its BlueFlame register.
pub(crate) struct Doorbell {
    record: NonNull<AtomicU32>,
    register: NonNull<u8>,
    uar_offset: usize,
    /// 0 or [`BF_BYTES`]: the half the next store goes to.
    half: usize,
    /// The soft device to tell; hardware sees the store itself.
    hook: Option<Rc<Control>>,
}

impl Doorbell {
    pub(crate) fn new(parts: &UarParts, record: NonNull<AtomicU32>, hook: Option<Rc<Control>>) -> Self {
        Self { record, register: parts.register, uar_offset: parts.uar_offset, half: 0, hook }
    }

    /// Announces everything up to `producer`. `wqe` is the last WQE's first byte; `whole` its length in bytes if it is the only new
    /// one and may go through BlueFlame, else 0.
    ///
    /// # Safety
    /// `wqe` points to 8 readable bytes, or `whole` (a multiple of 64, at most [`BF_BYTES`]) if that is not 0, aligned to 64.
    #[inline(always)]
    pub(crate) unsafe fn ring(&mut self, producer: u16, wqe: *const u8, whole: usize) {
        debug_assert!(whole <= BF_BYTES && whole % 64 == 0);
        compiler_fence(Ordering::Release);
        // SAFETY: the record lives as long as the QP's memory, which the owner of this doorbell holds.
        unsafe { self.record.as_ref() }.store(queue_record(producer), Ordering::Release);
        compiler_fence(Ordering::SeqCst);
        let words = (whole / 8).max(1);
        for i in 0..words {
            // SAFETY: `wqe` is readable for `whole` or 8 bytes (caller); the half of the register holds `BF_BYTES`, is aligned, and is
            // only accessed through atomics.
            unsafe {
                let word = wqe.cast::<u64>().add(i).read();
                (*self.register.as_ptr().add(self.half).cast::<AtomicU64>().add(i)).store(word, Ordering::Relaxed);
            }
        }
        let uar_offset = self.uar_offset + self.half;
        self.half ^= BF_BYTES;
        if let Some(device) = &self.hook {
            device.register_written(uar_offset);
        }
    }
}
