//! Errors, one type per verb.

use crate::token::Token;

/// The reason why a call was not made. The error returns the payload and the user data.
#[derive(thiserror::Error)]
pub enum CallError<T, U> {
    /// The number of unanswered calls to that node has reached the maximum. Poll, then try again.
    #[error("{in_flight} calls to node {to} are unanswered: poll for replies, then try again")]
    Full {
        /// The payload.
        payload: T,
        /// The user data.
        user_data: U,
        /// The node called.
        to: usize,
        /// Calls in flight to the node.
        in_flight: usize,
    },
    /// Node `to` was dropped. Permanent.
    #[error("node {to} is gone")]
    Disconnected {
        /// The payload.
        payload: T,
        /// The user data.
        user_data: U,
        /// The node called.
        to: usize,
    },
    /// No other node has this number. Permanent.
    #[error(
        "node {to} cannot be called: there are nodes 0 to {last}, and a node does not call itself"
    )]
    NoSuchNode {
        /// The payload.
        payload: T,
        /// The user data.
        user_data: U,
        /// The node called.
        to: usize,
        /// The number of the last node.
        last: usize,
    },
}

// Implemented by hand, so that payloads and user data need not be printable.
impl<T, U> std::fmt::Debug for CallError<T, U> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, to) = match self {
            Self::Full { to, .. } => ("Full", to),
            Self::Disconnected { to, .. } => ("Disconnected", to),
            Self::NoSuchNode { to, .. } => ("NoSuchNode", to),
        };
        f.debug_struct(name).field("to", to).finish_non_exhaustive()
    }
}

/// Another node received the call of this token. The error returns the token and the payload;
/// dropping the token rejects the call.
#[derive(thiserror::Error)]
#[error("this call was received by another node")]
pub struct ForeignToken<T> {
    /// The token.
    pub token: Token,
    /// The payload.
    pub payload: T,
}

impl<T> std::fmt::Debug for ForeignToken<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForeignToken")
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}
