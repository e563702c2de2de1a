//! Capabilities of devices, and configurations of queues, regions and queue pairs. Plain data.

use shm::memfd::NoHugePages;

use crate::mmio::RegisterKind;
use crate::wire::CQE_BYTES;

/// Options of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// How doorbells write its registers, which are memory that no device reads. Default [`RegisterKind::Ordinary`].
    pub register: RegisterKind,
}

/// The identity and capabilities of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Display name, for example `soft:lid=3`.
    pub name: String,
    /// Transport to the peers, in words.
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
    /// Maximum number of queue pairs.
    pub max_qp: u32,
    /// Maximum number of memory regions.
    pub max_mr: u32,
    /// Whether the device has [`CompareSwap`](crate::CompareSwap) and [`FetchAdd`](crate::FetchAdd). A device without them refuses to post
    /// them and to register a region for them.
    pub has_atomics: bool,
    /// NUMA node that the NIC is attached to, if the system tells; it is the best place for queues and buffers. `None` for the software
    /// HCA, whose memory is on the node of its thread.
    pub numa_node: Option<u32>,
    /// Timing, clock, strictness and faults of the device: the conditions under which results were obtained.
    pub modes: String,
    /// Time for which operations towards a dead peer are retried before they fail, in ns. Hardware cannot distinguish a dead peer from a
    /// slow one: there it is [`ConnectOptions::transport_timeout_ns`](crate::ConnectOptions::transport_timeout_ns) of the default options.
    pub dead_peer_timeout_ns: u64,
    /// Number of queue pair places and memory regions not yet returned, because a peer was stopped while using them.
    pub quarantined: u64,
    /// Number of rules broken, in strict mode, since they were last taken from [`Device::soft`](crate::Device::soft).
    pub violations: u64,
    /// Number of times that an operation of this device found no receive posted at its target (RNR NAK) and was delayed, or failed. `None`
    /// on hardware, which counts per port and for all programs (`rnr_nak_retry_err` of its counters in sysfs).
    pub rnr_naks: Option<u64>,
}

/// The configuration of a completion queue. A plain number converts to that many entries of 64 bytes, not compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqConfig {
    /// CQEs, 1..=[`DeviceInfo::max_cqe`](crate::DeviceInfo::max_cqe); rounded up to a power of two. Every operation that may complete
    /// before the next poll needs one: a queue that overruns is dead.
    pub entries: u32,
    /// Bytes of an entry, 64 or 128. A large entry has room for 64 bytes of received data before its CQE.
    pub cqe_bytes: u32,
    /// Whether the device may write similar CQEs as one session of 8-byte mini CQEs ([`MiniCqe`](crate::wire::MiniCqe)). Polls hand them
    /// out as ordinary CQEs.
    pub compression: bool,
    /// Completion vector of its events, 0..[`DeviceInfo::comp_vectors`](crate::DeviceInfo::comp_vectors). On hardware each vector has an
    /// interrupt of its own, usually on a core of its own: choose the vector of the core on which the program waits.
    pub comp_vector: u32,
}

impl From<u32> for CqConfig {
    fn from(entries: u32) -> Self {
        Self { entries, cqe_bytes: CQE_BYTES as u32, compression: false, comp_vector: 0 }
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Send WQEBBs of 64 B, 1..=32768; rounded up to a power of two.
    pub max_send_wr: u32,
    /// Inline bytes of one operation, 0..=220.
    pub max_inline_data: usize,
    /// Whether the device may put the data of a SEND of up to 32 bytes, or 64 with large CQEs, into the CQE instead of the receive's buffer
    /// ([`Cqe::inline_data`](crate::Cqe::inline_data)); that buffer is then not written. Reliable connections only.
    pub scatter_to_cqe: bool,
    /// Number of the peer's messages that may wait on the software HCA until this end polls, 1..=128; rounded up to a power of two, minimum
    /// 8. Each takes 64 bytes. The peer's operations wait for room; the depth of its queue pair need not be the same. Hardware ignores it.
    pub lane_slots: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self { max_send_wr: 256, max_inline_data: 64, scatter_to_cqe: false, lane_slots: 128 }
    }
}

/// The states of a queue pair (InfiniBand specification, "Queue Pair States").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Created; not connected.
    Reset,
    /// Receives may be posted.
    Init,
    /// Receives messages.
    ReadyToReceive,
    /// Sends and receives messages.
    ReadyToSend,
    /// An operation failed; everything posted is flushed. It is the last state of a queue pair: create a new one.
    Error,
}

/// The kind of pages under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages, as requested.
    Base,
    /// Huge pages, of 2 MiB.
    Huge,
    /// Ordinary pages although huge pages were requested, with the reason, in words.
    NotHuge(NoHugePages),
}
