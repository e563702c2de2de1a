//! Another device, mapped, and the proof that it has ended.

use core::ptr::NonNull;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use copyrpc_shm::region::{OwnerState, Region, owner_may_be_gone};

use crate::shared::memory::DeviceMemory;

/// The life word of a living device of a local fabric, as [`owner_may_be_gone`] reads it.
pub(crate) const LIVES: u32 = 1;

/// The word that shows whether a device lives, in memory that outlives the device.
pub(crate) enum Life {
    Shared(Region),
    Local(Arc<AtomicU32>),
}

/// Another device (or this device, for loopback), mapped.
pub(crate) struct Peer {
    pub(crate) lid: u16,
    pub(crate) epoch: u64,
    pub(crate) memory: DeviceMemory,
    /// Life word, kept alive by `life`. If `owner_may_be_gone(word)`, the slow check is needed.
    pub(crate) word: NonNull<AtomicU32>,
    life: Life,
    /// Whether [`is_newly_gone`](Self::is_newly_gone) has returned `true`.
    noticed: Cell<bool>,
}

impl Peer {
    pub(crate) fn new(lid: u16, epoch: u64, memory: DeviceMemory, life: Life) -> Self {
        let word = match &life {
            Life::Shared(region) => region.owner_word(),
            Life::Local(life) => NonNull::from(&**life),
        };
        Self {
            lid,
            epoch,
            memory,
            word,
            life,
            noticed: Cell::new(false),
        }
    }

    /// Returns whether the peer is gone and this is the first call that detects it.
    pub(crate) fn is_newly_gone(&self) -> bool {
        !self.noticed.get() && self.is_gone() && !self.noticed.replace(true)
    }

    pub(crate) fn may_be_of_another_process(&self) -> bool {
        matches!(self.life, Life::Shared(_))
    }

    /// Returns the peer's `executing` word: odd while the peer executes a doorbell, and different
    /// for each doorbell.
    pub(crate) fn executing(&self) -> u64 {
        self.memory
            .control()
            .header
            .executing
            .load(Ordering::Acquire)
    }

    /// Returns the number of times that the peer has copied its driver's receives (H9 of
    /// `shared::layout`).
    pub(crate) fn copies(&self) -> u64 {
        self.memory.control().header.copies.load(Ordering::Acquire)
    }

    /// Returns whether the peer's process executes a full fence after each write of its `executing`
    /// word. If it does, a full fence in this process is enough to see the word (H3).
    pub(crate) fn has_fences(&self) -> bool {
        self.memory
            .control()
            .header
            .has_fences
            .load(Ordering::Relaxed)
            != 0
    }

    /// Returns whether the peer's process is dead, or closed the device. Usually costs one load.
    #[inline(always)]
    pub(crate) fn is_gone(&self) -> bool {
        // SAFETY: `word` points to an atomic that `life` keeps alive.
        let word = unsafe { self.word.as_ref() }.load(Ordering::Acquire);
        owner_may_be_gone(word) && self.is_proven_to_be_gone()
    }

    #[cold]
    fn is_proven_to_be_gone(&self) -> bool {
        match &self.life {
            Life::Shared(region) => region.owner_state() != OwnerState::Alive,
            Life::Local(life) => life.load(Ordering::Acquire) != LIVES,
        }
    }
}
