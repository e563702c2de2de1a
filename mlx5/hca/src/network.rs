//! The interface to a model of the network, for devices whose WQEs are not executed in the doorbell.

use core::fmt;

#[doc(hidden)]
pub use crate::debug::trace::hash_of;
pub use crate::random::Random;
pub use crate::shared::receives::Receives as ReceiveQueue;

/// A model of the network between the devices that share it. It is asked once for each WQE, in the order of their doorbells.
pub trait Network: fmt::Debug + Send + Sync {
    /// Returns when a WQE has its effect, and when its completion is visible.
    fn times(&self, request: &Request<'_>) -> Times;
}

/// A WQE, as a model of the network sees it.
#[derive(Debug)]
pub struct Request<'a> {
    /// Time of its doorbell, or of the response that it waits for because it is fenced, in ns.
    pub posted_ns: u64,
    /// Time of the last effect of earlier WQEs of the queue pair, in ns: its effect is not earlier.
    pub after_ns: u64,
    /// LID and QPN of the sender.
    pub own: (u16, u32),
    /// LID and QPN of the queue pair that the sender is connected to.
    pub peer: Option<(u16, u32)>,
    /// Bytes that it sends.
    pub bytes: u64,
    /// Bytes that come back, for a READ or an atomic.
    pub response: Option<u64>,
    /// Number of the peer's receive queue, and the queue, if it takes a receive.
    pub receives: Option<(u32, &'a ReceiveQueue)>,
}

/// The times of a WQE, in ns of the clock that the devices share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time of its effect.
    pub effect_ns: u64,
    /// Time from which its completion is visible, not earlier than the effect.
    pub acknowledged_ns: u64,
}
