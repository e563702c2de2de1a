//! Descriptors that the HCA has for itself: a program that closes all descriptors must not close them, or their numbers would name other files of
//! the program when the HCA uses or closes them.

use core::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// Descriptors at or above this are never ours.
pub(crate) const MAX_FD: usize = 1 << 16;

static HELD: [AtomicBool; MAX_FD] = [const { AtomicBool::new(false) }; MAX_FD];

thread_local! {
    /// What runs is our own code, not the program's.
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// Runs our own code: what it opens is held, and what it closes is closed.
pub(crate) fn as_ourselves<T>(body: impl FnOnce() -> T) -> T {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            IS_OURS.set(self.0);
        }
    }
    let _back = Back(IS_OURS.replace(true));
    body()
}

/// A descriptor was opened: held, if by our own code.
pub(crate) fn opened(fd: c_int) -> c_int {
    if let Some(held) = HELD.get(fd as usize).filter(|_| IS_OURS.get()) {
        held.store(true, Ordering::Relaxed);
    }
    fd
}

/// A descriptor is about to be closed: not held any more, if by our own code.
pub(crate) fn closing(fd: c_int) {
    if IS_OURS.get() {
        hand_over(fd);
    }
}

/// The program gets it.
pub(crate) fn hand_over(fd: c_int) {
    if let Some(held) = HELD.get(fd as usize) {
        held.store(false, Ordering::Relaxed);
    }
}

/// Whether a descriptor is held, and it is the program that asks.
pub(crate) fn is_held(fd: c_int) -> bool {
    HELD.get(fd as usize).is_some_and(|held| held.load(Ordering::Relaxed)) && !IS_OURS.get()
}

/// In the child of a fork: none is held.
pub(crate) fn release_all() {
    for held in &HELD {
        if held.load(Ordering::Relaxed) {
            held.store(false, Ordering::Relaxed);
        }
    }
}
