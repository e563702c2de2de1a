//! The reasons why packets do not arrive. Errors of the calls that send packets are one source. The
//! others are the ICMP reports of routers and hosts, which the kernel queues for the socket (ip(7),
//! `IP_RECVERR`).

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;

use rustix::net::SocketAddrAny;

use crate::types::vendor::Limit;

/// Maximum number of reports that are kept until [`Reports::take`].
const MAX_REPORTS: usize = 64;
/// Length, in bytes, of the buffer for a control message with `sock_extended_err` and the address
/// of the reporting host.
const CONTROL_BYTES: usize = 128;
/// Codes of ICMP and ICMPv6 "destination unreachable" by which a firewall refuses packets.
const V4_FORBIDDEN: [u8; 3] = [9, 10, 13];
const V6_FORBIDDEN: [u8; 3] = [1, 5, 6];

/// Packets that did not arrive: their receivers, and the reasons.
#[derive(Debug, Default)]
pub(super) struct Reports(Vec<(SocketAddr, Limit)>);

impl Reports {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<(SocketAddr, Limit)> {
        core::mem::take(&mut self.0)
    }

    /// Adds a report, unless the same report is there already or there are too many. Ignores
    /// addresses that are not IP addresses.
    pub(super) fn add(&mut self, to: SocketAddrAny, why: Limit) {
        let Ok(to) = SocketAddr::try_from(to) else {
            return;
        };
        if self.0.len() < MAX_REPORTS && !self.0.contains(&(to, why)) {
            self.0.push((to, why));
        }
    }

    /// Adds the ICMP reports that the kernel has queued for a socket. Returns whether there were
    /// any. If so, the call that just failed must be repeated: after a report, the next call for
    /// the socket only returns the report's error, even if the call concerns a different peer.
    #[cold]
    pub(super) fn add_queued(&mut self, socket: &UdpSocket) -> bool {
        let mut is_any = false;
        while let Some((to, error)) = next_queued(socket) {
            // An error that this host itself caused is also returned by the call that failed, and
            // is reported there.
            if error.ee_origin != libc::SO_EE_ORIGIN_LOCAL {
                is_any = true;
                self.add(to, reason(&error));
            }
        }
        is_any
    }
}

/// Returns the reason in an error code of the kernel.
pub(super) const fn reason_of(errno: i32) -> Limit {
    match errno {
        libc::EMSGSIZE => Limit::PacketTooLong,
        libc::EPERM | libc::EACCES => Limit::Forbidden,
        libc::ECONNREFUSED => Limit::NoPort,
        _ => Limit::NoRoute,
    }
}

const fn reason(error: &libc::sock_extended_err) -> Limit {
    let [a, b, c] = match error.ee_origin {
        libc::SO_EE_ORIGIN_ICMP if error.ee_type == 3 => V4_FORBIDDEN,
        libc::SO_EE_ORIGIN_ICMP6 if error.ee_type == 1 => V6_FORBIDDEN,
        _ => return reason_of(error.ee_errno as i32),
    };
    if error.ee_code == a || error.ee_code == b || error.ee_code == c {
        Limit::Forbidden
    } else {
        reason_of(error.ee_errno as i32)
    }
}

/// Takes the next report from the queue of a socket: the receiver of the packet, and the error.
fn next_queued(socket: &UdpSocket) -> Option<(SocketAddrAny, libc::sock_extended_err)> {
    #[repr(align(8))]
    struct Control([u8; CONTROL_BYTES]);

    let mut control = Control([0; CONTROL_BYTES]);
    let mut to = SocketAddrAny::from(SocketAddr::from(([0_u16; 8], 0)));
    // SAFETY: zero bytes are a valid header, which is empty.
    let mut header: libc::msghdr = unsafe { core::mem::zeroed() };
    (header.msg_name, header.msg_namelen) = (to.as_mut_ptr().cast(), to.addr_len());
    (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL_BYTES);
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header describes `to` and `control`, which outlive the call.
    if unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) } < 0 {
        return None;
    }
    // SAFETY: the kernel has filled the control messages that the header describes.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: the macro only adds the length of the header.
    let needed = unsafe { libc::CMSG_LEN(size_of::<libc::sock_extended_err>() as u32) } as usize;
    // SAFETY: the macros return null or a pointer to the header of a control message in `control`.
    while let Some(found) = unsafe { message.as_ref() } {
        if let (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR) =
            (found.cmsg_level, found.cmsg_type)
        {
            // SAFETY: if the message has the needed length, its data begins with
            // `sock_extended_err`.
            return (found.cmsg_len >= needed).then(|| unsafe {
                (
                    to,
                    libc::CMSG_DATA(message)
                        .cast::<libc::sock_extended_err>()
                        .read_unaligned(),
                )
            });
        }
        // SAFETY: `message` is a control message of `header`.
        message = unsafe { libc::CMSG_NXTHDR(&raw const header, message) };
    }
    None
}
