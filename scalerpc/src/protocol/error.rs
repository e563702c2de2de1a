//! Errors and failures of calls. Retryable and permanent errors never share a variant.

use thiserror::Error;

/// The reason why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum CloseReason {
    /// The server's device does not answer, or the server evicted this client.
    #[error("the server is gone, or has evicted this client; connect again")]
    Disconnected,
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(ProtocolError),
    /// This end's device reported an error of itself, of a queue or of the queue pair.
    #[error("this end's device, or a queue of it, broke down; connect again")]
    Device,
    /// The server stopped. It answered the requests that it had taken; no handler got any other
    /// request, nor will get one.
    #[error("the server stopped; connect to the next one")]
    ServerStopped,
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
    /// The length of a message is impossible.
    #[error("invalid message length: {0} bytes")]
    Length(u32),
    /// The response answers a request other than the request of its slot.
    #[error("response to request {0:#x} in the slot of another request")]
    ReqId(u64),
    /// The zone of an activation does not exist.
    #[error("zone {0} does not exist")]
    Zone(u16),
    /// The client's state does not allow the event.
    #[error("an event that the client's state does not allow")]
    Event,
}

/// The reason why a call was not made, or ended without its handler's response: a
/// [`ClientError`](crate::ClientError) that is never `Connect` or `NoCredit`.
///
/// A call that was not made has one of these errors: `TooLarge`, if it does not fit a slot; `Full`,
/// if all slots hold calls, or wait for the responses to calls whose time ended (poll, take
/// completions, then call again); `NotSent`, if the connection has ended. A call that was made ends
/// as `NotSent` if the deadline passed, or the connection ended, before the server could see the
/// call, or if the server stopped before it accepted the call.
pub type CallFailure = copyrpc_calls::CallFailure<CloseReason>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_was_not_sent_is_retryable_and_one_that_a_handler_got_may_have_executed() {
        let failures = [
            (CallFailure::UnknownType, (false, false)),
            (CallFailure::Refused, (false, true)),
            (CallFailure::ReplyTooLong { len: None }, (false, true)),
            (CallFailure::Dropped, (false, true)),
            (CallFailure::NotSent, (true, false)),
            (CallFailure::TimedOut, (false, true)),
            (
                CallFailure::Closed(CloseReason::Disconnected),
                (false, true),
            ),
        ];
        for (failure, expected) in failures {
            assert_eq!(
                (failure.is_retryable(), failure.may_have_executed()),
                expected,
                "{failure}"
            );
        }
        assert_eq!(CallFailure::TimedOut.to_string(), "no reply in time");
        let errors = [
            (CallFailure::Full, (true, false)),
            (CallFailure::TooLarge { len: 2, max: 1 }, (false, false)),
        ];
        for (error, expected) in errors {
            assert_eq!(
                (error.is_retryable(), error.may_have_executed()),
                expected,
                "{error}"
            );
        }
    }
}
