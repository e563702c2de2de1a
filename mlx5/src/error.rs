//! The errors of the control path.

use crate::address::DeviceKind;
use crate::config::QpState;
use crate::verbs::{CallError, VerbsError};
use crate::wire::{Access, ConnectOptions};

/// The reason why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The shared-memory directory cannot be used.
    #[error("the fabric's directory: {0}")]
    Directory(#[from] shm::dir::DirError),
    /// The control file could not be created.
    #[error("the device's control file: {0}")]
    ControlFile(#[from] shm::region::CreateError),
    /// Memory for the device could not be allocated.
    #[error("memory for {what}: {source}")]
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// Every LID is taken.
    #[error("all {0} LIDs of the fabric are in use by living devices")]
    NoFreeLid(u16),
    /// A device behind libibverbs cannot be used; the error advises.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// The reason why an object could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// A size is outside the device's capabilities.
    #[error("{what} is {value}; the device takes {min}..={max}")]
    OutOfRange {
        /// The parameter.
        what: &'static str,
        /// The requested value.
        value: u64,
        /// Smallest legal value.
        min: u64,
        /// Largest legal value.
        max: u64,
    },
    /// The value is not one of the few legal ones.
    #[error("{what} is {value}; legal is {legal}")]
    Illegal {
        /// The parameter.
        what: &'static str,
        /// The requested value.
        value: u64,
        /// The legal values.
        legal: &'static str,
    },
    /// The device has no free object of this kind; destroy one first.
    #[error("the device has no free {what}: all {max} are in use")]
    Exhausted {
        /// The kind.
        what: &'static str,
        /// Number of objects of that kind.
        max: u64,
    },
    /// Memory could not be allocated.
    #[error("no memory for {what}: {source}")]
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
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

/// Refuses values outside `min..=max`.
pub(crate) fn check(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), CreateError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(CreateError::OutOfRange { what, value, min, max }) }
}

/// The reason why memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The region is empty.
    #[error("a memory region of 0 bytes; the smallest is 1")]
    Empty,
    /// Remote write or remote atomic access without local write access; `ibv_reg_mr` refuses it too.
    #[error("remote write and remote atomic access need local write access as well")]
    RemoteWithoutLocalWrite,
    /// The device's table is full.
    #[error("all {max} memory regions of the device are in use; drop some first")]
    Exhausted {
        /// Regions of the device.
        max: usize,
    },
    /// Peers could not reach this memory.
    #[error("memory of another allocator cannot be a remote buffer here: {reason}; use Pd::alloc")]
    Unreachable {
        /// The cause.
        reason: &'static str,
    },
    /// The region asks for remote atomic access, and the device has no atomics; see
    /// [`DeviceInfo::has_atomics`](crate::DeviceInfo::has_atomics).
    #[error("this device has no atomics: no region can give REMOTE_ATOMIC access")]
    NoAtomics,
    /// libibverbs or the kernel refused the call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The arena has no room, or the kernel no memory.
    #[error("no memory for a region of {bytes} bytes: {source}")]
    Memory {
        /// The requested bytes.
        bytes: usize,
        /// The cause.
        source: std::io::Error,
    },
}

/// The reason why a transition was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The queue pair is in another state. In the error state the only remedy is a new queue pair.
    #[error("the queue pair is in state {from:?}; this transition needs {needs:?}{}", if *from == QpState::Error { ": create a new queue pair" } else { "" })]
    WrongState {
        /// The state it is in.
        from: QpState,
        /// The state it must be in.
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
    #[error("a {local:?} device cannot connect to a {remote:?} one")]
    DifferentKinds {
        /// Kind of this end's device.
        local: DeviceKind,
        /// Kind of the peer's device.
        remote: DeviceKind,
    },
    /// One end is on InfiniBand and gave no GID; the other is on RoCE.
    #[error("the peer's address has no GID, and a RoCE port is named by nothing else")]
    NoGid,
    /// libibverbs or the kernel refused the call.
    #[error(transparent)]
    Call(#[from] CallError),
    /// No device of the fabric has that LID.
    #[error("no soft device with LID {lid} in this fabric: {reason}")]
    NoSuchDevice {
        /// The requested LID.
        lid: u16,
        /// The cause.
        reason: String,
    },
    /// The LID belongs to another device: a later one, or one in another directory.
    #[error(
        "LID {lid} belongs to another device here: the one that gave this address is gone, or in another shared-memory directory \
         (containers need a common /dev/shm)"
    )]
    StaleDevice {
        /// The requested LID.
        lid: u16,
    },
    /// The peer is a process of another user, whose shared memory this one must not open.
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
    /// The number names no queue pair of that device.
    #[error("QPN {qpn:#x} is not a queue pair of the device with LID {lid}")]
    NoSuchQp {
        /// The LID of the device.
        lid: u16,
        /// The requested number.
        qpn: u32,
    },
}

/// Refuses regions that no device registers.
pub(crate) fn check_region(bytes: usize, access: Access) -> Result<(), RegisterError> {
    match (bytes, access.is_legal()) {
        (0, _) => Err(RegisterError::Empty),
        (_, false) => Err(RegisterError::RemoteWithoutLocalWrite),
        (_, true) => Ok(()),
    }
}

/// Refuses options outside their ranges.
pub(crate) fn check_options(options: &ConnectOptions) -> Result<(), ConnectError> {
    let option = |option, value, legal| Err(ConnectError::Option { option, value, legal });
    match options {
        ConnectOptions { timeout: 0 | 32.., .. } => option("timeout", options.timeout, "1..=31"),
        ConnectOptions { retry_count: 8.., .. } => option("retry_count", options.retry_count, "0..=7"),
        ConnectOptions { rnr_retry: 8.., .. } => option("rnr_retry", options.rnr_retry, "0..=7"),
        _ => Ok(()),
    }
}

mod soft {
    use mlx5_hca as hca;

    use super::{ConnectError, CreateError, OpenError, RegisterError};

    impl From<hca::OpenError> for OpenError {
        fn from(error: hca::OpenError) -> Self {
            match error {
                hca::OpenError::Directory(error) => Self::Directory(error),
                hca::OpenError::ControlFile(error) => Self::ControlFile(error),
                hca::OpenError::Memory { what, source } => Self::Memory { what, source },
                hca::OpenError::NoFreeLid(lids) => Self::NoFreeLid(lids),
            }
        }
    }

    impl From<hca::CreateError> for CreateError {
        fn from(error: hca::CreateError) -> Self {
            match error {
                hca::CreateError::OutOfRange { what, value, min, max } => Self::OutOfRange { what, value, min, max },
                hca::CreateError::Illegal { what, value, legal } => Self::Illegal { what, value, legal },
                hca::CreateError::Exhausted { what, max } => Self::Exhausted { what, max },
                hca::CreateError::Memory { what, source } => Self::Memory { what, source },
            }
        }
    }

    impl From<hca::RegisterError> for RegisterError {
        fn from(error: hca::RegisterError) -> Self {
            match error {
                hca::RegisterError::Empty => Self::Empty,
                hca::RegisterError::RemoteWithoutLocalWrite => Self::RemoteWithoutLocalWrite,
                hca::RegisterError::Exhausted { max } => Self::Exhausted { max },
                hca::RegisterError::Unreachable { reason } => Self::Unreachable { reason },
                hca::RegisterError::Memory { bytes, source } => Self::Memory { bytes, source },
            }
        }
    }

    impl From<hca::ConnectError> for ConnectError {
        fn from(error: hca::ConnectError) -> Self {
            match error {
                hca::ConnectError::NoSuchDevice { lid, reason } => Self::NoSuchDevice { lid, reason },
                hca::ConnectError::StaleDevice { lid } => Self::StaleDevice { lid },
                hca::ConnectError::NoSuchQp { lid, qpn } => Self::NoSuchQp { lid, qpn },
            }
        }
    }
}
