//! The window of small batches under way: while it is full, messages gather (W1..W3 of
//! docs/copyrpc-protocol.md).

use std::collections::VecDeque;

/// The number of small batches that may be under way before further messages wait and gather.
///
/// The receiver's NIC takes a bounded number of WRITEs per second, which also bounds the rate of
/// messages if each WRITE has one message. With a window, the slower the NIC is, the larger the
/// batches become. The window concerns the sender only: nothing about it is sent to the peer.
///
/// `docs/study.md` finds its use by simulation, with one call at a time per client. Where the
/// clients of 8 nodes share receive queues that take 1.9 million WRITEs per second each, daemons
/// with [`Window::Completion`] of one batch do 3.1 times the operations of daemons without a
/// window. Without that limit of the receive queues, the window costs up to 12 % of the operations.
/// With the limit, [`Window::Consumption`] does fewer operations than no window: it waits for a
/// word that the peer sends with its own messages. No NIC has been measured, so [`Window::Off`] is
/// the default; on a NIC, compare it with one batch of `Completion`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Window {
    /// Each flush posts all messages that the limit of batches in flight permits.
    #[default]
    Off,
    /// A batch is under way until its WRITE completes: the peer's NIC has it. Costs a completion
    /// per batch.
    Completion {
        /// Maximum number of batches under way, at least 1. Each takes one more entry of the
        /// context's send CQ.
        batches: u32,
        /// A flush that finds more than this number of waiting bytes holds nothing back.
        exempt_bytes: u64,
    },
    /// A batch is under way until the peer has confirmed that it took the batch's receive
    /// completion.
    Consumption {
        /// Maximum number of batches under way, at least 1.
        batches: u32,
        /// A flush that finds more than this number of waiting bytes holds nothing back.
        exempt_bytes: u64,
    },
}

impl Window {
    /// Default of `exempt_bytes`: the number of waiting bytes above which a flush holds nothing
    /// back.
    pub const DEFAULT_EXEMPT_BYTES: u64 = 4096;

    /// Returns the number of send completions that the window adds to the bound B2 of
    /// docs/copyrpc-protocol.md: completions of batches that arrived and still count as under way,
    /// because their completions were not taken.
    pub(crate) const fn completions(self) -> u32 {
        match self {
            Self::Completion { batches, .. } => batches,
            Self::Off | Self::Consumption { .. } => 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct WindowState {
    /// Whether a batch is under way until its WRITE completes, and not until the peer has taken it.
    pub(super) is_by_completion: bool,
    limit: usize,
    /// Number of waiting bytes above which a flush holds nothing back; 0 without a window.
    exempt_bytes: u64,
    is_suspended: bool,
    /// Number of batches under way whose completions the window waits for.
    completing: usize,
    /// Numbers of the batches in the window that the peer is not known to have taken, oldest first.
    /// They are counted from 1, like the sent batches.
    untaken: VecDeque<u64>,
    /// Whether the last flush left messages that are sent when a completion arrives.
    awaits_completion: bool,
}

impl WindowState {
    pub(super) const fn new(window: Window) -> Self {
        let (is_by_completion, batches, exempt_bytes) = match window {
            Window::Off => (false, 0, 0),
            Window::Completion {
                batches,
                exempt_bytes,
            } => (true, batches, exempt_bytes),
            Window::Consumption {
                batches,
                exempt_bytes,
            } => (false, batches, exempt_bytes),
        };
        Self {
            is_by_completion,
            limit: batches as usize,
            exempt_bytes,
            is_suspended: false,
            completing: 0,
            untaken: VecDeque::new(),
            awaits_completion: false,
        }
    }

    pub(super) const fn suspend(&mut self, is_suspended: bool) {
        self.is_suspended = is_suspended;
    }

    /// Begins a flush of `waiting` bytes. Returns whether the window applies to the flush: it does
    /// up to `exempt_bytes` (W2).
    pub(super) const fn begin(&mut self, waiting: u64) -> bool {
        self.awaits_completion = false;
        // The window does not apply to a flush of 0 bytes either.
        !self.is_suspended && waiting.wrapping_sub(1) < self.exempt_bytes
    }

    /// Returns whether a flush that the window applies to has to wait (W1); the peer took
    /// `received` batches.
    pub(super) fn is_full(&mut self, received: u64) -> bool {
        while self
            .untaken
            .front()
            .is_some_and(|number| *number <= received)
        {
            self.untaken.pop_front();
        }
        let is_full = self.completing + self.untaken.len() >= self.limit;
        self.awaits_completion = is_full && self.is_by_completion;
        is_full
    }

    /// Notes that the batch of this number was posted and counts in the window.
    pub(super) fn posted(&mut self, number: u64) {
        if self.is_by_completion {
            self.completing += 1;
        } else {
            self.untaken.push_back(number);
        }
    }

    /// Notes that the oldest batch under way completed. Returns whether messages wait for a
    /// completion.
    pub(super) fn completed(&mut self) -> bool {
        self.completing = self.completing.saturating_sub(1);
        self.awaits_completion
    }

    /// Returns whether the waiting messages are sent when a completion arrives. Until then, no
    /// flush is needed for them (W3).
    pub(super) const fn awaits_completion(&self) -> bool {
        self.awaits_completion
    }
}
