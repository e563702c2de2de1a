//! The clock: the system's, or a clock that is set by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A monotonic clock, in nanoseconds since an arbitrary moment: the system's (the default), or a
/// clock that is set [by hand](Self::by_hand). Cheap to clone, `Send + Sync`.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    hands: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// Makes a clock whose time is the value of `hands`, which only grows: time passes when the
    /// owner of `hands` stores a value.
    #[must_use]
    pub fn by_hand(hands: Arc<AtomicU64>) -> Self {
        Self { hands: Some(hands) }
    }

    /// Returns the time.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.hands
            .as_ref()
            .map_or_else(monotonic_ns, |hands| hands.load(Ordering::Relaxed))
    }
}

/// Returns the number of nanoseconds since an arbitrary moment (`CLOCK_MONOTONIC`).
#[must_use]
pub fn monotonic_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// Returns the time of the last tick of the kernel, at most 10 ms ago, for a fifth of the cost of
/// [`monotonic_ns`] (`CLOCK_MONOTONIC_COARSE`).
#[must_use]
pub fn coarse_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC_COARSE)
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a valid `timespec` for the whole call. Linux has both clocks, so the call
    // cannot fail.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
