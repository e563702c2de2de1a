//! The interface to a model of the network, for devices whose WQEs are not executed in the
//! doorbell.

use core::fmt;

pub use crate::random::Random;
pub use crate::shared::receives::Receives as ReceiveQueue;

/// A model of the network between the devices that share it. It is asked once for each WQE, in the
/// order of their doorbells.
pub trait Network: fmt::Debug + Send + Sync {
    /// Returns the times of the effect and of the visible completion of a WQE.
    fn times(&self, request: &Request<'_>) -> Times;
}

/// A WQE, as described to a model of the network.
#[derive(Debug)]
pub struct Request<'a> {
    /// Time of the WQE's doorbell, in ns; for a fenced WQE, the arrival of the last earlier
    /// response if that is later.
    pub posted_ns: u64,
    /// Time of the last effect of earlier WQEs of the queue pair, in ns. The effect of this WQE is
    /// not earlier.
    pub after_ns: u64,
    /// LID and QPN of the sender.
    pub own: (u16, u32),
    /// LID and QPN of the queue pair that the sender is connected to.
    pub peer: Option<(u16, u32)>,
    /// Number of bytes sent.
    pub bytes: u64,
    /// Number of bytes returned, for a READ or an atomic.
    pub response: Option<u64>,
    /// Number of the peer's receive queue, and the queue, if the WQE takes a receive.
    pub receives: Option<(u32, &'a ReceiveQueue)>,
}

/// The times of a WQE, in ns of the clock that the devices share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Time of the WQE's effect.
    pub effect_ns: u64,
    /// Time from which the WQE's completion is visible, not earlier than the effect.
    pub acknowledged_ns: u64,
}
