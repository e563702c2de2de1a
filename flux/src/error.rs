//! The error of an answer.

use crate::token::Token;

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
