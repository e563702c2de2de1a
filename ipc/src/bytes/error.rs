//! What can go wrong, one type per verb.

use std::fmt;

use super::RecvHandle;
use crate::{ClientGone, SessionEnd};

/// Why a call was not made. The user data comes back.
#[derive(thiserror::Error)]
pub enum CallError<U> {
    /// The server takes no message of that length. Permanent.
    #[error("a request of {bytes} bytes: this server takes at most {max}")]
    TooLarge {
        /// The user data.
        user_data: U,
        /// Length of the request.
        bytes: usize,
        /// Longest request.
        max: usize,
    },
    /// As many calls as fit are unanswered. Poll, then try again.
    #[error("all {depth} calls of this client are unanswered: poll for replies, then try again")]
    QueueFull {
        /// The user data.
        user_data: U,
        /// Calls that can be unanswered.
        depth: usize,
    },
    /// The session is over. Permanent.
    #[error("{end}")]
    Ended {
        /// The user data.
        user_data: U,
        /// How it ended.
        end: SessionEnd,
    },
}

// By hand, so that user data need not be printable.
impl<U> fmt::Debug for CallError<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes, max, .. } => f.debug_struct("TooLarge").field("bytes", bytes).field("max", max).finish_non_exhaustive(),
            Self::QueueFull { depth, .. } => f.debug_struct("QueueFull").field("depth", depth).finish_non_exhaustive(),
            Self::Ended { end, .. } => f.debug_struct("Ended").field("end", end).finish_non_exhaustive(),
        }
    }
}

/// Why an answer was not delivered.
#[derive(Debug, thiserror::Error)]
pub enum ReplyError {
    /// The client left or died meanwhile; the answer was dropped.
    #[error(transparent)]
    ClientGone(#[from] ClientGone),
    /// A longer answer than the server was made for. The request still waits for one.
    #[error("an answer of {bytes} bytes: this server was created for at most {max}")]
    TooLarge {
        /// The request.
        request: RecvHandle,
        /// Length of the answer.
        bytes: usize,
        /// Longest answer.
        max: usize,
    },
}
