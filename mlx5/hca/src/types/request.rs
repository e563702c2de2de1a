//! Parameters of the firmware commands (PRM "Commands": CREATE_CQ, CREATE_QP, ..), with queues by
//! address.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::net::IpAddr;

use mlx5_wire::Service;

/// Memory of a completion queue: `entries` CQEs of `cqe_bytes`, and the two words of the doorbell
/// record, consumer and arm. The driver has set the opcode in the `op_own` of every CQE to 0xf
/// before the queue is created.
#[derive(Clone, Copy, Debug)]
pub struct CqMemory {
    /// The first entry, aligned to 64 bytes.
    pub buffer: NonNull<u8>,
    /// Number of entries, a power of two.
    pub entries: u32,
    /// Bytes of an entry, 64 or 128.
    pub cqe_bytes: u32,
    /// Whether CQEs may be compressed.
    pub compression: bool,
    /// The doorbell record, aligned to 8 bytes.
    pub record: NonNull<[AtomicU32; 2]>,
}

/// Memory of a receive queue: `wqe_cnt` WQEs of `stride` bytes, and the word that counts posted
/// receives. Every WQE of a shared receive queue starts with its next segment.
#[derive(Clone, Copy, Debug)]
pub struct RqMemory {
    /// The first WQE.
    pub buffer: NonNull<u8>,
    /// Number of WQEs, a power of two.
    pub wqe_cnt: u32,
    /// Bytes of a WQE, a power of two of at least 16.
    pub stride: u32,
    /// The receive word of the doorbell record.
    pub record: NonNull<AtomicU32>,
}

/// Memory of a send queue: `wqe_cnt` WQEBBs of 64 bytes, and the word that counts posted WQEBBs.
#[derive(Clone, Copy, Debug)]
pub struct SqMemory {
    /// The first WQEBB.
    pub buffer: NonNull<u8>,
    /// Number of WQEBBs, 0 or a power of two.
    pub wqe_cnt: u32,
    /// The send word of the doorbell record.
    pub record: NonNull<AtomicU32>,
    /// Both halves of the BlueFlame register, 512 bytes and aligned to 512, if the register is
    /// memory. Strict mode reads the stored bytes there, and overwrites them with a pattern.
    pub register: Option<NonNull<u8>>,
}

/// The source of a queue pair's receives.
#[derive(Clone, Copy, Debug)]
pub enum Receives {
    /// The shared receive queue with this number.
    Shared(u32),
    /// The queue pair's own queue, in the driver's memory. Each posted WQE is copied into memory
    /// that peers map.
    Own(RqMemory),
    /// The queue pair's own queue, with the number that [`create_rq`](crate::Hca::create_rq)
    /// returned, in memory that peers map. It is destroyed with the queue pair.
    OwnInReach(u32),
    /// No receives: messages that need a receive find the receiver not ready.
    None,
}

/// Parameters of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpMemory {
    /// Service of the queue pair.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of its sends.
    pub send_cq: u32,
    /// Completion queue of its receives.
    pub recv_cq: u32,
    /// Source of its receives.
    pub receives: Receives,
    /// Send queue of the queue pair.
    pub sq: SqMemory,
    /// `srqn_uidx` of its CQEs, 24 bits. `None`: the number of its receive queue.
    pub user_index: Option<u32>,
    /// Whether short received data is written into the CQE.
    pub scatter_to_cqe: bool,
    /// Maximum number of messages that wait in the queue pair's lane until its owner takes them: 1
    /// to 128, rounded up to a power of two, and to at least 8.
    pub lane_slots: u32,
}

/// A memory region.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The key, local and remote.
    pub key: u32,
    /// First byte of the region.
    pub addr: NonNull<u8>,
    /// Length in bytes.
    pub len: usize,
    /// Kind of the pages under the region.
    pub pages: Pages,
}

/// The kind of pages under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Base pages, as requested.
    Base,
    /// Huge pages, of 2 MiB.
    Huge,
    /// Ordinary pages, although huge pages were requested. The value is the reason.
    NotHuge(copyrpc_shm::memfd::NoHugePages),
}

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// LID of the queue pair's device, or its virtual function; 0: the device shares memory with no
    /// device.
    pub lid: u16,
    /// Number of the queue pair.
    pub qpn: u32,
    /// Incarnation of the device. A LID is used again after its owner died, an incarnation never.
    /// `None`: only LID and QPN of the peer are known, and mean the device that has the LID now.
    pub epoch: Option<u64>,
    /// The destination of packets for the queue pair. `None`: its device sends no packets.
    pub packets: Option<PacketAddress>,
}

/// The part of a queue pair's address that packets need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketAddress {
    /// IP address of the queue pair's device.
    pub ip: IpAddr,
    /// UDP port of the queue pair's device, if that is a software HCA, which publishes its port.
    /// Such a peer answers only while its program polls it, so requests to it are repeated for at
    /// least 2 s. `None`: the port that follows from
    /// [`RoceOptions::peers`](crate::RoceOptions::peers).
    pub port: Option<u16>,
    /// First packet sequence number of the queue pair, 24 bits.
    pub psn: u32,
    /// Maximum payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. A connection uses the
    /// smaller value of its two ends.
    pub mtu: u16,
    /// Traffic class of packets to the queue pair. Its upper six bits are the DSCP; the lower two
    /// are set by the sender.
    pub traffic_class: u8,
}

/// The way from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Each maps the other's memory.
    Memory,
    Packets,
    /// No way: one of the two devices sends no packets, and they share no memory.
    Nowhere,
}

/// The ways to a device, as the device publishes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) memory: bool,
    pub(crate) packets: bool,
}
