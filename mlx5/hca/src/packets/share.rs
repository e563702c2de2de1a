//! The share of UDP port 4791 that a socket receives: packets to queue pair 1, or all others.
//!
//! The BPF program that chooses a socket identifies the sockets by the order in which they were
//! bound. So at most one socket of each [`Share`] may be bound: each socket comes with a Unix
//! socket whose name contains the share, and a name is taken while its Unix socket is open. The
//! second socket attaches the BPF program. If the first socket is closed, the kernel passes all
//! packets to the second, until a new second socket attaches its own program.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as Name, UnixListener};

use mlx5_wire::roce::{MAD_QPN, UDP_PORT};
use rustix::net::{bind, sockopt};

use super::interface::own_socket;

/// The packets to port 4791 that a socket receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// Packets to queue pair 1.
    Management,
    /// All other packets.
    Device,
}

/// Binds a socket to port 4791 of `address` for a share of the packets. Returns the socket, and the
/// Unix socket that marks the share as taken. Both must be open for the same time.
///
/// # Errors
/// The errors of bind(2). `AddrInUse` if the share is taken, or if a socket of another user, or one
/// without `SO_REUSEPORT`, has the port.
pub(crate) fn share(address: IpAddr, share: Share) -> io::Result<(UdpSocket, UnixListener)> {
    let name = Name::from_abstract_name(format!("roce-{address}-{share:?}"))?;
    let name = UnixListener::bind_addr(&name)?;
    let at = own_socket(address, UDP_PORT)?;
    let socket = match UdpSocket::bind(at) {
        Ok(first) => {
            sockopt::set_socket_reuseport(&first, true)?;
            first
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let second = second(at)?;
            attach(&second, share)?;
            second
        }
        Err(error) => return Err(error),
    };
    Ok((socket, name))
}

/// Binds the second socket. It is opened by the C library's socket(2), which `mlx5-run` watches, so
/// that a program which closes all descriptors it does not know leaves it open.
fn second(at: SocketAddr) -> io::Result<UdpSocket> {
    let family = if at.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: plain numbers.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened above, and nothing else has it.
    let socket = unsafe { UdpSocket::from_raw_fd(fd) };
    sockopt::set_socket_reuseport(&socket, true)?;
    bind(&socket, &at)?;
    Ok(socket)
}

/// Attaches the BPF program, which returns the index of the socket for a packet: 0 is the socket
/// that was bound first, 1 is this socket.
fn attach(socket: &UdpSocket, share: Share) -> io::Result<()> {
    let (management, others) = match share {
        Share::Management => (1, 0),
        Share::Device => (0, 1),
    };
    let instruction = |code: u32, jf, k| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf,
        k,
    };
    // The number of the queue pair is in the lower 24 bits of the second word of the BTH.
    let mut program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 4),
        instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0xff_ffff),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, MAD_QPN),
        instruction(libc::BPF_RET | libc::BPF_K, 0, management),
        instruction(libc::BPF_RET | libc::BPF_K, 0, others),
    ];
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the kernel reads the program, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            size_of_val(&program) as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
