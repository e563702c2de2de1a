//! Errors of the software HCA.

use core::ops::RangeInclusive;
use std::io;
use std::net::{IpAddr, SocketAddr};

use mlx5_wire::Access;

/// The reason why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The shared-memory directory cannot be used.
    #[error("the fabric's directory: {0}")]
    Directory(#[from] copyrpc_shm::dir::DirError),
    /// The control file could not be made.
    #[error("the device's control file: {0}")]
    ControlFile(#[from] copyrpc_shm::region::CreateError),
    /// Memory for the device could not be allocated.
    #[error("memory for {what}: {source}")]
    Memory {
        /// The purpose of the memory.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The port for packets cannot be used.
    #[error(
        "RoCE packets from {address}, UDP port {port}: {source}; use an address of this host, and a free port"
    )]
    Wire {
        /// The address of the port.
        address: IpAddr,
        /// UDP port at the address; 0 means any free port.
        port: u16,
        /// The cause.
        source: io::Error,
    },
    /// The options have a port for packets, and a timing that is not immediate. Devices with
    /// packets execute each WQE at once.
    #[error("RoCE packets take real time: use no model of the time of operations with them")]
    WireInModel,
    /// Every LID is taken.
    #[error("all {0} LIDs of the fabric are in use by living devices")]
    NoFreeLid(u16),
}

impl OpenError {
    /// Returns whether another socket has the UDP port.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::Wire { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
    }
}

/// The reason why an object could not be created.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// A parameter is outside the device's capabilities.
    #[error("{what} is {value}; the device takes {min}..={max}")]
    OutOfRange {
        /// The parameter.
        what: &'static str,
        /// The value given.
        value: u64,
        /// Smallest legal value.
        min: u64,
        /// Largest legal value.
        max: u64,
    },
    /// A parameter has none of the few legal values.
    #[error("{what} is {value}; legal is {legal}")]
    Illegal {
        /// The parameter.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The legal values.
        legal: &'static str,
    },
    /// The device has no free object of this kind; destroy one first.
    #[error("the device has no free {what}: all {max} are in use")]
    Exhausted {
        /// The kind of object.
        what: &'static str,
        /// The maximum number of objects of this kind.
        max: u64,
    },
    /// Memory could not be allocated.
    #[error("no memory for {what}: {source}")]
    Memory {
        /// The purpose of the memory.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Refuses values that are not `legal`.
///
/// # Errors
/// [`CreateError::OutOfRange`].
pub fn check<T: TryInto<u64>>(
    what: &'static str,
    value: impl TryInto<u64>,
    legal: RangeInclusive<T>,
) -> Result<(), CreateError> {
    let value = value.try_into().unwrap_or(u64::MAX);
    let (min, max) = legal.into_inner();
    let [min, max] = [min, max].map(|bound| bound.try_into().unwrap_or(u64::MAX));
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(CreateError::OutOfRange {
            what,
            value,
            min,
            max,
        })
    }
}

pub(crate) fn exhausted(what: &'static str, max: usize) -> CreateError {
    let max = max as u64;
    CreateError::Exhausted { what, max }
}

/// The reason why memory could not be registered.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The region is empty.
    #[error("a memory region of 0 bytes; the smallest is 1")]
    Empty,
    /// The access includes remote WRITEs or atomics, but no local writes. `ibv_reg_mr` refuses this
    /// access too.
    #[error("remote write and remote atomic access need local write access as well")]
    RemoteWithoutLocalWrite,
    /// The device's table of regions is full.
    #[error("all {max} memory regions of the device are in use; drop some first")]
    Exhausted {
        /// Maximum number of regions.
        max: usize,
    },
    /// Peers could not reach this memory.
    #[error("peers cannot reach memory of another allocator here: {reason}")]
    Unreachable {
        /// The reason, in words.
        reason: &'static str,
    },
    /// The arena has no room, or the kernel has no memory.
    #[error("no memory for a region of {bytes} bytes: {source}")]
    Memory {
        /// The requested size.
        bytes: usize,
        /// The cause.
        source: io::Error,
    },
}

/// Refuses regions that no mlx5 device registers.
///
/// # Errors
/// [`RegisterError::Empty`], [`RegisterError::RemoteWithoutLocalWrite`].
pub fn check_region(bytes: usize, access: Access) -> Result<(), RegisterError> {
    match (bytes, access.is_legal()) {
        (0, _) => Err(RegisterError::Empty),
        (_, false) => Err(RegisterError::RemoteWithoutLocalWrite),
        (_, true) => Ok(()),
    }
}

/// The reason why a queue pair was not connected.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectError {
    /// No device has this LID.
    #[error("no soft device with LID {lid} in this fabric: {reason}")]
    NoSuchDevice {
        /// The requested LID.
        lid: u16,
        /// The reason.
        reason: String,
    },
    /// The device exists, and this process has no access to its memory.
    #[error("no access to the soft device with LID {lid}: {reason}")]
    NoAccess {
        /// The requested LID.
        lid: u16,
        /// The reason.
        reason: String,
    },
    /// The LID belongs to another device now: to a later device, or to a device in another
    /// directory.
    #[error(
        "LID {lid} belongs to another device here: the one that gave this address is gone, or in another shared-memory directory \
         (containers need a common /dev/shm)"
    )]
    StaleDevice {
        /// The requested LID.
        lid: u16,
    },
    /// The device has no queue pair with this number.
    #[error("QPN {qpn:#x} is not a queue pair of the device with LID {lid}")]
    NoSuchQp {
        /// The requested LID.
        lid: u16,
        /// The requested number.
        qpn: u32,
    },
    /// The peer can be reached by packets only, and the device sends no packets.
    #[error(
        "the peer at {to} is reached by RoCE packets, which this device does not send: open it as soft:roce=ADDRESS"
    )]
    NoWire {
        /// The address of the peer.
        to: IpAddr,
    },
    /// The path to the peer has no room for the packets of the connection, whose MTU is the smaller
    /// MTU of its two ends. The MTU of a connection cannot change later.
    #[error(
        "the path to {to} has room for IP packets of {path} bytes, and so for an RDMA MTU of {fits}; this connection has {mtu}: \
         use mtu={fits} at either end"
    )]
    PathMtu {
        /// The address of the peer.
        to: SocketAddr,
        /// MTU of the connection, in bytes of payload.
        mtu: u16,
        /// MTU of the path, in bytes of an IP packet.
        path: u32,
        /// The largest MTU of a connection on this path, in bytes of payload.
        fits: u16,
    },
    /// The peer sends its answers to UDP port 4791 only, like every device that is not a software
    /// HCA, and this device has a different port.
    #[error(
        "the peer at {to} sends to UDP port 4791, which another device of this address has; this one has port {own}"
    )]
    NotTheRocePort {
        /// The address of the peer.
        to: SocketAddr,
        /// The UDP port of this device.
        own: u16,
    },
}
