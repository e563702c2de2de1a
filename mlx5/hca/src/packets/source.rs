//! The sockets from which packets leave.
//!
//! Routers and the queues of a NIC are chosen by a hash of the addresses and UDP ports of a packet.
//! All RoCE devices receive at one port, so each sends the packets of different connections from
//! different ports (InfiniBand Architecture Specification, annex A17, "UDP header"). A software HCA
//! has its own port, at which it receives, and [`SPREAD`] further ports, from which it only sends. A
//! connection keeps its port, so the network does not reorder its packets.

use std::io;
use std::net::SocketAddr;

use super::reports::Reports;
use super::udp::{BATCH, Packets, Receiver, Udp};
use crate::counters::PortCounters;

/// Number of further ports of a device. Each is a socket.
pub(super) const SPREAD: usize = 1 << SPREAD_BITS;
const SPREAD_BITS: u32 = 3;
/// Lowest port from which RoCE devices send; the highest is 65535.
const FIRST_PORT: u16 = 0xc000;
/// 2^32 divided by the golden ratio: multiplication spreads numbers that differ in a few bits.
const GOLDEN: u32 = 0x9e37_79b1;

/// Returns the flow label, 20 bits, of the packets between two queue pairs, in both directions. It
/// is the label that Linux computes for RoCE devices (`rdma_calc_flow_label` in
/// `include/rdma/ib_verbs.h`): of the product of both numbers.
pub(crate) const fn flow_label(own: u32, peer: u32) -> u32 {
    let product = own as u64 * peer as u64;
    let folded = product ^ product >> 20;
    (folded ^ folded >> 40) as u32 & 0xf_ffff
}

/// Returns the port from which a device with port `own` sends packets with this flow label. NICs
/// use 14 bits of the label (`rdma_flow_label_to_udp_sport`). Here the label selects one of a few
/// ports, which follow from `own`: devices of one address have different ports, and a peer that
/// knows `own` knows them.
pub(crate) const fn source_port(own: u16, flow_label: u32) -> u16 {
    let nth = flow_label.wrapping_mul(GOLDEN) >> (u32::BITS - SPREAD_BITS);
    FIRST_PORT | own << SPREAD_BITS | nth as u16
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// The peer as a receiver of packets.
    pub(crate) to: Receiver,
    /// The UDP ports from which the peer may send: the port of the first packet that advanced the
    /// connection. Before that packet, they are the two from which a software HCA sends: the port
    /// in its address, and that of the flow label. `None`: any port, as the peer is no software HCA.
    pub(super) sources: Option<[u16; 2]>,
}

impl Peer {
    /// Returns whether this is the address of the peer, with a port from which it may send.
    #[inline]
    pub(crate) fn is_from(&self, from: &SocketAddr) -> bool {
        let port = from.port();
        let has_port = |[one, other]: [u16; 2]| one == port || other == port;
        self.to.socket.ip() == from.ip() && self.sources.is_none_or(has_port)
    }
}

/// A socket, and packets that wait for room in it.
pub(super) struct Source {
    pub(super) udp: Udp,
    /// The source address of the packets, with the port.
    pub(super) own: SocketAddr,
    /// Packets `first..end` wait.
    pub(super) out: Packets,
    first: usize,
    pub(super) end: usize,
}

impl Source {
    pub(super) fn new(udp: Udp) -> io::Result<Self> {
        Ok(Self {
            own: udp.local()?,
            udp,
            out: Packets::new(),
            first: 0,
            end: 0,
        })
    }

    /// Adds the first `len` bytes of the buffer after the packets that wait. Returns whether the
    /// source has no room for more.
    pub(super) fn add(&mut self, len: usize, to: &Receiver) -> bool {
        self.out.set(self.end, len, to);
        self.end += 1;
        self.end == BATCH
    }

    /// Sends the packets that wait, as far as the socket has room. Returns whether none waits any
    /// more, and the number of packets that the kernel refused, which are lost.
    pub(super) fn flush(
        &mut self,
        reports: &mut Reports,
        traffic: Option<&'static PortCounters>,
    ) -> (bool, u64) {
        let (next, refused) = self
            .udp
            .send(&mut self.out, (self.first, self.end), reports);
        if let Some(traffic) = traffic {
            traffic.sent((next - self.first) as u64, self.out.bytes(self.first..next));
        }
        let is_empty = next == self.end;
        (self.first, self.end) = if is_empty { (0, 0) } else { (next, self.end) };
        (is_empty, refused)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The expected labels are the results of `rdma_calc_flow_label`.
    #[test]
    fn a_flow_label_is_that_of_linux_and_that_of_the_other_end() {
        for (own, peer, label) in [
            (0, 7, 0),
            (0x11, 0x12, 0x132),
            (0x4001, 0x8002, 0x1_0202),
            (0xff_ffff, 0xff_fffe, 0xf_ff2d),
        ] {
            assert_eq!(flow_label(own, peer), label, "{own:#x} {peer:#x}");
            assert_eq!(flow_label(peer, own), label);
        }
    }

    /// Connections of a client with one queue pair each, of many queue pairs of a server to one, and
    /// of all to all.
    #[test]
    fn connections_are_spread_over_all_ports() {
        let pairs = |f: fn(u32) -> (u32, u32)| (0..64).map(f).collect::<Vec<_>>();
        for (base, other) in [(0x4000, 0x4000), (0x11, 0x11), (0x8001, 0x4001)] {
            for pairs in [
                pairs(|nth| (nth, nth)),
                pairs(|nth| (0, nth)),
                pairs(|nth| (nth % 8, nth / 8)),
            ] {
                let mut ports = BTreeMap::new();
                for (one, two) in pairs {
                    let port = source_port(4791, flow_label(base + one, other + two));
                    *ports.entry(port).or_insert(0) += 1;
                }
                assert_eq!(ports.len(), SPREAD, "{base:#x}");
                assert!(ports.values().all(|count| *count <= 16), "{ports:?}");
            }
        }
        let all = [4791, 4792].map(|own| (0..99).map(move |label| source_port(own, label)));
        let [mut one, other] = all.map(|ports| ports.collect::<Vec<_>>());
        assert!(
            one.iter()
                .all(|port| *port >= 0xc000 && !other.contains(port))
        );
        one.sort_unstable();
        one.dedup();
        assert_eq!(one.len(), SPREAD);
    }
}
