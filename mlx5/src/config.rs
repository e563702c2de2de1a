//! What devices are, and what queues, regions and queue pairs are to be. Plain data.

use shm::memfd::NoHugePages;

use crate::mmio::RegisterKind;
use crate::wire::CQE_BYTES;

/// Options of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// How doorbells write its registers, which are memory that nobody reads. Default [`RegisterKind::Ordinary`].
    pub register: RegisterKind,
}

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name for people, for example `soft:lid=3`.
    pub name: String,
    /// How peers are reached.
    pub transport: String,
    /// Largest send queue, WQEBBs.
    pub max_send_wr: u32,
    /// Largest receive queue of a queue pair, receives.
    pub max_recv_wr: u32,
    /// Most buffers of a receive.
    pub max_recv_sge: u32,
    /// Most inline bytes of an operation.
    pub max_inline_data: u32,
    /// Largest completion queue, CQEs.
    pub max_cqe: u32,
    /// Completion vectors.
    pub comp_vectors: u32,
    /// Largest shared receive queue, receives.
    pub max_srq_wr: u32,
    /// Most queue pairs.
    pub max_qp: u32,
    /// The maximum number of memory regions.
    pub max_mr: u32,
    /// Whether it has [`CompareSwap`](crate::CompareSwap) and [`FetchAdd`](crate::FetchAdd). A device without them posts none and takes no
    /// region for them.
    pub has_atomics: bool,
    /// The NUMA node a NIC is plugged into, where the system says so; queues and buffers are best there. `None` for the software HCA, whose
    /// memory is where its thread is.
    pub numa_node: Option<u32>,
    /// When it executes, by which clock, whether it is strict, and which faults it makes: what results were obtained under.
    pub modes: String,
    /// How long operations towards a dead peer are retried before they fail, in ns. Hardware cannot tell a dead peer from a slow one: there it is
    /// [`ConnectOptions::transport_timeout_ns`](crate::ConnectOptions::transport_timeout_ns), of the default options.
    pub dead_peer_timeout_ns: u64,
    /// Queue pair places and memory regions that were not given back so far, because a peer was stopped in the middle of using them.
    pub quarantined: u64,
    /// Rules broken, in strict mode, since they were last taken from [`Device::soft`](crate::Device::soft).
    pub violations: u64,
    /// Times that an operation of this device found no receive posted at its target (RNR NAK) and was put off, or failed. Hardware counts per
    /// port, for all programs (`rnr_nak_retry_err` of its counters in sysfs): `None` there.
    pub rnr_naks: Option<u64>,
}

/// What a completion queue is to be. A number alone is that many entries of 64 bytes, not compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqConfig {
    /// CQEs, 1..=[`DeviceInfo::max_cqe`](crate::DeviceInfo::max_cqe); rounded up to a power of two. Every operation that may complete
    /// before the next poll needs one: a queue that overruns is dead.
    pub entries: u32,
    /// Bytes of an entry, 64 or 128. A large entry has room for 64 bytes of received data in front of its CQE.
    pub cqe_bytes: u32,
    /// The device may write CQEs that differ in little as one session of 8-byte mini CQEs ([`MiniCqe`](crate::wire::MiniCqe)). Polls
    /// hand them out as any others.
    pub compression: bool,
    /// The vector that its events come by, 0..[`DeviceInfo::comp_vectors`](crate::DeviceInfo::comp_vectors). Hardware has an interrupt of
    /// its own for each, most often on a core of its own: choose that of the core on which the program waits.
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
    /// The device may put the data of a SEND of up to 32 bytes, 64 with large CQEs, into the CQE instead of the receive's buffer
    /// ([`Cqe::inline_data`](crate::Cqe::inline_data)); that buffer is then not written. Reliable connections only.
    pub scatter_to_cqe: bool,
    /// Messages of the peer that may wait on the software HCA until this end polls, 1..=128; rounded up to a power of two, at least 16. Each
    /// takes 64 bytes. The peer's operations wait for room; its queue pair's depth need not be the same. Hardware does not look at it.
    pub lane_slots: u32,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self { max_send_wr: 256, max_inline_data: 64, scatter_to_cqe: false, lane_slots: 128 }
    }
}

/// States of a queue pair (InfiniBand specification, "Queue Pair States").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Created; not connected.
    Reset,
    /// Receives may be posted.
    Init,
    /// Receives.
    ReadyToReceive,
    /// Sends and receives.
    ReadyToSend,
    /// An operation failed; everything posted is flushed.
    Error,
}

/// What pages a region lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary ones, as asked for.
    Base,
    /// Huge ones, of 2 MiB.
    Huge,
    /// Ordinary ones, although huge ones were asked for, and why: for people to read.
    NotHuge(NoHugePages),
}
