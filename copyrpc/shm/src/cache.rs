//! Bytes and the processor's cache: fetching ahead, and copies too short for a call.

/// Fetches the cache line at `addr` before its use. Any address is legal: nothing is accessed, and
/// nothing faults. On processors other than x86-64 the function does nothing.
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

/// Like [`prefetch`], for the line at `base + offset + AHEAD`, if this core will write to it: the
/// line is removed from the caches of the other cores.
#[inline(always)]
pub fn prefetch_to_write<const AHEAD: usize>(base: usize, offset: usize) {
    // The instruction is written in assembly, because the compiler emits it only for processors
    // that are sure to have it. A processor that does not have it does nothing.
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address has no effect but on the cache.
    unsafe {
        core::arch::asm!("prefetchw [{} + {} + {}]", in(reg) base, in(reg) offset, const AHEAD, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (base, offset);
}

/// Copies `len` bytes from `from` to `to`; the two ranges may overlap. 16 to 64 bytes are copied in
/// this function, all read before any is written, because a call of `memcpy` would cost as much as
/// the copy.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes. Another process may write to both ranges
/// meanwhile: then it is undetermined which bytes are copied.
#[inline(always)]
pub unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    /// Copies `len` bytes like `copy`: two parts from the start and two from the end, each of the
    /// size of `T`. `T` is not longer than half of `len`, nor shorter than a quarter.
    #[inline(always)]
    unsafe fn four<T: Copy>(to: *mut u8, from: *const u8, len: usize) {
        let second = size_of::<T>();
        let third = len - 2 * size_of::<T>();
        let last = len - size_of::<T>();
        // SAFETY: all four parts are inside the `len` bytes, which the caller guarantees to be
        // readable and writable.
        unsafe {
            let a = from.cast::<T>().read_unaligned();
            let b = from.add(second).cast::<T>().read_unaligned();
            let c = from.add(third).cast::<T>().read_unaligned();
            let d = from.add(last).cast::<T>().read_unaligned();
            to.cast::<T>().write_unaligned(a);
            to.add(second).cast::<T>().write_unaligned(b);
            to.add(third).cast::<T>().write_unaligned(c);
            to.add(last).cast::<T>().write_unaligned(d);
        }
    }
    // SAFETY: the caller guarantees that `len` bytes are readable at `from` and writable at `to`.
    // In both calls of `four`, `len` is two to four times the size of `T`.
    unsafe {
        match len {
            32..=64 => four::<u128>(to, from, len),
            16..=31 => four::<u64>(to, from, len),
            _ => from.copy_to(to, len),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_whole_also_onto_itself() {
        for len in 0..=80_usize {
            for shift in 0..=8_usize {
                let mut bytes: Vec<u8> = (0..100).collect();
                let mut expected = bytes.clone();
                expected.copy_within(..len, shift);
                let at = bytes.as_mut_ptr();
                // SAFETY: both ranges are inside the first 88 of 100 bytes.
                unsafe { copy(at.add(shift), at, len) };
                assert_eq!(bytes, expected, "{len} bytes, {shift} up");
            }
        }
        prefetch(1);
    }
}
