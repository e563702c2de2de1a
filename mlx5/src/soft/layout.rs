//! What the devices of a fabric share, byte for byte.
//!
//! A device has three memory segments. Peers map them all, lazily, when they connect:
//!
//! | segment | owner | peers | holds |
//! |---|---|---|---|
//! | control | rw | **ro** | header, queue pair table, memory region table, SRQ table, SRQ rings and doorbell records |
//! | lanes | rw | rw | ready words, pop words, one lane per queue pair |
//! | arena | rw | rw | registered memory |
//!
//! Its SQs, CQs, UAR and every counter not listed are private to its process. What more than one process writes is single words only:
//! `Pop::word` (compare and swap) and the ready words (fetch_or); everything else has one writer.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `QpEntry::identity` | owner | requester | **H1** Release/Acquire: the entry's other fields |
//! | `QpEntry::consumed` | owner, every 16 messages | requester | L2 of `shm::lane` |
//! | `QpEntry::armed` | owner | requester | R1 of `shm::ready` |
//! | `MrEntry::key` | owner | requesters | **H2** Release/Acquire: the entry's other fields |
//! | `Header::executing` | owner, as requester | peers that deregister or destroy | **H3** light/heavy barrier: odd while a doorbell executes |
//! | `Pop::word` | requesters, CAS | owner in repair | **H4** AcqRel: a popped receive is this requester's |
//! | `Lane::intent` | the lane's requester | owner in repair | **H5** Release/Acquire: set before the pop, cleared after the slot is published |
//! | SRQ doorbell record | owner's driver | requesters | device format; Release/Acquire: the WQEs below it |

use shm::lane::Slot;
use shm::memfd::MemfdId;
use shm::ready::ReadyWords;
use shm::sync::{AtomicU32, AtomicU64};

/// What the control file's `kind` says; its last digits change with any change of this file.
pub(crate) const REGION_KIND: u64 = u64::from_be_bytes(*b"MLX5HC02");

/// Bits of a QPN that index the table; the upper 10 are a generation, so numbers are sparse and a stale one names nothing.
pub(crate) const QP_INDEX_BITS: u32 = 14;
pub(crate) const MAX_QPS: usize = 1 << QP_INDEX_BITS;
pub(crate) const MAX_MRS: usize = 1 << 16;
pub(crate) const MAX_SRQS: usize = 1 << 8;
/// Messages that may wait in a lane.
pub(crate) const LANE_SLOTS: usize = 128;
/// Address space for SRQ rings.
pub(crate) const QUEUE_BYTES: usize = 256 << 20;

/// First page of the control segment.
#[repr(C, align(64))]
pub(crate) struct Header {
    /// Even: idle; odd: the owner executes a doorbell and may be reading or writing memory of its peers.
    pub(crate) executing: AtomicU64,
}

/// One queue pair.
#[repr(C, align(64))]
pub(crate) struct QpEntry {
    /// `qpn << 8 | flags`; 0 when free. See [`RECEIVES`].
    pub(crate) identity: AtomicU64,
    /// Who may send here: [`QpEntry::pack_peer`].
    pub(crate) peer: AtomicU64,
    /// And which incarnation of that device: its LID and QPN may be used again by another.
    pub(crate) peer_epoch: AtomicU64,
    /// Lane messages consumed.
    pub(crate) consumed: AtomicU64,
    /// `shm::ready::{HOT, ARMED}`.
    pub(crate) armed: AtomicU32,
    /// Protection domain.
    pub(crate) pd: AtomicU32,
    /// Shared receive queue.
    pub(crate) srqn: AtomicU32,
}

/// Flag in [`QpEntry::identity`]: the state is RTR or RTS.
pub(crate) const RECEIVES: u64 = 1;

impl QpEntry {
    pub(crate) const fn pack_identity(qpn: u32, flags: u64) -> u64 {
        (qpn as u64) << 8 | flags
    }

    pub(crate) const fn pack_peer(lid: u16, qpn: u32) -> u64 {
        (lid as u64) << 32 | qpn as u64
    }
}

/// One memory region.
#[repr(C, align(64))]
pub(crate) struct MrEntry {
    /// `VALID | key`; 0 when free.
    pub(crate) key: AtomicU64,
    /// Virtual address in the owner.
    pub(crate) addr: AtomicU64,
    pub(crate) len: AtomicU64,
    /// Offset in the arena, or [`FOREIGN`].
    pub(crate) offset: AtomicU64,
    /// `Access` bits.
    pub(crate) access: AtomicU32,
    pub(crate) pd: AtomicU32,
}

pub(crate) const VALID: u64 = 1 << 32;
/// Not in the arena: reached through the kernel, at the owner's virtual address.
pub(crate) const FOREIGN: u64 = u64::MAX;

/// One shared receive queue.
#[repr(C, align(64))]
pub(crate) struct SrqEntry {
    /// WQEs, a power of two; 0 when free.
    pub(crate) wqe_cnt: AtomicU32,
    pub(crate) stride: AtomicU32,
    /// Offset of the ring in the control segment's queue area.
    pub(crate) ring: AtomicU64,
    /// Doorbell record, device format.
    pub(crate) record: AtomicU32,
}

/// Where requesters take receives from an SRQ.
#[repr(C, align(64))]
pub(crate) struct Pop {
    /// `count << 16 | index`: receives taken (32 bits), and the next WQE of the list.
    pub(crate) word: AtomicU64,
}

impl Pop {
    pub(crate) const fn pack(count: u32, index: u16) -> u64 {
        (count as u64) << 16 | index as u64
    }

    pub(crate) const fn unpack(word: u64) -> (u32, u16) {
        ((word >> 16) as u32, word as u16)
    }
}

/// One arrived message: everything its CQE needs that the owner does not know better.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Message {
    /// Where the payload went, in the owner's addresses: for prefetching only, so any value is harmless.
    pub(crate) payload: u64,
    pub(crate) byte_count: u32,
    /// Host order.
    pub(crate) imm: u32,
    /// Pop count of the receive this message took.
    pub(crate) pop: u32,
    /// Index of that receive.
    pub(crate) wqe_index: u16,
    /// CQE opcode.
    pub(crate) opcode: u8,
    pub(crate) _zero: u8,
}

/// Where the one requester of a queue pair delivers to it.
#[repr(C, align(64))]
pub(crate) struct Lane {
    /// Pop count + 1 of a receive being taken; 0 when none is.
    pub(crate) intent: AtomicU64,
    pub(crate) slots: [Slot<Message>; LANE_SLOTS],
}

/// The control segment.
#[repr(C, align(4096))]
pub(crate) struct ControlSegment {
    pub(crate) header: Header,
    pub(crate) mrs: [MrEntry; MAX_MRS],
    pub(crate) qps: [QpEntry; MAX_QPS],
    pub(crate) srqs: [SrqEntry; MAX_SRQS],
    pub(crate) queues: [AtomicU64; QUEUE_BYTES / 8],
}

/// The lanes segment.
#[repr(C, align(4096))]
pub(crate) struct LanesSegment {
    pub(crate) ready: [AtomicU64; ReadyWords::words(MAX_QPS)],
    pub(crate) pops: [Pop; MAX_SRQS],
    pub(crate) lanes: [Lane; MAX_QPS],
}

/// The user bytes of a device's control file: where its segments are. Written before the file has a name, never changed.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Publication {
    pub(crate) lid: u64,
    /// Control, lanes, arena.
    pub(crate) segments: [MemfdId; 3],
}

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Header>() == 64);
    assert!(size_of::<QpEntry>() == 64 && offset_of!(QpEntry, consumed) == 24 && offset_of!(QpEntry, armed) == 32);
    assert!(size_of::<MrEntry>() == 64);
    assert!(size_of::<SrqEntry>() == 64 && offset_of!(SrqEntry, record) == 16);
    assert!(size_of::<Pop>() == 64);
    assert!(size_of::<Message>() == 24 && size_of::<Slot<Message>>() == 64);
    assert!(size_of::<Lane>() == 64 + 64 * LANE_SLOTS);
    assert!(offset_of!(ControlSegment, mrs) == 64);
    assert!(offset_of!(ControlSegment, qps) == 64 + 64 * MAX_MRS);
    assert!(offset_of!(LanesSegment, pops) % 64 == 0 && offset_of!(LanesSegment, lanes) % 64 == 0);
    assert!(size_of::<Publication>() == 8 + 3 * 24);
};
