//! How the main thread of a rank steers its workers, and how a worker's failure stops them all.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// What clients do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing yet: other ranks are still connecting.
    Ready,
    /// Load that is not measured.
    WarmUp,
    /// Load that counts for this run.
    Window(u16),
    /// Load that is not measured: ranks are meeting before the next window.
    Between,
    /// Nothing new; what is outstanding may end.
    Drain,
}

impl Phase {
    /// Whether clients issue requests.
    #[must_use]
    pub const fn is_loading(self) -> bool {
        matches!(self, Self::WarmUp | Self::Window(_) | Self::Between)
    }

    const fn encode(self) -> u32 {
        match self {
            Self::Ready => 0,
            Self::WarmUp => 1,
            Self::Between => 2,
            Self::Drain => 3,
            Self::Window(run) => 4 + run as u32,
        }
    }

    const fn decode(word: u32) -> Self {
        match word {
            0 => Self::Ready,
            1 => Self::WarmUp,
            2 => Self::Between,
            3 => Self::Drain,
            run => Self::Window((run - 4) as u16),
        }
    }
}

/// Shared by the threads of one rank. `E` is why a worker failed.
#[derive(Debug)]
pub struct Control<E> {
    phase: AtomicU32,
    stopped: AtomicBool,
    failure: Mutex<Option<E>>,
}

impl<E> Control<E> {
    /// In [`Phase::Ready`].
    #[must_use]
    pub const fn new() -> Self {
        Self { phase: AtomicU32::new(Phase::Ready.encode()), stopped: AtomicBool::new(false), failure: Mutex::new(None) }
    }

    /// The phase clients are in.
    #[inline]
    pub fn phase(&self) -> Phase {
        Phase::decode(self.phase.load(Ordering::Acquire))
    }

    /// Starts a phase.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase.encode(), Ordering::Release);
    }

    /// Whether every worker has to end at once.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Ends every worker.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Ends every worker because of `failure`. The first failure is kept: the others follow from it.
    pub fn fail(&self, failure: E) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
        self.stop();
    }

    /// The failure, once.
    pub fn take_failure(&self) -> Option<E> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<E> Default for Control<E> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_survive_the_shared_word() {
        let control = Control::<()>::new();
        assert_eq!(control.phase(), Phase::Ready);
        for phase in [Phase::WarmUp, Phase::Between, Phase::Window(0), Phase::Window(u16::MAX), Phase::Drain] {
            control.set_phase(phase);
            assert_eq!(control.phase(), phase);
        }
    }

    #[test]
    fn the_first_failure_is_the_one_reported() {
        let control = Control::new();
        control.fail("peer gone");
        control.fail("server gone");
        assert!(control.is_stopped());
        assert_eq!((control.take_failure(), control.take_failure()), (Some("peer gone"), None));
    }
}
