//! Unreliable-datagram queue pairs.

use std::fmt;

use crate::control::CreateError;
use crate::cq::Cqe;
use crate::ops::{Destination, Sge, UdOperation};
use crate::qp::{ConnectError, QpConfig, QpParents, QpState, QueuePair};
use crate::rq::PostReceiveError;
use crate::sq::{Flags, PostError};
use crate::wire::AddressVector;

/// Bytes at the start of a receive's buffers that a datagram's payload follows: room for a GRH (InfiniBand specification, "Global Route
/// Header"), filled if [`Cqe::has_grh`] says so. They are part of the CQE's byte count.
pub const GRH_BYTES: usize = 40;

/// An unreliable-datagram queue pair: it sends to any other, a message of at most [`MAX_DATAGRAM_BYTES`], and receives from any that knows its
/// Q_Key. A datagram that finds no receive, a wrong Q_Key or no queue pair is lost without a word; one longer than the receive's buffers is a
/// local length error, and ends the queue pair. A completion of a send says that the datagram has left, and no more.
///
/// It stays in its thread:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::UdQp>();
/// ```
pub struct UdQp {
    inner: QueuePair,
    qkey: u32,
}

/// Longest datagram: the largest MTU.
pub const MAX_DATAGRAM_BYTES: usize = 4096;

impl fmt::Debug for UdQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdQp").field("qpn", &self.qpn()).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl UdQp {
    pub(crate) fn create(parents: &QpParents<'_>, config: &QpConfig) -> Result<Self, CreateError> {
        Ok(Self { inner: QueuePair::create(parents, config, true)?, qkey: 0 })
    }

    /// Queue pair number, 24 bits.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.inner.qpn()
    }

    /// State, as far as this end knows: an error is known once its completion was given to [`complete`](Self::complete) or
    /// [`complete_receive`](Self::complete_receive).
    #[must_use]
    pub fn state(&self) -> QpState {
        self.inner.state
    }

    /// WQEBBs of the send queue, as the device gave them.
    #[must_use]
    pub fn send_capacity(&self) -> usize {
        usize::from(self.inner.sq.capacity())
    }

    /// Inline bytes of one operation, as the device gave them.
    #[must_use]
    pub fn max_inline_data(&self) -> usize {
        self.inner.sq.max_inline()
    }

    /// RESET to RTS: receives what brings `qkey`, and may send.
    ///
    /// # Errors
    /// The state is not RESET.
    pub fn activate(&mut self, qkey: u32) -> Result<(), ConnectError> {
        self.inner.transition(QpState::Reset, QpState::ReadyToSend)?;
        self.qkey = qkey;
        self.inner.control().activate_datagrams(self.qpn(), qkey);
        Ok(())
    }

    /// Where others reach this queue pair, on the same subnet; its Q_Key is that given to [`activate`](Self::activate).
    #[must_use]
    pub fn destination(&self) -> Destination {
        Destination::new(AddressVector::local(self.inner.address().lid, 0), self.qpn(), self.qkey)
    }

    /// To the error state: everything posted is flushed.
    pub fn fail(&mut self) {
        self.inner.fail();
    }

    /// Puts an operation into the send queue. `user` comes back from [`complete`](Self::complete) if the operation gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    pub fn post<O: UdOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        self.inner.post(op, flags, user)
    }

    /// Rings the doorbell for everything posted since the last call: with the whole WQE through BlueFlame if there is only one and it has
    /// at most 256 bytes, else as [`ring_doorbell`](Self::ring_doorbell). On a soft device the operations have run when it returns, unless
    /// they must be retried or its [`Timing`](crate::Timing) says otherwise.
    #[inline(always)]
    pub fn ring(&mut self) {
        self.inner.sq.ring();
    }

    /// Rings the doorbell with 8 bytes; the device reads the WQEs from memory.
    #[inline(always)]
    pub fn ring_doorbell(&mut self) {
        self.inner.sq.ring_doorbell();
    }

    /// Rings the doorbell with the whole last WQE through BlueFlame, however many are new; with 8 bytes if it has more than 256.
    #[inline(always)]
    pub fn ring_doorbell_bf(&mut self) {
        self.inner.sq.ring_doorbell_bf();
    }

    /// Takes a completion of this queue pair from its send CQ: frees the WQE and all before it, and returns what the poster attached.
    /// `None` if it is not of this queue pair's sends, or no such operation is outstanding. An error completion moves the state to
    /// [`QpState::Error`].
    #[inline(always)]
    pub fn complete(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        self.inner.complete(cqe)
    }

    /// As [`complete`](Self::complete), but hands to `each` what the posters of all operations that this completion finishes attached,
    /// unsignaled ones included, in posting order; returns how many there were. All but the last have succeeded; how the last ended is what
    /// the completion says. If `each` panics, the rest are not handed out.
    #[inline]
    pub fn complete_each(&mut self, cqe: &Cqe<'_>, each: impl FnMut(u64)) -> usize {
        self.inner.complete_each(cqe, each)
    }

    /// Posts one receive into `buffers`, in this order, to the queue pair's own receive queue. `user` comes back from
    /// [`complete_receive`](Self::complete_receive). The device sees it at the next [`ring_receives`](Self::ring_receives).
    ///
    /// # Errors
    /// See [`PostReceiveError`]; nothing was posted.
    #[inline]
    pub fn post_receive(&mut self, buffers: &[Sge], user: u64) -> Result<(), PostReceiveError> {
        self.inner.post_receive(buffers, user)
    }

    /// Makes the receives posted so far visible to the device.
    #[inline]
    pub fn ring_receives(&mut self) {
        self.inner.ring_receives();
    }

    /// Takes a completion of this queue pair's own receive queue: frees the receive and returns what its poster attached. `None` if it is not
    /// of this queue pair's receives. An error completion moves the state to [`QpState::Error`].
    #[inline]
    pub fn complete_receive(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        self.inner.complete_receive(cqe)
    }

    /// Receives that can be posted now; 0 with a shared receive queue.
    #[must_use]
    pub fn free_receives(&self) -> usize {
        self.inner.free_receives()
    }
}
