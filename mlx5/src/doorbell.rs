//! The one place that tells the device about new WQEs, and owns the order in which it must learn of them.
//!
//! The order (PRM "Posting a Work Request to Work Queue"; the same as rdma-core's mlx5 provider, `post_send_db`):
//! 1. the WQEs are stored to the SQ;
//! 2. `udma_to_device_barrier`: they are visible to the device before the record;
//! 3. the doorbell record gets the new producer counter (in WQEBBs, big-endian);
//! 4. `mmio_wc_start`: the record is visible before the register is written, else the device may read an old counter and stop;
//! 5. the BlueFlame register gets one or more whole WQEs (of at most the register's size) or the first 8 bytes of the last control
//!    segment, at the half of the register that was not used last time;
//! 6. `mmio_flush_writes`: the register's bytes leave before anything else is stored to it, the next doorbell included;
//! 7. on a soft device, the hook: "a store to this register just happened".
//!
//! What each barrier is on which register, and why that is enough, is in [`mmio`](crate::mmio). For a write-combining register steps 2 to
//! 6 are one function that is not inlined, so that their order in release code can be read off its disassembly, and is, by a test.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::rc::Rc;

use crate::control::{Control, UarParts};
use crate::mmio::{self, Mmio, Ordinary, RegisterKind, Streaming};
use crate::wire::queue_record;

/// Half of a 512-byte BlueFlame register, also the longest WQE that fits it.
pub(crate) const BF_BYTES: usize = 256;

/// Steps 2 to 6. `bytes` go to the register from `from`, or 8 if it is 0.
///
/// # Safety
/// 8 readable bytes at `from`, or `bytes` (a multiple of 64, at most [`BF_BYTES`]) if that is not 0, aligned to 64; as many writable ones
/// at `register`.
#[inline(always)]
unsafe fn announce<M: Mmio>(record: &AtomicU32, value: u32, register: *mut u8, from: *const u8, bytes: usize) {
    M::udma_to_device_barrier();
    M::store_record(record, value);
    M::mmio_wc_start();
    // SAFETY: the caller's.
    unsafe {
        if bytes == 0 {
            M::store_8(register, from);
        } else {
            M::copy(register, from, bytes);
        }
    }
    M::mmio_flush_writes();
}

type Announce = unsafe fn(&AtomicU32, u32, *mut u8, *const u8, usize);

/// [`announce`] for a write-combining register on this processor.
fn announce_write_combining() -> Announce {
    match Streaming::detect() {
        #[cfg(target_arch = "x86_64")]
        Streaming::Avx512 => announce::<mmio::Avx512>,
        #[cfg(target_arch = "x86_64")]
        Streaming::Avx => announce::<mmio::Avx>,
        #[cfg(target_arch = "x86_64")]
        Streaming::Sse2 => announce::<mmio::Sse2>,
        #[cfg(target_arch = "aarch64")]
        Streaming::Stnp => announce::<mmio::Stnp>,
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Streaming::Words => announce::<mmio::Words>,
    }
}

/// A QP's doorbell: its record and its BlueFlame register.
pub(crate) struct Doorbell {
    record: NonNull<AtomicU32>,
    register: NonNull<u8>,
    uar_offset: usize,
    /// 0 or [`BF_BYTES`]: the half the next store goes to.
    half: usize,
    /// `None`: the register is ordinary memory.
    announce: Option<Announce>,
    /// The soft device to tell; hardware sees the store itself.
    hook: Option<Rc<Control>>,
}

impl Doorbell {
    pub(crate) fn new(parts: &UarParts, record: NonNull<AtomicU32>, hook: Option<Rc<Control>>) -> Self {
        let announce = match parts.kind {
            RegisterKind::Ordinary => None,
            RegisterKind::WriteCombining => Some(announce_write_combining()),
        };
        Self { record, register: parts.register, uar_offset: parts.uar_offset, half: 0, announce, hook }
    }

    /// The same, with steps 2 to 6 made by `M`.
    #[cfg(test)]
    pub(crate) fn through<M: Mmio>(mut self) -> Self {
        self.announce = Some(announce::<M>);
        self
    }

    /// Announces everything up to `producer`. `bytes` from `wqes` go through BlueFlame, or 8 bytes if that is 0: the start of the last
    /// WQE.
    ///
    /// # Safety
    /// `wqes` points to 8 readable bytes, or `bytes` (a multiple of 64, at most [`BF_BYTES`]) if that is not 0, aligned to 64.
    #[inline(always)]
    pub(crate) unsafe fn ring(&mut self, producer: u16, wqes: *const u8, bytes: usize) {
        debug_assert!(bytes <= BF_BYTES && bytes % 64 == 0);
        // SAFETY: the record lives as long as the QP's memory, which the owner of this doorbell holds; each half of the register has
        // `BF_BYTES` and is aligned to them.
        unsafe {
            let record = self.record.as_ref();
            let register = self.register.as_ptr().add(self.half);
            match self.announce {
                None => announce::<Ordinary>(record, queue_record(producer), register, wqes, bytes),
                Some(announce) => announce(record, queue_record(producer), register, wqes, bytes),
            }
        }
        let uar_offset = self.uar_offset + self.half;
        self.half ^= BF_BYTES;
        if let Some(device) = &self.hook {
            device.register_written(uar_offset);
        }
    }
}
