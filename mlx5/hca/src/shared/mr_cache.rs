//! The MR cache of a queue pair: the region of its last access.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use mlx5_wire::Access;

use crate::shared::memory::{DeviceMemory, Keyed};
use crate::types::vendor::Fault;

/// A region, copied from its entry when an access by its key was last checked. The entry does not
/// change while its stamp is the same (H2 of `shared::layout`), so the next access by that key
/// reads only the stamp. The copy is valid as long as the memory of the region's device is mapped.
pub(crate) struct MrCache {
    /// Value of [`MrEntry::stamp`](crate::shared::layout::MrEntry::stamp) at that check.
    stamp: u64,
    entry: NonNull<AtomicU64>,
    /// Address of the region in the owner.
    start: u64,
    len: u64,
    /// Address of the region in this process.
    base: NonNull<u8>,
}

/// Number of look-ups of regions that the WRITEs of a queue pair may still make in a row. If none
/// is left, the general path executes the WRITE, which needs no cache. Without the limit, a WRITE
/// to a peer that changes its region all the time could look the region up without end.
pub(crate) struct Lookups(u32);

impl Lookups {
    /// Maximum number of look-ups in a row, plus one.
    pub(crate) const MAX: u32 = 128;

    pub(crate) const fn new() -> Self {
        Self(Self::MAX)
    }

    /// Counts a look-up. Returns `false`, and resets the count, if no look-up is left.
    pub(crate) fn take(&mut self) -> bool {
        self.0 -= 1;
        let may = self.0 > 0;
        if !may {
            *self = Self::new();
        }
        may
    }
}

/// A stamp that belongs to no region.
static NOWHERE: AtomicU64 = AtomicU64::new(0);

impl MrCache {
    /// Returns the empty cache, in which nothing is found.
    pub(crate) fn none() -> Self {
        Self {
            stamp: 0,
            entry: NonNull::from(&NOWHERE),
            start: 0,
            len: 0,
            base: NonNull::dangling(),
        }
    }

    /// Returns the address in this process of `len` bytes, at least one, at `addr` of the owner.
    /// `None` unless `key` still belongs to this registration and the bytes are inside the region.
    #[inline(always)]
    pub(crate) fn find(&self, key: u32, addr: u64, len: u64) -> Option<NonNull<u8>> {
        // SAFETY: `entry` points to an atomic in mapped memory, or to `NOWHERE`.
        let entry = unsafe { self.entry.as_ref() };
        // H2
        if self.stamp as u32 != key || entry.load(Ordering::Acquire) != self.stamp {
            return None;
        }
        let offset = addr.wrapping_sub(self.start);
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: the address is inside the region, which `of_own` or `of_peer` found to be mapped
        // in this process.
        Some(unsafe { self.base.add(offset as usize) })
    }

    /// Returns the region of this process's own `memory` to which the key of `bytes` belongs now,
    /// if the region contains the bytes and belongs to domain `pd`.
    pub(crate) fn of_own(memory: &DeviceMemory, bytes: Keyed, pd: u32) -> Result<Self, Fault> {
        let (cached, _) = Self::look_up(memory, bytes, Access::empty(), pd)?;
        let base = NonNull::new(cached.start as *mut u8).ok_or(Fault::Bounds)?;
        Ok(Self { base, ..cached })
    }

    /// Returns the region of a peer's `memory` to which the key of `bytes` belongs now, if the
    /// region allows WRITEs to the bytes in domain `pd`, and is mapped as a whole in this process.
    pub(crate) fn of_peer(memory: &DeviceMemory, bytes: Keyed, pd: u32) -> Result<Self, Fault> {
        let (cached, offset) = Self::look_up(memory, bytes, Access::REMOTE_WRITE, pd)?;
        let arena = &memory.arena;
        if offset > arena.len() as u64 || cached.len > arena.len() as u64 - offset {
            return Err(Fault::Bounds);
        }
        Ok(Self {
            // SAFETY: `offset` is inside the arena's mapping, or at its end.
            base: unsafe { arena.base().add(offset as usize) },
            ..cached
        })
    }

    /// Returns the region, without its address in this process, and its offset in the arena.
    fn look_up(
        memory: &DeviceMemory,
        bytes: Keyed,
        access: Access,
        pd: u32,
    ) -> Result<(Self, u64), Fault> {
        // H2. The stamp is read first: if the fields change after it, `find` sees another stamp.
        let stamp = memory.mr(bytes.key).stamp.load(Ordering::Acquire);
        let (entry, _) = memory.check(bytes, access, pd)?;
        let cached = Self {
            stamp,
            entry: NonNull::from(&entry.stamp),
            start: entry.addr.load(Ordering::Relaxed),
            len: entry.len.load(Ordering::Relaxed),
            base: NonNull::dangling(),
        };
        Ok((cached, entry.offset.load(Ordering::Relaxed)))
    }
}
