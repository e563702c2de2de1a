//! Bytes and the processor's cache: fetching ahead.

/// Has the cache fetch the line at `addr`, which may be any: nothing is accessed, and nothing faults. On processors other than x86-64 it
/// does nothing.
#[inline(always)]
pub fn prefetch(addr: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect but on the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::without_provenance(addr)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}

/// As [`prefetch`], for a line that this core will write: no other core has it then.
#[inline(always)]
pub fn prefetch_to_write(addr: usize) {
    // By hand, because the compiler emits the instruction only for processors that are sure to have it; it does nothing on others.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no effect but on the cache.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) addr, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = addr;
}
