//! Sockets of connections, and ports of services. A port is a Unix socket with a name in the
//! directory of the fabric, which only the user of the fabric can enter.

use std::cell::Cell;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::{self, RecvFlags, SendFlags};

use crate::cm::sockets;
use crate::options::errno::Errno;
use crate::system::held;

/// The first port chosen for a program, and the number of such ports: the defaults of Linux.
const CHOSEN: (u16, u16) = (32_768, 28_232);

/// The port of the service to which this process connected last, in any port space.
static REACHED: AtomicU16 = AtomicU16::new(0);

pub(crate) const IN_USE: Errno = Errno(libc::EADDRINUSE);

/// The options of an id that decide which other ids may have its port.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sharing {
    /// Whether other ids with this option may have the address too, until one listens.
    pub(crate) reuse: bool,
    /// Whether the unspecified IPv6 address does not include the IPv4 addresses.
    pub(crate) only_own_family: bool,
}

/// An address and a port of a port space, reserved for an id. The reservation is a lock on bytes of
/// a file, so it ends with the process that has it, even if that process is killed.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) socket: OwnedFd,
    pub(crate) number: u16,
    fabric: PathBuf,
    /// Name of the socket, in the directory of the fabric.
    name: String,
    /// The locked bytes: the first, and their number.
    bytes: (i64, i64),
    lock: File,
    listens: Cell<bool>,
}

impl Drop for Port {
    fn drop(&mut self) {
        if self.listens.get() {
            let _ = fs::remove_file(self.fabric.join(&self.name));
        }
    }
}

/// Number of bits of an address in the lock file: one for the family, and 32 for the address, or
/// for a hash of it.
const ADDRESS_BITS: u32 = 33;

/// Returns the bytes of the lock file that belong to an address and a port of a port space: one
/// byte for an address, the bytes of all addresses for the unspecified address.
fn bytes(space: u16, at: SocketAddr, sharing: Sharing) -> (i64, i64) {
    const FAMILY: i64 = 1 << (ADDRESS_BITS - 1);
    let port = (i64::from(space) << 16 | i64::from(at.port())) << ADDRESS_BITS;
    match at.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => (port, FAMILY),
        IpAddr::V4(ip) => (port + i64::from(u32::from(ip)), 1),
        IpAddr::V6(ip) if ip.is_unspecified() && sharing.only_own_family => (port + FAMILY, FAMILY),
        IpAddr::V6(ip) if ip.is_unspecified() => (port, 2 * FAMILY),
        IpAddr::V6(ip) => {
            let words = u128::from(ip);
            let hash = (words ^ words >> 32 ^ words >> 64 ^ words >> 96) as u32;
            (port + FAMILY + i64::from(hash), 1)
        }
    }
}

pub(crate) fn random() -> u32 {
    RandomState::new().hash_one(0) as u32
}

/// Returns a random port, for a program that does not choose one itself.
pub(crate) fn chosen_port() -> u16 {
    CHOSEN.0 + (random() % u32::from(CHOSEN.1)) as u16
}

/// Makes a socket that the program cannot close.
fn socket() -> Result<OwnedFd, Errno> {
    Ok(hold(sockets::socket()?))
}

/// Marks a new descriptor as held, so that the program cannot close it. Returns the descriptor.
pub(crate) fn hold(fd: OwnedFd) -> OwnedFd {
    held::opened(fd.as_raw_fd());
    fd
}

impl Port {
    /// Reserves a port; 0 means any free port.
    ///
    /// # Errors
    /// `EADDRINUSE`: another id has the address and the port. `EADDRNOTAVAIL`: the same, and one of
    /// the two has the unspecified address.
    pub(crate) fn reserve(
        fabric: &Path,
        space: u16,
        at: SocketAddr,
        sharing: Sharing,
    ) -> Result<Self, Errno> {
        if at.port() == 0 {
            let first = u32::from(chosen_port() - CHOSEN.0);
            let ports = (0..u32::from(CHOSEN.1))
                .map(|n| CHOSEN.0 + ((first + n) % u32::from(CHOSEN.1)) as u16);
            return ports
                .map(|port| Self::reserve(fabric, space, (at.ip(), port).into(), sharing))
                .find(|port| !matches!(port, Err(Errno(libc::EADDRINUSE | libc::EADDRNOTAVAIL))))
                .unwrap_or(Err(IN_USE));
        }
        let lock = File::options()
            .create(true)
            .read(true)
            .append(true)
            .open(fabric.join("cm-ports"))?;
        let port = Self {
            socket: socket()?,
            number: at.port(),
            fabric: fabric.to_owned(),
            name: sockets::name(space, at),
            bytes: bytes(space, at, sharing),
            lock,
            listens: Cell::new(false),
        };
        port.lock(if sharing.reuse {
            libc::F_RDLCK
        } else {
            libc::F_WRLCK
        })?;
        Ok(port)
    }

    /// Locks the bytes of the port, alone (`F_WRLCK`) or together with others (`F_RDLCK`).
    fn lock(&self, kind: i32) -> Result<(), Errno> {
        let (start, len) = self.bytes;
        let mut range = libc::flock {
            l_type: kind as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: start,
            l_len: len,
            l_pid: 0,
        };
        let fd = self.lock.as_raw_fd();
        // SAFETY: the descriptor is open, and `range` is an initialized structure.
        if unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const range) } == 0 {
            return Ok(());
        }
        // SAFETY: the descriptor is open, and `range` is an initialized structure, to which the
        // call writes the range of another lock.
        unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut range) };
        Err(if len > 1 || range.l_len > 1 {
            Errno(libc::EADDRNOTAVAIL)
        } else {
            IN_USE
        })
    }

    pub(crate) fn listen(&self, backlog: u32) -> Result<(), Errno> {
        // The limit of the kernel's connection manager, which replaces 0 by the limit too.
        const MOST: u32 = 1024;
        let backlog = if (1..MOST).contains(&backlog) {
            backlog
        } else {
            MOST
        };
        // Only one id may listen, although other ids may have reserved the same port.
        self.lock(libc::F_WRLCK)?;
        // If a previous owner of the port was killed, the name of its socket still exists.
        let _ = fs::remove_file(self.fabric.join(&self.name));
        let dir = File::open(&self.fabric)?;
        net::bind(&self.socket, &sockets::address(&dir, &self.name)?)?;
        self.listens.set(true);
        Ok(net::listen(&self.socket, backlog as i32)?)
    }
}

/// Returns whether the last service that this process reached was at this port.
pub(crate) fn was_reached(port: u16) -> bool {
    REACHED.load(Ordering::Relaxed) == port
}

/// Connects to the service at an address, or else to the service that listens at all addresses.
///
/// # Errors
/// `ENOENT` or `ECONNREFUSED`: there is no such service. `EAGAIN`: the maximum number of
/// connections is waiting for the service.
pub(crate) fn connect(fabric: &Path, space: u16, to: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    sockets::connect(&socket, &sockets::open(fabric)?, space, to)?;
    REACHED.store(to.port(), Ordering::Relaxed);
    Ok(socket)
}

/// Connects to the gate of an address, by which messages reach other hosts.
///
/// # Errors
/// `ECONNREFUSED`: there is no gate.
pub(crate) fn connect_gate(ip: IpAddr) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    sockets::connect_gate(&socket, ip)?;
    Ok(socket)
}

/// Accepts a connection.
///
/// # Errors
/// `EAGAIN`: no connection waits.
pub(crate) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    Ok(hold(net::accept_with(listener, sockets::FLAGS)?))
}

/// Sends a message. An error means that the peer is gone, which the next receive reports.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8]) {
    let _ = net::send(socket, bytes, SendFlags::NOSIGNAL);
}

/// Receives a message into the buffer. Returns the bytes of the message. No bytes: the peer has
/// ended, or the message is longer than the buffer.
///
/// # Errors
/// `EAGAIN`: no message has arrived.
pub(crate) fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    match net::recv(socket, &mut *buffer, RecvFlags::TRUNC) {
        Err(rustix::io::Errno::AGAIN) => Err(Errno(libc::EAGAIN)),
        // A reset counts as the end of the peer. So does a message that is longer than the buffer:
        // then `len` is the length of the message.
        result => Ok(buffer
            .get(..result.map_or(0, |(_, len)| len))
            .unwrap_or(&[])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("mlx5-cm-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        dir
    }

    fn reserve(dir: &Path, space: u16, at: &str, sharing: Sharing) -> Result<Port, Errno> {
        Port::reserve(dir, space, at.parse().unwrap(), sharing)
    }

    const ALONE: Sharing = Sharing {
        reuse: false,
        only_own_family: false,
    };

    #[test]
    fn a_port_has_one_owner_and_is_free_afterwards_even_if_that_was_killed() {
        let dir = fabric("ports");
        let at = "127.0.0.1:7471";
        let port = reserve(&dir, 0x106, at, ALONE).unwrap();
        assert_eq!(reserve(&dir, 0x106, at, ALONE).err(), Some(IN_USE));
        assert!(reserve(&dir, 0x111, at, ALONE).is_ok(), "of another space");
        let any = reserve(&dir, 0x106, "127.0.0.1:0", ALONE).unwrap();
        assert!(any.number >= CHOSEN.0);
        drop(port);
        let name = dir.join("cm-106-7471-127.0.0.1");
        drop(std::os::unix::net::UnixListener::bind(name).unwrap());
        reserve(&dir, 0x106, at, ALONE).unwrap().listen(1).unwrap();
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_port_is_shared_by_addresses_families_and_those_that_reuse_it() {
        const NOT_AVAILABLE: Errno = Errno(libc::EADDRNOTAVAIL);
        let dir = fabric("addresses");
        let (only, reuse) = (
            Sharing {
                only_own_family: true,
                ..ALONE
            },
            Sharing {
                reuse: true,
                ..ALONE
            },
        );
        let [one, two] = ["127.0.0.1:1", "127.0.0.2:1"].map(|at| reserve(&dir, 1, at, ALONE));
        assert!(one.is_ok() && two.is_ok(), "two addresses");
        for any in ["0.0.0.0:1", "[::]:1"] {
            let refused = reserve(&dir, 1, any, ALONE).err();
            assert_eq!(refused, Some(NOT_AVAILABLE), "{any}");
        }
        let all = reserve(&dir, 1, "0.0.0.0:2", ALONE).unwrap();
        let refused = reserve(&dir, 1, "127.0.0.1:2", ALONE).err();
        assert_eq!(refused, Some(NOT_AVAILABLE), "one of all");
        let other_family = reserve(&dir, 1, "[::]:2", only).unwrap();
        let refused = reserve(&dir, 1, "[::]:2", ALONE).err();
        assert_eq!(refused, Some(NOT_AVAILABLE), "both families");

        let [first, second] = [(); 2].map(|()| reserve(&dir, 1, "[::1]:3", reuse).unwrap());
        assert_eq!(reserve(&dir, 1, "[::1]:3", ALONE).err(), Some(IN_USE));
        assert_eq!(first.listen(1), Err(IN_USE), "the other has it too");
        drop(second);
        first.listen(1).unwrap();
        assert_eq!(reserve(&dir, 1, "[::1]:3", reuse).err(), Some(IN_USE));

        all.listen(1).unwrap();
        let to = |at: &str| connect(&dir, 1, at.parse().unwrap()).is_ok();
        assert!(to("127.0.0.9:2") && to("[::1]:3") && !to("[::1]:2"));
        other_family.listen(1).unwrap();
        assert!(to("[::1]:2"));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn messages_pass_and_an_end_is_seen() {
        const NOTHING: Result<&[u8], Errno> = Err(Errno(libc::EAGAIN));
        let dir = fabric("messages");
        let at = "127.0.0.1:1".parse().unwrap();
        let port = reserve(&dir, 0x106, "127.0.0.1:1", ALONE).unwrap();
        let refused = connect(&dir, 0x106, at).err();
        assert_eq!(refused, Some(Errno(libc::ENOENT)), "it does not listen");
        port.listen(1).unwrap();
        let client = connect(&dir, 0x106, at).unwrap();
        let server = accept(&port.socket).unwrap();
        assert_eq!(accept(&port.socket).err(), Some(Errno(libc::EAGAIN)));

        let mut buffer = [0; 4];
        assert_eq!(receive(&server, &mut buffer), NOTHING);
        send(&client, b"four");
        send(&client, b"longer");
        drop(client);
        assert_eq!(receive(&server, &mut buffer), Ok(&b"four"[..]));
        assert_eq!(
            receive(&server, &mut buffer),
            Ok(&[][..]),
            "longer than the buffer"
        );
        assert_eq!(receive(&server, &mut buffer), Ok(&[][..]));

        let waiting: Vec<_> = (0..8)
            .map_while(|_| connect(&dir, 0x106, at).ok())
            .collect();
        assert_eq!(waiting.len(), 2, "one more than asked for");
        fs::remove_dir_all(dir).unwrap();
    }
}
