//! [`Phase`]: what the clients of a job do at a time.

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
    /// What is outstanding is not waited for any more.
    GiveUp,
}

impl Phase {
    /// Whether clients issue requests.
    #[must_use]
    pub const fn is_loading(self) -> bool {
        matches!(self, Self::WarmUp | Self::Window(_) | Self::Between)
    }

    /// As one word.
    #[must_use]
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

    /// The inverse of [`encode`](Self::encode); every word is a phase.
    #[must_use]
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
