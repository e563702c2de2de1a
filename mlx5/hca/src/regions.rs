//! Memory regions: registering, deregistering, and what peers see of them.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::io;

use mlx5_wire::Access;
use shm::memfd::HUGE_PAGE;

use super::arena::{PAGE, free_index};
use super::error::RegisterError;
use super::layout::{FOREIGN, MAX_MRS};
use super::memory::{commit, foreign_memory_reachable};
use super::request::Region;
use super::{Hca, State};

/// Regions below it are reserved.
const FIRST_MR: usize = 2;

/// A memory region index in use, or its key's next tag.
#[derive(Clone, Copy, Default)]
pub(crate) struct MrSlot {
    tag: u8,
    state: MrState,
}

#[derive(Clone, Copy, Default)]
enum MrState {
    #[default]
    Free,
    Arena {
        offset: usize,
        bytes: usize,
    },
    Foreign,
    /// Not to be used: keys 0 and 0x100 (`INVALID_LKEY`) would be these indices'.
    Reserved,
}

/// Refuses what no device registers.
fn check(bytes: usize, access: Access) -> Result<(), RegisterError> {
    match (bytes, access.is_legal()) {
        (0, _) => Err(RegisterError::Empty),
        (_, false) => Err(RegisterError::RemoteWithoutLocalWrite),
        (_, true) => Ok(()),
    }
}

impl Hca {
    /// Allocates a region of zeroed memory that peers access at memory speed, on huge pages if requested and available.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<Region, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        check(bytes, access)?;
        let index = free_region(state)?;
        let no_memory = |source| RegisterError::Memory { bytes, source };
        let full = || no_memory(io::Error::other("the device's arena is full; raise arena_bytes"));
        let page = if huge { HUGE_PAGE } else { PAGE };
        let size = bytes.checked_next_multiple_of(page).ok_or_else(full)?;
        let offset = state.arena.take_aligned(size, page).ok_or_else(full)?;
        // SAFETY: inside the arena.
        let addr = unsafe { self.memory.arena().base().add(offset) };
        let slot = &mut state.mrs[index];
        let (arena, range) = (self.memory.arena(), offset..offset + size);
        let committed = if huge { arena.commit_huge(range) } else { arena.commit(range).map(|()| None) };
        let published = committed.map_err(|e| no_memory(io::Error::other(e))).and_then(|not_huge| {
            let region = self.publish_mr(index, slot.tag, pd, addr, bytes, offset as u64, access)?;
            Ok(Region { not_huge, ..region })
        });
        match published {
            Ok(_) => slot.state = MrState::Arena { offset, bytes: size },
            Err(_) => state.arena.give(offset, size),
        }
        published
    }

    /// Registers memory of this process, which peers reach by the kernel's cross-process copy. Atomics are executed by this device.
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// `addr..addr + bytes` stays mapped until [`try_deregister`](Self::try_deregister) returned `true`.
    pub unsafe fn register(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<Region, RegisterError> {
        check(bytes, access)?;
        // Of a port's queue pairs all memory is such, and so is that which their peers send into.
        if self.port.is_some() || access.intersects(Access::REMOTE_READ | Access::REMOTE_WRITE) {
            foreign_memory_reachable().map_err(|reason| RegisterError::Unreachable { reason })?;
        }
        let state = &mut *self.state.borrow_mut();
        let index = free_region(state)?;
        let slot = &mut state.mrs[index];
        let published = self.publish_mr(index, slot.tag, pd, addr, bytes, FOREIGN, access)?;
        slot.state = MrState::Foreign;
        Ok(published)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one table entry")]
    fn publish_mr(
        &self,
        index: usize,
        tag: u8,
        pd: u32,
        addr: NonNull<u8>,
        len: usize,
        offset: u64,
        access: Access,
    ) -> Result<Region, RegisterError> {
        let key = (index as u32) << 8 | u32::from(tag);
        let entry = self.memory.mr(key);
        commit(self.memory.control_memfd(), entry).map_err(|e| RegisterError::Memory { bytes: len, source: io::Error::other(e) })?;
        entry.addr.store(addr.as_ptr() as u64, Ordering::Relaxed);
        entry.len.store(len as u64, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        // H2
        entry.stamp.store(self.stamp(key), Ordering::Release);
        Ok(Region { key, addr, len, not_huge: None })
    }

    /// Returns a new stamp for the entry of `key`, whose fields have changed.
    fn stamp(&self, key: u32) -> u64 {
        let registration = self.registrations.get().wrapping_add(1);
        self.registrations.set(registration);
        u64::from(registration) << 32 | u64::from(key)
    }

    /// Invalidates the key, waits for peers that may be copying under it, and gives the memory back. `false` if one of them does not finish
    /// in time (it may be stopped, and resume): then the region's place stays taken, and calling this again looks again.
    pub fn try_deregister(&self, key: u32) -> bool {
        let State { mrs, arena, links, stuck, .. } = &mut *self.state.borrow_mut();
        self.memory.mr(key).stamp.store(0, Ordering::Release);
        if !self.quiesce(stuck, links.peers()) {
            return false;
        }
        let slot = &mut mrs[(key >> 8) as usize];
        if let MrState::Arena { offset, bytes } = slot.state {
            // Zero for the next region; pages that cannot be zeroed are not used again.
            if self.memory.arena().release(offset..offset + bytes).is_ok() {
                arena.give(offset, bytes);
            }
        }
        *slot = MrSlot { tag: slot.tag.wrapping_add(1), state: MrState::Free };
        true
    }

    /// Changes the domain and the access of a region in place: the key stays. `false` if a peer that may have looked before does not finish in
    /// time (50 ms); calling this again looks again.
    ///
    /// # Errors
    /// [`RegisterError::RemoteWithoutLocalWrite`].
    pub fn try_reregister(&self, key: u32, pd: u32, access: Access) -> Result<bool, RegisterError> {
        let State { links, stuck, .. } = &mut *self.state.borrow_mut();
        let entry = self.memory.mr(key);
        check(entry.len.load(Ordering::Relaxed) as usize, access)?;
        // Of both at once a peer may see one, as long as this goes on and no longer.
        entry.pd.store(pd, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        // H2
        entry.stamp.store(self.stamp(key), Ordering::Release);
        Ok(self.quiesce(stuck, links.peers()))
    }

    /// Deregisters for good: what cannot be given back is never used again by this device.
    pub fn deregister(&self, key: u32) {
        if !self.try_deregister(key) {
            self.state.borrow_mut().quarantined += 1;
        }
    }
}

fn free_region(state: &mut State) -> Result<usize, RegisterError> {
    let is_free = |slot: &MrSlot| matches!(slot.state, MrState::Free);
    if state.mrs.is_empty() {
        state.mrs.resize(FIRST_MR, MrSlot { tag: 0, state: MrState::Reserved });
    }
    free_index(&mut state.mrs, MAX_MRS, is_free, MrSlot::default).ok_or(RegisterError::Exhausted { max: MAX_MRS })
}
