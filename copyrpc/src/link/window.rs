//! The window of small batches under way: while it is full, messages gather (W1..W3).

use std::collections::VecDeque;

/// How many small batches may be under way before what comes next waits and gathers.
///
/// The receiver's NIC takes a bounded number of WRITEs in a second; who sends each message as soon as it is there gets that rate in
/// messages too. A window makes the batches as large as the NIC is slow. It is the sender's own affair: the peer is told nothing of it.
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

/// What a batch is to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// It goes, and takes no place.
    Exempt,
    /// It goes, and takes a place once it is posted.
    Counted,
    /// It waits.
    Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    Completion,
    Consumption,
}

#[derive(Debug)]
pub(super) struct WindowState {
    clock: Clock,
    limit: usize,
    /// 0 without a window: a batch has more.
    exempt_bytes: u64,
    /// Numbers of the batches under way, oldest first, counted as the sent ones from 1.
    under_way: VecDeque<u64>,
    /// The last batch looked at waits.
    is_holding: bool,
}

impl WindowState {
    pub(super) fn new(window: Window) -> Self {
        let (clock, batches, exempt_bytes) = match window {
            Window::Off => (Clock::Completion, 0, 0),
            Window::Completion { batches, exempt_bytes } => (Clock::Completion, batches, exempt_bytes),
            Window::Consumption { batches, exempt_bytes } => (Clock::Consumption, batches, exempt_bytes),
        };
        Self { clock, limit: batches as usize, exempt_bytes, under_way: VecDeque::new(), is_holding: false }
    }

    /// Whether the next batch may go, `span` of `waiting` bytes that are not posted (W1, W2).
    #[inline]
    pub(super) fn admit(&mut self, waiting: u64, span: u64) -> Admission {
        if waiting > self.exempt_bytes {
            self.is_holding = false;
            return Admission::Exempt;
        }
        self.is_holding = self.under_way.len() >= self.limit;
        match (self.is_holding, span == waiting) {
            (true, _) => Admission::Held,
            (false, false) => Admission::Exempt,
            (false, true) => Admission::Counted,
        }
    }

    /// The completion of a counted batch has to be announced.
    #[inline]
    pub(super) fn needs_completion(&self, admission: Admission) -> bool {
        admission == Admission::Counted && self.clock == Clock::Completion
    }

    /// A batch was posted as this number.
    #[inline]
    pub(super) fn posted(&mut self, admission: Admission, number: u64) {
        if admission == Admission::Counted {
            self.under_way.push_back(number);
        }
    }

    /// The oldest batch under way completed. Whether something waits for that.
    pub(super) fn completed(&mut self) -> bool {
        self.under_way.pop_front();
        self.is_holding
    }

    /// The peer told that it took the first `received` batches.
    #[inline]
    pub(super) fn received(&mut self, received: u64) {
        if self.clock == Clock::Consumption {
            while self.under_way.front().is_some_and(|number| *number <= received) {
                self.under_way.pop_front();
            }
        }
    }

    /// What waits goes when the peer's word comes, which a READ would bring (W3).
    #[inline]
    pub(super) fn wants_read(&self) -> bool {
        self.is_holding && self.clock == Clock::Consumption
    }

    /// What waits goes when a completion comes: nothing is to do before (W3).
    #[inline]
    pub(super) fn awaits_completion(&self) -> bool {
        self.is_holding && self.clock == Clock::Completion
    }
}
