//! The reasons to refuse an operation.

use crate::config::QpState;
use crate::wire::MAX_MESSAGE_BYTES;

/// The reason why an operation was not posted. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The queue has too little room; poll the send CQ and retry.
    #[error(
        "send queue full: {needed} of {capacity} WQEBBs needed, {free} free; poll the send CQ and retry"
    )]
    QueueFull {
        /// Number of WQEBBs that the operation needs, padding at the end of the ring included.
        needed: usize,
        /// Number of free WQEBBs.
        free: usize,
        /// Number of WQEBBs of the queue.
        capacity: usize,
    },
    /// The QP cannot send. Connect the QP; if it is in the error state, create a new one.
    #[error("the queue pair is in state {0:?}; posting needs ReadyToSend")]
    WrongState(QpState),
    /// More inline bytes than the QP was created for.
    #[error(
        "{bytes} inline bytes; this queue pair takes at most {max}: use an SGE, or create it with a larger max_inline_data"
    )]
    InlineTooLong {
        /// Number of requested bytes.
        bytes: usize,
        /// The QP's limit.
        max: usize,
    },
    /// The message is longer than any device can send.
    #[error("a message of {bytes} bytes; the longest is {MAX_MESSAGE_BYTES}")]
    MessageTooLong {
        /// Number of requested bytes.
        bytes: u64,
    },
    /// The address of an atomic is not a multiple of 8.
    #[error("an atomic at {addr:#x}; the address must be a multiple of 8")]
    AtomicMisaligned {
        /// Remote address requested.
        addr: u64,
    },
    /// The device has no atomics: [`DeviceInfo::has_atomics`](crate::DeviceInfo::has_atomics).
    #[error("this device has no atomics")]
    NoAtomics,
    /// The buffer for the result of an atomic is not 8 bytes long.
    #[error("{bytes} bytes for the result of an atomic, which is 8 bytes long")]
    AtomicResult {
        /// Length of the SGE in bytes.
        bytes: u32,
    },
}
