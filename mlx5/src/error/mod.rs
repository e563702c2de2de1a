//! Errors of the control path: the errors of the software HCA, whose texts are used for all
//! devices, and the errors of hardware.

pub(crate) mod verbs;

use self::verbs::{CallError, VerbsError};
use crate::address::DeviceKind;
use crate::config::QpState;
use crate::wire::ConnectOptions;

/// The reason why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The software HCA cannot be opened.
    #[error(transparent)]
    Soft(#[from] mlx5_hca::OpenError),
    /// The options in the name of a software HCA with a port for packets are not legal.
    #[error("soft:roce=ADDRESS: {reason}")]
    Roce {
        /// The mistake, and the legal form.
        reason: String,
    },
    /// A device of libibverbs cannot be used; the error text gives advice.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The name is not that of a software HCA, and libibverbs is not installed or has no devices;
    /// the error text contains advice.
    #[error("{0:?} would be a device behind libibverbs, but {1}")]
    NoVerbs(String, VerbsError),
}

/// The reason why an object could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A size is outside the device's limits, or memory is missing.
    #[error(transparent)]
    Refused(#[from] mlx5_hca::CreateError),
    /// The device lacks a feature.
    #[error("this device has no {what}")]
    Unsupported {
        /// The requested feature.
        what: &'static str,
    },
    /// libibverbs or the kernel refused the call.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// The reason why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// No device registers such a region, peers could not reach it, or memory is missing.
    #[error(transparent)]
    Refused(#[from] mlx5_hca::RegisterError),
    /// The region asks for remote atomic access, and the device has no atomics; see
    /// [`DeviceInfo::has_atomics`](crate::DeviceInfo::has_atomics).
    #[error("this device has no atomics: no region can give REMOTE_ATOMIC access")]
    NoAtomics,
    /// libibverbs or the kernel refused the call.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// The reason why a transition was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The queue pair is not in the state that the transition needs. In the error state the only
    /// remedy is a new queue pair.
    #[error("the queue pair is in state {from:?}; this transition needs {needs:?}{}", if *from == QpState::Error { ": create a new queue pair" } else { "" })]
    WrongState {
        /// The current state.
        from: QpState,
        /// The necessary state.
        needs: QpState,
    },
    /// An option is outside its range.
    #[error("{option} is {value}; legal is {legal}")]
    Option {
        /// The option.
        option: &'static str,
        /// The requested value.
        value: u8,
        /// The legal range.
        legal: &'static str,
    },
    /// The peer's device is of another kind.
    #[error(
        "this end is {local:?}, the peer {remote:?}: open both as soft on one host, or each as a NIC or as soft:roce=ADDRESS"
    )]
    DifferentKinds {
        /// Kind of this end's device.
        local: DeviceKind,
        /// Kind of the peer's device.
        remote: DeviceKind,
    },
    /// The peer's address has no GID, as on InfiniBand, and this end's port is a RoCE port.
    #[error("the peer's address has no GID, and a RoCE port is named by nothing else")]
    NoGid,
    /// libibverbs or the kernel refused the call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The software HCA refused the connection: for example, no device of the fabric has that LID,
    /// or the device has no such queue pair.
    #[error(transparent)]
    Soft(#[from] mlx5_hca::ConnectError),
    /// The peer is a process of another user, whose shared memory this process must not open.
    #[error(
        "the peer's process is of user {theirs}, this one of user {own}: soft devices connect within one user of a host, and within one \
         user namespace"
    )]
    OtherUser {
        /// User id of the peer's process, as that process sees it.
        theirs: u32,
        /// User id of this process.
        own: u32,
    },
}

impl ConnectError {
    /// Returns whether a later attempt may succeed with another process at the same address: true
    /// for each [`Soft`](Self::Soft) error except a lack of access, and for each call that
    /// libibverbs or the kernel refused.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        match self {
            Self::Soft(error) => !matches!(error, mlx5_hca::ConnectError::NoAccess { .. }),
            Self::Call(_) => true,
            _ => false,
        }
    }
}

pub(crate) fn check_options(options: &ConnectOptions) -> Result<(), ConnectError> {
    let option = |option, value, legal| {
        Err(ConnectError::Option {
            option,
            value,
            legal,
        })
    };
    match options {
        ConnectOptions {
            timeout: 0 | 32.., ..
        } => option("timeout", options.timeout, "1..=31"),
        ConnectOptions {
            retry_count: 8.., ..
        } => option("retry_count", options.retry_count, "0..=7"),
        ConnectOptions { rnr_retry: 8.., .. } => option("rnr_retry", options.rnr_retry, "0..=7"),
        _ => Ok(()),
    }
}
