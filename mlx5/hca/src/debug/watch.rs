//! State of strict mode.

use crate::debug::rule::Rule;

/// State of strict mode for a queue pair.
#[derive(Default)]
pub(crate) struct QpWatch {
    /// The record at the last doorbell.
    pub(crate) notified: u16,
    /// Counter behind the last WQE that gave a CQE.
    pub(crate) reported: u16,
    /// Counter behind the last announced WQE that is to give one.
    pub(crate) signaled: u16,
    pub(crate) half: Option<usize>,
    /// A rule was broken: the next WQE fails by it.
    pub(crate) broken: Option<Rule>,
}

/// State of strict mode for a receive queue.
#[derive(Default)]
pub(crate) struct RqWatch {
    /// The record at the last check.
    pub(crate) checked: u16,
    /// The next WQE to be posted.
    pub(crate) next: u16,
    /// By WQE, plus 1: number of its last posting.
    pub(crate) posted: Vec<u64>,
    pub(crate) count: u64,
    pub(crate) broken: bool,
}
