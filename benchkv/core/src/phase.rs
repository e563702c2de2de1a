//! [`Phase`]: the current activity of a job's clients.

/// The current activity of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// No load yet: other ranks are still connecting.
    Ready,
    /// Load that is not measured.
    WarmUp,
    /// Load that counts for this run.
    Window(u16),
    /// Load that is not measured: ranks wait for each other before the next window.
    Between,
    /// No new operations; outstanding operations may end.
    Drain,
    /// Clients do not wait for outstanding operations any more.
    GiveUp,
}

impl Phase {
    /// Returns whether clients issue requests.
    pub const fn is_loading(self) -> bool {
        matches!(self, Self::WarmUp | Self::Window(_) | Self::Between)
    }

    /// Encodes the phase as one word.
    pub const fn encode(self) -> u32 {
        match self {
            Self::Ready => 0,
            Self::WarmUp => 1,
            Self::Between => 2,
            Self::Drain => 3,
            Self::GiveUp => 4,
            Self::Window(run) => 5 + run as u32,
        }
    }

    /// Decodes the word of [`encode`](Self::encode). Every word is a phase.
    pub const fn decode(word: u32) -> Self {
        match word {
            0 => Self::Ready,
            1 => Self::WarmUp,
            2 => Self::Between,
            3 => Self::Drain,
            4 => Self::GiveUp,
            run => Self::Window((run - 5) as u16),
        }
    }
}
