//! The device's side of a queue pair and of a completion queue.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::rc::Rc;

use shm::lane::{LaneRx, LaneTx};
use shm::ready::ReadyWords;

use super::fabric::Peer;
use super::layout::{Message, QpEntry};
use super::private::PrivateMemory;
use crate::doorbell::BF_BYTES;
use crate::qp::ConnectOptions;
use crate::wire::{CQE_BYTES, CqeOpcode, OP_OWN_OFFSET, WQEBB, op_own, queue_record_index};

/// Where things are in a queue pair's private memory: the BlueFlame register, the doorbell record, the SQ.
pub(crate) const SQ_RECORD: usize = 2 * BF_BYTES;
pub(crate) const SQ_BUFFER: usize = 4096;

/// A queue pair, as the device sees it.
pub(crate) struct SoftQp {
    pub(crate) qpn: u32,
    pub(crate) index: usize,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srqn: u32,
    /// WQEs of that SRQ, to bound what peers name.
    pub(crate) srq_wqes: u16,
    pub(crate) memory: PrivateMemory,
    pub(crate) sq_mask: u16,
    /// WQEBBs executed.
    pub(crate) sq_consumer: u16,
    pub(crate) failed: bool,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) lane: LaneRx<Message>,
    pub(crate) remote: Option<Remote>,
    pub(crate) options: ConnectOptions,
}

/// Why the WQE at the head of an SQ has not run yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitFor {
    /// The peer does not answer: it is gone, or its queue pair is not connected to this one.
    Peer,
    /// The peer has no receive posted.
    Receive,
    /// The peer has not looked at its lane for 128 messages.
    Room,
}

/// A stopped SQ.
pub(crate) struct Waiting {
    pub(crate) reason: WaitFor,
    pub(crate) since_ns: u64,
    /// RNR retries left; 7 is without end.
    pub(crate) rnr_left: u8,
}

/// The other end of a connected queue pair.
pub(crate) struct Remote {
    pub(crate) peer: Rc<Peer>,
    pub(crate) index: usize,
    /// What its `identity` and `peer` words say while it is connected to this queue pair and receives.
    pub(crate) identity: u64,
    pub(crate) own: u64,
    pub(crate) pd: u32,
    pub(crate) srqn: u32,
    pub(crate) srq_wqes: u16,
    pub(crate) srq_stride: usize,
    pub(crate) srq_ring: usize,
    pub(crate) lane: LaneTx<Message>,
    pub(crate) ready: ReadyWords,
    /// A message was published since the ready bit was last considered.
    pub(crate) published: bool,
}

impl Remote {
    #[inline(always)]
    pub(crate) fn entry(&self) -> &QpEntry {
        self.peer.memory.qp(self.index)
    }
}

impl SoftQp {
    /// The producer counter in the doorbell record.
    #[inline(always)]
    pub(crate) fn sq_producer(&self) -> u16 {
        // SAFETY: inside the private memory; the driver accesses it through the same atomic type.
        let record = unsafe { self.memory.at::<AtomicU32>(SQ_RECORD).as_ref() };
        queue_record_index(record.load(Ordering::Acquire))
    }

    /// The WQEBB of a counter.
    #[inline(always)]
    pub(crate) fn wqebb(&self, counter: u16) -> NonNull<u8> {
        self.memory.at(SQ_BUFFER + usize::from(counter & self.sq_mask) * WQEBB)
    }
}

/// A completion queue, as the device sees it.
pub(crate) struct SoftCq {
    pub(crate) memory: PrivateMemory,
    pub(crate) log_entries: u32,
    pub(crate) producer: u32,
    /// A CQE was due while the queue was full; nothing is written any more.
    pub(crate) overrun: bool,
}

/// The CQ is full, or was: on hardware that is fatal to it.
pub(crate) struct Overrun;

/// Where the doorbell record and the CQEs are in a completion queue's private memory.
pub(crate) const CQ_RECORD: usize = 0;
pub(crate) const CQ_BUFFER: usize = 4096;

impl SoftCq {
    fn cqe(&self, index: u32) -> NonNull<u8> {
        self.memory.at(CQ_BUFFER + index as usize * CQE_BYTES)
    }

    /// Writes a CQE: body first, then the byte with the owner bit.
    #[inline(always)]
    pub(crate) fn write(&mut self, bytes: &[u8; CQE_BYTES], opcode: CqeOpcode) -> Result<(), Overrun> {
        // SAFETY: inside the private memory; the driver accesses it through the same atomic type.
        let record = unsafe { self.memory.at::<AtomicU32>(CQ_RECORD).as_ref() };
        let entries = 1u32 << self.log_entries;
        // The record has 24 bits. Acquire: the driver has finished reading what it passed.
        let consumed = u32::from_be(record.load(Ordering::Acquire));
        if self.overrun || self.producer.wrapping_sub(consumed) & 0xff_ffff >= entries {
            self.overrun = true;
            return Err(Overrun);
        }
        let at = self.cqe(self.producer & (entries - 1));
        let owner = (self.producer >> self.log_entries) & 1 != 0;
        // SAFETY: the entry is inside the buffer and the driver is done with it (above).
        unsafe {
            at.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), OP_OWN_OFFSET);
            (*at.as_ptr().add(OP_OWN_OFFSET).cast::<AtomicU8>()).store(op_own(opcode, owner), Ordering::Release);
        }
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }
}
