//! The accesses to the device. Every store and barrier of a send queue's doorbell is one of the six
//! operations of [`Mmio`]. [`doorbell`](crate::queues::doorbell) determines their order; the tests
//! record that order with an implementation of this trait. A receive queue's record and the
//! register that arms a CQ have a function each.
//!
//! The barriers are named by their use, as in rdma-core's `util/udma_barrier.h`:
//!
//! | name | between | x86-64 | AArch64 |
//! |---|---|---|---|
//! | `udma_to_device_barrier` | stores to memory that the device reads, and the store that announces them | the compiler only: the processor keeps such stores in order | `dmb oshst` |
//! | `mmio_wc_start` | the stores above, and the first store to a write-combining register, which otherwise overtakes them | `sfence` | `dsb st` |
//! | `mmio_flush_writes` | stores to that register, and those of the next doorbell; also flushes them now | `sfence` | `dsb st` |
//!
//! A soft device's register and record are ordinary memory, read by the storing thread itself in
//! the hook that follows, so program order suffices and all three are compiler fences. Its register
//! gets plain stores: a non-temporal copy into ordinary memory evicts the line from the cache and
//! costs a hundred times as much. A write-combining register gets whole 64-byte lines in
//! non-temporal stores of the widest kind that the processor has, which is detected once.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// The kind of memory of a BlueFlame register. It determines how the register is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RegisterKind {
    /// Cached memory, read by the storing thread: a strict soft device.
    #[default]
    Ordinary,
    /// The register is not written, because the device does not read it: a soft device that is not
    /// strict is called after a doorbell, and reads the doorbell record.
    Unread,
    /// Write-combining memory: hardware.
    WriteCombining,
    /// A hardware register that takes 8 bytes at a time and no WQE, because the kernel had no
    /// BlueFlame register left or the device has none: every doorbell is rung as by
    /// [`ring_doorbell`](crate::Qp::ring_doorbell).
    DoorbellOnly,
}

/// The operations of a doorbell. The defaults are for hardware. Each implementation has its own
/// copy routine; [`Ordinary`] also replaces the barriers. The implementing types have no values:
/// every call is direct.
pub(crate) trait Mmio {
    /// Name of the routine that copies a WQE.
    const COPY: &'static str;

    /// Makes the stores before the call visible to the device before the stores after the call.
    #[inline(always)]
    fn udma_to_device_barrier() {
        hardware::udma_to_device_barrier();
    }

    /// Stores `value` to a doorbell record, which is memory that the device reads.
    #[inline(always)]
    fn store_record(record: &AtomicU32, value: u32) {
        record.store(value, Ordering::Relaxed);
    }

    /// Makes the stores before the call, to memory of any kind, visible to the device before the
    /// stores after the call to a write-combining register.
    #[inline(always)]
    fn mmio_wc_start() {
        hardware::sfence();
    }

    /// Stores 8 bytes to the register.
    ///
    /// # Safety
    /// 8 bytes are readable at `from`, and writable at `register`; both are 8-aligned.
    #[inline(always)]
    unsafe fn store_8(register: *mut u8, from: *const u8) {
        // SAFETY: guaranteed by the caller; the register is accessed through atomics and
        // non-temporal stores only.
        unsafe {
            (*register.cast::<AtomicU64>()).store(from.cast::<u64>().read(), Ordering::Relaxed)
        };
    }

    /// Copies the line of 64 bytes at offset `AT`.
    ///
    /// # Safety
    /// The line is readable at `from + AT` and writable at `register + AT`; both are 64-aligned.
    unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8);

    #[inline(always)]
    fn end_copy() {}

    /// Copies `bytes` to the register.
    ///
    /// # Safety
    /// `bytes` is 64, 128, 192 or 256. This number of bytes is readable at `from` and writable at
    /// `register`; both are 64-aligned.
    #[inline(always)]
    unsafe fn copy(register: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            Self::copy_line::<0>(register, from);
            if bytes > 64 {
                Self::copy_line::<64>(register, from);
                if bytes > 128 {
                    Self::copy_line::<128>(register, from);
                    if bytes > 192 {
                        Self::copy_line::<192>(register, from);
                    }
                }
            }
        }
        Self::end_copy();
    }

    /// Flushes the stores to a write-combining register out of the processor now, and before any
    /// later store.
    #[inline(always)]
    fn mmio_flush_writes() {
        hardware::sfence();
    }
}

/// Follows a load, with Acquire, of a byte that the device stored: all stores that the device made
/// before it stored this byte are visible to later loads (rdma-core's `udma_from_device_barrier`).
/// On AArch64 an Acquire load alone orders only the stores of processors.
#[inline(always)]
pub(crate) fn udma_from_device_barrier() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the instruction orders loads and does nothing else.
    unsafe {
        core::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
}

/// Makes a receive queue's WQEs visible to requesters and hardware. This is the whole doorbell,
/// because a receive queue has no register.
#[inline(always)]
pub(crate) fn ring_record(record: &AtomicU32, value: u32) {
    hardware::udma_to_device_barrier();
    // Release: requesters of a soft device are other threads, whose Acquire loads pair with it.
    record.store(value, Ordering::Release);
}

/// Stores 8 bytes, which repeat the doorbell record, to a register of write-combining memory: the
/// second half of arming a CQ (libmlx5 `mlx5_arm_cq`).
///
/// # Safety
/// `register` is writable for 8 bytes and 8-aligned.
pub(crate) unsafe fn repeat_to_register(register: *mut u8, bytes: [u8; 8]) {
    // The first fence orders the record before the register. The second orders both before every
    // later store.
    hardware::sfence();
    // SAFETY: guaranteed by the caller; the register is accessed through atomics only.
    unsafe { (*register.cast::<AtomicU64>()).store(u64::from_ne_bytes(bytes), Ordering::Relaxed) };
    hardware::sfence();
}

/// A register of kind [`RegisterKind::Ordinary`], read by this thread only.
pub(crate) enum Ordinary {}

impl Mmio for Ordinary {
    const COPY: &'static str = "plain 8-byte stores";

    #[inline(always)]
    fn udma_to_device_barrier() {
        compiler_fence(Ordering::SeqCst);
    }

    #[inline(always)]
    fn mmio_wc_start() {
        compiler_fence(Ordering::SeqCst);
    }

    #[inline(always)]
    unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
        for at in (AT..AT + 64).step_by(8) {
            // SAFETY: guaranteed by the caller.
            unsafe { Self::store_8(register.add(at), from.add(at)) };
        }
    }

    #[inline(always)]
    fn mmio_flush_writes() {
        compiler_fence(Ordering::SeqCst);
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Avx, Avx512, Sse2};

/// The operations for hardware, with the copy routine that every processor of this architecture
/// has.
#[cfg(target_arch = "x86_64")]
pub(crate) type Baseline = Sse2;
#[cfg(target_arch = "aarch64")]
pub(crate) type Baseline = Stnp;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) type Baseline = Words;

#[cfg(target_arch = "x86_64")]
mod hardware {
    use core::arch::asm;

    #[inline(always)]
    pub(super) fn udma_to_device_barrier() {
        // SAFETY: the assembly has no instruction. It clobbers memory, so the compiler moves no
        // access across it.
        unsafe { asm!("", options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    pub(super) fn sfence() {
        // SAFETY: the instruction orders stores and does nothing else; every x86-64 processor has
        // it.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    //! The copies are assembly because the compiler's own non-temporal stores have no place in its
    //! memory model (it may move other accesses across them), and because AVX-512 intrinsics are
    //! younger than this crate's Rust version.

    use super::Mmio;
    use core::arch::asm;

    /// 16-byte stores, which every x86-64 has.
    pub(crate) enum Sse2 {}
    /// 32-byte stores. Only for processors with AVX.
    pub(crate) enum Avx {}
    /// 64-byte stores. Only for processors with AVX-512F.
    pub(crate) enum Avx512 {}

    impl Mmio for Sse2 {
        const COPY: &'static str = "non-temporal 16-byte stores (SSE2)";

        #[inline(always)]
        unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
            // SAFETY: the caller guarantees 64 aligned bytes on both sides.
            unsafe {
                asm!(
                    "movdqa xmm0, [{from} + {at}]",
                    "movdqa xmm1, [{from} + {at} + 16]",
                    "movdqa xmm2, [{from} + {at} + 32]",
                    "movdqa xmm3, [{from} + {at} + 48]",
                    "movntdq [{to} + {at}], xmm0",
                    "movntdq [{to} + {at} + 16], xmm1",
                    "movntdq [{to} + {at} + 32], xmm2",
                    "movntdq [{to} + {at} + 48], xmm3",
                    from = in(reg) from, to = in(reg) register, at = const AT,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    impl Mmio for Avx {
        const COPY: &'static str = "non-temporal 32-byte stores (AVX)";

        #[inline(always)]
        unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
            // SAFETY: the caller guarantees 64 aligned bytes on both sides. The processor has AVX,
            // because this type is used only on such processors. A clobbered xmm register includes
            // its wider forms.
            unsafe {
                asm!(
                    "vmovdqa ymm0, [{from} + {at}]",
                    "vmovdqa ymm1, [{from} + {at} + 32]",
                    "vmovntdq [{to} + {at}], ymm0",
                    "vmovntdq [{to} + {at} + 32], ymm1",
                    from = in(reg) from, to = in(reg) register, at = const AT,
                    out("xmm0") _, out("xmm1") _,
                    options(nostack, preserves_flags),
                );
            }
        }

        #[inline(always)]
        fn end_copy() {
            leave_avx();
        }
    }

    impl Mmio for Avx512 {
        const COPY: &'static str = "non-temporal 64-byte stores (AVX-512)";

        #[inline(always)]
        unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
            // SAFETY: the caller guarantees 64 aligned bytes on both sides. The processor has
            // AVX-512F, because this type is used only on such processors.
            unsafe {
                asm!(
                    "vmovdqa64 zmm0, [{from} + {at}]",
                    "vmovntdq [{to} + {at}], zmm0",
                    from = in(reg) from, to = in(reg) register, at = const AT,
                    out("xmm0") _,
                    options(nostack, preserves_flags),
                );
            }
        }

        #[inline(always)]
        fn end_copy() {
            leave_avx();
        }
    }

    /// Clears the upper halves of the vector registers, as the calling convention requires:
    /// otherwise the caller's SSE code is slowed down.
    #[inline(always)]
    fn leave_avx() {
        // SAFETY: the instruction clears the upper halves of all vector registers. Code compiled
        // for x86-64 without AVX never uses them; for code compiled with AVX, the clobbers declare
        // the change.
        unsafe {
            asm!(
                "vzeroupper",
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _, out("xmm12") _, out("xmm13") _, out("xmm14") _,
                out("xmm15") _,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod hardware {
    use core::arch::asm;

    #[inline(always)]
    pub(super) fn udma_to_device_barrier() {
        // SAFETY: the instruction orders stores and does nothing else.
        unsafe { asm!("dmb oshst", options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    pub(super) fn sfence() {
        // SAFETY: the instruction waits for stores and does nothing else.
        unsafe { asm!("dsb st", options(nostack, preserves_flags)) };
    }
}

/// Non-temporal stores of pairs of 16 bytes.
#[cfg(target_arch = "aarch64")]
pub(crate) enum Stnp {}

#[cfg(target_arch = "aarch64")]
impl Mmio for Stnp {
    const COPY: &'static str = "non-temporal pairs of 16 bytes (stnp)";

    #[inline(always)]
    unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
        // SAFETY: the caller guarantees 64 aligned bytes on both sides.
        unsafe {
            core::arch::asm!(
                "ldp q0, q1, [{from}, #{at}]",
                "ldp q2, q3, [{from}, #{at} + 32]",
                "stnp q0, q1, [{to}, #{at}]",
                "stnp q2, q3, [{to}, #{at} + 32]",
                from = in(reg) from, to = in(reg) register, at = const AT,
                out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod hardware {
    use core::sync::atomic::{Ordering, fence};

    /// The strongest fence is used, because no barrier between memory and a device is known for
    /// this processor.
    #[inline(always)]
    pub(super) fn udma_to_device_barrier() {
        fence(Ordering::SeqCst);
    }

    #[inline(always)]
    pub(super) fn sfence() {
        fence(Ordering::SeqCst);
    }
}

/// 8-byte stores, for processors other than x86-64 and AArch64.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) enum Words {}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
impl Mmio for Words {
    const COPY: &'static str = "8-byte stores";

    #[inline(always)]
    unsafe fn copy_line<const AT: usize>(register: *mut u8, from: *const u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { Ordinary::copy_line::<AT>(register, from) };
    }
}
