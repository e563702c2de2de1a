//! The calls that a client gave up: a word for each slot of its calls. The client stores the tag of
//! the call there, and the server reads the word when its owner asks whether a request is wanted,
//! so calls that are not given up cost nothing. Tags are not used again while the client is
//! connected, so no word is cleared before the server resets the memory of the entry.

use std::ptr::NonNull;

use copyrpc_calls::Tag;
use copyrpc_shm::sync::{AtomicU64, Ordering};

/// The words of one client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GivenUp {
    words: NonNull<AtomicU64>,
    depth: usize,
}

// SAFETY: a `GivenUp` is a view of shared atomics, which any thread may use. They stay mapped as
// long as the view is used (contract of `new`).
unsafe impl Send for GivenUp {}

impl GivenUp {
    /// Makes a view of `depth` words.
    ///
    /// # Safety
    /// The words were zeroed before the first use, and stay mapped as long as this value or a copy
    /// is used.
    pub(crate) const unsafe fn new(words: NonNull<AtomicU64>, depth: usize) -> Self {
        Self { words, depth }
    }

    fn word(&self, slot: usize) -> Option<&AtomicU64> {
        // SAFETY: the slot was checked, so its word is one of those that `new` was given, and it is
        // an atomic.
        (slot < self.depth).then(|| unsafe { self.words.add(slot).as_ref() })
    }

    /// Client: notes for the server that this call was given up.
    pub(crate) fn tell(&self, call: Tag) {
        if let Some(word) = self.word(call.slot()) {
            // Nothing else is read because of the word, so no other memory has to be visible.
            word.store(call.pack(0), Ordering::Relaxed);
        }
    }

    /// Server: returns whether the client gave up this call. The slot may be any number.
    pub(crate) fn has(&self, call: Tag) -> bool {
        self.word(call.slot())
            .is_some_and(|word| word.load(Ordering::Relaxed) == call.pack(0))
    }

    /// Server: makes the words ready for the next client.
    pub(crate) fn reset(&self) {
        (0..self.depth)
            .filter_map(|slot| self.word(slot))
            .for_each(|word| word.store(0, Ordering::Relaxed));
    }
}
