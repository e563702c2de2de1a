//! The errors of contexts, endpoints, calls and replies, and the reasons why a connection ends.

use mlx5::{AsyncEvent, CompletionError, Syndrome};
pub use mlx5_rendezvous::SetupError;
use thiserror::Error;

use crate::ring::MAX_RING_SIZE;

/// A function that does not nest was called from inside a callback of a poll of the same context,
/// and did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{NESTED}")]
pub struct Reentrant;

const NESTED: &str = "poll, drain, flush, and the creation and connection of endpoints are impossible from inside a poll's callback";

impl From<Reentrant> for SetupError {
    fn from(_: Reentrant) -> Self {
        Self::Misuse(NESTED)
    }
}

/// A violation of the protocol by the peer. The violation ends this one connection; all pending
/// calls end with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// An immediate announced no bytes, or more than the free part of the receive ring (T1).
    #[error("batch of {span} bytes announced, the receive ring has {free} free")]
    Overrun {
        /// Bytes the immediate announced.
        span: u64,
        /// Bytes that the peer was permitted to write.
        free: u64,
    },
    /// The peer has more batches in flight than this end granted (T2).
    #[error("more than the granted {granted} batches in flight")]
    TooManyBatches {
        /// Batches that the peer may have in flight.
        granted: u32,
    },
    /// The batch does not end where the ring rules require (T3).
    #[error("batch of {span} bytes at ring offset {offset} is misplaced")]
    Misplaced {
        /// Ring offset of the batch.
        offset: u64,
        /// Bytes the immediate announced.
        span: u64,
    },
    /// A batch announces more messages than it can hold (T4).
    #[error("{count} messages cannot fill a batch of {span} bytes")]
    MessageCount {
        /// `message_count` of the metadata.
        count: u32,
        /// Bytes the immediate announced.
        span: u64,
    },
    /// Reserved metadata bytes are not zero (T4).
    #[error("reserved metadata bytes are not zero")]
    ReservedNotZero,
    /// A message is longer than the rest of its batch (T4).
    #[error("message with {len} payload bytes in the last {left} bytes of a batch")]
    MessageTooLong {
        /// `len` of the header.
        len: u32,
        /// Bytes left in the batch.
        left: u64,
    },
    /// A batch has bytes left after its last message (T4).
    #[error("{left} bytes after the last message of a batch")]
    TrailingBytes {
        /// Bytes left in the batch.
        left: u64,
    },
    /// The consumer position is unaligned, below an earlier one that arrived in the same way (in
    /// batches, or by READs), or beyond the end of what was sent (T5).
    #[error("consumer position {told} is not an aligned position in {floor}..={ceiling}")]
    ConsumerPosition {
        /// Position that the peer reported.
        told: u64,
        /// Position that the peer reported before, in the same way.
        floor: u64,
        /// Position up to which this end has sent.
        ceiling: u64,
    },
    /// The cumulative credit is unaligned, below an earlier one that arrived in the same way (in
    /// batches, or by READs), or more than a quarter ring above the spent credit (T5).
    #[error("cumulative credit {told} is not an aligned number in {floor}..={ceiling}")]
    Credit {
        /// Credit that the peer reported.
        told: u64,
        /// Credit that the peer reported before, in the same way.
        floor: u64,
        /// Credit spent plus a quarter ring.
        ceiling: u64,
    },
    /// The count of received batches is below an earlier one that arrived in the same way (in
    /// batches, or by READs), or above the number of batches sent (T5).
    #[error("count of received batches {told} is not in {floor}..={ceiling}")]
    BatchesReceived {
        /// Count that the peer reported.
        told: u64,
        /// Count that the peer reported before, in the same way.
        floor: u64,
        /// Number of batches sent.
        ceiling: u64,
    },
    /// A request is larger than an eighth of the ring (T6).
    #[error("request of {padded} ring bytes, the limit is {max}")]
    RequestTooLarge {
        /// Padded size of the request.
        padded: u64,
        /// Maximum padded size.
        max: u64,
    },
    /// A request asks for less response credit than any response takes, for more than is granted
    /// and unused, or for more than the maximum (T6).
    #[error("request wants {wanted} bytes of response credit, legal is 64..={available}")]
    Allowance {
        /// Internal allowance in bytes: the ring bytes that the request reserves for its response.
        wanted: u64,
        /// Credit granted and not yet used, at most the maximum allowance.
        available: u64,
    },
    /// A response is larger than its call allowed (T7).
    #[error("response of {len} bytes to a call that allowed {max}")]
    ResponseTooLarge {
        /// Payload bytes of the response.
        len: u32,
        /// Payload bytes the call paid for.
        max: u64,
    },
    /// A response carries a status that this version does not define (T7).
    #[error("unknown response status {0}")]
    UnknownStatus(u32),
}

/// The reason why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CloseReason {
    /// The peer's device does not answer: its process is dead, or its end of the connection is
    /// closed. This is also the reason if the first event at this end is that its operations were
    /// flushed: the queue pair was in error before, and the cause was reported elsewhere or not at
    /// all.
    #[error("the peer is gone, or the queue pair was in error already; connect again")]
    Disconnected,
    /// The device reported another error of the connection.
    #[error(
        "the device failed an operation with syndrome {syndrome:#04x} (vendor {vendor:#04x}); connect again"
    )]
    Transport {
        /// Syndrome of the completion.
        syndrome: u8,
        /// The vendor's own error code.
        vendor: u8,
    },
    /// The device reported that the queue pair, a queue of the context, or the device itself broke
    /// down. In the last two cases the context makes no more endpoints.
    #[error("{0}")]
    Device(AsyncEvent),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The peer's device answers, but its process did nothing for the stall timeout: it is stopped,
    /// or its thread does not poll.
    #[error("the peer lives but does nothing: it is stopped or does not poll")]
    PeerStalled,
    /// Nothing was outstanding for
    /// [`EndpointConfig::idle_timeout`](crate::EndpointConfig::idle_timeout), so this end closed
    /// the connection.
    #[error("nothing happened for the idle timeout, and this end closed the connection")]
    IdleTimeout,
    /// This end was closed, or its context is gone.
    #[error("this end was closed")]
    ClosedHere,
    /// The peer closed the connection, and everything that was outstanding has ended.
    #[error("the peer closed the connection")]
    ClosedByPeer,
}

impl CloseReason {
    pub(crate) const fn of(error: CompletionError) -> Self {
        match error.syndrome {
            Syndrome::TransportRetryExceeded | Syndrome::WorkRequestFlushed => Self::Disconnected,
            _ => Self::Transport {
                syndrome: error.raw,
                vendor: error.vendor,
            },
        }
    }
}

/// The reason why a call was not taken. Returns `user_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError<U> {
    /// No room in the ring now. Poll, then retry.
    #[error("no room in the ring now: poll, then retry")]
    RingFull(U),
    /// The peer has not granted enough response credit yet, or every call id is in use. Poll, then
    /// retry.
    #[error("not enough response credit now: poll, then retry")]
    InsufficientCredit(U),
    /// The payload exceeds the maximum of rings of this size.
    #[error("payload of {len} bytes, the limit is {max}: split it or use a larger ring")]
    PayloadTooLarge {
        /// Data of the caller.
        user_data: U,
        /// Payload bytes of the call.
        len: usize,
        /// Maximum payload of this ring.
        max: usize,
    },
    /// The response allowance exceeds the maximum of rings of this size.
    #[error("response allowance of {len} bytes, the limit is {max}: use a larger ring")]
    AllowanceTooLarge {
        /// Data of the caller.
        user_data: U,
        /// Allowance of the call.
        len: usize,
        /// Maximum allowance of this ring.
        max: usize,
    },
    /// The connection has ended.
    #[error("connection closed: {reason}")]
    Closed {
        /// Data of the caller.
        user_data: U,
        /// The reason of the end.
        reason: CloseReason,
    },
}

impl<U> CallError<U> {
    /// Returns whether the same call can succeed on this connection, after more polls.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::RingFull(_) | Self::InsufficientCredit(_))
    }

    /// Returns `false`: the call was not made. See
    /// [`Ending::may_have_executed`](copyrpc_calls::Ending::may_have_executed).
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        false
    }

    /// Returns the caller's data.
    #[must_use]
    pub fn into_user_data(self) -> U {
        match self {
            Self::RingFull(user_data)
            | Self::InsufficientCredit(user_data)
            | Self::PayloadTooLarge { user_data, .. }
            | Self::AllowanceTooLarge { user_data, .. }
            | Self::Closed { user_data, .. } => user_data,
        }
    }
}

/// The reason why a call that was taken ended without a reply of its handler: a
/// [`ClientError`](crate::ClientError) that is never `Connect`, `TooLarge`, `Full` or `NoCredit`. A
/// call that the peer did not execute because it closed the connection ends as `NotSent`.
pub type CallFailure = copyrpc_calls::CallFailure<CloseReason>;

/// Converts the end of a connection to the end of its calls. A peer that closes in good order has
/// executed none of the calls that are left, so these can be made again.
impl From<CloseReason> for CallFailure {
    fn from(reason: CloseReason) -> Self {
        match reason {
            CloseReason::ClosedByPeer => Self::NotSent,
            reason => Self::Closed(reason),
        }
    }
}

/// The reason why a reply was not taken. `R` is the request, or the handle that holds it.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum ReplyError<R> {
    /// The payload exceeds the caller's allowance. Returns the request, to be answered with less.
    #[error("reply of {len} bytes, the caller allowed {max}")]
    TooLarge {
        /// The unanswered request.
        request: R,
        /// Payload bytes of the reply.
        len: usize,
        /// Maximum payload bytes by the caller's allowance.
        max: usize,
    },
    /// The connection has ended.
    #[error("connection closed: {0}")]
    Closed(CloseReason),
}

impl<R> ReplyError<R> {
    pub(crate) fn map_request<T>(self, into: impl FnOnce(R) -> T) -> ReplyError<T> {
        match self {
            Self::TooLarge { request, len, max } => ReplyError::TooLarge {
                request: into(request),
                len,
                max,
            },
            Self::Closed(reason) => ReplyError::Closed(reason),
        }
    }
}

const _: () = assert!(MAX_RING_SIZE / 256 == crate::wire::CallId::MAX_CALLS as u64);

#[cfg(test)]
mod tests {
    use mlx5::DeviceKind;

    use super::*;

    /// A flush is the consequence of an error, so its syndrome explains nothing.
    #[test]
    fn a_flushed_operation_is_no_reason_of_its_own() {
        let reason = |syndrome: Syndrome| {
            CloseReason::of(CompletionError {
                syndrome,
                raw: syndrome as u8,
                vendor: 3,
                kind: DeviceKind::Soft,
            })
        };
        assert_eq!(
            reason(Syndrome::WorkRequestFlushed),
            CloseReason::Disconnected
        );
        assert_eq!(
            reason(Syndrome::TransportRetryExceeded),
            CloseReason::Disconnected
        );
        assert_eq!(
            reason(Syndrome::RemoteAccess),
            CloseReason::Transport {
                syndrome: 0x13,
                vendor: 3
            }
        );
    }
}
