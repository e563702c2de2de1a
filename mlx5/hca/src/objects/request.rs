//! Queues by address: what a driver's kernel half asks the firmware for (PRM "Commands": CREATE_CQ, CREATE_QP, ..).

use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;

use mlx5_wire::Service;

/// A completion queue's memory: `entries` (a power of two) CQEs of `cqe_bytes` (64 or 128), every `op_own` with the opcode 0xf, and the
/// two words of the doorbell record, consumer and arm.
#[derive(Clone, Copy, Debug)]
pub struct CqMemory {
    /// The first entry, 64-aligned.
    pub buffer: NonNull<u8>,
    /// Entries.
    pub entries: u32,
    /// Bytes of each.
    pub cqe_bytes: u32,
    /// Whether CQEs may be compressed.
    pub compression: bool,
    /// The doorbell record, 8-aligned.
    pub record: NonNull<[AtomicU32; 2]>,
}

/// A receive queue's memory: `wqe_cnt` WQEs (a power of two) of `stride` bytes, and the word that counts what was posted. In a shared
/// receive queue every WQE starts with its next segment.
#[derive(Clone, Copy, Debug)]
pub struct RqMemory {
    /// The first WQE.
    pub buffer: NonNull<u8>,
    /// WQEs.
    pub wqe_cnt: u32,
    /// Bytes of each, a power of two of at least 16.
    pub stride: u32,
    /// The receive word of the doorbell record.
    pub record: NonNull<AtomicU32>,
}

/// A send queue's memory: `wqe_cnt` WQEBBs of 64 bytes (0, or a power of two), and the word that counts what was posted.
#[derive(Clone, Copy, Debug)]
pub struct SqMemory {
    /// The first WQEBB.
    pub buffer: NonNull<u8>,
    /// WQEBBs.
    pub wqe_cnt: u32,
    /// The send word of the doorbell record.
    pub record: NonNull<AtomicU32>,
    /// Both halves of the BlueFlame register, 512 bytes and aligned to them, if it is memory: strict mode reads what was stored there, and writes
    /// a pattern over it.
    pub register: Option<NonNull<u8>>,
}

/// The source of a queue pair's receives.
#[derive(Clone, Copy, Debug)]
pub enum Receives {
    /// A shared receive queue.
    Shared(u32),
    /// A queue of its own, in the driver's memory: what is posted is copied, WQE by WQE, into memory that peers reach.
    Own(RqMemory),
    /// A queue of its own that [`create_rq`](crate::Hca::create_rq) made in memory that peers reach. It goes with the queue pair.
    OwnInReach(u32),
    /// Nowhere: messages that need one find the receiver not ready.
    None,
}

/// A queue pair to be made.
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
    /// Its receives.
    pub receives: Receives,
    /// Its send queue.
    pub sq: SqMemory,
    /// `srqn_uidx` of its CQEs, 24 bits; `None`: the number of its receive queue.
    pub user_index: Option<u32>,
    /// Short received data goes into the CQE.
    pub scatter_to_cqe: bool,
    /// Messages that may wait for its owner to take them in, 1..=128; rounded up to a power of two.
    pub lane_slots: u32,
}

/// A memory region.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The key, local and remote.
    pub key: u32,
    /// Its first byte.
    pub addr: NonNull<u8>,
    /// Bytes.
    pub len: usize,
    /// The pages under it.
    pub pages: Pages,
}

/// The kind of pages under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Ordinary pages, as requested.
    Base,
    /// Huge pages, of 2 MiB.
    Huge,
    /// Ordinary pages although huge pages were requested, with the reason, in words.
    NotHuge(shm::memfd::NoHugePages),
}

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// LID of its device.
    pub lid: u16,
    /// Its number.
    pub qpn: u32,
    /// Which incarnation of the device: a LID is used again after its owner died, this number never.
    pub epoch: u64,
}
