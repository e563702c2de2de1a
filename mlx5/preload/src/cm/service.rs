//! Sockets of connections, and ports of services. A port is a Unix socket with a name in the
//! directory of the fabric, which only the user of the fabric can enter.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::net::{
    self, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::options::errno::Errno;
use crate::system::held;

/// The first port chosen for a program, and the number of such ports: the defaults of Linux.
const CHOSEN: (u16, u16) = (32_768, 28_232);

/// The port of the service to which this process connected last, in any port space.
static REACHED: AtomicU16 = AtomicU16::new(0);

pub(crate) const IN_USE: Errno = Errno(libc::EADDRINUSE);

/// A port of a port space, reserved for an id. The reservation is a lock on a byte of a file, so it
/// ends with the process that has it, even if that process is killed.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) socket: OwnedFd,
    pub(crate) number: u16,
    path: PathBuf,
    _lock: File,
}

impl Drop for Port {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

pub(crate) fn random() -> u32 {
    RandomState::new().hash_one(0) as u32
}

/// Returns a random port, for a program that does not choose one itself.
pub(crate) fn chosen_port() -> u16 {
    CHOSEN.0 + (random() % u32::from(CHOSEN.1)) as u16
}

/// Returns the address of a service's socket. The path is short, because an address has only 108
/// bytes: it leads through the descriptor of the directory, which must stay open while the address
/// is used.
fn name(fabric: &File, space: u16, port: u16) -> Result<SocketAddrUnix, Errno> {
    let dir = fabric.as_raw_fd();
    let path = format!("/proc/self/fd/{dir}/cm-{space:x}-{port}");
    Ok(SocketAddrUnix::new(path)?)
}

const FLAGS: SocketFlags = SocketFlags::NONBLOCK.union(SocketFlags::CLOEXEC);

fn socket() -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(hold(net::socket_with(family, kind, FLAGS, None)?))
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
    /// `EADDRINUSE`: another id has the port.
    pub(crate) fn reserve(fabric: &Path, space: u16, port: u16) -> Result<Self, Errno> {
        if port == 0 {
            let first = u32::from(chosen_port() - CHOSEN.0);
            let ports = (0..u32::from(CHOSEN.1))
                .map(|n| CHOSEN.0 + ((first + n) % u32::from(CHOSEN.1)) as u16);
            return ports
                .map(|port| Self::reserve(fabric, space, port))
                .find(|port| !matches!(port, Err(IN_USE)))
                .unwrap_or(Err(IN_USE));
        }
        let lock = File::options()
            .create(true)
            .append(true)
            .open(fabric.join("cm-ports"))?;
        let start = i64::from(space) << 16 | i64::from(port);
        let range = libc::flock {
            l_type: libc::F_WRLCK as i16,
            l_whence: libc::SEEK_SET as i16,
            l_start: start,
            l_len: 1,
            l_pid: 0,
        };
        // SAFETY: the descriptor is open, and `range` is an initialized structure.
        if unsafe { libc::fcntl(lock.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) } != 0 {
            return Err(IN_USE);
        }
        let path = fabric.join(format!("cm-{space:x}-{port}"));
        // If a previous owner of the port was killed, the name of its socket still exists.
        let _ = fs::remove_file(&path);
        let socket = socket()?;
        let dir = File::open(fabric)?;
        net::bind(&socket, &name(&dir, space, port)?)?;
        Ok(Self {
            socket,
            number: port,
            path,
            _lock: lock,
        })
    }

    pub(crate) fn listen(&self, backlog: u32) -> Result<(), Errno> {
        // The limit of the kernel's connection manager, which replaces 0 by this limit too.
        const MOST: u32 = 1024;
        let backlog = if (1..MOST).contains(&backlog) {
            backlog
        } else {
            MOST
        };
        Ok(net::listen(&self.socket, backlog as i32)?)
    }
}

/// Returns whether the last service that this process reached was at this port.
pub(crate) fn was_reached(port: u16) -> bool {
    REACHED.load(Ordering::Relaxed) == port
}

/// Connects to a service.
///
/// # Errors
/// `ENOENT` or `ECONNREFUSED`: there is no such service. `EAGAIN`: the maximum number of
/// connections is waiting for the service.
pub(crate) fn connect(fabric: &Path, space: u16, port: u16) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    let dir = File::open(fabric)?;
    net::connect(&socket, &name(&dir, space, port)?)?;
    REACHED.store(port, Ordering::Relaxed);
    Ok(socket)
}

/// Accepts a connection.
///
/// # Errors
/// `EAGAIN`: no connection waits.
pub(crate) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    Ok(hold(net::accept_with(listener, FLAGS)?))
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

    #[test]
    fn a_port_has_one_owner_and_is_free_afterwards_even_if_that_was_killed() {
        let dir = fabric("ports");
        let port = Port::reserve(&dir, 0x106, 7471).unwrap();
        assert_eq!(
            Port::reserve(&dir, 0x106, 7471).err(),
            Some(Errno(libc::EADDRINUSE))
        );
        assert!(Port::reserve(&dir, 0x111, 7471).is_ok(), "of another space");
        assert!(Port::reserve(&dir, 0x106, 0).unwrap().number >= CHOSEN.0);
        drop(port);
        drop(std::os::unix::net::UnixListener::bind(dir.join("cm-106-7471")).unwrap());
        assert!(Port::reserve(&dir, 0x106, 7471).is_ok());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn messages_pass_and_an_end_is_seen() {
        const NOTHING: Result<&[u8], Errno> = Err(Errno(libc::EAGAIN));
        let dir = fabric("messages");
        assert_eq!(connect(&dir, 0x106, 1).err(), Some(Errno(libc::ENOENT)));
        let port = Port::reserve(&dir, 0x106, 1).unwrap();
        assert_eq!(
            connect(&dir, 0x106, 1).err(),
            Some(Errno(libc::ECONNREFUSED)),
            "it does not listen"
        );
        port.listen(1).unwrap();
        let client = connect(&dir, 0x106, 1).unwrap();
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

        let waiting: Vec<_> = (0..8).map_while(|_| connect(&dir, 0x106, 1).ok()).collect();
        assert_eq!(waiting.len(), 2, "one more than asked for");
        fs::remove_dir_all(dir).unwrap();
    }
}
