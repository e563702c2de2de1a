//! UCX's active messages through libucp, which is opened at run time: nothing of UCX is needed to
//! build.
//!
//! - `ffi`: functions, structs and constants of `ucp/api/ucp.h`, and the library.
//! - `worker`: a safe worker with its endpoints.

mod ffi;
#[cfg(test)]
mod tests;
pub(crate) mod worker;

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The oldest version with the functions in use: active messages with `ucp_am_send_nbx`.
const OLDEST: (u32, u32) = (1, 10);

/// Whether UCX detects that peers are gone (`ucp_err_handling_mode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerErrors {
    /// UCX detects dead peers, and uses no transport that cannot detect them.
    Peer,
    /// UCX does not detect the death of a peer.
    None,
}

impl fmt::Display for PeerErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peer => "peer",
            Self::None => "none, so that UCX may use transports that cannot notice a dead peer",
        })
    }
}

/// The reason why UCX cannot be used, or a failure of UCX.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UcxError {
    /// The library is not installed.
    #[error(
        "ucx-am needs UCX ({reason}): apt-get install libucx0, or your system's package of UCX; another --backend needs none"
    )]
    NotInstalled {
        /// The loader's reason.
        reason: String,
    },
    /// The library is older than the oldest usable version.
    #[error("ucx-am needs UCX {}.{} or later, and this is {version}{lacks}", OLDEST.0, OLDEST.1)]
    TooOld {
        /// The library's version.
        version: String,
        /// A function that the library lacks, in words; empty if the version is reason enough.
        lacks: String,
    },
    /// A call failed.
    #[error("{call}: {status}")]
    Call {
        /// The function.
        call: &'static str,
        /// Text of the status that the function returned.
        status: String,
    },
    /// UCX reports that the peer of an endpoint cannot be reached any more.
    #[error("{0}")]
    Peer(String),
}

/// Loads the library. Returns its version and file as text.
///
/// # Errors
/// [`UcxError::NotInstalled`] or [`UcxError::TooOld`].
pub fn load() -> Result<String, UcxError> {
    ffi::Api::get().map(|api| api.describe())
}
