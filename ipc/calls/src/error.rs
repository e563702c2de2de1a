//! The errors of calls: of sessions, of calls that were made, and of calls that were not.

use std::fmt;

/// The end of a session. Permanent: connect anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The other end, a server or a node, ended or died.
    #[error("the other end is gone: connect again when it is back")]
    PeerGone,
    /// The server ended this client's session. The client broke the protocol; or another part of its process opened and closed the
    /// region's file, and so dropped the lock that proves the client alive.
    #[error("the server ended this client's session: connect again")]
    Evicted,
}

/// The end of a call without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallFailed {
    /// The handler dropped the request without an answer, panicked, or returned an answer that is too long. It may or may not have executed
    /// the call.
    #[error("the other end dropped the request, or had an answer that is too long")]
    Rejected,
    /// No answer arrived before the call's deadline. The other end may execute the request; a later answer is discarded.
    #[error("no answer in time")]
    TimedOut,
    /// The session ended before an answer arrived. The other end may have executed the request.
    #[error("connection lost before a reply arrived (the call may have executed): {0}")]
    Disconnected(SessionEnd),
}

/// The error of a blocking call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Another call of this client is unanswered, or all slots are taken by cancelled calls that the server has not answered yet.
    /// Retryable: poll first in the first case, ask again later in the second.
    #[error("this client has unanswered calls: poll for replies, then ask again")]
    Full,
    /// The request is longer than the other end accepts. Permanent.
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

/// The reason why a call was not made. Nothing was sent; the request and the user data come back.
#[derive(thiserror::Error)]
pub enum CallError<Req, U> {
    /// All slots hold unanswered calls. Retryable: poll first.
    #[error("all {depth} calls that fit are unanswered: poll for replies, then try again")]
    Full {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Calls that can be unanswered.
        depth: usize,
    },
    /// The request is longer than the other end accepts. Permanent.
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
    /// The session is over. Permanent. Earlier calls still end in `poll`: poll until it returns this end too.
    #[error("{end}")]
    #[doc(alias = "ServerDisconnected")]
    Disconnected {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// The end of the session.
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
