//! The description of a device.

use core::fmt;

use crate::PacketCounters;

/// The part that executes the operations in a device's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The device itself, an mlx5 NIC.
    Direct,
    /// A device of any vendor, through the calls of libibverbs.
    Relay,
    /// The processors of this host.
    Software,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Relay => "relay",
            Self::Software => "software",
        })
    }
}

/// The identity and capabilities of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Display name, for example `soft:lid=3`.
    pub name: String,
    /// The part that executes the device's operations.
    pub engine: Engine,
    /// Description of the transport to the peers.
    pub transport: String,
    /// Maximum size of a send queue, in WQEBBs.
    pub max_send_wr: u32,
    /// Maximum size of a queue pair's own receive queue, in receives.
    pub max_recv_wr: u32,
    /// Maximum number of buffers of a receive.
    pub max_recv_sge: u32,
    /// Maximum number of inline bytes of an operation.
    pub max_inline_data: u32,
    /// Maximum size of a completion queue, in CQEs.
    pub max_cqe: u32,
    /// Number of completion vectors.
    pub comp_vectors: u32,
    /// Maximum size of a shared receive queue, in receives.
    pub max_srq_wr: u32,
    /// Whether the device has atomics. A device without atomics refuses to post them, and to
    /// register a region with remote atomic access.
    pub has_atomics: bool,
    /// NUMA node that the NIC is attached to, if the system reports it. It is the best place for
    /// queues and buffers. `None` for the software HCA, whose memory is on the node of its thread.
    pub numa_node: Option<u32>,
    /// Timing, clock, strictness and faults of the device: the conditions under which results were
    /// obtained.
    pub modes: String,
    /// Time for which operations towards a dead peer are retried before they fail, in ns. Hardware
    /// cannot distinguish a dead peer from a slow one: there the time is
    /// [`ConnectOptions::transport_timeout_ns`](mlx5_wire::ConnectOptions::transport_timeout_ns) of
    /// the default options.
    pub dead_peer_timeout_ns: u64,
    /// Number of queue pair places and memory regions that are never reused, because a peer stopped
    /// while it used them.
    pub quarantined: u64,
    /// Number of times that a rule was found broken, by strict mode or by the check of buffers, since
    /// the violations were last [taken](crate::Hca::take_violations).
    pub violations: u64,
    /// Number of times that an operation of this device found no receive posted at its target (RNR
    /// NAK), and was delayed or failed. `None` on hardware, which counts per port and for all
    /// programs (`rnr_nak_retry_err` of its counters in sysfs).
    pub rnr_naks: Option<u64>,
    /// Counters of the device's packets. `None` on hardware and on devices without a [port for
    /// them](crate::RoceOptions).
    pub packets: Option<PacketCounters>,
}
