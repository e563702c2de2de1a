//! The part of a completion queue that its queue pairs keep alive: the device's object, and the
//! entries not yet polled.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::rc::Rc;

use mlx5_hca::CqMemory;

use crate::config::CqConfig;
use crate::control::Control;
use crate::error::CreateError;
use crate::mmio::udma_from_device_barrier;
use crate::wire::{
    CQE_BYTES, CqeFormat, CqeOpcode, NO_QPN, OP_OWN_OFFSET, QPN_OFFSET, ResponderCqe, TitleCqe,
};

/// The entries of a completion queue, which live as long as its [`CqObject`].
#[derive(Clone, Copy)]
pub(crate) struct CqEntries {
    /// The first entry's CQE, which is the last 64 bytes of the entry.
    pub(crate) first: NonNull<u8>,
    /// Length of an entry in bytes, 64 or 128.
    pub(crate) stride: usize,
    pub(crate) log_entries: u32,
    pub(crate) mask: u32,
}

impl CqEntries {
    fn new(memory: &CqMemory) -> Self {
        let stride = memory.cqe_bytes as usize;
        Self {
            // SAFETY: the buffer holds at least one entry of `stride` bytes, 64 or 128.
            first: unsafe { memory.buffer.add(stride - CQE_BYTES) },
            stride,
            log_entries: memory.entries.trailing_zeros(),
            mask: memory.entries - 1,
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.mask + 1
    }

    #[inline(always)]
    pub(crate) fn place(&self, counter: u32) -> NonNull<u8> {
        let index = (counter & self.mask) as usize;
        // SAFETY: the buffer holds `mask + 1` entries of `stride` bytes.
        unsafe { self.first.add(index * self.stride) }
    }

    /// Returns the owner bit that the device writes to the entry at `counter`.
    #[inline(always)]
    pub(crate) fn owner(&self, counter: u32) -> u8 {
        (counter >> self.log_entries) as u8 & 1
    }

    /// Returns the number of CQEs of the session with this title, limited to
    /// 1..=[`count`](Self::count). A correct device writes no other number; the limit keeps the
    /// driver inside the ring if a device is not correct.
    #[inline(always)]
    pub(crate) fn session_count(&self, title: &TitleCqe) -> u32 {
        title.count.min(self.count()).max(1)
    }
}

/// Returns whether the device has written an entry with this op_own byte: its owner bit is `owner`,
/// the owner bit of the lap, and its opcode is valid.
#[inline(always)]
pub(crate) fn is_written(op_own: u8, owner: u8) -> bool {
    // One comparison suffices: the rotation moves the owner bit to the top, where it must be 0, and
    // the bits below must be less than the invalid opcode.
    (op_own ^ owner).rotate_right(1) < (CqeOpcode::Invalid as u8) << 3
}

/// Returns the `op_own` byte of the CQE at `place`, which is inside the buffer of a completion
/// queue.
#[inline(always)]
pub(crate) fn op_own_at(place: NonNull<u8>) -> u8 {
    // SAFETY: the byte is inside the buffer. The device writes it last and in one store, so an
    // atomic load reads a whole value.
    unsafe { place.add(OP_OWN_OFFSET).cast::<AtomicU8>().as_ref() }.load(Ordering::Acquire)
}

pub(crate) struct CqObject {
    pub(crate) cqn: u32,
    pub(crate) control: Control,
    pub(crate) entries: CqEntries,
    /// The consumer word of the doorbell record.
    pub(crate) record: NonNull<AtomicU32>,
    /// QPN of the compressed session that is being handed out; [`NO_QPN`] if no session is, or if
    /// its queue pair was destroyed.
    pub(crate) session_qpn: Cell<u32>,
}

impl CqObject {
    pub(crate) fn create(control: &Control, config: &CqConfig) -> Result<Rc<Self>, CreateError> {
        let (cqn, memory) = control.queues().create_cq(config)?;
        Ok(Rc::new(Self {
            cqn,
            control: control.clone(),
            entries: CqEntries::new(&memory),
            record: memory.record.cast(),
            session_qpn: Cell::new(NO_QPN),
        }))
    }

    /// Replaces the QPN by [`NO_QPN`] in every completion of queue pair `qpn` that is still in the
    /// queue. The device has destroyed the queue pair, so it writes no more completions with this
    /// QPN, and may give the number to another queue pair at once. libmlx5 removes such completions
    /// (`mlx5_cq_clean`), except from queues that a program polls itself. Here they stay in the
    /// queue, because each completion of a receive also returns that receive to its shared queue.
    pub(crate) fn disown(&self, qpn: u32) {
        if self.session_qpn.get() == qpn {
            self.session_qpn.set(NO_QPN);
        }
        // SAFETY: the record lives as long as this object.
        let consumed = u32::from_be(unsafe { self.record.as_ref() }.load(Ordering::Relaxed));
        let mut next = 0;
        while next < self.entries.count() {
            let counter = consumed.wrapping_add(next);
            let place = self.entries.place(counter);
            let op_own = op_own_at(place);
            if !is_written(op_own, self.entries.owner(counter)) {
                break;
            }
            udma_from_device_barrier();
            // SAFETY: `place` is a CQE inside the buffer. Its owner bit, read with Acquire, shows
            // that the device has finished writing it.
            let cqe = unsafe { place.cast::<[u8; CQE_BYTES]>().read() };
            if ResponderCqe::parse(&cqe).qpn == qpn {
                // SAFETY: as above. During a poll this may be an entry that was handed out: a `Cqe`
                // holds no reference to these bytes.
                unsafe { place.add(QPN_OFFSET).cast().write([0xff_u8; 3]) };
            }
            let is_title = CqeFormat::from_op_own(op_own) == CqeFormat::Compressed;
            next += if is_title {
                self.entries.session_count(&TitleCqe::parse(&cqe))
            } else {
                1
            };
        }
    }
}

impl Drop for CqObject {
    fn drop(&mut self) {
        self.control.queues().destroy_cq(self.cqn);
    }
}
