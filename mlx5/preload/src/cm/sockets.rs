//! Names of sockets, and messages, that the library and the launcher's gate share. The gate is the
//! process that exchanges the messages of an address with other hosts
//! (`bin/mlx5-run/gate/mod.rs`).

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use mlx5_hca::wire::roce::{MAD_BYTES, Mad};
use mlx5_hca::{address_of, gid_of};
use rustix::io::{Errno, Result};
use rustix::net::{
    self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt::socket_peercred,
};
use rustix::process::geteuid;

pub(crate) const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

pub(crate) fn socket() -> Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    net::socket_with(family, kind, FLAGS, None)
}

/// Returns the name of a service's socket.
pub(crate) fn name(space: u16, at: SocketAddr) -> String {
    format!("cm-{space:x}-{}-{}", at.port(), at.ip())
}

/// Returns the address of a service's socket. The path is short, because an address has only 108
/// bytes: it leads through the descriptor of the directory, which must stay open while the address
/// is used.
pub(crate) fn address(fabric: &File, name: &str) -> Result<SocketAddrUnix> {
    let dir = fabric.as_raw_fd();
    SocketAddrUnix::new(format!("/proc/self/fd/{dir}/{name}"))
}

/// Connects a socket to the service at an address, or else to the service that listens at all
/// addresses.
///
/// # Errors
/// `ENOENT` or `ECONNREFUSED`: there is no such service. `EAGAIN`: the maximum number of
/// connections is waiting for the service.
pub(crate) fn connect(socket: &OwnedFd, fabric: &File, space: u16, to: SocketAddr) -> Result<()> {
    let any_v6 = IpAddr::from(Ipv6Addr::UNSPECIFIED);
    let any = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        any_v6
    };
    let mut result = Err(Errno::NOENT);
    for ip in [to.ip(), any, any_v6] {
        let at = name(space, (ip, to.port()).into());
        result = net::connect(socket, &address(fabric, &at)?);
        if !matches!(result, Err(Errno::NOENT | Errno::CONNREFUSED)) {
            break;
        }
    }
    result
}

/// Returns the address of the socket at which the gate of an IP address listens. The socket's name
/// belongs to the network namespace, like the IP address.
pub(crate) fn gate(ip: IpAddr) -> Result<SocketAddrUnix> {
    let name = format!("mlx5-run-{}-{ip}", geteuid().as_raw());
    SocketAddrUnix::new_abstract_name(name.as_bytes())
}

/// Connects a socket to the gate of an IP address.
///
/// # Errors
/// `ECONNREFUSED`: there is no gate. `EPERM`: another user has the gate's name.
pub(crate) fn connect_gate(socket: &OwnedFd, ip: IpAddr) -> Result<()> {
    net::connect(socket, &gate(ip)?)?;
    is_own(socket).then_some(()).ok_or(Errno::PERM)
}

/// Returns whether the other end of a socket is of the same user.
pub(crate) fn is_own(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == geteuid())
}

/// Opens the directory of a fabric, for [`connect`].
pub(crate) fn open(fabric: &Path) -> Result<File> {
    File::open(fabric).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOENT))
}

/// Length of an encoded [`Parcel`].
pub(crate) const PARCEL_BYTES: usize = 16 + MAD_BYTES;

/// A message to, or from, another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parcel {
    pub(crate) peer: IpAddr,
    pub(crate) mad: Mad,
}

impl Parcel {
    pub(crate) fn emit(&self) -> [u8; PARCEL_BYTES] {
        let mut bytes = [0; PARCEL_BYTES];
        let (peer, mad) = bytes.split_at_mut(16);
        peer.copy_from_slice(&gid_of(self.peer));
        mad.copy_from_slice(self.mad.bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let (peer, mad) = bytes.split_first_chunk::<16>()?;
        Some(Self {
            peer: address_of(peer)?,
            mad: Mad::parse(mad)?,
        })
    }
}
