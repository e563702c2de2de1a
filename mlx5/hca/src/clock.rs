//! Sources of the software HCA's time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use copyrpc_shm::clock;

/// The clock of a device's timers, time-outs and traces.
#[derive(Clone, Debug, Default)]
pub enum Clock {
    /// The system's monotonic clock.
    #[default]
    System,
    /// A clock that its user sets, in ns: for tests and simulations.
    Manual(Arc<AtomicU64>),
    /// A clock that its user sets, and that every poll of an empty CQ advances by a constant. So a
    /// loop that polls for an event ends, and so does a blocking wait.
    Stepping {
        /// The present time, in ns.
        now_ns: Arc<AtomicU64>,
        /// Time that each poll of an empty CQ adds, in ns.
        poll_ns: u64,
    },
}

impl Clock {
    /// Returns the time in ns since an arbitrary moment.
    #[must_use]
    #[inline]
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::System => clock::monotonic_ns(),
            Self::Manual(now_ns) | Self::Stepping { now_ns, .. } => now_ns.load(Ordering::Relaxed),
        }
    }

    /// Like [`now_ns`](Self::now_ns) at a fifth of the cost (`CLOCK_MONOTONIC_COARSE`), but with
    /// the system's clock the time may be some milliseconds old.
    pub(crate) fn coarse_now_ns(&self) -> u64 {
        match self {
            Self::System => clock::coarse_ns(),
            Self::Manual(_) | Self::Stepping { .. } => self.now_ns(),
        }
    }

    /// Returns whether polls of empty CQs advance this clock.
    pub(crate) fn steps(&self) -> bool {
        matches!(self, Self::Stepping { .. })
    }

    /// Advances the clock for a poll that found a CQ empty.
    pub(crate) fn polled(&self) {
        if let Self::Stepping { now_ns, poll_ns } = self {
            now_ns.fetch_add(*poll_ns, Ordering::Relaxed);
        }
    }
}
