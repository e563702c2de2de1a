//! The window of small batches under way: while it is full, messages gather (W1..W3).

use std::collections::VecDeque;

/// How many small batches may be under way before what comes next waits and gathers.
///
/// The receiver's NIC takes a bounded number of WRITEs in a second; who sends each message as soon as it is there gets that rate in
/// messages too. A window makes the batches as large as the NIC is slow. It is the sender's own affair: the peer is told nothing of it.
///
/// `docs/study.md` finds its use by simulation: where the clients of 8 nodes meet receive queues that take 1.9 million WRITEs in a second each, daemons
/// with [`Window::Completion`] of one batch do 3.1 times the operations of daemons without a window. Without that ceiling it costs up to 12 %.
/// [`Window::Consumption`] loses there: it waits for a word that the peer sends with its own messages. No NIC has been measured, so [`Window::Off`] is
/// the default; on a NIC, compare it with one batch of `Completion`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Window {
    /// Each flush posts what there is.
    #[default]
    Off,
    /// A batch is under way until its WRITE completes: the peer's NIC has it. Costs a completion per batch.
    Completion {
        /// Batches under way, at least 1. Each takes one more entry of the context's send CQ.
        batches: u32,
        /// Nothing is held back while more than these bytes wait.
        exempt_bytes: u64,
    },
    /// A batch is under way until the peer has told that it took its receive completion.
    Consumption {
        /// Batches under way, at least 1.
        batches: u32,
        /// Nothing is held back while more than these bytes wait.
        exempt_bytes: u64,
    },
}

impl Window {
    /// Bytes above which a batch is not held back, unless there is a reason for another number.
    pub const DEFAULT_EXEMPT_BYTES: u64 = 4096;

    /// Send completions beside those of B2: of batches that arrived and are under way still, since nobody took their completions.
    pub(crate) const fn completions(self) -> u32 {
        match self {
            Self::Completion { batches, .. } => batches,
            Self::Off | Self::Consumption { .. } => 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Completion,
    Consumption,
}

/// What a window that holds a flush back waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    Completion,
    /// What a READ would tell.
    PeersWord,
}

#[derive(Debug)]
pub(super) struct WindowState {
    clock: Clock,
    limit: usize,
    /// 0 without a window.
    exempt_bytes: u64,
    /// Numbers of the batches under way, oldest first, counted as the sent ones from 1.
    under_way: VecDeque<u64>,
    /// The last flush left something that goes when a completion comes.
    awaits_completion: bool,
}

impl WindowState {
    pub(super) fn new(window: Window) -> Self {
        let (clock, batches, exempt_bytes) = match window {
            Window::Off => (Clock::Completion, 0, 0),
            Window::Completion { batches, exempt_bytes } => (Clock::Completion, batches, exempt_bytes),
            Window::Consumption { batches, exempt_bytes } => (Clock::Consumption, batches, exempt_bytes),
        };
        Self { clock, limit: batches as usize, exempt_bytes, under_way: VecDeque::new(), awaits_completion: false }
    }

    /// There is none.
    #[inline(always)]
    pub(super) const fn is_off(&self) -> bool {
        self.exempt_bytes == 0
    }

    /// A flush of so many bytes begins. Whether the window applies to it (W2).
    #[inline]
    pub(super) const fn begin(&mut self, waiting: u64) -> bool {
        self.awaits_completion = false;
        // Not to none either.
        waiting.wrapping_sub(1) < self.exempt_bytes
    }

    /// Whether a flush that the window applies to has to wait (W1); `received` batches were taken by the peer.
    #[inline(never)]
    pub(super) fn hold(&mut self, received: u64) -> Option<Hold> {
        if self.clock == Clock::Consumption {
            while self.under_way.front().is_some_and(|number| *number <= received) {
                self.under_way.pop_front();
            }
        }
        let is_full = self.under_way.len() >= self.limit;
        self.awaits_completion = is_full && self.clock == Clock::Completion;
        match self.clock {
            _ if !is_full => None,
            Clock::Completion => Some(Hold::Completion),
            Clock::Consumption => Some(Hold::PeersWord),
        }
    }

    /// The completions of the batches that take a place have to be announced.
    pub(super) fn needs_completions(&self) -> bool {
        self.clock == Clock::Completion
    }

    /// The batch of this number was posted and takes a place.
    pub(super) fn posted(&mut self, number: u64) {
        self.under_way.push_back(number);
    }

    /// The oldest batch under way completed. Whether something waits for that.
    pub(super) fn completed(&mut self) -> bool {
        self.under_way.pop_front();
        self.awaits_completion
    }

    /// What waits goes when a completion comes: nothing is to do before (W3).
    #[inline]
    pub(super) const fn awaits_completion(&self) -> bool {
        self.awaits_completion
    }
}
