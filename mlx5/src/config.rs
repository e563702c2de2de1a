//! Configurations of queues and queue pairs, and the states of queue pairs. Plain data.

use mlx5_hca::{CreateError, check};

use crate::mmio::RegisterKind;
use crate::wire::{CQE_BYTES, CQE128_BYTES, MAX_INLINE};

/// Options of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// Kind of the device's registers, which are memory that no device reads; it determines how
    /// doorbells write them. Default [`RegisterKind::Ordinary`].
    pub register: RegisterKind,
}

/// The configuration of a completion queue. A plain number converts to a configuration with this
/// number of entries of 64 bytes, not compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqConfig {
    /// Number of CQEs, 1..=[`DeviceInfo::max_cqe`](crate::DeviceInfo::max_cqe). The number is
    /// rounded up to a power of two. Every operation that may complete before the next poll needs
    /// an entry: a queue that overruns is dead.
    pub entries: u32,
    /// Length of an entry in bytes, 64 or 128. A large entry has 64 bytes of data before its CQE.
    pub cqe_bytes: u32,
    /// Whether the device may write similar CQEs as one session of 8-byte mini CQEs
    /// ([`MiniCqe`](crate::wire::MiniCqe)). Polls hand them out as ordinary CQEs.
    pub compression: bool,
    /// Completion vector of the queue's events,
    /// 0..[`DeviceInfo::comp_vectors`](crate::DeviceInfo::comp_vectors). On hardware each vector
    /// has an interrupt of its own, usually on a core of its own: choose the vector of the core on
    /// which the program waits.
    pub comp_vector: u32,
}

impl CqConfig {
    pub(crate) fn check(&self, max_cqe: u32, comp_vectors: u32) -> Result<(), CreateError> {
        check("the number of CQ entries", self.entries, 1..=max_cqe)?;
        check(
            "the completion vector",
            self.comp_vector,
            0..=comp_vectors - 1,
        )
    }

    pub(crate) fn stride(&self) -> Result<usize, CreateError> {
        match self.cqe_bytes as usize {
            stride @ (CQE_BYTES | CQE128_BYTES) => Ok(stride),
            stride => Err(CreateError::Illegal {
                what: "the size of a CQE",
                value: stride as u64,
                legal: "64 or 128",
            }),
        }
    }
}

impl From<u32> for CqConfig {
    fn from(entries: u32) -> Self {
        Self {
            entries,
            cqe_bytes: CQE_BYTES as u32,
            compression: false,
            comp_vector: 0,
        }
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Number of send WQEBBs of 64 bytes, 1..=32768, rounded up to a power of two.
    pub max_send_wr: u32,
    /// Maximum number of inline bytes of one operation, 0..=220.
    pub max_inline_data: usize,
    /// Whether the device may put the data of a SEND into the CQE instead of the receive's buffer
    /// ([`Cqe::inline_data`](crate::Cqe::inline_data)): up to 32 bytes, or 64 with large CQEs. That
    /// buffer is then not written. Reliable connections only.
    pub scatter_to_cqe: bool,
    /// Maximum number of the peer's messages that may wait on the software HCA until this end
    /// polls, 1..=128; the number is rounded up to a power of two, and to at least 8. Each message
    /// takes 64 bytes. The peer's operations wait while there is no room; the peer's own value need
    /// not be the same. Hardware ignores this option.
    pub lane_slots: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self {
            max_send_wr: 256,
            max_inline_data: 64,
            scatter_to_cqe: false,
            lane_slots: 128,
        }
    }
}

impl QpConfig {
    pub(crate) fn check(&self, max_send_wr: u32) -> Result<(), CreateError> {
        check("max_send_wr", self.max_send_wr, 1..=max_send_wr)?;
        check("max_inline_data", self.max_inline_data, 0..=MAX_INLINE)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct RqSize {
    /// Minimum number of receives.
    pub(crate) depth: u32,
    /// Maximum number of buffers of a receive.
    pub(crate) max_sge: usize,
}

impl RqSize {
    pub(crate) fn check(self, max_depth: u32, most_sges: u32) -> Result<(), CreateError> {
        let Self { depth, max_sge } = self;
        check("the depth of a receive queue", depth, 1..=max_depth)?;
        check("the number of buffers of a receive", max_sge, 0..=most_sges)
    }
}

/// The states of a queue pair (InfiniBand specification, "Queue Pair States").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Created; not connected.
    Reset,
    /// Receives may be posted.
    Init,
    /// Receives messages.
    ReadyToReceive,
    /// Sends and receives messages.
    ReadyToSend,
    /// An operation failed, or [`Qp::fail`](crate::Qp::fail) was called; every posted operation is
    /// flushed. This is the last state of a queue pair: create a new one.
    Error,
}
