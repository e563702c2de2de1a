//! [`BlueflameBatch`]: several WQEs in one store to the BlueFlame register.

use core::fmt;

use crate::ops::{PostError, RcOperation};
use crate::queues::rc_qp::RcQp;
use crate::queues::sq::Flags;

/// Several short operations whose WQEs go through BlueFlame together: the device need not read any
/// of them from memory.
///
/// The WQEs are built in the send queue, as always. [`finish`](Self::finish) copies them to the
/// register, after the same record and barriers as any other doorbell. WQEs that together take more
/// than 256 bytes, or that lie on both sides of the ring's end, are announced with an 8-byte
/// doorbell instead. Four WQEs of up to 64 bytes fit.
///
/// Not proven on a NIC: rdma-core copies a WQE to BlueFlame only if it is the only new one, and no
/// driver is known that copies several into one register. Nothing in this crate uses a batch by
/// itself.
///
/// If a batch is dropped without `finish`, its operations stay posted, and the queue pair's next
/// doorbell announces them.
#[must_use = "its operations are announced by `finish`"]
#[doc(alias = "BlueframeBatch")]
pub struct BlueflameBatch<'a> {
    qp: &'a mut RcQp,
}

impl fmt::Debug for BlueflameBatch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlueflameBatch")
            .field("qpn", &self.qp.qpn())
            .finish_non_exhaustive()
    }
}

impl BlueflameBatch<'_> {
    /// Adds an operation, as [`RcQp::post`](crate::RcQp::post) does.
    ///
    /// # Errors
    /// See [`PostError`]; the batch is unchanged.
    pub fn post<O: RcOperation>(
        &mut self,
        op: &O,
        flags: impl Into<Flags>,
        user: u64,
    ) -> Result<(), PostError> {
        self.qp.post(op, flags, user)
    }

    /// Announces the batch to the device. Does nothing if the batch is empty. Returns whether
    /// several WQEs went through BlueFlame together.
    pub fn finish(self) -> bool {
        self.qp.sq.ring_batch()
    }
}

impl RcQp {
    /// Starts a batch of operations that are announced together through BlueFlame. Operations
    /// posted before are announced now: the register gets the batch's WQEs only.
    pub fn blueflame_batch(&mut self) -> BlueflameBatch<'_> {
        self.sq.ring();
        BlueflameBatch { qp: self }
    }
}
