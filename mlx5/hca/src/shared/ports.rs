//! The ports of a network, and the queue pairs of each port.

use std::net::Ipv6Addr;

use mlx5_wire::AddressVector;

use crate::shared::layout::vf_of;
use crate::types::request::Address;

/// A port of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The ports of the network, the same for all devices of a fabric.
    pub network: &'static [PortAddress],
    /// Index of this port in `network`.
    pub index: usize,
}

/// The addresses of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// LID of the port; 0 on RoCE, where only GIDs identify a port.
    pub lid: u16,
    /// GID table of the port.
    pub gids: &'static [Gid],
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The bytes in the order of an IPv6 address.
    pub bytes: [u8; 16],
    /// Packet format of datagrams sent from this GID.
    pub kind: GidKind,
}

/// Packet format of a GID (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand packets.
    InfiniBand,
    /// RoCE version 1: Ethernet frames.
    RoceV1,
    /// RoCE version 2: UDP.
    RoceV2,
}

impl Address {
    /// Returns the address of a queue pair of a virtual function of this fabric, whose device sends
    /// no packets.
    #[must_use]
    pub fn of_number(qpn: u32) -> Self {
        Self {
            lid: vf_of(qpn),
            qpn,
            epoch: None,
            packets: None,
        }
    }
}

impl Gid {
    /// Returns the IPv4 address that the GID maps (`::ffff:a.b.c.d`). `None` for other GIDs.
    #[must_use]
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        Ipv6Addr::from(self.bytes)
            .to_ipv4_mapped()
            .map(|address| address.octets())
    }
}

impl Port {
    /// Returns the addresses of the port. `None`: the network has no port with its index.
    #[must_use]
    pub fn address(&self) -> Option<&'static PortAddress> {
        self.network.get(self.index)
    }

    /// Returns whether the queue pair with this number, if it exists, is at the port with this
    /// index.
    #[must_use]
    pub fn has(&self, index: usize, qpn: u32) -> bool {
        self.is_at(index, vf_of(qpn))
    }

    /// Returns the LID of the port that has the queue pair with this number; 0 on RoCE.
    pub(crate) fn lid_of(&self, qpn: u32) -> u16 {
        self.network
            .get(usize::from(vf_of(qpn)) % self.network.len().max(1))
            .map_or(0, |port| port.lid)
    }

    /// Returns whether the device that is virtual function `vf` is at the port with this index.
    pub(crate) fn is_at(&self, index: usize, vf: u16) -> bool {
        usize::from(vf) % self.network.len().max(1) == index
    }

    /// Returns the virtual function that has queue pair `qpn`, if datagrams with this vector reach
    /// the queue pair. On RoCE, the destination GID must be an entry of the table of its port, with
    /// the packet format of the GID from which the datagrams are sent.
    pub(crate) fn find(&self, qpn: u32, vector: &AddressVector) -> Option<u16> {
        let of_source = |gid: &Gid| {
            gid.bytes == vector.rgid
                && self
                    .source(vector)
                    .is_some_and(|source| source.kind == gid.kind)
        };
        let is_named = |port: &PortAddress| {
            if port.lid == 0 {
                port.gids.iter().any(of_source)
            } else {
                port.lid == vector.rlid
            }
        };
        let index = self.network.iter().position(is_named)?;
        self.has(index, qpn).then(|| vf_of(qpn))
    }

    /// Returns the source GID of datagrams with this vector.
    pub(crate) fn source(&self, vector: &AddressVector) -> Option<&'static Gid> {
        self.address()?
            .gids
            .get(usize::from(vector.source_gid_index()))
    }
}
