//! Memory regions: registering, deregistering, and what peers see of them.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::io;

use shm::memfd::HUGE_PAGE;

use super::arena::PAGE;
use super::layout::{FOREIGN, MAX_MRS};
use super::memory::foreign_memory_reachable;
use super::objects::{commit, free_index};
use super::{Hca, State};
use crate::control::MrParts;
use crate::mr::{Access, Pages, RegisterError};

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

impl Hca {
    /// A region in the arena, in huge pages if they are asked for and to be had.
    pub(crate) fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        access.check(bytes)?;
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
        let committed = if huge {
            arena.commit_huge(range).map(|why| why.map_or(Pages::Huge, Pages::NotHuge))
        } else {
            arena.commit(range).map(|()| Pages::Base)
        };
        let published = committed.map_err(|e| no_memory(io::Error::other(e))).and_then(|pages| {
            let parts = self.publish_mr(index, slot.tag, pd, addr, bytes, offset as u64, access)?;
            Ok(MrParts { pages, ..parts })
        });
        match published {
            Ok(_) => slot.state = MrState::Arena { offset, bytes: size },
            Err(_) => state.arena.give(offset, size),
        }
        published
    }

    pub(crate) fn register_foreign(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        access.check(bytes)?;
        if access.contains(Access::REMOTE_ATOMIC) {
            return Err(RegisterError::Unreachable { reason: "no process can do an atomic operation on another's private memory" });
        }
        if access.intersects(Access::REMOTE_READ | Access::REMOTE_WRITE) {
            foreign_memory_reachable().map_err(|reason| RegisterError::Unreachable { reason })?;
        }
        self.place_foreign(pd, addr, bytes, access)
    }

    /// A region of memory that is not this crate's.
    pub(crate) fn place_foreign(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        access.check(bytes)?;
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
    ) -> Result<MrParts, RegisterError> {
        let key = (index as u32) << 8 | u32::from(tag);
        let entry = self.memory.mr(key);
        commit(self.memory.control_memfd(), entry).map_err(|e| RegisterError::Memory { bytes: len, source: io::Error::other(e) })?;
        entry.addr.store(addr.as_ptr() as u64, Ordering::Relaxed);
        entry.len.store(len as u64, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        // H2
        entry.key.store(key, Ordering::Release);
        Ok(MrParts { key, addr, len, pages: Pages::Base })
    }

    /// Invalidates the key, waits for peers that may be copying under it, and gives the memory back. `false` if one of them does not finish
    /// in time (it may be stopped, and resume): then the region's place stays taken, and calling this again looks again.
    pub(crate) fn try_deregister(&self, key: u32) -> bool {
        let State { mrs, arena, links, stuck, .. } = &mut *self.state.borrow_mut();
        self.memory.mr(key).key.store(0, Ordering::Release);
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
    /// time; calling this again looks again.
    pub(crate) fn try_reregister(&self, key: u32, pd: u32, access: Access) -> Result<bool, RegisterError> {
        let State { links, stuck, .. } = &mut *self.state.borrow_mut();
        let entry = self.memory.mr(key);
        access.check(entry.len.load(Ordering::Relaxed) as usize)?;
        // Of both at once a peer may see one, as long as this goes on and no longer.
        entry.pd.store(pd, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        Ok(self.quiesce(stuck, links.peers()))
    }

    /// Deregisters for good: what cannot be given back is never used again by this device.
    pub(crate) fn deregister(&self, key: u32) {
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
