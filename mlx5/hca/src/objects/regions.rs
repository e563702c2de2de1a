//! Memory regions: registers and deregisters them, and writes the entries that peers read.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::io;

use copyrpc_shm::memfd::HUGE_PAGE;
use mlx5_wire::Access;

use crate::error::{RegisterError, check_region};
use crate::random::Random;
use crate::shared::arena::PAGE;
use crate::shared::layout::{FOREIGN, MAX_MRS};
use crate::shared::memory::{commit, foreign_memory_reachable};
use crate::types::request::{Pages, Region};
use crate::{Hca, State};

/// Index of the first entry that can have a region. The entries before it would have the keys 0 and
/// 0x100 (`INVALID_LKEY`).
const FIRST_MR: usize = 2;
const ENTRIES: usize = MAX_MRS - FIRST_MR;
/// Maximum number of regions of a device.
pub const MAX_REGIONS: u32 = ENTRIES as u32;
/// Number of free entries that are left unused. An entry is used again, the oldest first, only if
/// more are free, or if the table is full. Unless the table is full, a key returns after more than
/// 256 times this number of registrations, because an entry has 256 keys.
const REUSE_DELAY: usize = 1024;

pub(crate) struct Regions {
    slots: Vec<MrSlot>,
    /// Free slots that had a region. The slot that was freed first is first.
    free: VecDeque<usize>,
    /// [`REUSE_DELAY`], or less in tests.
    pub(crate) reuse_delay: usize,
    /// Entry of the first slot, less [`FIRST_MR`]. It is random, so that two successive devices
    /// with the same LID nearly always have different keys.
    first: usize,
}

/// The region of an entry, and the tag (the lowest byte) of its key. If the entry is free, this is
/// the tag of its next key.
#[derive(Clone, Copy)]
struct MrSlot {
    tag: u8,
    state: MrState,
}

#[derive(Clone, Copy)]
enum MrState {
    Free,
    Arena { offset: usize, bytes: usize },
    Foreign,
}

impl Regions {
    pub(crate) fn new(random: &mut Random) -> Self {
        let first = random.below(ENTRIES as u64) as usize;
        Self {
            slots: Vec::new(),
            free: VecDeque::new(),
            reuse_delay: REUSE_DELAY,
            first,
        }
    }

    /// Takes a slot. Returns the slot and the key of its region. The caller must [give](Self::give)
    /// the slot back if it makes no region.
    fn take(&mut self) -> Result<(usize, u32), RegisterError> {
        let may_grow = self.slots.len() < ENTRIES;
        let oldest = if self.free.len() > self.reuse_delay || !may_grow {
            self.free.pop_front()
        } else {
            None
        };
        let slot = match oldest {
            Some(slot) => slot,
            None if may_grow => {
                self.slots.push(MrSlot {
                    tag: 0,
                    state: MrState::Free,
                });
                self.slots.len() - 1
            }
            None => return Err(RegisterError::Exhausted { max: ENTRIES }),
        };
        let entry = FIRST_MR + (self.first + slot) % ENTRIES;
        Ok((slot, (entry as u32) << 8 | u32::from(self.slots[slot].tag)))
    }

    fn find(&self, key: u32) -> Option<usize> {
        let slot = ((key >> 8) as usize + 2 * ENTRIES - FIRST_MR - self.first) % ENTRIES;
        let is_there =
            |found: &MrSlot| found.tag == key as u8 && !matches!(found.state, MrState::Free);
        self.slots.get(slot).is_some_and(is_there).then_some(slot)
    }

    /// Frees a slot. The next region in the slot has another key.
    fn give(&mut self, slot: usize) {
        self.slots[slot] = MrSlot {
            tag: self.slots[slot].tag.wrapping_add(1),
            state: MrState::Free,
        };
        self.free.push_back(slot);
    }
}

impl Hca {
    /// Allocates a region of zeroed memory that peers access at memory speed, on huge pages if
    /// requested and available.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc_registered(
        &self,
        pd: u32,
        bytes: usize,
        access: Access,
        huge: bool,
    ) -> Result<Region, RegisterError> {
        let state = &mut *self.state.borrow_mut();
        check_region(bytes, access)?;
        let no_memory = |source| RegisterError::Memory { bytes, source };
        let full = || {
            no_memory(io::Error::other(
                "the device's arena is full; raise arena_bytes",
            ))
        };
        let page = if huge { HUGE_PAGE } else { PAGE };
        let size = bytes.checked_next_multiple_of(page).ok_or_else(full)?;
        let offset = state.arena.take_aligned(size, page).ok_or_else(full)?;
        let taken = state
            .mrs
            .take()
            .inspect_err(|_| state.arena.give(offset, size));
        let (slot, key) = taken?;
        // SAFETY: `offset` is inside the arena.
        let addr = unsafe { self.memory.arena.base().add(offset) };
        let (arena, range) = (&self.memory.arena, offset..offset + size);
        let committed = if huge {
            arena.commit_huge(range)
        } else {
            arena.commit(range).map(|()| None)
        };
        let published = committed
            .map_err(|e| no_memory(io::Error::other(e)))
            .and_then(|not_huge| {
                let region = self.publish_mr(key, pd, addr, bytes, offset as u64, access)?;
                let pages = if huge {
                    not_huge.map_or(Pages::Huge, Pages::NotHuge)
                } else {
                    Pages::Base
                };
                Ok(Region { pages, ..region })
            });
        match published {
            Ok(_) => {
                state.mrs.slots[slot].state = MrState::Arena {
                    offset,
                    bytes: size,
                }
            }
            Err(_) => {
                state.mrs.give(slot);
                state.arena.give(offset, size);
            }
        }
        published
    }

    /// Registers memory of this process, which peers reach by the kernel's cross-process copy. This
    /// device executes the atomics on this memory.
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// `addr..addr + bytes` stays mapped until [`try_deregister`](Self::try_deregister) has
    /// returned `true`.
    pub unsafe fn register(
        &self,
        pd: u32,
        addr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        check_region(bytes, access)?;
        // Peers of a device with a port use the kernel's copy also to fill receive buffers.
        if self.port.is_some() || access.intersects(Access::REMOTE_READ | Access::REMOTE_WRITE) {
            foreign_memory_reachable().map_err(|reason| RegisterError::Unreachable { reason })?;
        }
        let state = &mut *self.state.borrow_mut();
        let (slot, key) = state.mrs.take()?;
        let published = self.publish_mr(key, pd, addr, bytes, FOREIGN, access);
        match published {
            Ok(_) => state.mrs.slots[slot].state = MrState::Foreign,
            Err(_) => state.mrs.give(slot),
        }
        published
    }

    fn publish_mr(
        &self,
        key: u32,
        pd: u32,
        addr: NonNull<u8>,
        len: usize,
        offset: u64,
        access: Access,
    ) -> Result<Region, RegisterError> {
        let entry = self.memory.mr(key);
        commit(&self.memory.control_memfd, entry).map_err(|e| RegisterError::Memory {
            bytes: len,
            source: io::Error::other(e),
        })?;
        entry.addr.store(addr.as_ptr() as u64, Ordering::Relaxed);
        entry.len.store(len as u64, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        // H2 of `shared::layout`: stored after the entry's other fields.
        entry.stamp.store(self.stamp(key), Ordering::Release);
        Ok(Region {
            key,
            addr,
            len,
            pages: Pages::Base,
        })
    }

    /// Returns a new stamp for the entry of `key`, after its fields have changed.
    fn stamp(&self, key: u32) -> u64 {
        let registration = self.registrations.get().wrapping_add(1);
        self.registrations.set(registration);
        u64::from(registration) << 32 | u64::from(key)
    }

    /// Invalidates the key, waits for peers that may be copying under it, and frees the memory.
    /// Returns `false` if a peer does not finish in time; that peer may be stopped, and resume.
    /// Then the region keeps its place, and another call tries again. Returns `true` for a key that
    /// no region has.
    pub fn try_deregister(&self, key: u32) -> bool {
        let state = &mut *self.state.borrow_mut();
        let Some(slot) = state.mrs.find(key) else {
            return true;
        };
        self.memory.mr(key).stamp.store(0, Ordering::Release);
        if !self.quiesce(&mut state.stuck, state.links.peers()) {
            return false;
        }
        if let MrState::Arena { offset, bytes } = state.mrs.slots[slot].state {
            // The pages are zeroed for the next region. Pages that cannot be zeroed are not reused.
            if self.memory.arena.release(offset..offset + bytes).is_ok() {
                state.arena.give(offset, bytes);
            }
        }
        state.mrs.give(slot);
        true
    }

    /// Changes the domain and the access of a region in place: the key stays. Returns `false` if a
    /// peer that may be using the old values does not finish in time (50 ms); another call tries
    /// again.
    ///
    /// # Errors
    /// [`RegisterError::RemoteWithoutLocalWrite`].
    pub fn try_reregister(&self, key: u32, pd: u32, access: Access) -> Result<bool, RegisterError> {
        let State { links, stuck, .. } = &mut *self.state.borrow_mut();
        let entry = self.memory.mr(key);
        check_region(entry.len.load(Ordering::Relaxed) as usize, access)?;
        // A peer may see only one of the two changes until `quiesce` returns.
        entry.pd.store(pd, Ordering::Relaxed);
        entry.access.store(access.bits(), Ordering::Relaxed);
        // H2: stored after the new values.
        entry.stamp.store(self.stamp(key), Ordering::Release);
        Ok(self.quiesce(stuck, links.peers()))
    }

    /// Deregisters the region of `key`, without a retry. Memory that a peer may still use is never
    /// reused.
    pub fn deregister(&self, key: u32) {
        if !self.try_deregister(key) {
            self.state.borrow_mut().quarantined += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn regions() -> Regions {
        Regions::new(&mut Random::new(7))
    }

    fn take(regions: &mut Regions) -> Option<u32> {
        let (slot, key) = regions.take().ok()?;
        regions.slots[slot].state = MrState::Foreign;
        Some(key)
    }

    #[test]
    fn a_key_returns_after_256_registrations_of_as_many_entries_as_are_free_first() {
        let mut regions = regions();
        let held = take(&mut regions).unwrap();
        let mut last = HashMap::new();
        let mut soonest = usize::MAX;
        for number in 0..600_000 {
            let key = take(&mut regions).unwrap();
            soonest = last
                .insert(key, number)
                .map_or(soonest, |before| soonest.min(number - before));
            let slot = regions.find(key).unwrap();
            regions.give(slot);
            assert!(regions.find(key).is_none() && key != held);
        }
        assert_eq!(soonest, 256 * (REUSE_DELAY + 1));
    }

    #[test]
    fn all_entries_are_used_but_those_of_the_reserved_keys() {
        let mut regions = regions();
        let mut keys: Vec<u32> = core::iter::from_fn(|| take(&mut regions)).collect();
        let first = keys[0];
        keys.sort_unstable();
        assert!(
            keys.iter()
                .map(|key| (key >> 8) as usize)
                .eq(FIRST_MR..MAX_MRS)
        );
        assert!(keys.iter().all(|&key| regions.find(key).is_some()));
        // All entries are taken: the entry that is returned is used at once, under another key.
        let slot = regions.find(first).unwrap();
        regions.give(slot);
        assert_eq!(take(&mut regions), Some(first + 1));
        assert_eq!(take(&mut regions), None);
    }
}
