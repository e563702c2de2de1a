//! The errors of contexts, endpoints, calls and replies, and the reasons why a connection ends.

use std::io;

use copyrpc_calls::ConnectFailure;
use mlx5::{AsyncEvent, CompletionError, CreateError, OpenError, RegisterError, Syndrome};
use mlx5_rendezvous::Unreachable;
use mlx5_rendezvous::record::{RecordError, Refusal};
use thiserror::Error;

use crate::ring::{MAX_RING_SIZE, MIN_RING_SIZE};

/// The reason why a context, an endpoint, a connection, a client or a server could not be made, or
/// why a server cannot continue.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SetupError {
    /// No server was reached.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// The server cannot listen at the address.
    #[error("listening at {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// The thread of an [`AsyncClient`](crate::AsyncClient) or an
    /// [`AsyncServer`](crate::AsyncServer) could not be started.
    #[error("starting a thread: {0}")]
    Thread(#[source] io::Error),
    /// The device could not be opened.
    #[error("opening the device: {0}")]
    Open(#[from] OpenError),
    /// A queue could not be created.
    #[error("creating a queue: {0}")]
    Queue(#[from] CreateError),
    /// The memory of a context or of an endpoint could not be allocated.
    #[error("memory for the device: {0}")]
    Memory(#[from] RegisterError),
    /// The device, or a queue of the context, broke down: all peers are lost. Another context or
    /// server may work, and opens the device again.
    #[error("the device broke down ({0}): make a new server or context")]
    Broken(AsyncEvent),
    /// A function was called from inside a callback of a poll of the same context.
    #[error(transparent)]
    Reentrant(#[from] Reentrant),
    /// The context was dropped.
    #[error("the context of this endpoint is gone")]
    ContextGone,
    /// The shared receive queue of this number of endpoints would be longer than the device
    /// permits.
    #[error(
        "{endpoints} endpoints with {batches_in_flight} batches in flight each: the device has receives for {max} of them; ask for fewer, \
         or for fewer batches (EndpointConfig::batches_in_flight)"
    )]
    TooManyEndpoints {
        /// Endpoints asked for.
        endpoints: u32,
        /// Batches in flight of each endpoint.
        batches_in_flight: u32,
        /// Maximum number of such endpoints.
        max: u64,
    },
    /// The receive completion queue has fewer entries than the shared receive queue has receives,
    /// and could overrun.
    #[error(
        "completion queues of {cq_size} entries cannot hold the completions of {srq_depth} receives: leave cq_size out, or ask for \
         cq_size({srq_depth})"
    )]
    CqBelowSrq {
        /// Entries of the completion queue.
        cq_size: u32,
        /// Receives of the shared receive queue.
        srq_depth: usize,
    },
    /// The shared receive queue is too small for one more endpoint.
    #[error(
        "{wanted} more batches in flight need a shared receive queue of at least {needed} receives, this one has {depth}: build the context \
         with ContextBuilder::endpoints of more than {endpoints}, or with srq_size({needed})"
    )]
    SrqTooSmall {
        /// Batches in flight that the endpoint wants to grant; at least 1 is legal.
        wanted: u32,
        /// Receives that the context would need.
        needed: u64,
        /// Receives that the shared receive queue has.
        depth: usize,
        /// Endpoints that share the receive queue already.
        endpoints: u32,
    },
    /// The send completion queue is too small for one more endpoint.
    #[error(
        "one more endpoint needs a completion queue of at least {needed} entries, this one has {entries}: build the context with \
         ContextBuilder::endpoints of more than {endpoints}, or with cq_size({needed})"
    )]
    CqTooSmall {
        /// Entries that the context would need.
        needed: u64,
        /// Entries that the completion queue has.
        entries: u32,
        /// Endpoints that share the completion queue already.
        endpoints: u32,
    },
    /// The ring size is not usable.
    #[error(
        "ring size {0} is not usable: it must be a power of two from {MIN_RING_SIZE} to {MAX_RING_SIZE} bytes"
    )]
    RingSize(u64),
    /// The two ends have rings of different sizes.
    #[error("ring size {local} here, {remote} at the peer: they must be equal")]
    RingSizes {
        /// Ring bytes of this end.
        local: u64,
        /// Ring bytes of the peer.
        remote: u64,
    },
    /// [`EndpointConfig::window`](crate::EndpointConfig::window) is a window of no batches, in
    /// which nothing would be sent.
    #[error("a window of 0 batches: at least 1 is legal, or Window::Off")]
    EmptyWindow,
    /// [`ClientOptions::max_reply`](crate::ClientOptions::max_reply) is above the limit.
    #[error(
        "a max_reply of {wanted} bytes, the limit is {max}: larger rings permit more (EndpointConfig::ring_size)"
    )]
    MaxReply {
        /// The value of the option.
        wanted: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The channel of [`PendingEndpoint::connect_over`](crate::PendingEndpoint::connect_over)
    /// failed.
    #[error("exchanging records: {0}")]
    Channel(#[from] io::Error),
    /// The peer of [`PendingEndpoint::connect_over`](crate::PendingEndpoint::connect_over) could
    /// not connect its end. The reason is in the peer's own error.
    #[error(
        "the peer could not connect its end, and has the reason: its own error, or ServerOptions::events of a server"
    )]
    NotConnectedThere,
    /// The peer's bytes are not a record, the peer refuses, or a number of its record is outside
    /// its range.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The address of the peer's queue pair is malformed: a kind, MTU, QPN or PSN that does not
    /// exist, or reserved bytes that are not 0.
    #[error("bytes 16..56 of the exchange record are not the address of a queue pair")]
    Address,
    /// The queue pair could not be connected.
    #[error(transparent)]
    Connect(#[from] mlx5::ConnectError),
}

impl ConnectFailure for SetupError {
    fn may_pass(&self) -> bool {
        match self {
            Self::Record(error) => error.may_pass(),
            Self::Connect(error) => error.may_pass(),
            Self::Thread(_)
            | Self::Reentrant(_)
            | Self::ContextGone
            | Self::RingSize(_)
            | Self::RingSizes { .. }
            | Self::EmptyWindow
            | Self::MaxReply { .. }
            | Self::Address => false,
            _ => true,
        }
    }

    /// Returns a copy of the error. Variants that cannot be copied become `Channel` with the same
    /// text; like them, a `Channel` may pass.
    fn again(&self) -> Self {
        match *self {
            Self::Unreachable(ref error) => Self::Unreachable(error.again()),
            Self::Connect(ref error) => Self::Connect(error.clone()),
            Self::Channel(ref error) => {
                Self::Channel(io::Error::new(error.kind(), error.to_string()))
            }
            Self::Thread(ref error) => {
                Self::Thread(io::Error::new(error.kind(), error.to_string()))
            }
            Self::Reentrant(error) => Self::Reentrant(error),
            Self::ContextGone => Self::ContextGone,
            Self::RingSize(bytes) => Self::RingSize(bytes),
            Self::EmptyWindow => Self::EmptyWindow,
            Self::Record(error) => Self::Record(error),
            Self::MaxReply { wanted, max } => Self::MaxReply { wanted, max },
            Self::RingSizes { local, remote } => Self::RingSizes { local, remote },
            Self::NotConnectedThere => Self::NotConnectedThere,
            Self::Address => Self::Address,
            _ => Self::Channel(io::Error::other(self.to_string())),
        }
    }
}

impl SetupError {
    /// Returns whether one of the ends refused because it has no room for another peer now.
    pub(crate) const fn is_for_lack_of_room(&self) -> bool {
        matches!(self, Self::Record(RecordError::Refused(Refusal::Full)))
    }
}

/// A function that does not nest was called from inside a callback of a poll of the same context,
/// and did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "poll, drain, flush, and the creation and connection of endpoints are impossible from inside a poll's callback"
)]
pub struct Reentrant;

/// A violation of the protocol by the peer, of one of the rules T1 to T7 of
/// docs/copyrpc-protocol.md. The violation ends this one connection, and all of its pending calls.
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
    /// The consumer position is unaligned, below the earlier one of the same channel, or beyond the
    /// end of what was sent (T5).
    #[error("consumer position {told} is not an aligned position in {floor}..={ceiling}")]
    ConsumerPosition {
        /// Position that the peer reported.
        told: u64,
        /// Position that the peer reported before, on the same channel.
        floor: u64,
        /// Position up to which this end has sent.
        ceiling: u64,
    },
    /// The cumulative credit is unaligned, below the earlier one of the same channel, or more than
    /// a quarter ring above the spent credit (T5).
    #[error("cumulative credit {told} is not an aligned number in {floor}..={ceiling}")]
    Credit {
        /// Credit that the peer reported.
        told: u64,
        /// Credit that the peer reported before, on the same channel.
        floor: u64,
        /// Credit spent plus a quarter ring.
        ceiling: u64,
    },
    /// The count of received batches is below the earlier one of the same channel, or above the
    /// number of batches sent (T5).
    #[error("count of received batches {told} is not in {floor}..={ceiling}")]
    BatchesReceived {
        /// Count that the peer reported.
        told: u64,
        /// Count that the peer reported before, on the same channel.
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
    /// A request asks for less response credit than any response takes, or for more than was
    /// granted (T6).
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
    /// The device reported that the queue pair broke down, or a queue of the context, or the device
    /// itself. After the last two the context makes no more endpoints.
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

    #[test]
    fn a_copy_of_a_permanent_error_is_permanent() {
        let thread = SetupError::Thread(io::ErrorKind::OutOfMemory.into());
        let permanent = [
            thread,
            SetupError::Reentrant(Reentrant),
            SetupError::ContextGone,
            SetupError::RingSize(1),
            SetupError::EmptyWindow,
            SetupError::MaxReply { wanted: 2, max: 1 },
            SetupError::RingSizes {
                local: 1,
                remote: 2,
            },
            SetupError::Address,
        ];
        for error in permanent {
            assert!(!error.may_pass() && !error.again().may_pass(), "{error}");
            assert_eq!(error.again().to_string(), error.to_string());
        }
    }

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
