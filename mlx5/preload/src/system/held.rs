//! Descriptors that the HCA opens for its own use. A program that closes all descriptors must not
//! close these descriptors: later their numbers would refer to other files of the program, which
//! the HCA would use or close.
//!
//! The standard library makes descriptors by calls of the C library, which are interposed and mark
//! a descriptor as held. Code of this crate that makes a descriptor by another call must mark the
//! descriptor ([`opened`]).

use core::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

/// Descriptors at or above this number are never held.
pub(crate) const MAX_FD: usize = 1 << 16;

static HELD: [AtomicBool; MAX_FD] = [const { AtomicBool::new(false) }; MAX_FD];

thread_local! {
    /// Whether this thread runs code of the library rather than of the program.
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// Runs code of the library: descriptors that it opens are held, and it may close held descriptors.
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

/// Marks a new descriptor as held if code of the library opened it.
pub(crate) fn opened(fd: c_int) -> c_int {
    if let Some(held) = HELD.get(fd as usize).filter(|_| IS_OURS.get()) {
        held.store(true, Ordering::Relaxed);
    }
    fd
}

/// Prepares to close a descriptor: if code of the library closes the descriptor, it is not held any
/// more.
pub(crate) fn closing(fd: c_int) {
    if IS_OURS.get() {
        hand_over(fd);
    }
}

/// Gives a descriptor to the program: the descriptor is not held any more.
pub(crate) fn hand_over(fd: c_int) {
    if let Some(held) = HELD.get(fd as usize) {
        held.store(false, Ordering::Relaxed);
    }
}

/// Returns whether a descriptor is held, and the caller is the program and not the library.
pub(crate) fn is_held(fd: c_int) -> bool {
    HELD.get(fd as usize)
        .is_some_and(|held| held.load(Ordering::Relaxed))
        && !IS_OURS.get()
}

/// Releases all descriptors, in the child of a fork.
pub(crate) fn release_all() {
    for held in &HELD {
        if held.load(Ordering::Relaxed) {
            held.store(false, Ordering::Relaxed);
        }
    }
}
