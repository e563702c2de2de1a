//! A device's memory, used by its owner and its peers: the three segments, and the check of every
//! access by key.

#[cfg(target_arch = "x86_64")]
use core::arch::asm;
use core::ptr::NonNull;
use std::io;
use std::sync::atomic::{Ordering, fence};

use copyrpc_shm::lane::Slot;
use copyrpc_shm::memfd::{Memfd, MemfdAttachError, MemfdCreateError, MemfdId, MemfdRangeError};
use copyrpc_shm::ready::ReadyWords;
use mlx5_wire::Access;

use crate::error::CreateError;
use crate::shared::arena::PAGE;
use crate::shared::layout::{
    ControlSegment, DatagramLane, FOREIGN, Lane, LanePlace, LanesSegment, MAX_QPS, Message,
    MrEntry, Pop, QpEntry, RECEIVES, RqEntry,
};
use crate::types::vendor::Fault;

/// A range of a device's memory that was checked by [`DeviceMemory::resolve`].
#[derive(Clone, Copy)]
pub(crate) enum Span {
    /// The address of memory that this process has mapped.
    Mapped(NonNull<u8>),
    /// Memory of another allocator, at this address in its process.
    Foreign { pid: libc::pid_t, addr: u64 },
}

/// The segments of one device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(crate) control_memfd: Memfd,
    pub(crate) lanes_memfd: Memfd,
    pub(crate) arena: Memfd,
}

/// A range of a registered region: its key, and the address and length of the range in the process
/// of the region's owner.
#[derive(Clone, Copy)]
pub(crate) struct Keyed {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

impl Keyed {
    #[inline(always)]
    pub(crate) const fn new(key: u32, addr: u64, len: u64) -> Self {
        Self { key, addr, len }
    }
}

impl DeviceMemory {
    /// Makes the segments of a new device. Their pages are committed later.
    pub(crate) fn create(arena_bytes: usize) -> Result<Self, (&'static str, MemfdCreateError)> {
        Ok(Self {
            control_memfd: Memfd::create("mlx5-control", size_of::<ControlSegment>())
                .map_err(|e| ("the control segment", e))?,
            lanes_memfd: Memfd::create("mlx5-lanes", size_of::<LanesSegment>())
                .map_err(|e| ("the lanes segment", e))?,
            arena: Memfd::create("mlx5-arena", arena_bytes).map_err(|e| ("the arena", e))?,
        })
    }

    pub(crate) fn attach(ids: &[MemfdId; 3]) -> Result<Self, MemfdAttachError> {
        let size_is = |id: &MemfdId, bytes: usize| {
            if id.bytes == bytes as u64 {
                Ok(())
            } else {
                Err(MemfdAttachError::Stale(*id))
            }
        };
        size_is(&ids[0], size_of::<ControlSegment>())?;
        size_is(&ids[1], size_of::<LanesSegment>())?;
        Ok(Self {
            control_memfd: Memfd::attach(&ids[0], false)?,
            lanes_memfd: Memfd::attach(&ids[1], true)?,
            arena: Memfd::attach(&ids[2], true)?,
        })
    }

    /// Returns another handle of the same mappings, for a peer in this process.
    pub(crate) fn share(&self) -> Self {
        Self {
            control_memfd: self.control_memfd.share(),
            lanes_memfd: self.lanes_memfd.share(),
            arena: self.arena.share(),
        }
    }

    pub(crate) fn ids(&self) -> [MemfdId; 3] {
        [
            self.control_memfd.id(),
            self.lanes_memfd.id(),
            self.arena.id(),
        ]
    }

    /// Returns the control segment. Peers only load from it; other processes have it read-only.
    #[inline(always)]
    pub(crate) fn control(&self) -> &ControlSegment {
        // SAFETY: the mapping has this size and page alignment, and the segment is made of atomics
        // only.
        unsafe { self.control_memfd.base().cast().as_ref() }
    }

    #[inline(always)]
    pub(crate) fn lanes(&self) -> &LanesSegment {
        // SAFETY: the mapping has this size and page alignment, and the segment is made of atomics
        // and `UnsafeCell`s only.
        unsafe { self.lanes_memfd.base().cast().as_ref() }
    }

    #[inline(always)]
    pub(crate) fn qp(&self, index: usize) -> &QpEntry {
        &self.control().qps[index]
    }

    #[inline(always)]
    pub(crate) fn lane(&self, index: usize) -> &Lane {
        &self.lanes().lanes[index]
    }

    #[inline(always)]
    /// Returns the slots of a lane. The place must be one that [`LanePlace::unpack`] accepts.
    pub(crate) fn lane_slots(&self, place: LanePlace) -> NonNull<Slot<Message>> {
        NonNull::from(&self.lanes().slots[place.range()]).cast()
    }

    pub(crate) fn datagram_lane(&self, index: usize) -> &DatagramLane {
        &self.lanes().datagrams[index]
    }

    pub(crate) fn receives(&self, index: usize) -> bool {
        self.qp(index).identity.load(Ordering::Relaxed) & RECEIVES != 0
    }

    /// Zeroes `len` bytes of the lanes segment at `at`.
    ///
    /// # Safety
    /// The bytes are committed and inside the segment, and no peer accesses them during the call.
    pub(crate) unsafe fn clear_lanes(&self, at: NonNull<u8>, len: usize) {
        let offset = at.addr().get() - self.lanes_memfd.base().addr().get();
        // SAFETY: guaranteed by the caller. The bytes are written through the mapping, and not
        // through a reference to slots, because slots have padding that no reference may write.
        unsafe { self.lanes_memfd.base().add(offset).write_bytes(0, len) };
    }

    /// Wakes the owner if it sleeps. The caller has set a ready bit before.
    pub(crate) fn wake(&self) {
        // H7 of `shared::layout`: this call sees the sleep, or the owner sees the ready bit.
        self.lanes().sleep.0.wake();
    }

    #[inline(always)]
    pub(crate) fn mr(&self, key: u32) -> &MrEntry {
        &self.control().mrs[(key >> 8) as usize & (crate::shared::layout::MAX_MRS - 1)]
    }

    pub(crate) fn rq(&self, rqn: u32) -> Option<(&RqEntry, &Pop)> {
        Some((
            self.control().rqs.get(rqn as usize)?,
            &self.lanes().pops[rqn as usize],
        ))
    }

    /// Checks an access to bytes of a region in domain `pd`. Returns the entry of the region, and
    /// the offset of the bytes in the region.
    #[inline(always)]
    pub(crate) fn check(
        &self,
        bytes: Keyed,
        access: Access,
        pd: u32,
    ) -> Result<(&MrEntry, u64), Fault> {
        let Keyed { key, addr, len } = bytes;
        let entry = self.mr(key);
        // H2 of `shared::layout`: while the stamp has this key, the other fields belong to its
        // region.
        if entry.stamp.load(Ordering::Acquire) as u32 != key {
            return Err(Fault::Key);
        }
        if entry.pd.load(Ordering::Relaxed) != pd {
            return Err(Fault::Domain);
        }
        if !access.is_empty()
            && entry.access.load(Ordering::Relaxed) & access.bits() != access.bits()
        {
            return Err(Fault::Access);
        }
        let offset = addr.wrapping_sub(entry.addr.load(Ordering::Relaxed));
        let region = entry.len.load(Ordering::Relaxed);
        if offset > region || len > region - offset {
            return Err(Fault::Bounds);
        }
        Ok((entry, offset))
    }

    /// Makes the check of [`check`](Self::check), and returns the span of the bytes. The owner,
    /// maybe another process, wrote the entry. So its range is checked against the arena too: a
    /// wrong range gives an error here, and no fault in the copy.
    #[inline(always)]
    pub(crate) fn resolve(&self, bytes: Keyed, access: Access, pd: u32) -> Result<Span, Fault> {
        let (entry, offset) = self.check(bytes, access, pd)?;
        let Keyed { addr, len, .. } = bytes;
        let base = entry.offset.load(Ordering::Relaxed);
        let start = base.wrapping_add(offset);
        let arena = self.arena.len() as u64;
        if start <= arena && len <= arena - start {
            // SAFETY: `start` is inside the arena's mapping, or at its end.
            return Ok(Span::Mapped(unsafe {
                self.arena.base().add(start as usize)
            }));
        }
        if base == FOREIGN {
            Ok(Span::Foreign {
                pid: self.arena.id().pid as libc::pid_t,
                addr,
            })
        } else {
            Err(Fault::Bounds)
        }
    }
}

/// Number of bytes that [`place`] places last.
const LAST: usize = size_of::<u64>();

/// Places a part of a WRITE, with immediate or not. Its last eight bytes become visible after all
/// others and after all earlier parts, since NICs place a message in the order of its addresses. A
/// reader that polls the end of a message, and not a CQE, relies on this order. If the eight bytes
/// are aligned, they become visible at once, and such a reader reads them atomically, with Acquire.
///
/// # Safety
/// Like [`copy`](copyrpc_shm::cache::copy).
#[inline(always)]
pub(crate) unsafe fn place(to: *mut u8, from: *const u8, len: usize) {
    /// Places all but the last eight bytes, and returns these eight. It places four pieces: two
    /// from the start, one that ends 16 bytes before the end, and the eight bytes after it. The
    /// first two pieces end before the last eight bytes, and at or after the start of the third
    /// piece.
    #[inline(always)]
    unsafe fn most<T: Copy>(to: *mut u8, from: *const u8, len: usize) -> u64 {
        let second = size_of::<T>();
        let third = len - 2 * LAST - size_of::<T>();
        let fourth = len - 2 * LAST;
        let last = len - LAST;
        // SAFETY: guaranteed by the caller; all pieces are inside the `len` bytes.
        unsafe {
            let a = from.cast::<T>().read_unaligned();
            let b = from.add(second).cast::<T>().read_unaligned();
            let c = from.add(third).cast::<T>().read_unaligned();
            let d = from.add(fourth).cast::<u64>().read_unaligned();
            let e = from.add(last).cast::<u64>().read_unaligned();
            to.cast::<T>().write_unaligned(a);
            to.add(second).cast::<T>().write_unaligned(b);
            to.add(third).cast::<T>().write_unaligned(c);
            to.add(fourth).cast::<u64>().write_unaligned(d);
            e
        }
    }
    // SAFETY: guaranteed by the caller. The last bytes are read first because source and target may
    // overlap.
    unsafe {
        let last = match len {
            40..=64 => most::<u128>(to, from, len),
            72..=112 => most::<[u128; 2]>(to, from, len),
            24..=39 => most::<u64>(to, from, len),
            _ => return place_other(to, from, len),
        };
        place_last(to, len, last);
    }
}

/// Places the last eight of `len` bytes at `to`, after all bytes that were placed before.
///
/// # Safety
/// `to` is writable for `len` bytes, and `len` is at least 8.
#[inline(always)]
unsafe fn place_last(to: *mut u8, len: usize, last: u64) {
    fence(Ordering::Release);
    // SAFETY: the caller guarantees that the last eight bytes are writable. On x86-64 they are
    // written by one store, which may be at any address and is atomic if its address is aligned.
    // Elsewhere the address is checked before it is used as an atomic.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        asm!("mov qword ptr [{to} + {len} - 8], {last}", to = in(reg) to, len = in(reg) len, last = in(reg) last, options(nostack, preserves_flags));
        #[cfg(not(target_arch = "x86_64"))]
        {
            let at = to.add(len - LAST).cast::<u64>();
            if at.is_aligned() {
                std::sync::atomic::AtomicU64::from_ptr(at).store(last, Ordering::Relaxed);
            } else {
                at.write_unaligned(last);
            }
        }
    }
}

/// Places any number of bytes. [`place`] calls it for the lengths for which it has no pieces.
///
/// # Safety
/// Like [`place`].
#[inline(never)]
unsafe fn place_other(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: guaranteed by the caller. The last eight bytes are inside the `len` bytes, and are
    // read first because source and target may overlap.
    unsafe {
        if len < LAST {
            // The fence makes earlier parts of the payload visible before these bytes.
            fence(Ordering::Release);
            return from.copy_to(to, len);
        }
        let rest = len - LAST;
        let last = from.add(rest).cast::<u64>().read_unaligned();
        from.copy_to(to, rest);
        place_last(to, len, last);
    }
}

impl Span {
    /// Copies `len` bytes from `from` to byte `offset` of the span.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes, and the span was resolved for at least `offset + len`.
    #[inline(always)]
    pub(crate) unsafe fn write(
        self,
        offset: u64,
        from: *const u8,
        len: usize,
    ) -> Result<(), Fault> {
        match self {
            // SAFETY: the caller resolved the span for these bytes, and `from` is readable. Source
            // and target may overlap (a loopback WRITE), which `place` allows. Other processes may
            // access the target at the same time, as with any DMA; nothing here reads the target
            // back.
            Self::Mapped(to) => unsafe { place(to.as_ptr().add(offset as usize), from, len) },
            Self::Foreign { pid, addr } => {
                cross_process(Direction::Write, pid, addr + offset, from.cast_mut(), len)?
            }
        }
        Ok(())
    }

    /// Copies `len` bytes at `offset` of the span to `to`.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes, and the span was resolved for at least `offset + len`.
    #[inline(always)]
    pub(crate) unsafe fn read(self, offset: u64, to: *mut u8, len: usize) -> Result<(), Fault> {
        match self {
            // SAFETY: the caller resolved the span for these bytes, and `to` is writable. Source
            // and target may overlap, and other processes may write the source at the same time, as
            // with any DMA.
            Self::Mapped(from) => unsafe { from.as_ptr().add(offset as usize).copy_to(to, len) },
            Self::Foreign { pid, addr } => {
                cross_process(Direction::Read, pid, addr + offset, to, len)?
            }
        }
        Ok(())
    }
}

#[inline(always)]
pub(crate) fn ready_words(memory: &DeviceMemory) -> ReadyWords {
    // SAFETY: the lanes segment holds the words for MAX_QPS lanes. Views do not outlive the memory
    // they are made from.
    unsafe { ReadyWords::new(NonNull::from(&memory.lanes().ready).cast(), MAX_QPS) }
}

/// Allocates the pages of `object`, which is a part of `segment`.
pub(crate) fn commit<T: ?Sized>(segment: &Memfd, object: &T) -> Result<(), MemfdRangeError> {
    let start =
        core::ptr::from_ref(object).cast::<u8>() as usize - segment.base().as_ptr() as usize;
    let end = start + size_of_val(object);
    segment.commit(start / PAGE * PAGE..end.next_multiple_of(PAGE))
}

pub(crate) fn memory_error(what: &'static str) -> impl Fn(MemfdRangeError) -> CreateError {
    move |e| CreateError::Memory {
        what,
        source: io::Error::other(e),
    }
}

enum Direction {
    Read,
    Write,
}

/// Copies with the kernel's cross-process copy, which works even if the process is stopped.
#[cold]
fn cross_process(
    direction: Direction,
    pid: libc::pid_t,
    remote: u64,
    local: *mut u8,
    len: usize,
) -> Result<(), Fault> {
    let local = libc::iovec {
        iov_base: local.cast(),
        iov_len: len,
    };
    let remote = libc::iovec {
        iov_base: remote as *mut libc::c_void,
        iov_len: len,
    };
    // SAFETY: both vectors are valid. The callers of `read` and `write` guarantee the local range.
    // The kernel checks the remote range against the other process.
    let copied = unsafe {
        match direction {
            Direction::Read => {
                libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0)
            }
            Direction::Write => {
                libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0)
            }
        }
    };
    match usize::try_from(copied) {
        Ok(copied) if copied == len => Ok(()),
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) => {
            Err(Fault::Gone)
        }
        _ => Err(Fault::Copy),
    }
}

/// Checks that peers can reach memory of other allocators in this process, and permits their access
/// if Yama requires that. An error is the reason why they cannot.
pub(crate) fn foreign_memory_reachable() -> Result<(), &'static str> {
    match std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(scope) if scope.trim() == "0" => Ok(()),
        Ok(scope) if scope.trim() == "1" => {
            // SAFETY: the call passes integers only.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
            Ok(())
        }
        Ok(_) => {
            Err("kernel.yama.ptrace_scope is 2 or more, so processes may not copy from one another")
        }
        Err(_) => Err("kernel.yama.ptrace_scope cannot be read"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_placed_whole_at_any_address_also_onto_itself() {
        for len in 0..=200_usize {
            for (from, to) in [(0, 0), (0, 8), (3, 16), (16, 1), (0, 211)] {
                let mut bytes: Vec<u8> = (0..=255).chain(0..=200).collect();
                let mut expected = bytes.clone();
                expected.copy_within(from..from + len, to);
                let at = bytes.as_mut_ptr();
                // SAFETY: the source ends at byte 216 or before, and the target at byte 411 or
                // before, of 457 bytes.
                unsafe { place(at.add(to), at.add(from), len) };
                assert_eq!(bytes, expected, "{len} bytes from {from} to {to}");
            }
        }
    }
}
