//! What can go wrong, one enum per verb. Retryable and permanent errors never share a variant.

use mlx5::{AsyncEvent, CompletionError, Syndrome};
use thiserror::Error;

use crate::ring::MAX_RING_SIZE;

/// The peer broke the protocol. It ends this one connection; all pending calls end with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// An immediate announced no bytes, or more than the free part of the receive ring (T1).
    #[error("batch of {span} bytes announced, the receive ring has {free} free")]
    Overrun {
        /// Bytes the immediate announced.
        span: u64,
        /// Bytes the peer was allowed to write.
        free: u64,
    },
    /// More batches than were granted are unacknowledged (T2).
    #[error("more than the granted {granted} batches in flight")]
    TooManyBatches {
        /// Batches the peer may have in flight.
        granted: u32,
    },
    /// The batch does not end where the ring rules say (T3).
    #[error("batch of {span} bytes at ring offset {offset} is misplaced")]
    Misplaced {
        /// Ring offset of the batch.
        offset: u64,
        /// Bytes the immediate announced.
        span: u64,
    },
    /// More messages than the batch can hold (T4).
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
    /// A message is longer than what is left of its batch (T4).
    #[error("message with {len} payload bytes in the last {left} bytes of a batch")]
    MessageTooLong {
        /// `len` of the header.
        len: u32,
        /// Bytes left in the batch.
        left: u64,
    },
    /// Bytes are left after the last message of a batch (T4).
    #[error("{left} bytes after the last message of a batch")]
    TrailingBytes {
        /// Bytes left in the batch.
        left: u64,
    },
    /// The consumer position is unaligned, went backwards, or passed what was sent (T5).
    #[error("consumer position {told} is not an aligned position in {floor}..={ceiling}")]
    ConsumerPosition {
        /// What the peer told.
        told: u64,
        /// What the peer told before, by the same channel.
        floor: u64,
        /// What was sent.
        ceiling: u64,
    },
    /// The cumulative credit is unaligned, went backwards, or exceeds the quarter ring (T5).
    #[error("cumulative credit {told} is not an aligned number in {floor}..={ceiling}")]
    Credit {
        /// What the peer told.
        told: u64,
        /// What the peer told before, by the same channel.
        floor: u64,
        /// Credit spent plus a quarter ring.
        ceiling: u64,
    },
    /// The count of received batches went backwards or passed what was sent (T5).
    #[error("count of received batches {told} is not in {floor}..={ceiling}")]
    BatchesReceived {
        /// What the peer told.
        told: u64,
        /// What the peer told before, by the same channel.
        floor: u64,
        /// Batches sent.
        ceiling: u64,
    },
    /// A request is larger than an eighth of the ring (T6).
    #[error("request of {padded} ring bytes, the limit is {max}")]
    RequestTooLarge {
        /// Padded size of the request.
        padded: u64,
        /// Largest padded size.
        max: u64,
    },
    /// A request asks for a response that no granted credit pays for (T6).
    #[error("request wants {wanted} bytes of response credit, legal is 64..={available}")]
    Allowance {
        /// Internal allowance in bytes.
        wanted: u64,
        /// Credit granted and not yet used, at most the largest allowance.
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
    /// A response carries a status this version does not know (T7).
    #[error("unknown response status {0}")]
    UnknownStatus(u32),
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CloseReason {
    /// The peer's device does not answer: its process is dead, or its end of the connection is closed. Also when the first this end
    /// hears is that its operations were flushed: the queue pair was in error before, and what put it there was reported elsewhere or
    /// not at all.
    #[error("the peer is gone, or the queue pair was in error already; connect again")]
    Disconnected,
    /// The device reported another error of the connection.
    #[error("the device failed an operation with syndrome {syndrome:#04x} (vendor {vendor:#04x}); connect again")]
    Transport {
        /// Syndrome of the completion.
        syndrome: u8,
        /// The vendor's detail.
        vendor: u8,
    },
    /// The device reported that the queue pair broke down, or a queue of the context, or the device itself. After the last two the context makes
    /// no endpoints any more.
    #[error("{0}")]
    Device(AsyncEvent),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The peer's device answers, but its process did nothing for the stall timeout: it is stopped, or its thread does not poll.
    #[error("the peer lives but does nothing: it is stopped or does not poll")]
    PeerStalled,
    /// Nothing was outstanding for [`EndpointConfig::idle_timeout`](crate::EndpointConfig::idle_timeout), so this end closed the connection.
    #[error("nothing happened for the idle timeout, and this end closed the connection")]
    IdleTimeout,
    /// This end was closed, or its context is gone.
    #[error("this end was closed")]
    ClosedHere,
    /// The peer closed the connection, and everything that was outstanding has ended. Of a call: it came after that, and no handler got
    /// it.
    #[error("the peer closed the connection")]
    ClosedByPeer,
}

impl CloseReason {
    /// What an error completion says of the connection.
    pub(crate) const fn of(error: CompletionError) -> Self {
        match error.syndrome {
            Syndrome::TransportRetryExceeded | Syndrome::WorkRequestFlushed => Self::Disconnected,
            _ => Self::Transport { syndrome: error.raw, vendor: error.vendor },
        }
    }
}

/// A call that was not taken. `user_data` comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError<U> {
    /// No room in the ring now. Poll, then retry.
    #[error("no room in the ring now: poll, then retry")]
    RingFull(U),
    /// The peer has not granted enough response credit yet, or every call id is in use. Poll, then
    /// retry.
    #[error("not enough response credit now: poll, then retry")]
    InsufficientCredit(U),
    /// The payload fits no ring of this size, ever.
    #[error("payload of {len} bytes, the limit is {max}: split it or use a larger ring")]
    PayloadTooLarge {
        /// Data of the caller.
        user_data: U,
        /// Payload bytes asked for.
        len: usize,
        /// Largest payload of this ring.
        max: usize,
    },
    /// No ring of this size can ever grant this response allowance.
    #[error("response allowance of {len} bytes, the limit is {max}: use a larger ring")]
    AllowanceTooLarge {
        /// Data of the caller.
        user_data: U,
        /// Allowance asked for.
        len: usize,
        /// Largest allowance of this ring.
        max: usize,
    },
    /// The connection has ended.
    #[error("connection closed: {reason}")]
    Closed {
        /// Data of the caller.
        user_data: U,
        /// Why it ended.
        reason: CloseReason,
    },
}

impl<U> CallError<U> {
    /// Whether the same call can succeed after more polls.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::RingFull(_) | Self::InsufficientCredit(_))
    }

    /// The same error with other data.
    #[must_use]
    pub fn map_user_data<V>(self, into: impl FnOnce(U) -> V) -> CallError<V> {
        match self {
            Self::RingFull(user_data) => CallError::RingFull(into(user_data)),
            Self::InsufficientCredit(user_data) => CallError::InsufficientCredit(into(user_data)),
            Self::PayloadTooLarge { user_data, len, max } => CallError::PayloadTooLarge { user_data: into(user_data), len, max },
            Self::AllowanceTooLarge { user_data, len, max } => CallError::AllowanceTooLarge { user_data: into(user_data), len, max },
            Self::Closed { user_data, reason } => CallError::Closed { user_data: into(user_data), reason },
        }
    }

    /// The caller's data.
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

/// A call that was taken and ended without a reply of its handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallFailure {
    /// The handler dropped the request.
    #[error("the peer's handler dropped the request")]
    Dropped,
    /// The handler refused the request.
    #[error("the peer's handler refused the request")]
    Refused,
    /// The deadline passed first. Whether the handler ran or will is not known; its reply reaches no call.
    #[error("no reply before the deadline")]
    DeadlineExceeded,
    /// The connection ended first. Whether the handler ran is not known.
    #[error("connection closed: {0}")]
    Closed(#[from] CloseReason),
}

/// A reply that was not taken. `R` is the request, or the handle that holds it.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum ReplyError<R> {
    /// The payload exceeds what the caller allowed. The request is given back, to be answered with less.
    #[error("reply of {len} bytes, the caller allowed {max}")]
    TooLarge {
        /// The unanswered request.
        request: R,
        /// Payload bytes of the reply.
        len: usize,
        /// Payload bytes the caller allowed.
        max: usize,
    },
    /// The connection has ended.
    #[error("connection closed: {0}")]
    Closed(CloseReason),
    /// The request came from another connection.
    #[error("the request does not belong to this connection")]
    Foreign(R),
}

impl<R> ReplyError<R> {
    /// The same error with the request in another form.
    pub(crate) fn map_request<T>(self, into: impl FnOnce(R) -> T) -> ReplyError<T> {
        match self {
            Self::TooLarge { request, len, max } => ReplyError::TooLarge { request: into(request), len, max },
            Self::Closed(reason) => ReplyError::Closed(reason),
            Self::Foreign(request) => ReplyError::Foreign(into(request)),
        }
    }
}

/// A connection that cannot be set up with these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LinkConfigError {
    /// The send and the receive ring differ in size.
    #[error("send ring {send} bytes, receive ring {recv} bytes: they must be equal")]
    UnequalRings {
        /// Size of the send ring.
        send: u64,
        /// Size of the receive ring.
        recv: u64,
    },
    /// An initial credit is unaligned or above a quarter ring.
    #[error("initial credit {credit} must be a multiple of 32 and at most {max}")]
    Credit {
        /// The credit.
        credit: u64,
        /// A quarter ring.
        max: u64,
    },
    /// No batch may be in flight.
    #[error("batches in flight must be at least 1")]
    NoBatches,
    /// A start position is unaligned.
    #[error("start position {0} must be a multiple of 32")]
    StartPosition(u64),
}

const _: () = assert!(MAX_RING_SIZE / 256 == crate::wire::CallId::MAX_CALLS as u64);

#[cfg(test)]
mod tests {
    use mlx5::DeviceKind;

    use super::*;

    /// A flush is the consequence of an error, so its syndrome explains nothing.
    #[test]
    fn a_flushed_operation_is_no_reason_of_its_own() {
        let reason =
            |syndrome: Syndrome| CloseReason::of(CompletionError { syndrome, raw: syndrome as u8, vendor: 3, kind: DeviceKind::Soft });
        assert_eq!(reason(Syndrome::WorkRequestFlushed), CloseReason::Disconnected);
        assert_eq!(reason(Syndrome::TransportRetryExceeded), CloseReason::Disconnected);
        assert_eq!(reason(Syndrome::RemoteAccess), CloseReason::Transport { syndrome: 0x13, vendor: 3 });
    }
}
