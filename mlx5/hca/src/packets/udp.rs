//! The port on the wire: a UDP socket that needs no rights, with packets in batches (sendmmsg(2),
//! recvmmsg(2)).
//!
//! The socket is not connected and has `IP_PMTUDISC_DO`: Linux then sends the IPv4 identification 0
//! (ip(7)), which an ICRC covers and a program cannot set. A packet is lost if it is longer than
//! the path allows.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixListener;

use mlx5_wire::roce::{ICRC_BYTES, MAX_HEADER_BYTES};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketAddrAny;
use rustix::net::sockopt::{self, Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};

use super::interface;
use super::reports::{self, Reports};
use super::share::{Share, share};

/// Maximum UDP payload of a packet. It includes pad bytes, which a payload of the largest MTU does
/// not need.
const MAX_PACKET: usize = MAX_HEADER_BYTES + 4096 + 4 + ICRC_BYTES;
/// Maximum number of packets of a batch.
pub(crate) const BATCH: usize = 64;
/// Requested size of the socket's buffers, in bytes; the kernel gives at most its `rmem_max` and
/// `wmem_max`.
const BUFFER_BYTES: usize = 4 << 20;
/// Bytes of IP and UDP headers of a packet.
const IPV4_AND_UDP: u32 = 28;
const IPV6_AND_UDP: u32 = 48;

/// Returns the largest RDMA MTU whose packets fit into IP packets of this size, in bytes; at
/// least 256.
pub(crate) fn rdma_mtu(ip_mtu: u32, address: &IpAddr) -> u16 {
    let headers = if address.is_ipv4() {
        IPV4_AND_UDP
    } else {
        IPV6_AND_UDP
    } + (MAX_HEADER_BYTES + ICRC_BYTES) as u32;
    [4096, 2048, 1024, 512]
        .into_iter()
        .find(|mtu| u32::from(*mtu) + headers <= ip_mtu)
        .unwrap_or(256)
}

/// Length of the kernel's form of an IP address and a port, in bytes.
const RAW_ADDRESS_BYTES: libc::socklen_t = size_of::<libc::sockaddr_in6>() as libc::socklen_t;

/// Room for the control message of a packet, which has its traffic class.
#[repr(align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL_BYTES]);
const CONTROL_BYTES: usize = 32;
/// Values of the lower two bits of a traffic class (RFC 3168). `ECT_0`: the sender reacts to marks.
/// `CONGESTION`: a router has marked the packet.
const ECT_0: u8 = 2;
const CONGESTION: u8 = 3;

/// The receiver of a packet, the traffic class of the packet, whose upper six bits are the DSCP (RFC
/// 2474), and the socket from which it leaves: a place among the port's sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Receiver {
    pub(crate) socket: SocketAddr,
    pub(crate) class: u8,
    pub(crate) source: u8,
}

/// Packets of a batch, with the addresses of their other ends and the kernel's descriptions of all
/// packets. The default has no room for packets.
#[derive(Default)]
pub(crate) struct Packets {
    bytes: Vec<[u8; MAX_PACKET]>,
    addresses: Vec<SocketAddrAny>,
    /// Traffic classes of the packets to be sent.
    classes: Vec<u8>,
    /// Control messages of received packets. Packets that are sent have none.
    controls: Vec<Control>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    /// Number of packets that were received last.
    received: usize,
}

impl Packets {
    pub(crate) fn new() -> Self {
        // The larger kind of address is used, so that all bytes are initialized.
        let none = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0).into();
        let (mut bytes, mut addresses) = (vec![[0; MAX_PACKET]; BATCH], vec![none; BATCH]);
        let vector = |buffer: &mut [u8; MAX_PACKET]| libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: MAX_PACKET,
        };
        // The `Vec`s do not grow, so the elements to which the pointers below point are not moved.
        let mut vectors: Vec<_> = bytes.iter_mut().map(vector).collect();
        let header = |(vector, address)| {
            // SAFETY: zero bytes are a valid header, which is empty.
            let mut header: libc::mmsghdr = unsafe { core::mem::zeroed() };
            (header.msg_hdr.msg_iov, header.msg_hdr.msg_iovlen) = (vector, 1);
            (header.msg_hdr.msg_name, header.msg_hdr.msg_namelen) =
                (SocketAddrAny::as_mut_ptr(address).cast(), RAW_ADDRESS_BYTES);
            header
        };
        let headers = vectors
            .iter_mut()
            .map(core::ptr::from_mut)
            .zip(&mut addresses)
            .map(header)
            .collect();
        Self {
            bytes,
            addresses,
            classes: vec![0; BATCH],
            vectors,
            headers,
            ..Self::default()
        }
    }

    /// Makes room for control messages, for packets to be received.
    pub(crate) fn with_controls(mut self) -> Self {
        self.controls = vec![Control([0; CONTROL_BYTES]); BATCH];
        for (header, control) in self.headers.iter_mut().zip(&mut self.controls) {
            header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = CONTROL_BYTES;
        }
        self
    }

    /// Returns whether the network has marked received packet `nth`, as a queue on its way is long.
    pub(crate) fn is_marked(&self, nth: usize) -> bool {
        self.class(nth) & CONGESTION == CONGESTION
    }

    /// Returns the traffic class of received packet `nth`.
    fn class(&self, nth: usize) -> u8 {
        // SAFETY: the kernel has filled the control messages that the header describes.
        let message = unsafe { libc::CMSG_FIRSTHDR(&raw const self.headers[nth].msg_hdr) };
        // SAFETY: the macro returns null or a pointer to a whole control message.
        let Some(found) = (unsafe { message.as_ref() }) else {
            return 0;
        };
        // SAFETY: the data of either kind of message has the type that is read.
        unsafe {
            let data = libc::CMSG_DATA(message);
            match (found.cmsg_level, found.cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_TOS) => *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    data.cast::<i32>().read_unaligned() as u8
                }
                _ => 0,
            }
        }
    }

    /// Returns packet `nth` and its sender. Returns `None` if it was longer than the maximum length
    /// of a packet.
    pub(crate) fn get(&self, nth: usize) -> Option<(SocketAddr, &[u8])> {
        let header = &self.headers[nth];
        let is_cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        Some((
            self.addresses[nth].clone().try_into().ok()?,
            self.bytes[nth]
                .get(..header.msg_len as usize)
                .filter(|_| !is_cut)?,
        ))
    }

    /// Returns the total length of these packets, which were sent or received.
    pub(crate) fn bytes(&self, packets: Range<usize>) -> u64 {
        self.headers[packets]
            .iter()
            .map(|header| u64::from(header.msg_len))
            .sum()
    }

    pub(crate) fn buffer(&mut self, nth: usize) -> &mut [u8; MAX_PACKET] {
        &mut self.bytes[nth]
    }

    /// Makes packet `nth` the first `len` bytes of its buffer, for this receiver.
    pub(crate) fn set(&mut self, nth: usize, len: usize, to: &Receiver) {
        // The address is stored over the earlier address, to which the header points.
        self.addresses[nth] = to.socket.into();
        self.classes[nth] = to.class;
        self.vectors[nth].iov_len = len;
        self.headers[nth].msg_hdr.msg_namelen = self.addresses[nth].addr_len();
    }
}

/// Sets an option of a socket, of type `int`, to 1.
fn turn_on(socket: &UdpSocket, level: libc::c_int, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let bytes = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the kernel reads `on`.
    let code = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const on).cast(),
            bytes,
        )
    };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[derive(Debug)]
pub(crate) struct Udp {
    pub(crate) socket: UdpSocket,
    /// Traffic class of the packets that are sent next. `None`: the class that sockets have.
    class: Option<u8>,
    /// Marks the share of the port as taken, if the port is shared.
    _share: Option<UnixListener>,
}

impl Udp {
    /// Binds a socket to this address.
    ///
    /// # Errors
    /// The errors of socket(2), bind(2) and setsockopt(2).
    pub(crate) fn bind(address: SocketAddr) -> io::Result<Self> {
        Self::prepare(UdpSocket::bind(address)?, None)?.with_news()
    }

    /// Binds a socket to port 4791 of `address`, for a share of the packets to this port.
    ///
    /// # Errors
    /// The errors of [`bind`](Self::bind); `AddrInUse` if the share is taken.
    pub(crate) fn share(address: IpAddr, of: Share) -> io::Result<Self> {
        let (socket, name) = share(address, of)?;
        let udp = Self::prepare(socket, Some(name))?;
        match of {
            Share::Management => Ok(udp),
            Share::Device => udp.with_news(),
        }
    }

    /// Makes the kernel queue ICMP reports, and add the traffic class to each received packet.
    fn with_news(self) -> io::Result<Self> {
        let socket = &self.socket;
        if self.local()?.is_ipv4() {
            turn_on(socket, libc::IPPROTO_IP, libc::IP_RECVERR)?;
            sockopt::set_ip_recvtos(socket, true)?;
        } else {
            turn_on(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR)?;
            sockopt::set_ipv6_recvtclass(socket, true)?;
        }
        Ok(self)
    }

    /// Gives the packets that are sent next this traffic class, with `ECT_0` in its lower two bits,
    /// because this sender reacts to congestion marks.
    fn set_class(&mut self, class: u8) {
        if self.class.replace(class) == Some(class) {
            return;
        }
        let class = class & !CONGESTION | ECT_0;
        // An error is ignored: the network may only treat the packets in another way.
        let _ = match self.local() {
            Ok(own) if own.is_ipv4() => sockopt::set_ip_tos(&self.socket, class),
            _ => sockopt::set_ipv6_tclass(&self.socket, class.into()),
        };
    }

    fn prepare(socket: UdpSocket, share: Option<UnixListener>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        if socket.local_addr()?.is_ipv4() {
            sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO)?;
        } else {
            sockopt::set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO)?;
            // The kernel's RoCE sends no UDP checksum, so datagrams without a checksum are
            // accepted.
            turn_on(&socket, libc::IPPROTO_UDP, libc::UDP_NO_CHECK6_RX)?;
        }
        // An error is ignored: without larger buffers packets are only lost sooner.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER_BYTES);
        let _ = sockopt::set_socket_send_buffer_size(&socket, BUFFER_BYTES);
        Ok(Self {
            socket,
            class: None,
            _share: share,
        })
    }

    pub(crate) fn local(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns the MTU of the path to a peer, in bytes of an IP packet: the MTU of the route, or
    /// less if a router has reported less.
    ///
    /// # Errors
    /// The errors of socket(2), bind(2), connect(2) and getsockopt(2), for example if there is no
    /// route.
    pub(crate) fn path_mtu(&self, to: &SocketAddr) -> io::Result<u32> {
        let mut own = self.local()?;
        own.set_port(0);
        let socket = UdpSocket::bind(own)?;
        socket.connect(to)?;
        Ok(if to.is_ipv4() {
            sockopt::ip_mtu(&socket)?
        } else {
            sockopt::ipv6_mtu(&socket)?
        })
    }

    /// Returns the smallest MTU of the interfaces by which packets from the socket's address may
    /// leave, in bytes of an IP packet.
    ///
    /// # Errors
    /// The errors of getifaddrs(3) and netdevice(7), and an error if no interface has the address.
    pub(crate) fn interface_mtu(&self) -> io::Result<u32> {
        let names = interface::names_of(self.local()?.ip())?;
        names
            .iter()
            .map(|name| self.mtu_of(name))
            .try_fold(u32::MAX, |least, mtu| Ok(least.min(mtu?)))
    }

    fn mtu_of(&self, name: &str) -> io::Result<u32> {
        let mut ifr_name = [0; libc::IFNAMSIZ];
        // A name has fewer bytes than `ifr_name`, so a zero byte ends it.
        for (to, byte) in ifr_name.iter_mut().zip(name.bytes()) {
            *to = byte as libc::c_char;
        }
        let mut request = libc::ifreq {
            ifr_name,
            ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_mtu: 0 },
        };
        // SAFETY: the kernel reads the name in `request`, and writes the MTU into it.
        if unsafe { libc::ioctl(self.fd(), libc::SIOCGIFMTU, &raw mut request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has written the field `ifru_mtu`.
        Ok(unsafe { request.ifr_ifru.ifru_mtu }.unsigned_abs())
    }

    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Returns whether a packet or a report has arrived.
    pub(crate) fn is_readable(&self) -> bool {
        poll(
            &mut [PollFd::new(&self.socket, PollFlags::IN)],
            Some(&Timespec::default()),
        ) == Ok(1)
    }

    /// Receives packets, and returns their number. recvmmsg(2) polls for another packet until it has
    /// the maximum number or finds none, and the packets that it already has wait meanwhile. So the
    /// maximum is twice the number of the last call, at least 1 and at most [`BATCH`].
    pub(super) fn receive(&self, packets: &mut Packets, reports: &mut Reports) -> usize {
        // The kernel overwrote these lengths of the packets that were received last.
        packets.headers[..packets.received]
            .iter_mut()
            .for_each(|header| {
                header.msg_hdr.msg_namelen = RAW_ADDRESS_BYTES;
                header.msg_hdr.msg_controllen = CONTROL_BYTES;
            });
        let most = (2 * packets.received).clamp(1, BATCH) as u32;
        let headers = packets.headers.as_mut_ptr();
        packets.received = loop {
            // SAFETY: the first `most` headers describe buffers and addresses of `packets`, which
            // outlive the call.
            let count = unsafe {
                libc::recvmmsg(
                    self.fd(),
                    headers,
                    most,
                    libc::MSG_DONTWAIT,
                    core::ptr::null_mut(),
                )
            };
            if let Ok(count) = usize::try_from(count) {
                break count;
            }
            if io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
                || !reports.add_queued(&self.socket)
            {
                break 0;
            }
        };
        packets.received
    }

    /// Sends packets `first..end`. Returns the number of the first packet for which the socket has
    /// no room, and the number of packets that the kernel refused, which are lost.
    pub(super) fn send(
        &mut self,
        packets: &mut Packets,
        (first, end): (usize, usize),
        reports: &mut Reports,
    ) -> (usize, u64) {
        let (mut next, mut refused) = (first, 0);
        while next < end {
            let class = packets.classes[next];
            self.set_class(class);
            let alike = packets.classes[next..end]
                .iter()
                .take_while(|other| **other == class);
            let rest = &mut packets.headers[next..next + alike.count()];
            // SAFETY: the headers `rest` describe buffers and addresses of `packets`, which outlive
            // the call.
            let sent = unsafe {
                libc::sendmmsg(
                    self.fd(),
                    rest.as_mut_ptr(),
                    rest.len() as u32,
                    libc::MSG_DONTWAIT,
                )
            };
            if let Ok(sent @ 1..) = usize::try_from(sent) {
                next += sent;
                continue;
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock => break,
                io::ErrorKind::Interrupted => {}
                _ if reports.add_queued(&self.socket) => {}
                _ => {
                    let why = reports::reason_of(error.raw_os_error().unwrap_or(0));
                    reports.add(packets.addresses[next].clone(), why);
                    (next, refused) = (next + 1, refused + 1);
                }
            }
        }
        (next, refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rdma_mtu_leaves_room_for_all_headers() {
        let (v4, v6) = (
            IpAddr::from([127, 0, 0, 1]),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        );
        for (ip_mtu, of_v4, of_v6) in [
            (65536, 4096, 4096),
            (4168, 4096, 2048),
            (4167, 2048, 2048),
            (1500, 1024, 1024),
            (0, 256, 256),
        ] {
            assert_eq!(
                (rdma_mtu(ip_mtu, &v4), rdma_mtu(ip_mtu, &v6)),
                (of_v4, of_v6),
                "{ip_mtu}"
            );
        }
    }

    #[test]
    fn packets_arrive_with_their_lengths_and_senders() {
        for address in [
            IpAddr::from([127, 0, 0, 1]),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        ] {
            let [mut a, b] = [0, 1].map(|_| Udp::bind(SocketAddr::new(address, 0)).unwrap());
            let (mut out, mut incoming) = (Packets::new(), Packets::new().with_controls());
            let reports = &mut Reports::default();
            for (nth, len) in [0, 1, 1500, MAX_PACKET].into_iter().enumerate() {
                out.buffer(nth)[..len].fill(nth as u8 + 1);
                let socket = b.local().unwrap();
                out.set(
                    nth,
                    len,
                    &Receiver {
                        socket,
                        class: 0,
                        source: 0,
                    },
                );
            }
            assert_eq!(a.send(&mut out, (0, 4), reports), (4, 0));
            let mut lengths = [0, 1, 1500, MAX_PACKET].into_iter().enumerate();
            for count in [1, 2, 1, 0] {
                assert_eq!(b.receive(&mut incoming, reports), count);
                for at in 0..count {
                    let (nth, len) = lengths.next().unwrap();
                    assert_eq!(
                        incoming.get(at).unwrap(),
                        (a.local().unwrap(), &vec![nth as u8 + 1; len][..])
                    );
                }
            }
            // A router with a long queue changes `ECT_0` to `CONGESTION`. Here the sender itself
            // sets each of the two.
            for class in [CONGESTION, ECT_0] {
                if address.is_ipv4() {
                    sockopt::set_ip_tos(&a.socket, class).unwrap();
                } else {
                    sockopt::set_ipv6_tclass(&a.socket, class.into()).unwrap();
                }
                assert_eq!(a.send(&mut out, (0, 1), reports), (1, 0));
                assert_eq!(b.receive(&mut incoming, reports), 1);
                assert_eq!(incoming.is_marked(0), class == CONGESTION);
            }
            // Each packet of a batch has its own class, and arrives with it.
            let classes = [0x60, 0x60, 0xb8, 0];
            for (nth, class) in classes.into_iter().enumerate() {
                let socket = b.local().unwrap();
                out.set(
                    nth,
                    1,
                    &Receiver {
                        socket,
                        class,
                        source: 0,
                    },
                );
            }
            assert_eq!(a.send(&mut out, (0, 4), reports), (4, 0));
            let mut arrived = Vec::new();
            while arrived.len() < 4 {
                let count = b.receive(&mut incoming, reports);
                arrived.extend((0..count).map(|nth| incoming.class(nth)));
            }
            assert_eq!(arrived, classes.map(|class| class | ECT_0));
            let longer = UdpSocket::bind((address, 0)).unwrap();
            longer
                .send_to(&[0; MAX_PACKET + 1], b.local().unwrap())
                .unwrap();
            assert_eq!(
                (b.receive(&mut incoming, reports), incoming.get(0).is_some()),
                (1, false)
            );
        }
    }
}
