//! How calls end, and why one is not made.

use std::fmt;

/// Why a session ended. Permanent: connect anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The other end, a server or a node, ended or died.
    #[error("the other end is gone: connect again when it is back")]
    PeerGone,
    /// The server ended this client's session: the client broke the protocol, or lost the lock that proves it alive because another part
    /// of its process opened and closed the region's file.
    #[error("the server ended this client's session: connect again")]
    Evicted,
}

/// Why a call ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallFailed {
    /// The handler got the request, and dropped it without an answer, panicked, or had an answer that is longer than possible. It may have
    /// executed the call.
    #[error("the other end dropped the request, or had an answer that is too long")]
    Rejected,
    /// There was no answer within the time of the call. Whether the other end executes the request is unknown; a later answer reaches no call.
    #[error("no answer in time")]
    TimedOut,
    /// The session ended first; whether the other end executed the request is unknown.
    #[error("no answer, and unknown whether the call was executed: {0}")]
    Disconnected(SessionEnd),
}

/// Why one who asked and waited has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Another call of this client is unanswered, or so many that were given up and that the other end has not answered yet that no other
    /// fits. Retryable: poll first in the one case, ask again later in the other.
    #[error("this client has unanswered calls: poll for replies, then ask again")]
    Full,
    /// The other end takes no request of that length. Permanent.
    #[error("the request is longer than the {max} bytes that are possible")]
    TooLarge {
        /// Maximum length.
        max: usize,
    },
    /// The call was made, or the session is over.
    #[error(transparent)]
    Failed(#[from] CallFailed),
}

impl<Req, U> From<CallError<Req, U>> for AskError {
    fn from(error: CallError<Req, U>) -> Self {
        match error {
            CallError::Full { .. } => Self::Full,
            CallError::TooLarge { max, .. } => Self::TooLarge { max },
            CallError::Disconnected { end, .. } => Self::Failed(CallFailed::Disconnected(end)),
        }
    }
}

/// Why a call was not made. What was to be sent and the user data come back; nothing was sent.
#[derive(thiserror::Error)]
pub enum CallError<Req, U> {
    /// As many calls as fit are unanswered. Retryable: poll first.
    #[error("all {depth} calls that fit are unanswered: poll for replies, then try again")]
    Full {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Calls that can be unanswered.
        depth: usize,
    },
    /// The other end takes no request of that length. Permanent.
    #[error("a request of {bytes} bytes: at most {max} are possible")]
    TooLarge {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Length of the request.
        bytes: usize,
        /// Maximum length.
        max: usize,
    },
    /// The session is over. Permanent. The calls that were made before still end by `poll`: poll until it returns this end too.
    #[error("{end}")]
    #[doc(alias = "ServerDisconnected")]
    Disconnected {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// How it ended.
        end: SessionEnd,
    },
}

// By hand, so that payloads and user data need not be printable.
impl<Req, U> fmt::Debug for CallError<Req, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { depth, .. } => f.debug_struct("Full").field("depth", depth).finish_non_exhaustive(),
            Self::TooLarge { bytes, max, .. } => f.debug_struct("TooLarge").field("bytes", bytes).field("max", max).finish_non_exhaustive(),
            Self::Disconnected { end, .. } => f.debug_struct("Disconnected").field("end", end).finish_non_exhaustive(),
        }
    }
}
