//! [`BlueflameBatch`]: several WQEs in one store to the BlueFlame register.

use core::fmt;
use core::mem::MaybeUninit;

use crate::ops::{PostError, RcOperation};
use crate::queues::rc_qp::RcQp;
use crate::queues::sq::{BlueflameBuffer, Flags};
use crate::wire::BLUEFLAME_BYTES;

/// Several short operations whose WQEs go through BlueFlame together: the device need not read any of them from memory.
///
/// The WQEs are built in the send queue, as always, and also copied to a buffer of 256 bytes on the stack. [`finish`](Self::finish) copies
/// that buffer to the register, after the same record and barriers as any other doorbell. WQEs that together take more than 256 bytes are
/// announced with an 8-byte doorbell instead. Four WQEs of up to 64 bytes fit; the NOPs at the ring's end count.
///
/// Not proven on a NIC: rdma-core copies a WQE to BlueFlame only if it is the only new one, and no driver is known that copies several into
/// one register. Nothing in this crate uses a batch by itself.
///
/// If a batch is dropped without `finish`, its operations stay posted, and the queue pair's next doorbell announces them.
#[must_use = "its operations are announced by `finish`"]
#[doc(alias = "BlueframeBatch")]
pub struct BlueflameBatch<'a> {
    qp: &'a mut RcQp,
    buffer: BlueflameBuffer,
    fits: bool,
}

impl fmt::Debug for BlueflameBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlueflameBatch").field("qpn", &self.qp.qpn()).field("fits", &self.fits).finish_non_exhaustive()
    }
}

impl<'a> BlueflameBatch<'a> {
    /// Announces the operations posted before the batch: the register gets this batch's WQEs only.
    pub(crate) fn new(qp: &'a mut RcQp) -> Self {
        qp.sq.ring();
        Self { qp, buffer: BlueflameBuffer([MaybeUninit::uninit(); BLUEFLAME_BYTES]), fits: true }
    }

    /// Adds an operation, as [`RcQp::post`](crate::RcQp::post) does.
    ///
    /// # Errors
    /// See [`PostError`]; the batch is unchanged.
    #[inline]
    pub fn post<O: RcOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        let from = self.qp.sq.pending();
        self.qp.post(op, flags, user)?;
        self.fits = self.fits && self.qp.sq.copy_pending(from, &mut self.buffer);
        Ok(())
    }

    /// Announces the batch to the device. Does nothing if the batch is empty. Returns whether several WQEs were announced together.
    pub fn finish(self) -> bool {
        let sq = &mut self.qp.sq;
        let are_several = self.fits && sq.has_several_pending();
        if self.fits && sq.pending() > 0 {
            sq.ring_buffer(&self.buffer);
        } else {
            sq.ring_doorbell();
        }
        are_several
    }
}

impl RcQp {
    /// Starts a batch of operations that are announced together through BlueFlame. Operations posted before are announced now.
    pub fn blueflame_batch(&mut self) -> BlueflameBatch<'_> {
        BlueflameBatch::new(self)
    }
}
