//! Options of a device.

use std::net::Ipv6Addr;
use std::path::PathBuf;

use mlx5_wire::AddressVector;
use rustix::process::{Resource, getrlimit};

use crate::packets::options::RoceOptions;
use crate::shared::layout::vf_of;
use crate::{Clock, Faults, LocalFabric, PortCounters, Timing};

/// The place where a software HCA meets its peers.
#[derive(Clone, Debug)]
pub enum FabricSpec {
    /// All processes of this user on this host, through small control files in a shared-memory
    /// directory. `None`: the default directory.
    Shared {
        /// The directory.
        dir: Option<PathBuf>,
    },
    /// Devices of this process only, for tests and simulations. No file is made.
    Local(LocalFabric),
}

/// A port of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// The ports of the network, the same for all devices of a fabric.
    pub network: &'static [PortAddress],
    /// Index of this one.
    pub index: usize,
}

/// The addresses of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// Its LID; 0 on RoCE, where only GIDs name a port.
    pub lid: u16,
    /// Its GID table.
    pub gids: &'static [Gid],
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The bytes in the order of an IPv6 address.
    pub bytes: [u8; 16],
    /// Packet format of datagrams sent from it.
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
    /// Returns its addresses. `None`: the network has no port with its index.
    #[must_use]
    pub fn address(&self) -> Option<&'static PortAddress> {
        self.network.get(self.index)
    }

    /// Returns whether the port with this index has the queue pair with this number, if one does.
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

    /// Returns the virtual function that has queue pair `qpn`, if datagrams with this vector get to
    /// it. On RoCE a port is a peer of the GID that they are sent from.
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

/// Options of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// The fabric of its peers.
    pub fabric: FabricSpec,
    /// The port for packets, to peers that share no memory with this device. Default `None`.
    pub roce: Option<RoceOptions>,
    /// The port that it shares with others of its fabric. Each is a virtual function, at most
    /// [`MAX_VF`](crate::MAX_VF) in all; those of the port with index i of n leave the remainder i.
    /// The upper 10 bits of a queue pair number are the virtual function, so the number alone names
    /// the device. Default `None`: each device is a port of its own, with a LID.
    pub port: Option<Port>,
    /// Address space for registered memory, in bytes. Memory is allocated only as regions are made.
    /// Each peer maps the address space too. Default 64 GiB, or a sixteenth of what this process
    /// may map (`ulimit -v`) if that is less.
    pub arena_bytes: usize,
    /// Time after which operations fail if the peer is proven dead, in ns. Default 10 ms.
    pub dead_peer_timeout_ns: u64,
    /// Clock of its retries and timeouts.
    pub clock: Clock,
    /// When operations are executed.
    pub timing: Timing,
    /// Whether every [`Rule`](crate::Rule) is checked. Hardware reacts silently to a broken rule;
    /// here the queue pair goes to the error state, if possible, and the device's violations
    /// describe the mistake. Costs about three times the instructions.
    pub strict: bool,
    /// Faults that the device makes.
    pub faults: Faults,
    /// Whether to keep a hash over all events of the device.
    pub trace: bool,
    /// Counters of the ports of [`port`](Self::port)'s network, one of each, to which the device
    /// adds its traffic. Each operation then takes the general path. Default `None`.
    pub counters: Option<&'static [PortCounters]>,
}

/// Returns the default of [`SoftOptions::arena_bytes`].
fn default_arena_bytes() -> usize {
    const SHARE: u64 = 16;
    const PAGE: u64 = 2 << 20;
    let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
    // At least a page, so that a process without address space gets an error.
    (limit / SHARE / PAGE * PAGE).clamp(PAGE, 64 << 30) as usize
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self {
            fabric: FabricSpec::Shared { dir: None },
            roce: None,
            port: None,
            arena_bytes: default_arena_bytes(),
            dead_peer_timeout_ns: 10_000_000,
            clock: Clock::System,
            timing: Timing::Immediate,
            strict: false,
            faults: Faults::default(),
            trace: false,
            counters: None,
        }
    }
}
