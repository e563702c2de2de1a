//! UCX's active messages through libucp, which is opened at run time: nothing of UCX is needed to build.
//!
//! - `ffi`: functions, structs and constants of `ucp/api/ucp.h`, and the library. - `worker`: a safe worker with its endpoints.

mod ffi;
#[cfg(test)]
mod oracle;
pub(crate) mod worker;

use std::fmt;

use clap::{Args, ValueEnum};
use harness::device::DeviceChoice;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::plan::Transport;
use crate::cli::Cli;
use crate::options::{OptionError, range};
use crate::port::PortOptions;

/// The oldest version with what is used: active messages with `ucp_am_send_nbx`.
const OLDEST: (u32, u32) = (1, 10);

/// Options of `ucx-am`.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub struct UcxArgs {
    /// Whether UCX notices that a peer of ucx-am is dead: peer leaves out transports that cannot, such as its shared memory; none leaves it to
    /// what started the ranks; auto is none for ranks on one host, else peer.
    #[arg(long, value_enum, default_value_t = PeerErrorsChoice::Auto)]
    pub ucx_errors: PeerErrorsChoice,
}

impl UcxArgs {
    /// Whether UCX is to notice dead peers on so many hosts; `None` where UCX has no part.
    ///
    /// # Errors
    /// UCX is told what another backend is, or the other way round.
    pub fn resolve(self, cli: &Cli, hosts: usize) -> Result<Option<PeerErrors>, OptionError> {
        match cli.backend.transport() {
            Transport::UcxAm if cli.device != DeviceChoice::Auto || cli.port != PortOptions::default() => {
                let (why, what) = ("UCX chooses its transports itself", "none with ucx-am; UCX_TLS and UCX_NET_DEVICES tell UCX");
                Err(range("--device", format!("{} {}", cli.device, cli.port).trim_end(), why, what.to_owned()))
            }
            Transport::UcxAm => Ok(Some(self.ucx_errors.resolve(hosts))),
            _ if self.ucx_errors != PeerErrorsChoice::Auto => {
                let (why, what) = ("this --backend has no part in UCX", "none without --backend ucx-am");
                Err(range("--ucx-errors", self.ucx_errors, why, what.to_owned()))
            }
            _ => Ok(None),
        }
    }
}

/// What `--ucx-errors` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PeerErrorsChoice {
    /// None for ranks on one host, else peer.
    Auto,
    /// UCX notices dead peers, and leaves out transports that cannot.
    Peer,
    /// UCX does not notice them.
    None,
}

impl PeerErrorsChoice {
    /// The mode for ranks on so many hosts.
    const fn resolve(self, hosts: usize) -> PeerErrors {
        match self {
            Self::Peer => PeerErrors::Peer,
            Self::None => PeerErrors::None,
            Self::Auto if hosts > 1 => PeerErrors::Peer,
            Self::Auto => PeerErrors::None,
        }
    }
}

/// Whether UCX is to notice that peers are gone (`ucp_err_handling_mode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerErrors {
    /// It is, and uses no transport that cannot.
    Peer,
    /// It is not.
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

/// UCX cannot be used, or failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UcxError {
    /// The library is not there.
    #[error("ucx-am needs UCX ({reason}): apt-get install libucx0, or your system's package of UCX; another --backend needs none")]
    NotInstalled {
        /// What the loader says.
        reason: String,
    },
    /// The library is older than what is used.
    #[error("ucx-am needs UCX {}.{} or later, and this is {version}{lacks}", OLDEST.0, OLDEST.1)]
    TooOld {
        /// The library's version.
        version: String,
        /// A function it lacks, in words; empty when the version says enough.
        lacks: String,
    },
    /// A call failed.
    #[error("{call}: {status}")]
    Call {
        /// The function.
        call: &'static str,
        /// What its status means.
        status: String,
    },
    /// UCX says of an endpoint that its peer cannot be reached any more.
    #[error("{0}")]
    Peer(String),
}

/// Loads the library. Returns its version and file, for people.
///
/// # Errors
/// [`UcxError::NotInstalled`] or [`UcxError::TooOld`].
pub fn load() -> Result<String, UcxError> {
    ffi::Api::get().map(|api| api.describe())
}
