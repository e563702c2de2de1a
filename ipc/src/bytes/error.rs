//! What can go wrong, one type per verb.

use super::RecvHandle;
use crate::ClientGone;

/// Why an answer was not delivered.
#[derive(Debug, thiserror::Error)]
pub enum ReplyError {
    /// The client left or died meanwhile; the answer was dropped.
    #[error(transparent)]
    ClientGone(#[from] ClientGone),
    /// A longer answer than the server was made for. The request still waits for one.
    #[error("an answer of {bytes} bytes: this server was created for at most {}", request.response_max())]
    TooLarge {
        /// The request.
        request: RecvHandle,
        /// Length of the answer.
        bytes: usize,
    },
}
