//! Options of a device.

use std::net::Ipv6Addr;
use std::path::PathBuf;

use mlx5_wire::AddressVector;

use crate::{Clock, Faults, LocalFabric, Timing};

/// The place where a software HCA meets its peers.
#[derive(Clone, Debug)]
pub enum FabricSpec {
    /// All processes of this user on this host, through small control files in a shared-memory directory (`None`: the default one).
    Shared {
        /// The directory.
        dir: Option<PathBuf>,
    },
    /// Devices of this process only, for tests and simulation. No file is made.
    Local(LocalFabric),
}

/// The port that all devices of a fabric are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its LID; 0 on RoCE, where GIDs alone name it.
    pub lid: u16,
    /// Its GID table.
    pub gids: &'static [Gid],
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// As IPv6 addresses are written: the first byte first.
    pub bytes: [u8; 16],
    /// Form of the packets sent from it.
    pub kind: GidKind,
}

/// Form of the packets sent from a GID (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand packets.
    InfiniBand,
    /// Ethernet frames of a type of their own.
    RoceV1,
    /// UDP.
    RoceV2,
}

impl Gid {
    /// Returns the IPv4 address that it was made of (`::ffff:a.b.c.d`).
    #[must_use]
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        Ipv6Addr::from(self.bytes).to_ipv4_mapped().map(|address| address.octets())
    }
}

impl Port {
    /// Returns whether datagrams with this vector get here: on RoCE, as a peer of the GID that they go out from.
    pub(crate) fn is_at(&self, vector: &AddressVector) -> bool {
        let of_kind = |kind| self.gids.iter().any(|gid| gid.kind == kind && gid.bytes == vector.rgid);
        if self.lid == 0 { self.source(vector).is_some_and(|source| of_kind(source.kind)) } else { vector.rlid == self.lid }
    }

    /// Returns the GID that datagrams with this vector go out from.
    pub(crate) fn source(&self, vector: &AddressVector) -> Option<&'static Gid> {
        self.gids.get(usize::from(vector.source_gid_index()))
    }
}

/// Options of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// The fabric of its peers.
    pub fabric: FabricSpec,
    /// The port that it shares with all others of its fabric, which then have up to [`MAX_PORT_SLOT`](crate::MAX_PORT_SLOT) slots: the upper 10 bits of
    /// a queue pair number are the slot of the device that has it, so the number alone says where it is. Default `None`: each device is a port
    /// of its own, with a LID.
    pub port: Option<Port>,
    /// Address space for registered memory, in bytes; memory is taken from the system only as regions are made. Each peer maps
    /// it too. Default 64 GiB, or a sixteenth of what this process may map (`ulimit -v`) if that is less.
    pub arena_bytes: usize,
    /// After this long without an answer from a peer proven dead, its operations fail, in ns. Default 10 ms.
    pub dead_peer_timeout_ns: u64,
    /// The source of its time and retry times.
    pub clock: Clock,
    /// When operations are executed.
    pub timing: Timing,
    /// Checks every [`Rule`](crate::Rule), which hardware would punish silently. A driver that breaks one gets its queue pair into the
    /// error state, where that is possible, and the device's violations describe the mistake. Costs about three times the instructions.
    pub strict: bool,
    /// Faults to make.
    pub faults: Faults,
    /// Keep a hash over everything the device does.
    pub trace: bool,
}

/// Returns the default of [`SoftOptions::arena_bytes`].
fn default_arena_bytes() -> usize {
    const SHARE: u64 = 16;
    const PAGE: u64 = 2 << 20;
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` into the live value; if it refuses, there is no limit.
    let _ = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    // At least a page, so that the error of a process without address space says so.
    (limit.rlim_cur / SHARE / PAGE * PAGE).clamp(PAGE, 64 << 30) as usize
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self {
            fabric: FabricSpec::Shared { dir: None },
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
