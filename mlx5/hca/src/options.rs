//! Options of a device.

use rustix::process::{Resource, getrlimit};

use crate::packets::options::RoceOptions;
use crate::{Clock, FabricSpec, Faults, Port, PortCounters, Timing};

/// Options of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// Fabric in which the device finds its peers.
    pub fabric: FabricSpec,
    /// The port for packets, to peers that share no memory with this device. Default `None`.
    pub roce: Option<RoceOptions>,
    /// Port that the device shares with other devices of its fabric. The device is then one of the
    /// port's virtual functions. They are numbered from 1 to at most [`MAX_VF`](crate::MAX_VF); in
    /// a network of n ports, virtual function v is at the port with index v modulo n. The upper 10
    /// bits of a queue pair number are the virtual function, so a queue pair number alone
    /// identifies the device. Default `None`: each device is a port of its own, with a LID.
    pub port: Option<Port>,
    /// Address space for registered memory, in bytes. Memory is allocated only as regions are made.
    /// Each peer maps the address space too. Default 64 GiB, or a sixteenth of what this process
    /// may map (`ulimit -v`) if that is less.
    pub arena_bytes: usize,
    /// Time after which operations fail if the peer is proven dead, in ns. Default 10 ms.
    pub dead_peer_timeout_ns: u64,
    /// Clock of the device's retries and timeouts.
    pub clock: Clock,
    /// Time at which the device executes operations.
    pub timing: Timing,
    /// Whether every [`Rule`](crate::Rule) is checked. Hardware reacts silently to a broken rule;
    /// here the queue pair goes to the error state, if possible, and the device's violations
    /// describe the mistake. Costs about three times the instructions.
    pub strict: bool,
    /// Whether [`Rule::SourceChanged`](crate::Rule::SourceChanged) is checked without the other
    /// rules. Needs a timing that is not immediate.
    pub check_buffers: bool,
    /// Faults that the device makes.
    pub faults: Faults,
    /// Whether to keep a hash over all events of the device.
    pub trace: bool,
    /// Counters, one entry for each port of the network of [`port`](Self::port). The device adds
    /// its traffic to them. With counters, no operation takes the fast path for plain WRITEs.
    /// Default `None`.
    pub counters: Option<&'static [PortCounters]>,
}

fn default_arena_bytes() -> usize {
    const SHARE: u64 = 16;
    const PAGE: u64 = 2 << 20;
    let limit = getrlimit(Resource::As).current.unwrap_or(u64::MAX);
    // The minimum is one page: if no address space is left, mapping it fails with an error.
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
            check_buffers: false,
            faults: Faults::default(),
            trace: false,
            counters: None,
        }
    }
}
