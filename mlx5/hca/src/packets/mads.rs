//! Management datagrams: packets to queue pair 1 at UDP port 4791.
//!
//! A device whose address several devices share (under `mlx5-run`) has no queue pair 1. A separate
//! process, which outlives the programs, receives the management datagrams of the address
//! ([`MadPort`]). This process and the device both bind UDP port 4791. The kernel passes each
//! packet to the right socket by the packet's queue pair number (`SO_ATTACH_REUSEPORT_CBPF` of
//! socket(7), which needs no rights). [`share`](super::share) describes how.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

use mlx5_wire::roce::{
    Deth, Flow, Headers, MAD_QKEY, MAD_QPN, Mad, Opcode, PacketOpcode, Psn, Transport, UDP_PORT,
};

use super::interface::peer_socket;
use super::share::Share;
use super::udp::Udp;

const OPCODE: PacketOpcode = PacketOpcode {
    transport: Transport::Ud,
    opcode: Opcode::SendOnly,
};
const DETH: Deth = Deth {
    qkey: MAD_QKEY,
    source_qpn: MAD_QPN,
};

/// Socket for the management datagrams to an IP address. The socket shares UDP port 4791 with the
/// socket of a device, which receives all other packets.
#[derive(Debug)]
pub struct MadPort {
    udp: Udp,
    own: SocketAddr,
}

impl MadPort {
    /// Binds the socket.
    ///
    /// # Errors
    /// The errors of bind(2). `AddrInUse` if another program receives the management datagrams of
    /// the address, or has UDP port 4791 without sharing it, or belongs to another user.
    pub fn open(address: IpAddr) -> io::Result<Self> {
        let udp = Udp::share(address, Share::Management)?;
        let own = udp.local()?;
        Ok(Self { udp, own })
    }

    /// Returns the oldest message that has arrived, and the address of its sender. Returns `None`
    /// if no message has arrived. Discards packets that are damaged, or are not messages of the
    /// connection manager.
    pub fn receive(&self) -> Option<(IpAddr, Mad)> {
        let mut buffer = [0; 512];
        loop {
            let (len, from) = self.udp.socket.recv_from(&mut buffer).ok()?;
            let packet = &buffer[..len];
            let flow = Flow {
                source: from,
                destination: self.own,
                identification: 0,
            };
            let parsed = Headers::parse(packet).ok().filter(|(headers, _)| {
                headers.opcode == OPCODE && (headers.bth.qpn, headers.deth) == (MAD_QPN, DETH)
            });
            if let Some(mad) = parsed
                .filter(|_| flow.check(packet).is_some())
                .and_then(|(_, payload)| Mad::parse(payload))
            {
                return Some((from.ip(), mad));
            }
        }
    }

    /// Sends a message to queue pair 1 at `to`. The message may be lost, as any datagram may be,
    /// and errors are ignored.
    pub fn send(&self, to: IpAddr, mad: &Mad) {
        let flow = Flow {
            source: self.own,
            destination: peer_socket(&self.own, to, UDP_PORT),
            identification: 0,
        };
        let mut headers = Headers::new(OPCODE, MAD_QPN, Psn::new(0));
        headers.deth = DETH;
        let headers = headers.emit();
        let icrc = flow.icrc(&headers, mad.bytes());
        let packet = [&headers[..], mad.bytes(), &icrc].concat();
        let _ = self.udp.socket.send_to(&packet, flow.destination);
    }
}

impl AsFd for MadPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.udp.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use mlx5_wire::roce::CmKind;

    use super::*;

    /// Returns an address of this host whose ports no other test uses.
    fn own_address(test: u8) -> IpAddr {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        [127, 32 + test, high, low].into()
    }

    fn received(port: &MadPort) -> Option<(IpAddr, Mad)> {
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            if let Some(received) = port.receive() {
                return Some(received);
            }
            std::thread::yield_now();
        }
        None
    }

    #[test]
    fn a_message_arrives_and_what_is_none_is_skipped() {
        let [one, other] = [0, 1].map(|test| MadPort::open(own_address(test)).unwrap());
        let mad = Mad::new(CmKind::ReadyToUse);
        let stranger = UdpSocket::bind((own_address(0), 0)).unwrap();
        for garbage in [&[][..], &[0; 280], &[0x64; 500]] {
            stranger.send_to(garbage, other.own).unwrap();
        }
        one.send(other.own.ip(), &mad);
        assert_eq!(received(&other), Some((one.own.ip(), mad)));
        assert_eq!(other.receive(), None);
    }

    /// Packets reach the right socket, whichever of the two was bound first. Each socket is closed
    /// and bound again.
    #[test]
    fn the_port_is_shared_by_queue_pair_number() {
        let (address, from) = (own_address(2), MadPort::open(own_address(3)).unwrap());
        let open = |share| Udp::share(address, share).unwrap();
        let [mut management, mut device] = [Share::Management, Share::Device].map(open);
        let device_packet = |udp: &Udp| {
            let headers = Headers::new(OPCODE, 0x4001, Psn::new(0)).emit();
            let to = udp.local().unwrap();
            from.udp.socket.send_to(&headers, to).unwrap();
            let mut buffer = [0; 64];
            let end = Instant::now() + Duration::from_secs(60);
            while Instant::now() < end {
                if let Ok(len) = udp.socket.recv(&mut buffer) {
                    return buffer[..len] == headers[..];
                }
            }
            false
        };
        for is_device_first in [false, true, false] {
            assert_eq!(
                Udp::share(address, Share::Device).unwrap_err().kind(),
                io::ErrorKind::AddrInUse,
                "one device"
            );
            // The senders have different ports: without a BPF program the kernel would spread their
            // packets over both sockets.
            for _ in 0..16 {
                let from = UdpSocket::bind((from.own.ip(), 0)).unwrap();
                from.send_to(
                    &Headers::new(OPCODE, MAD_QPN, Psn::new(0)).emit(),
                    device.local().unwrap(),
                )
                .unwrap();
            }
            assert!(device_packet(&device), "and nothing else");
            let mut packets = 0;
            while management.socket.recv(&mut [0; 64]).is_ok() {
                packets += 1;
            }
            assert_eq!(packets, 16);
            if is_device_first {
                drop(management);
                management = open(Share::Management);
            } else {
                drop(device);
                device = open(Share::Device);
            }
        }
    }
}
