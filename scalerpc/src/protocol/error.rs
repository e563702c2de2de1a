//! Errors and failures of calls. Retryable and permanent errors never share a variant.

use thiserror::Error;

/// The reason why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum CloseReason {
    /// The server's device does not answer, or it evicted this client.
    #[error("the server is gone, or has evicted this client; connect again")]
    Disconnected,
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(ProtocolError),
    /// This end's device reported that it, a queue or the queue pair broke down.
    #[error("this end's device, or a queue of it, broke down; connect again")]
    Device,
    /// This end was closed.
    #[error("this end was closed")]
    ClosedHere,
}

/// The reason why a message or event of the server breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The bytes are not a response or event.
    #[error("a malformed response or event")]
    Malformed,
    /// No message has this length.
    #[error("invalid message length: {0} bytes")]
    Length(u32),
    /// The response answers another request than the one of its slot.
    #[error("response to request {0:#x} in the slot of another request")]
    ReqId(u64),
    /// An activation names a zone that no pool has.
    #[error("zone {0} does not exist")]
    Zone(u16),
    /// An event for a client in another state.
    #[error("an event that the client's state does not allow")]
    Event,
}

/// The reason why a call was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallError {
    /// All slots hold calls, or wait for the responses of calls that ran out of time. Poll, take completions, then retry.
    #[error("no free slot now: poll, take completions, then retry")]
    NoSlot,
    /// The client may not write into the pool now. Returned only by [`RdmaClient::try_activate`](crate::RdmaClient::try_activate).
    #[error("the server serves another group now: retry, or make an ordinary call, which waits at the client")]
    NotActive,
    /// The payload is larger than a slot.
    #[error("payload of {len} bytes, the limit is {max}: split it, or give the server larger slots")]
    PayloadTooLarge {
        /// Payload bytes of the call.
        len: usize,
        /// Maximum payload bytes of a slot.
        max: usize,
    },
    /// The connection has ended.
    #[error("connection closed: {0}")]
    Closed(CloseReason),
}

impl CallError {
    /// Returns whether the same call can succeed after more polls.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::NoSlot | Self::NotActive)
    }
}

/// The reason why a call ended without its handler's response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum CallFailure {
    /// The server has no handler of the call's type.
    #[error("the server has no handler of this type")]
    UnknownType,
    /// The handler failed.
    #[error("the handler failed")]
    HandlerFailed,
    /// The handler's response is larger than a slot.
    #[error("the handler's response is larger than a slot")]
    ResponseTooLarge,
    /// The deadline passed, or the connection ended, before the server could see the call. The handler did not run, and will not.
    #[error("the call was not sent: its time, or the connection, ended before a slot or the server's slice came")]
    NotSent,
    /// The deadline passed first. Whether the handler ran or will run is not known; its response is dropped.
    #[error("no response before the deadline")]
    DeadlineExceeded,
    /// The connection ended first. Whether the handler ran is not known.
    #[error("connection closed: {0}")]
    Closed(CloseReason),
}

impl CallFailure {
    /// Returns whether the handler did not run, and may run if the call is made again: on a new connection, if this one has ended.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::NotSent)
    }
}
