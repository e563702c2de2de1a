//! Layout of the memory that the devices of a fabric share.
//!
//! A device has three memory segments. Another device of the fabric, its peer, maps all three when
//! it first connects to the device or exchanges datagrams with it:
//!
//! | segment | owner | peers | holds |
//! |---|---|---|---|
//! | control | rw | **ro** | header, queue pair table, memory region table, receive queue table, receive rings and doorbell records |
//! | lanes | rw | rw | ready words, pop words, one lane per queue pair and its slots, lanes of datagrams |
//! | arena | rw | rw | registered memory |
//!
//! SQs, CQs, the UAR and every counter not listed here are private to the process. More than one
//! process at a time writes only these words: `Pop::word` (compare and swap), the ready words
//! (fetch_or) and the wakes of `OwnerSleep` (fetch_add). Every other word has one writer at a time.
//! Other comments refer to the pairings by the names H1 to H9. The pairings L1, L2, R1, W1 and W2
//! are in docs/shm-protocols.md.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `QpEntry::identity` | owner | requester | **H1** Release/Acquire: the entry's other fields |
//! | `Acks::consumed` | owner, every quarter of the lane, at least every 16 messages | requester | L2 of `copyrpc_shm::lane` |
//! | `Acks::answered` | owner | requester | **H8** Release/Acquire: the old value of the atomic it answers |
//! | `QpEntry::armed` | owner | requester | R1 of `copyrpc_shm::ready` |
//! | `MrEntry::stamp` | owner | requesters | **H2** Release/Acquire: the other fields, unchanged while this word is |
//! | `Header::executing` | owner, as requester | peers that deregister or destroy | **H3** light/heavy barrier: odd while a doorbell executes; or fences, see `has_fences` |
//! | `Pop::word` | requesters, and the owner in repair, CAS | requesters | **H4** AcqRel: a popped receive is this requester's |
//! | `DatagramLane::consumed` | the receiver; the sender, when it assigns the lane to a device | the sender, whose memory it is | L2 of `copyrpc_shm::lane` |
//! | `DatagramLane::target` | owner | receivers | Release/Acquire: the lane's `target_epoch` and `consumed`; read again after a message (L1): unchanged if the message is for this receiver |
//! | `OwnerSleep` | requesters, fetch_add; owner | both | **H7** W1 and W2 of `copyrpc_shm::sleep`, after a ready bit: a requester sees that the owner sleeps, or its ready bit is seen |
//! | `AtomicRequest` | the lane's requester | owner | L1 of the message that announces the request; written again after H8 only |
//! | `Lane::intent` | the lane's requester | owner in repair | **H5** Release/Acquire: set before the pop, cleared after the slot is published |
//! | `RqEntry::record` | owner's driver | requesters | device format; Release/Acquire: the WQEs below it |
//! | `RqEntry::returned` | owner | requesters | **H6** Release/Acquire: stored after the pop word whose next receive is the returned one |
//! | `Header::copies` | owner, per poll | requesters | **H9** Release/Acquire: the records and WQEs that the owner copied from its driver's receive queues |

use copyrpc_shm::lane::Slot;
use copyrpc_shm::memfd::MemfdId;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::sleep::Sleep;
use copyrpc_shm::sync::{AtomicU32, AtomicU64, UnsafeCell};
use mlx5_wire::{Access, CqeFormat, CqeOpcode, GRH_BYTES, Syndrome, op_own_with};

/// `kind` of a device's control file. Its last digits are raised with every change of the layout,
/// so that devices of different versions do not map each other.
pub(crate) const REGION_KIND: u64 = u64::from_be_bytes(*b"MLX5HC18");

/// Number of low bits of a QPN that are the queue pair's index in the table. The upper 10 bits are
/// the virtual function on a device with a port. Otherwise they change with each queue pair that has
/// this index, so that the number of a destroyed queue pair is used again only by the 1,022nd queue
/// pair after it.
pub(crate) const QP_INDEX_BITS: u32 = 14;
pub(crate) const MAX_QPS: usize = 1 << QP_INDEX_BITS;
pub(crate) const MAX_MRS: usize = 1 << 20;
/// Maximum number of receive queues, shared and own.
pub(crate) const MAX_RQS: usize = 1 << 15;
/// Longest datagram, in bytes: the largest MTU.
pub(crate) const MAX_MTU: usize = mlx5_wire::MAX_DATAGRAM_BYTES;
/// Maximum number of datagrams that a device has sent to one other device and that the other device
/// has not taken yet.
pub(crate) const DATAGRAM_SLOTS: usize = 32;
/// Maximum number of devices to which a device has sent datagrams that they have not taken yet.
/// Small in unit tests, so that a few devices use up all lanes.
pub(crate) const MAX_DATAGRAM_LANES: usize = if cfg!(test) { 4 } else { 256 };
pub(crate) const LID_BITS: u32 = 16;
pub(crate) const MAX_LIDS: usize = 1 << LID_BITS;
/// Maximum number of slots of a lane, a power of two: the number of messages that may wait.
pub(crate) const LANE_SLOTS: usize = 128;
pub(crate) const MIN_LANE_SLOTS: usize = 8;
/// Address space for receive rings, in bytes.
pub(crate) const QUEUE_BYTES: usize = 256 << 20;

/// The header of the control segment.
#[repr(C, align(64))]
pub(crate) struct Header {
    /// Odd while the owner executes a doorbell, and may access memory of its peers; even otherwise.
    pub(crate) executing: AtomicU64,
    /// Not 0 if the owner executes a full fence after each write of `executing`, because
    /// membarrier(2) does not work in its process. Written before the device has peers.
    pub(crate) has_fences: AtomicU32,
    /// Number of times that the owner has copied the receives that its driver posts in memory that
    /// peers do not map. 0 for a device whose driver posts into the rings that peers map.
    pub(crate) copies: AtomicU64,
}

#[repr(C, align(64))]
pub(crate) struct QpEntry {
    /// `version << 32 | qpn << 8 | flags`; 0 when free. See [`RECEIVES`]. The version counts the
    /// changes of this entry, including the changes from one queue pair to the next. So the value
    /// that a requester remembers does not occur again before 2^32 changes. `peer`, `peer_epoch`
    /// and `generation` do not change while this word is unchanged.
    pub(crate) identity: AtomicU64,
    /// The queue pair that may send to this queue pair: [`QpEntry::pack_peer`].
    pub(crate) peer: AtomicU64,
    /// Epoch of the device of the queue pair in `peer`: a number that no other device has.
    pub(crate) peer_epoch: AtomicU64,
    /// `HOT` if the owner polls the lane, or `ARMED` if it waits for the lane's ready bit
    /// (`copyrpc_shm::ready`).
    pub(crate) armed: AtomicU32,
    pub(crate) pd: AtomicU32,
    pub(crate) rqn: AtomicU32,
    /// Version in `identity` when the queue pair was made, or last reset. Distinguishes it from
    /// earlier queue pairs with this number.
    pub(crate) generation: AtomicU32,
    /// Place of its lane's slots: [`LanePlace::pack`].
    pub(crate) lane: AtomicU64,
    /// Terms that this end expects of its peer (`types::terms::pack`); 0 if its driver has set none.
    /// Unchanged while `identity` has [`RECEIVES`].
    pub(crate) terms: AtomicU64,
    pub(crate) acks: Acks,
}

/// The words that the owner of a queue pair writes for its requester. They are on a cache line of
/// their own, because the owner writes them every few messages (at most 16), and the requester
/// reads them once per lap of the lane. The requester reads the other words of the entry with every
/// doorbell.
#[repr(C, align(64))]
pub(crate) struct Acks {
    /// Number of lane messages consumed.
    pub(crate) consumed: AtomicU64,
    /// The last atomic that the owner executed: [`Acks::pack`].
    pub(crate) answered: AtomicU64,
    /// The previous value of the word of the atomic in `answered`.
    pub(crate) old: AtomicU64,
}

impl Acks {
    /// Packs the answer to atomic `number` of the connection: the fault, or 0.
    pub(crate) const fn pack(number: u32, fault: u8) -> u64 {
        (number as u64) << 8 | fault as u64
    }

    pub(crate) const fn unpack(word: u64) -> (u32, u8) {
        ((word >> 8) as u32, word as u8)
    }
}

/// Flag in [`QpEntry::identity`]: the state is RTR or RTS.
pub(crate) const RECEIVES: u64 = 1;
/// Flags in [`QpEntry::identity`] of a queue pair that receives: the rights of its peer, as the
/// bits of [`Access`]. They may change while it is connected.
pub(crate) const RIGHTS: u64 = Access::REMOTE.bits() as u64;
/// Flag in [`QpEntry::identity`]: unreliable datagrams. No queue pair connects to it.
pub(crate) const DATAGRAM: u64 = 1 << 4;

impl QpEntry {
    /// Returns the identity of queue pair `qpn` after `version` changes of its place.
    pub(crate) const fn pack_identity(version: u32, qpn: u32, flags: u64) -> u64 {
        (version as u64) << 32 | (qpn as u64) << 8 | flags
    }

    pub(crate) const fn qpn(identity: u64) -> u32 {
        (identity >> 8) as u32 & 0xff_ffff
    }

    /// Packs the number and the generation of the peer's queue pair. An earlier queue pair with
    /// this number has a different generation, so it does not match.
    pub(crate) const fn pack_peer(qpn: u32, generation: u32) -> u64 {
        (generation as u64) << 32 | qpn as u64
    }
}

#[repr(C, align(64))]
pub(crate) struct MrEntry {
    /// `registration << 32 | key`; 0 when free. A key is used again after 256 registrations of its
    /// entry, a stamp after 2^32 registrations of the device.
    pub(crate) stamp: AtomicU64,
    /// Virtual address in the owner.
    pub(crate) addr: AtomicU64,
    pub(crate) len: AtomicU64,
    /// Offset in the arena, or [`FOREIGN`].
    pub(crate) offset: AtomicU64,
    /// `Access` bits.
    pub(crate) access: AtomicU32,
    pub(crate) pd: AtomicU32,
}

/// Value of [`MrEntry::offset`] for memory that is not in the arena. The sum of this value and an
/// offset inside a region is beyond every arena.
pub(crate) const FOREIGN: u64 = 1 << 63;

/// A receive queue: an SRQ or a queue pair's own.
#[repr(C, align(64))]
pub(crate) struct RqEntry {
    /// Number of WQEs, a power of two; 0 when free.
    pub(crate) wqe_cnt: AtomicU32,
    pub(crate) stride: AtomicU32,
    /// Offset of the ring in the control segment's queue area.
    pub(crate) ring: AtomicU64,
    /// Doorbell record, in the device's format.
    pub(crate) record: AtomicU32,
    /// Number of receives that processes took before they died, and that the owner put back into
    /// the queue. They count as posted.
    pub(crate) returned: AtomicU32,
    /// [`LINKED`], or 0 for a ring.
    pub(crate) kind: AtomicU32,
    pub(crate) pd: AtomicU32,
}

/// Value of [`RqEntry::kind`]: every WQE contains the index of its successor.
pub(crate) const LINKED: u32 = 1;

/// The pop word of a receive queue, by which requesters take receives.
#[repr(C, align(64))]
pub(crate) struct Pop {
    /// `count << 16 | index`: the number of receives taken (48 bits, of which 32 are compared), and
    /// the index of the WQE that is taken next.
    pub(crate) word: AtomicU64,
}

impl Pop {
    /// The count 1 in a pop word. An intent is a pop word plus this value, so that an intent is
    /// never 0.
    pub(crate) const ONE: u64 = 1 << 16;

    /// Returns the count and the index, which another process may have written.
    pub(crate) const fn unpack(word: u64) -> (u32, u16) {
        ((word >> 16) as u32, word as u16)
    }

    /// Returns the pop word after the receive of pop word `word` was taken. `next` is the successor
    /// of that receive.
    pub(crate) const fn taken(word: u64, next: u16) -> u64 {
        word.wrapping_add(Self::ONE) & !0xffff | next as u64
    }

    /// Returns the pop word with the count of `word`, and receive `head` as the next receive.
    pub(crate) const fn with_head(word: u64, head: u16) -> u64 {
        word & !0xffff | head as u64
    }
}

/// A popped receive: the pop word that was exchanged to take it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Taking(pub(crate) u64);

impl Taking {
    /// Makes the value for WQE `index`, popped as number `count`.
    pub(crate) const fn new(count: u32, index: u16) -> Self {
        Self((count as u64) << 16 | index as u64)
    }

    #[inline(always)]
    pub(crate) const fn count(self) -> u32 {
        Pop::unpack(self.0).0
    }

    /// Returns the index of its WQE, which another process may have written.
    #[inline(always)]
    pub(crate) const fn index(self) -> u16 {
        Pop::unpack(self.0).1
    }
}

/// A message in a lane: the fields of its CQE that the owner of the lane does not know.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Message {
    /// Address of the payload in the owner's memory, for prefetching only: any value is harmless.
    pub(crate) payload: u64,
    pub(crate) byte_count: u32,
    /// Immediate, in host byte order.
    pub(crate) imm: u32,
    /// The receive that this message took.
    pub(crate) taking: Taking,
    /// `op_own` of its CQE without the owner bit ([`Message::op_own`]), or [`ATOMIC`] or
    /// [`REFUSED`]. The field has 64 bits, so that a message has no padding that would be copied
    /// too.
    pub(crate) op_own: u64,
}

/// Flag of a datagram: the sender asked for an event.
pub(crate) const SOLICITED: u32 = 1;
/// Flag of a datagram: its payload begins with a GRH.
pub(crate) const GRH: u32 = 2;
/// Value of op_own of a message that takes no receive and requests the execution of the
/// [`AtomicRequest`] of its lane.
pub(crate) const ATOMIC: u64 = 0x80;
/// Value of op_own of a message that takes no receive and reports that the requester was refused
/// an operation, with which the connection ends. Its immediate is a [`Message::error`].
pub(crate) const REFUSED: u64 = 0x81;

/// An atomic on memory that peers do not map. There is one at a time, because the requester's send
/// queue waits for the answer.
#[repr(C)]
pub(crate) struct AtomicRequest {
    /// `1 << 32` for fetch-and-add, 0 for compare-and-swap; plus the rkey.
    pub(crate) kind_key: AtomicU64,
    pub(crate) addr: AtomicU64,
    pub(crate) compare: AtomicU64,
    /// Value to store, or addend.
    pub(crate) swap: AtomicU64,
}

impl Message {
    /// Returns op_own of a CQE. `solicited` is set if the sender asked for an event.
    #[inline(always)]
    pub(crate) const fn op_own(opcode: CqeOpcode, solicited: bool) -> u64 {
        op_own_with(opcode, CqeFormat::Plain, solicited, false) as u64
    }

    /// Returns the immediate field of a message with opcode `ResponderError`, or [`REFUSED`].
    pub(crate) const fn error(syndrome: Syndrome, vendor: u8) -> u32 {
        (vendor as u32) << 8 | syndrome as u32
    }
}

/// A datagram, without its payload.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DatagramHeader {
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) source_qpn: u32,
    pub(crate) byte_count: u32,
    /// Immediate, in host byte order.
    pub(crate) imm: u32,
    /// CQE opcode.
    pub(crate) opcode: u32,
    /// Flags [`SOLICITED`] and [`GRH`].
    pub(crate) flags: u32,
}

impl DatagramHeader {
    /// The two opcodes of datagrams. They are opcodes of CQEs.
    const SEND: u32 = CqeOpcode::ResponderSend as u32;
    const SEND_IMM: u32 = CqeOpcode::ResponderSendImm as u32;

    pub(crate) fn new(
        (qpn, qkey): (u32, u32),
        source_qpn: u32,
        byte_count: u32,
        imm: Option<u32>,
        (is_solicited, has_grh): (bool, bool),
    ) -> Self {
        Self {
            qpn,
            qkey,
            source_qpn,
            byte_count,
            imm: imm.unwrap_or(0),
            opcode: imm.map_or(Self::SEND, |_| Self::SEND_IMM),
            flags: if is_solicited { SOLICITED } else { 0 } | if has_grh { GRH } else { 0 },
        }
    }

    /// Returns the immediate, or `Some(None)` if the datagram has no immediate. Returns `None` if
    /// the opcode, which another process wrote, is not that of a SEND.
    pub(crate) fn imm(&self) -> Option<Option<u32>> {
        match self.opcode {
            Self::SEND => Some(None),
            Self::SEND_IMM => Some(Some(self.imm)),
            _ => None,
        }
    }
}

/// Datagrams from the owner of this memory to one other device, which reads them in this lane.
///
/// When that device has taken all datagrams, or has ended, the owner may use the lane for another
/// device. The positions in the lane then continue. The earlier device takes a message only if it
/// reads an unchanged `target` *after* the message, and writes `consumed` only if it took a
/// message.
#[repr(C, align(64))]
pub(crate) struct DatagramLane {
    /// `number << LID_BITS | LID` of the receiving device, with a new number for each device; 0
    /// when unused.
    pub(crate) target: AtomicU64,
    pub(crate) target_epoch: AtomicU64,
    /// Number of datagrams taken, or lost with a device that is gone.
    pub(crate) consumed: AtomicU64,
    pub(crate) slots: [Slot<DatagramHeader>; DATAGRAM_SLOTS],
    /// Payloads of the slots, after a GRH if the header has the flag [`GRH`].
    pub(crate) payloads: [UnsafeCell<[u8; GRH_BYTES + MAX_MTU]>; DATAGRAM_SLOTS],
}

/// The slots of one lane among all lane slots of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LanePlace {
    pub(crate) first: u32,
    /// Number of slots: a power of two.
    pub(crate) slots: u32,
}

impl LanePlace {
    /// Packs the place for [`QpEntry::lane`].
    pub(crate) const fn pack(self) -> u64 {
        (self.first as u64) << 32 | self.slots as u64
    }

    /// Returns the place in a word of another process; `None` if no lane can be there.
    pub(crate) fn unpack(word: u64) -> Option<Self> {
        let place = Self {
            first: (word >> 32) as u32,
            slots: word as u32,
        };
        let is_size = place.slots.is_power_of_two()
            && (MIN_LANE_SLOTS..=LANE_SLOTS).contains(&(place.slots as usize));
        (is_size && place.range().end <= ALL_LANE_SLOTS).then_some(place)
    }

    pub(crate) fn range(self) -> core::ops::Range<usize> {
        self.first as usize..self.first as usize + self.slots as usize
    }
}

pub(crate) const ALL_LANE_SLOTS: usize = MAX_QPS * LANE_SLOTS;

/// The words that the one requester of a queue pair writes, in addition to the lane's slots.
#[repr(C, align(64))]
pub(crate) struct Lane {
    /// Pop word of the receive that the requester is taking, plus [`Pop::ONE`]; otherwise 0.
    pub(crate) intent: AtomicU64,
    pub(crate) atomic: AtomicRequest,
}

#[repr(C, align(4096))]
pub(crate) struct ControlSegment {
    pub(crate) header: Header,
    pub(crate) mrs: [MrEntry; MAX_MRS],
    pub(crate) qps: [QpEntry; MAX_QPS],
    pub(crate) rqs: [RqEntry; MAX_RQS],
    pub(crate) queues: [AtomicU64; QUEUE_BYTES / 8],
}

#[repr(C, align(4096))]
pub(crate) struct LanesSegment {
    pub(crate) ready: [AtomicU64; ReadyWords::words(MAX_QPS)],
    pub(crate) pops: [Pop; MAX_RQS],
    pub(crate) lanes: [Lane; MAX_QPS],
    pub(crate) slots: [Slot<Message>; ALL_LANE_SLOTS],
    /// Bits, one for each LID: whether the device with that LID has datagrams for this device.
    pub(crate) datagram_ready: [AtomicU64; ReadyWords::words(MAX_LIDS)],
    pub(crate) datagrams: [DatagramLane; MAX_DATAGRAM_LANES],
    pub(crate) sleep: OwnerSleep,
}

/// The word on which a device's owner sleeps, alone on its line.
#[repr(C, align(64))]
pub(crate) struct OwnerSleep(pub(crate) Sleep);

/// The user bytes of a device's control file: the places of its segments. They are written before
/// the file has a name, and never changed.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Publication {
    pub(crate) lid: u64,
    /// The owner's [`pid_namespace`](copyrpc_shm::memfd::pid_namespace).
    pub(crate) pid_namespace: u64,
    /// Domain of the owner ([`domain`](crate::shared::domain)).
    pub(crate) domain: u64,
    /// The segments: control, lanes, arena.
    pub(crate) segments: [MemfdId; 3],
}

/// Returns whether an identity word has the right `needed`. The word 0 has no right.
#[inline(always)]
pub(crate) fn allows(identity: u64, needed: Access) -> bool {
    identity & u64::from(needed.bits()) != 0
}

const _: () = {
    use core::mem::offset_of;
    assert!(RIGHTS & (RECEIVES | DATAGRAM) == 0 && RIGHTS <= 0xff);
    assert!(size_of::<Header>() == 64);
    assert!(
        size_of::<QpEntry>() == 128
            && offset_of!(QpEntry, armed) == 24
            && offset_of!(QpEntry, acks) == 64
    );
    assert!(size_of::<MrEntry>() == 64);
    assert!(size_of::<RqEntry>() == 64 && offset_of!(RqEntry, record) == 16);
    assert!(size_of::<Pop>() == 64);
    assert!(size_of::<Message>() == 32 && size_of::<Slot<Message>>() == 64);
    assert!(size_of::<Lane>() == 64);
    assert!(offset_of!(ControlSegment, mrs) == 64);
    assert!(offset_of!(ControlSegment, qps) == 64 + 64 * MAX_MRS);
    assert!(offset_of!(LanesSegment, pops) % 64 == 0 && offset_of!(LanesSegment, lanes) % 64 == 0);
    assert!(offset_of!(LanesSegment, slots) % 64 == 0);
    assert!(size_of::<Publication>() == 24 + 3 * 24);
};

/// Returns the virtual function of the port that has this queue pair.
pub(crate) fn vf_of(qpn: u32) -> u16 {
    (qpn >> QP_INDEX_BITS) as u16
}

pub(crate) fn qp_index(qpn: u32) -> usize {
    qpn as usize & (MAX_QPS - 1)
}
