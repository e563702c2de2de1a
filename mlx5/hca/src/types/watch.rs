//! State of strict mode.

use crate::types::rule::Rule;

/// State of strict mode for a queue pair.
#[derive(Default)]
pub(crate) struct QpWatch {
    /// Producer counter in the doorbell record at the last doorbell.
    pub(crate) notified: u16,
    /// Counter after the last WQE that wrote a CQE.
    pub(crate) reported: u16,
    /// Counter after the last announced WQE that asks for a CQE.
    pub(crate) signaled: u16,
    pub(crate) half: Option<usize>,
    /// The broken rule. The next WQE fails with it as vendor syndrome.
    pub(crate) broken: Option<Rule>,
}

/// State of strict mode for a receive queue.
#[derive(Default)]
pub(crate) struct RqWatch {
    /// Number of posted receives in the record at the last check.
    pub(crate) checked: u16,
    /// Index of the WQE that is posted next.
    pub(crate) next: u16,
    /// Number of the last posting of each WQE, from 1; 0 if the WQE was never posted.
    pub(crate) posted: Vec<u64>,
    pub(crate) count: u64,
    pub(crate) broken: bool,
}
