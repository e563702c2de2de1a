//! Options of a device.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::PathBuf;
use std::str::FromStr;

use mlx5_wire::AddressVector;

use crate::hca::vf_of;
use crate::{Clock, Faults, LocalFabric, Timing};

/// The place where a software HCA meets its peers.
#[derive(Clone, Debug)]
pub enum FabricSpec {
    /// All processes of this user on this host, through small control files in a shared-memory directory. `None`: the default directory.
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
        Ipv6Addr::from(self.bytes).to_ipv4_mapped().map(|address| address.octets())
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

    /// Returns whether the device that is virtual function `vf` is at the port with this index.
    pub(crate) fn is_at(&self, index: usize, vf: u16) -> bool {
        usize::from(vf) % self.network.len().max(1) == index
    }

    /// Returns the virtual function that has queue pair `qpn`, if datagrams with this vector get to it. On RoCE a port is a peer of the GID
    /// that they are sent from.
    pub(crate) fn find(&self, qpn: u32, vector: &AddressVector) -> Option<u16> {
        let of_source = |gid: &Gid| gid.bytes == vector.rgid && self.source(vector).is_some_and(|source| source.kind == gid.kind);
        let is_named = |port: &PortAddress| if port.lid == 0 { port.gids.iter().any(of_source) } else { port.lid == vector.rlid };
        let index = self.network.iter().position(is_named)?;
        self.has(index, qpn).then(|| vf_of(qpn))
    }

    /// Returns the source GID of datagrams with this vector.
    pub(crate) fn source(&self, vector: &AddressVector) -> Option<&'static Gid> {
        self.address()?.gids.get(usize::from(vector.source_gid_index()))
    }
}

/// Options of a port for RoCEv2 packets in UDP datagrams. It needs no rights and no kernel module. Its peers are software HCAs and other
/// RoCEv2 devices on any host. Packets are neither encrypted nor authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceOptions {
    /// An IP address of this host. Packets come from it, and it is the device's GID.
    pub address: IpAddr,
    /// Length of a network prefix, in bits: the device has the address of this host in the network of `address`. So hosts with one network
    /// can have the same options. `None`: it has `address`.
    pub prefix: Option<u8>,
    /// Its UDP port. `None`: 4791, or any free one if another device of this address has that. Software HCAs learn the port of a peer;
    /// other devices send to 4791 only.
    pub port: Option<u16>,
    /// RDMA MTU, in bytes: 256, 512, 1024, 2048 or 4096. `None`: the largest for the address's interface.
    pub mtu: Option<u16>,
    /// Whether peers of the same fabric get packets as well, and no shared memory: for tests, and to measure.
    pub is_for_all: bool,
    /// Packets in a thousand that are lost on purpose.
    pub loss_permille: u16,
    /// File for a capture of all packets (pcap).
    pub pcap: Option<PathBuf>,
}

impl RoceOptions {
    /// Returns the options of a port with this address and all defaults.
    #[must_use]
    pub const fn new(address: IpAddr) -> Self {
        Self { address, prefix: None, port: None, mtu: None, is_for_all: false, loss_permille: 0, pcap: None }
    }
}

/// Parses `ADDRESS` or `ADDRESS/BITS` ([`prefix`](Self::prefix)), and after commas `port=N`, `mtu=N`, `packets=all` ([`is_for_all`](Self::is_for_all)), `loss=PERMILLE`, `pcap=FILE`. The
/// error is a sentence that says what is legal.
impl FromStr for RoceOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let text = parts.next().unwrap_or_default();
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let legal = || format!("\"{text}\" is no IP address of this host, nor a network, such as 10.1.0.0/16, in which it has one");
        let mut options = Self::new(address.parse().map_err(|_| legal())?);
        let most = if options.address.is_ipv4() { 32 } else { 128 };
        options.prefix = match prefix.map(str::parse) {
            Some(Ok(bits)) if bits <= most => Some(bits),
            Some(_) => return Err(legal()),
            None => None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let number = |legal: &str| value.parse().map_err(|_| format!("{key}={value}: use {legal}"));
            match key {
                "port" => options.port = Some(number("a UDP port, 0 to 65535")?),
                "mtu" => {
                    let legal = "256, 512, 1024, 2048 or 4096";
                    let mtu = number(legal)?;
                    let is_legal = [256, 512, 1024, 2048, 4096].contains(&mtu);
                    options.mtu = Some(if is_legal { mtu } else { return Err(format!("mtu={value}: use {legal}")) });
                }
                "loss" => options.loss_permille = number("packets in a thousand, 0 to 1000")?.min(1000),
                "packets" if value == "all" => options.is_for_all = true,
                "pcap" if !value.is_empty() => options.pcap = Some(value.into()),
                _ => return Err(format!("\"{part}\": use port=N, mtu=N, packets=all, loss=PERMILLE, pcap=FILE")),
            }
        }
        Ok(options)
    }
}

/// Formats the options as they are parsed, without defaults.
impl fmt::Display for RoceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, prefix, port, mtu, is_for_all, loss_permille, pcap } = self;
        address.fmt(f)?;
        prefix.map_or(Ok(()), |bits| write!(f, "/{bits}"))?;
        port.map_or(Ok(()), |port| write!(f, ",port={port}"))?;
        mtu.map_or(Ok(()), |mtu| write!(f, ",mtu={mtu}"))?;
        f.write_str(if *is_for_all { ",packets=all" } else { "" })?;
        if *loss_permille > 0 {
            write!(f, ",loss={loss_permille}")?;
        }
        pcap.as_ref().map_or(Ok(()), |file| write!(f, ",pcap={}", file.display()))
    }
}

/// Options of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// The fabric of its peers.
    pub fabric: FabricSpec,
    /// The port for packets, to peers that share no memory with this device. Default `None`.
    pub roce: Option<RoceOptions>,
    /// The port that it shares with others of its fabric. Each is a virtual function, at most [`MAX_VF`](crate::MAX_VF) in all; those of the
    /// port with index i of n leave the remainder i. The upper 10 bits of a queue pair number are the virtual function, so the number alone
    /// names the device. Default `None`: each device is a port of its own, with a LID.
    pub port: Option<Port>,
    /// Address space for registered memory, in bytes. Memory is allocated only as regions are made. Each peer maps the address space too.
    /// Default 64 GiB, or a sixteenth of what this process may map (`ulimit -v`) if that is less.
    pub arena_bytes: usize,
    /// Time after which operations fail if the peer is proven dead, in ns. Default 10 ms.
    pub dead_peer_timeout_ns: u64,
    /// Clock of its retries and timeouts.
    pub clock: Clock,
    /// When operations are executed.
    pub timing: Timing,
    /// Whether every [`Rule`](crate::Rule) is checked. Hardware reacts silently to a broken rule; here the queue pair goes to the error
    /// state, if possible, and the device's violations describe the mistake. Costs about three times the instructions.
    pub strict: bool,
    /// Faults that the device makes.
    pub faults: Faults,
    /// Whether to keep a hash over all events of the device.
    pub trace: bool,
}

/// Returns the default of [`SoftOptions::arena_bytes`].
fn default_arena_bytes() -> usize {
    const SHARE: u64 = 16;
    const PAGE: u64 = 2 << 20;
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` into the live value; if it refuses, there is no limit.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    // At least a page, so that a process without address space gets an error.
    (limit.rlim_cur / SHARE / PAGE * PAGE).clamp(PAGE, 64 << 30) as usize
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_a_port_are_printed_as_they_are_parsed_and_others_are_refused_with_those_that_are_legal() {
        for text in ["127.0.0.1", "::1,port=0", "10.1.0.0/16,port=4791,mtu=1024,packets=all,loss=10,pcap=/tmp/a"] {
            assert_eq!(text.parse::<RoceOptions>().unwrap().to_string(), text);
        }
        for (text, part) in [
            ("", "no IP address"),
            ("eth0", "no IP address"),
            ("10.1.0.0/33", "10.1.0.0/16"),
            ("::1,port=70000", "a UDP port, 0 to 65535"),
            ("::1,mtu=1000", "256, 512, 1024, 2048 or 4096"),
            ("::1,loss=1.5", "0 to 1000"),
            ("::1,packets=some", "packets=all"),
            ("::1,pcap=", "pcap=FILE"),
            ("::1,", "port=N"),
        ] {
            let refused = text.parse::<RoceOptions>().unwrap_err();
            assert!(refused.contains(part), "{text}: {refused}");
        }
    }
}
