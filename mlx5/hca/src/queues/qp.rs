//! The device's side of a queue pair.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};

use copyrpc_shm::lane::LaneRx;
use mlx5_wire::{
    Access, ConnectOptions, CtrlWords, SEGMENT, WQEBB, Wqe, WqeError, Writes, queue_record_index,
};

use crate::Hca;
use crate::queues::in_flight::InFlight;
use crate::shared::layout::{LanePlace, Message, QpEntry, RECEIVES, RIGHTS, qp_index};
use crate::shared::mr_cache::{Lookups, MrCache};
use crate::shared::receives::{Receives, Taken};
use crate::shared::remote::Remote;
use crate::types::outcome::WaitFor;
use crate::types::request::SqMemory;
use crate::types::terms::Terms;
use crate::types::watch::QpWatch;

/// Longest WQE, in bytes: `ds` has 6 bits.
const MAX_WQE: usize = 16 * WQEBB;

/// The memory of a send queue.
#[derive(Clone, Copy)]
pub(crate) struct SqPlace {
    buffer: NonNull<u8>,
    record: NonNull<AtomicU32>,
    /// Number of WQEBBs, less one.
    mask: usize,
    /// The BlueFlame register, if it can be read.
    pub(crate) register: Option<NonNull<u8>>,
}

impl SqPlace {
    /// Makes the place of the queue in `memory`, whose number of WQEBBs is a power of two.
    ///
    /// # Safety
    /// The memory is valid as long as the result.
    pub(crate) unsafe fn new(memory: &SqMemory) -> Self {
        let SqMemory {
            buffer,
            wqe_cnt,
            record,
            register,
        } = *memory;
        Self {
            buffer,
            record,
            mask: wqe_cnt as usize - 1,
            register,
        }
    }

    /// Returns the producer counter in the doorbell record.
    #[inline(always)]
    pub(crate) fn producer(&self) -> u16 {
        // SAFETY: the record is valid as long as the queue pair. A driver in Rust accesses it
        // through the same atomic type.
        let record = unsafe { self.record.as_ref() };
        queue_record_index(record.load(Ordering::Acquire))
    }

    #[inline(always)]
    pub(crate) fn wqebb(&self, counter: u16) -> NonNull<u8> {
        // SAFETY: the address is inside the buffer, at the start of a WQEBB.
        unsafe { self.buffer.add((usize::from(counter) & self.mask) * WQEBB) }
    }

    /// Returns the number of WQEBBs from WQEBB `counter` to the end of the buffer.
    #[inline(always)]
    pub(crate) fn to_end(self, counter: u16) -> u16 {
        (!usize::from(counter) & self.mask) as u16 + 1
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.mask as u32 + 1
    }

    #[inline(always)]
    pub(crate) fn ctrl(&self, counter: u16) -> CtrlWords {
        // SAFETY: the segment is the start of a WQEBB of the SQ, which the driver does not touch
        // between the doorbell and the completion.
        CtrlWords::parse(&unsafe { self.wqebb(counter).cast::<[u8; SEGMENT]>().read() })
    }

    /// Calls `f` with the bytes of `segments` segments, at most 64, from the WQEBB at `counter` on.
    /// If they wrap around the end of the buffer, `f` gets a copy.
    #[inline(always)]
    pub(crate) fn with_bytes<R>(self, counter: u16, segments: u8, f: impl FnOnce(&[u8]) -> R) -> R {
        let len = (usize::from(segments) * SEGMENT).min(MAX_WQE);
        if blocks(segments) <= self.to_end(counter) {
            let at = self.wqebb(counter).as_ptr();
            // SAFETY: the `len` bytes at `at` are inside the SQ, which the driver does not touch
            // between the doorbell and the completion.
            return f(unsafe { core::slice::from_raw_parts(at, len) });
        }
        let mut copy = [0; MAX_WQE];
        for (block, out) in (0..).zip(copy[..len].chunks_mut(WQEBB)) {
            let at = self.wqebb(counter.wrapping_add(block)).as_ptr();
            // SAFETY: `at` is a WQEBB of the SQ, which the driver does not touch (as above), and
            // `out` is not longer than a WQEBB.
            unsafe { out.as_mut_ptr().copy_from_nonoverlapping(at, out.len()) };
        }
        f(&copy[..len])
    }
}

pub(crate) struct SoftQp {
    pub(crate) qpn: u32,
    /// The bits that the control segments of its WRITEs have in common, for the fast path.
    pub(crate) writes: Writes,
    pub(crate) index: usize,
    /// The part of the queue pair that its peer reads, in the memory of this device.
    pub(crate) entry: NonNull<QpEntry>,
    /// Value of [`QpEntry::generation`].
    pub(crate) generation: u32,
    /// Version in the identity of the queue pair ([`QpEntry::identity`]).
    pub(crate) version: u32,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) rqn: u32,
    /// Number of receives flushed by an error.
    pub(crate) flushed: u32,
    /// Number of messages of its lane that took no receive: atomics, and refused requests.
    pub(crate) answered: u32,
    /// Whether short received data is written into the CQE.
    pub(crate) scatters: bool,
    /// Whether the queue pair scatters to CQEs, or its receive CQ has compressed sessions.
    pub(crate) is_compact: bool,
    pub(crate) receives: Receives,
    pub(crate) taken: Taken,
    pub(crate) sq: SqPlace,
    /// MR cache of the source of plain WRITEs.
    pub(crate) source: MrCache,
    pub(crate) lookups: Lookups,
    /// User index of its CQEs: the number of its receive queue unless a driver set another.
    pub(crate) user_index: u32,
    /// Number of WQEBBs executed, modulo 2^16.
    pub(crate) sq_consumer: u16,
    /// Counter up to which WQEBBs may be executed, because their doorbells are due.
    pub(crate) sq_limit: u16,
    pub(crate) mode: Mode,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) lane: LaneRx<Message>,
    pub(crate) lane_place: LanePlace,
    /// Mask, a power of two less one. The owner stores its position in the lane for the requester
    /// ([`Acks::consumed`](crate::shared::layout::Acks::consumed)) when the position has none of
    /// these bits.
    pub(crate) ack_mask: u64,
    /// Address after the last payload, where the next payload is if payloads are written to a ring.
    /// The address is used only for prefetching.
    pub(crate) next_payload: u64,
    pub(crate) transport: Transport,
    pub(crate) is_unreliable: bool,
    /// Rights of the queue pair's connected peer, which limit the rights that the regions give.
    pub(crate) access: Access,
    pub(crate) options: ConnectOptions,
    /// Terms of the connection, if the driver has set them.
    pub(crate) terms: Option<Terms>,
    /// Whether a difference between the terms of both ends was reported.
    pub(crate) has_reported: bool,
    /// Whether the HCA polls the doorbell record, because the driver announces no doorbells.
    pub(crate) is_watched: bool,
    pub(crate) in_flight: InFlight,
    pub(crate) watch: QpWatch,
}

/// The way in which the WQEs of a send queue are executed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    /// WQEs take the fast path if they are [`plain`](crate::requester::plain). The device has
    /// immediate timing, and is neither strict nor traced, nor has it counters.
    Plain,
    /// WQEs take the general path.
    Ordinary,
    /// WQEs get extra checks: a rule was broken, the port is or was down, or the device makes
    /// faults.
    Exceptional,
    /// The queue pair is in the error state: every WQE is flushed.
    Failed,
}

/// The target of a queue pair's messages.
pub(crate) enum Transport {
    /// Connection through shared memory.
    Connected(Box<Remote>),
    Unconnected,
    /// Connected to a queue pair that was not found.
    NoPeer,
    /// Connection by packets.
    Wire,
    /// Unreliable datagrams. The queue pair receives datagrams with this Q_Key.
    Datagram {
        qkey: u32,
    },
}

/// The state of a stopped SQ.
pub(crate) struct Waiting {
    pub(crate) reason: WaitFor,
    pub(crate) since_ns: u64,
    /// Time of the next attempt.
    pub(crate) again_ns: u64,
    /// RNR retries left; 7 means without limit.
    pub(crate) rnr_left: u8,
}

impl SoftQp {
    #[inline(always)]
    pub(crate) fn entry(&self) -> &QpEntry {
        // SAFETY: the entry is in the memory of this device, which outlives the queue pair, and is
        // made of atomics.
        unsafe { self.entry.as_ref() }
    }

    /// Returns the queue pair's identity word for the states in which it is connected and receives.
    pub(crate) fn connected_identity(&self) -> u64 {
        self.identity(RECEIVES | u64::from(self.access.bits()) & RIGHTS)
    }

    pub(crate) fn identity(&self, flags: u64) -> u64 {
        QpEntry::pack_identity(self.version, self.qpn, flags)
    }

    /// Returns the counter up to which doorbells have announced WQEs.
    pub(crate) fn announced(&self) -> u16 {
        let last = self.in_flight.announced.back();
        last.map_or(self.sq_limit, |last| last.end)
    }

    #[inline(always)]
    pub(crate) fn with_wqe<R>(
        &self,
        counter: u16,
        f: impl FnOnce(Result<Wqe<'_>, WqeError>) -> R,
    ) -> R {
        self.sq
            .with_bytes(counter, self.sq.ctrl(counter).ds(), |bytes| {
                f(Wqe::parse(bytes, self.is_datagram()))
            })
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.mode == Mode::Failed
    }

    /// Returns whether the receive queue belongs to this queue pair alone and is flushed with it.
    /// Such a queue is a ring; shared receive queues are lists.
    pub(crate) fn owns_rq(&self) -> bool {
        !self.receives.is_linked
    }

    /// Returns whether this device takes the receives of the queue pair, and no peer takes them.
    pub(crate) fn takes_receives(&self) -> bool {
        matches!(self.transport, Transport::Datagram { .. } | Transport::Wire)
    }

    pub(crate) fn is_datagram(&self) -> bool {
        matches!(self.transport, Transport::Datagram { .. })
    }

    #[inline(always)]
    pub(crate) fn remote(&self) -> Option<&Remote> {
        match &self.transport {
            Transport::Connected(remote) => Some(remote),
            Transport::Unconnected
            | Transport::Datagram { .. }
            | Transport::NoPeer
            | Transport::Wire => None,
        }
    }

    /// Goes to the error state: its operations are flushed, and its peer gets no answer any more.
    #[cold]
    pub(crate) fn fail(&mut self, hca: &Hca) {
        if !self.has_failed() {
            hca.failed.borrow_mut().push((self.index, self.generation));
        }
        self.mode = Mode::Failed;
        hca.has_chores.set(true);
        self.entry()
            .identity
            .store(self.identity(0), Ordering::Release);
    }
}

pub(crate) fn by_number(qps: &mut [Option<Box<SoftQp>>], qpn: u32) -> Option<&mut SoftQp> {
    let qp = qps.get_mut(qp_index(qpn))?.as_deref_mut()?;
    (qp.qpn == qpn).then_some(qp)
}

/// Returns the first segment of a WQE.
pub(crate) fn head(bytes: &[u8]) -> [u8; SEGMENT] {
    bytes.first_chunk().copied().unwrap_or([0; SEGMENT])
}

/// Returns the number of WQEBBs of a WQE of `ds` segments. The result is 0 for the malformed `ds`
/// 0; a caller that skips such a WQE advances by 1.
#[inline(always)]
pub(crate) fn blocks(ds: u8) -> u16 {
    (u16::from(ds) + 3) >> 2
}
