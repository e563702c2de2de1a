//! Parameters of the firmware commands (PRM "Commands": CREATE_CQ, CREATE_QP, ..), with queues by
//! address.

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::net::IpAddr;

use mlx5_wire::Service;

/// Memory of a completion queue: `entries` CQEs of `cqe_bytes`, and the two words of the doorbell
/// record, consumer and arm. Every `op_own` begins with the opcode 0xf.
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
    /// Both halves of the BlueFlame register, 512 bytes and aligned to them, if it is memory.
    /// Strict mode reads the stored bytes there, and overwrites them with a pattern.
    pub register: Option<NonNull<u8>>,
}

/// The source of a queue pair's receives.
#[derive(Clone, Copy, Debug)]
pub enum Receives {
    /// A shared receive queue.
    Shared(u32),
    /// A queue of its own in the driver's memory. Each posted WQE is copied into memory that peers
    /// map.
    Own(RqMemory),
    /// A queue of its own that [`create_rq`](crate::Hca::create_rq) made in memory that peers map.
    /// It is destroyed with the queue pair.
    OwnInReach(u32),
    /// No receives: messages that need a receive find the receiver not ready.
    None,
}

/// Parameters of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpMemory {
    /// Its service.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of its sends.
    pub send_cq: u32,
    /// Completion queue of its receives.
    pub recv_cq: u32,
    /// Source of its receives.
    pub receives: Receives,
    /// Its send queue.
    pub sq: SqMemory,
    /// `srqn_uidx` of its CQEs, 24 bits. `None`: the number of its receive queue.
    pub user_index: Option<u32>,
    /// Whether short received data goes into the CQE.
    pub scatter_to_cqe: bool,
    /// Maximum number of messages that wait for its owner to take them, 1..=128; rounded up to a
    /// power of two.
    pub lane_slots: u32,
}

/// A memory region.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The key, local and remote.
    pub key: u32,
    /// Its first byte.
    pub addr: NonNull<u8>,
    /// Length in bytes.
    pub len: usize,
    /// Kind of the pages under it.
    pub pages: Pages,
}

/// The kind of pages under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Base pages, as requested.
    Base,
    /// Huge pages, of 2 MiB.
    Huge,
    /// Ordinary pages although huge pages were requested, with the reason, in words.
    NotHuge(copyrpc_shm::memfd::NoHugePages),
}

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// LID of its device, or its virtual function; 0: it shares memory with no device.
    pub lid: u16,
    /// Its number.
    pub qpn: u32,
    /// Incarnation of the device. A LID is used again after its owner died, this number never.
    /// `None`: the peer is known by its number alone, and the device is the one that has it now.
    pub epoch: Option<u64>,
    /// Where packets for it go. `None`: its device sends none.
    pub packets: Option<PacketAddress>,
}

/// The part of a queue pair's address that packets need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketAddress {
    /// IP address of its device.
    pub ip: IpAddr,
    /// UDP port of a software HCA that tells it. Such a peer answers only while its program polls
    /// it, and is asked for 2 s at least. `None`: [`RoceOptions::peers`](crate::RoceOptions::peers).
    pub port: Option<u16>,
    /// Its first packet sequence number, 24 bits.
    pub psn: u32,
    /// Maximum payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. A connection uses the
    /// smaller one of its two ends.
    pub mtu: u16,
}

/// The way from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Each maps the other's memory.
    Memory,
    /// Packets.
    Packets,
    /// None: one of the two sends no packets, and they share no memory.
    Nowhere,
}

/// The ways by which a device says that it is reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) memory: bool,
    pub(crate) packets: bool,
}
