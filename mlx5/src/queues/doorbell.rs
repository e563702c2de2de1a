//! The only module that announces new WQEs of send queues to the device. It owns the order of the
//! stores.
//!
//! The order (PRM "Posting a Work Request to Work Queue"; the same as rdma-core's mlx5 provider,
//! `post_send_db`):
//! 1. the WQEs are stored to the SQ;
//! 2. `udma_to_device_barrier`: they are visible to the device before the record;
//! 3. the doorbell record gets the new producer counter (in WQEBBs, big-endian);
//! 4. `mmio_wc_start`: the record is visible before the register is written; otherwise the device
//!    may read an old counter and stop;
//! 5. the BlueFlame register gets one or more whole WQEs (together at most half the register's
//!    size) or the first 8 bytes of the last control segment, in the half of the register that the
//!    last doorbell did not use;
//! 6. `mmio_flush_writes`: the register's bytes reach the device before any later store to it,
//!    including the next doorbell;
//! 7. on a soft device, the hook: "a store to this register just happened".
//!
//! [`mmio`] describes the barriers of each kind of register, and why they suffice. Steps 2 to 6 are
//! one function per kind of register, called through a pointer, so that a test can check their
//! order in the disassembly of release code.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::rc::Rc;

use crate::control::Hook;
use crate::mmio::{self, Mmio, Ordinary, RegisterKind};
use crate::provider::parts::UarParts;
use crate::wire::{BLUEFLAME_BYTES, queue_record};

/// Performs steps 2 to 6. Copies `bytes` bytes from `from` to the register, or 8 bytes if `bytes`
/// is 0 or larger than `HALF`. `HALF` is the size of a half of the register; it is 0 for a register
/// that takes no WQE and is not divided into halves.
///
/// # Safety
/// `from` is aligned to 64. `bytes` is a multiple of 64; this number of bytes is readable at
/// `from`, or 8 bytes if `bytes` is 0.
unsafe fn announce<M: Mmio, const HALF: usize>(
    bell: &Bell,
    value: u32,
    from: *const u8,
    bytes: usize,
) {
    let register = bell.half.get();
    M::udma_to_device_barrier();
    // SAFETY: the record lives as long as the QP's memory, which the owner of this doorbell holds.
    M::store_record(unsafe { bell.record.as_ref() }, value);
    M::mmio_wc_start();
    // SAFETY: the register lives as long as the record. Each half has `HALF` bytes, or 8 if `HALF`
    // is 0, and is aligned to its size. The caller guarantees the rest.
    unsafe {
        if (1..=HALF).contains(&bytes) {
            M::copy(register, from, bytes);
        } else {
            M::store_8(register, from);
        }
    }
    M::mmio_flush_writes();
    bell.half.set(register.map_addr(|at| at ^ HALF));
}

/// Performs steps 2 and 3, for a register that is not read. Such a register is not written, so its
/// halves do not alternate.
///
/// # Safety
/// The same as for [`announce`].
unsafe fn announce_by_record(bell: &Bell, value: u32, _from: *const u8, _bytes: usize) {
    Ordinary::udma_to_device_barrier();
    // SAFETY: as in `announce`.
    Ordinary::store_record(unsafe { bell.record.as_ref() }, value);
}

/// Performs steps 2 and 3 like [`announce_by_record`], then calls the relay.
///
/// # Safety
/// The same as for [`announce`].
unsafe fn announce_by_relay(bell: &Bell, value: u32, from: *const u8, bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { announce_by_record(bell, value, from, bytes) };
    bell.hook.ring_relay(bell.register_index);
}

type Announce = unsafe fn(&Bell, u32, *const u8, usize);

struct Bell {
    record: NonNull<AtomicU32>,
    /// The half of the register to which the next store writes ([`UarParts::half`]). The whole
    /// register is aligned to its size.
    half: Rc<Cell<*mut u8>>,
    register_index: usize,
    hook: Hook,
}

/// Returns [`announce`] for a write-combining register, with the widest copy of this processor, and
/// the name of the copy routine.
fn write_combining() -> (Announce, &'static str) {
    fn by<M: Mmio>() -> (Announce, &'static str) {
        (announce::<M, BLUEFLAME_BYTES>, M::COPY)
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        return by::<mmio::Avx512>();
    } else if std::arch::is_x86_feature_detected!("avx") {
        return by::<mmio::Avx>();
    }
    by::<mmio::Baseline>()
}

impl RegisterKind {
    /// Returns the name of the routine that copies a WQE into a register of this kind on this
    /// machine.
    #[must_use]
    pub fn copy_routine(self) -> &'static str {
        match self {
            Self::Ordinary => Ordinary::COPY,
            Self::Unread | Self::DoorbellOnly => "none",
            Self::WriteCombining => write_combining().1,
        }
    }
}

pub(crate) struct Doorbell {
    bell: Bell,
    announce: Announce,
}

impl Doorbell {
    pub(crate) fn new(parts: &UarParts, record: NonNull<AtomicU32>, hook: Hook) -> Self {
        let announce = match parts.kind {
            RegisterKind::Ordinary => announce::<Ordinary, BLUEFLAME_BYTES>,
            RegisterKind::Unread if matches!(hook, Hook::Relay(_)) => announce_by_relay,
            RegisterKind::Unread => announce_by_record,
            RegisterKind::DoorbellOnly => announce::<mmio::Baseline, 0>,
            RegisterKind::WriteCombining => write_combining().0,
        };
        let half = Rc::clone(&parts.half);
        debug_assert!(
            half.get().addr()
                % if parts.kind == RegisterKind::DoorbellOnly {
                    8
                } else {
                    BLUEFLAME_BYTES
                }
                == 0
        );
        Self {
            bell: Bell {
                record,
                half,
                register_index: parts.register_index,
                hook,
            },
            announce,
        }
    }

    /// Makes `M` perform steps 2 to 6 from now on.
    #[cfg(test)]
    pub(crate) fn set_mmio<M: Mmio>(&mut self) {
        self.announce = announce::<M, BLUEFLAME_BYTES>;
    }

    /// Announces all WQEs up to `producer`. Copies `bytes` from `wqes` through BlueFlame, or the
    /// first 8 if `bytes` is 0 or does not fit.
    ///
    /// # Safety
    /// `wqes` is aligned to 64, and points to the last WQE or to the first of all new WQEs. `bytes`
    /// is a multiple of 64; this number of bytes is readable at `wqes`, or 8 bytes if `bytes` is 0.
    #[inline(always)]
    pub(crate) unsafe fn ring(&mut self, producer: u16, wqes: *const u8, bytes: usize) {
        debug_assert!(bytes % 64 == 0 && wqes.addr() % 64 == 0);
        // SAFETY: guaranteed by the caller.
        unsafe { (self.announce)(&self.bell, queue_record(producer), wqes, bytes) };
        self.bell.hook.ring(self.bell.register_index);
    }
}
