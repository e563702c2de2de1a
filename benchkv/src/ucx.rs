//! The options of `ucx-am`.

use benchkv_harness::range::{RangeError, range};
use clap::{Args, ValueEnum};
use engine::topology::Carrier;
use engine::ucx::PeerErrors;

use crate::devices::Devices;
use crate::port::PortOptions;

/// Options of `ucx-am`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Args)]
#[group(skip)]
pub struct UcxArgs {
    /// Whether UCX detects dead peers of ucx-am. peer: it does, without the transports that cannot,
    /// such as its shared memory. none: only the launcher of the ranks does. auto: none for ranks
    /// on one host, else peer.
    #[arg(help_heading = "Device", long, hide_short_help = true, value_enum, default_value_t = PeerErrorsChoice::Auto)]
    pub ucx_errors: PeerErrorsChoice,
}

impl UcxArgs {
    /// Returns whether UCX has to detect dead peers in a job on `hosts` hosts; `None` if the
    /// carrier is not `ucx-am`.
    ///
    /// # Errors
    /// [`RangeError`]: options of a device are given with `ucx-am`, or `--ucx-errors` without it.
    pub fn resolve(
        self,
        carrier: Carrier,
        device: &Devices,
        port: &PortOptions,
        hosts: usize,
    ) -> Result<Option<PeerErrors>, RangeError> {
        match carrier {
            Carrier::UcxAm if !device.is_auto() || *port != PortOptions::default() => {
                let why = "UCX chooses its transports itself";
                let what = "no value with --carrier ucx-am; UCX_TLS and UCX_NET_DEVICES tell UCX";
                let given = format!("{device} {port}");
                Err(range("--device", given.trim_end(), why, what.to_owned()))
            }
            Carrier::UcxAm => Ok(Some(self.ucx_errors.resolve(hosts))),
            _ if self.ucx_errors != PeerErrorsChoice::Auto => {
                let why = "this --carrier has no part in UCX";
                let what = "no value without --carrier ucx-am".to_owned();
                Err(range("--ucx-errors", self.ucx_errors, why, what))
            }
            _ => Ok(None),
        }
    }
}

/// The values of `--ucx-errors`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum PeerErrorsChoice {
    #[default]
    /// None for ranks on one host, else peer.
    Auto,
    /// UCX detects dead peers, and leaves out transports that cannot.
    Peer,
    /// UCX does not detect dead peers.
    None,
}

impl PeerErrorsChoice {
    const fn resolve(self, hosts: usize) -> PeerErrors {
        match self {
            Self::Peer => PeerErrors::Peer,
            Self::None => PeerErrors::None,
            Self::Auto if hosts > 1 => PeerErrors::Peer,
            Self::Auto => PeerErrors::None,
        }
    }
}
