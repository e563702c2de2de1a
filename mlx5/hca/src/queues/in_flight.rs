//! The work in flight of a queue pair whose WQEs are not executed in the doorbell.

use std::collections::VecDeque;

use mlx5_wire::{CQE_BYTES, CqeOpcode};

/// The work in flight of a queue pair. It is empty if the device's timing is immediate.
#[derive(Default)]
pub(crate) struct InFlight {
    /// Announced WQEs that are not due yet.
    pub(crate) announced: VecDeque<Announced>,
    /// Acknowledgements and responses on their way back, in order.
    pub(crate) acknowledged: VecDeque<Acknowledged>,
    /// Time from the effect of the WQE being executed to its visible completion.
    pub(crate) acknowledge_ns: u64,
    /// If the device checks source buffers: hashes of the buffers of announced WQEs, taken when the
    /// doorbell rang.
    pub(crate) sources: VecDeque<Source>,
    /// Time of the last scheduled effect, so that effects are in order.
    pub(crate) last_effect_ns: u64,
    /// Time at which the last response arrives, for fences.
    pub(crate) last_response_ns: u64,
}

impl InFlight {
    /// Makes room for the WQEs of a whole send queue, so that nothing is allocated later.
    pub(crate) fn with_capacity(wqes: usize, is_strict: bool) -> Self {
        Self {
            announced: VecDeque::with_capacity(wqes),
            acknowledged: VecDeque::with_capacity(wqes),
            sources: VecDeque::with_capacity(if is_strict { wqes } else { 0 }),
            ..Self::default()
        }
    }
}

/// WQEs of the SQ up to `end`, which may be executed at `at_ns`.
#[derive(Clone, Copy)]
pub(crate) struct Announced {
    pub(crate) at_ns: u64,
    pub(crate) end: u16,
    pub(crate) acknowledge_ns: u64,
}

/// An acknowledgement: from `at_ns` on, its CQE is visible and its result is in the buffer.
pub(crate) struct Acknowledged {
    pub(crate) at_ns: u64,
    pub(crate) cqe: Option<([u8; CQE_BYTES], CqeOpcode)>,
    pub(crate) landing: Option<Landing>,
}

/// A hash of the bytes to be sent by a WQE, at the time of its doorbell.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub(crate) counter: u16,
    pub(crate) hash: u64,
}

/// The result of a READ or an atomic.
pub(crate) struct Landing {
    pub(crate) counter: u16,
    pub(crate) bytes: Vec<u8>,
}
