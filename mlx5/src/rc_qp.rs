//! Reliable-connected queue pairs.

use std::fmt;

use crate::batch::BlueflameBatch;
use crate::control::{ConnectParts, CreateError};
use crate::cq::Cqe;
use crate::ops::{RcOperation, Sge};
use crate::qp::{ConnectError, ConnectOptions, QpAddress, QpConfig, QpParents, QpState, QueuePair};
use crate::rq::PostReceiveError;
use crate::sq::{Flags, PostError};

/// A reliable-connected queue pair.
///
/// Operations are posted with [`post`](Self::post) and start at [`ring`](Self::ring). They take effect at the peer, and complete, in posting
/// order; only a READ or an atomic may still be under way when what is behind it starts ([`Signal::fence`](crate::Signal::fence)). A failure moves
/// the queue pair to [`QpState::Error`] and flushes what follows.
///
/// It stays in its thread:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::RcQp>();
/// ```
pub struct RcQp {
    inner: QueuePair,
}

impl fmt::Debug for RcQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RcQp").field("qpn", &self.qpn()).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl RcQp {
    pub(crate) fn create(parents: &QpParents<'_>, config: &QpConfig) -> Result<Self, CreateError> {
        Ok(Self { inner: QueuePair::create(parents, config, false)? })
    }

    #[cfg(test)]
    pub(crate) fn sq(&mut self) -> &mut crate::sq::SendQueue {
        &mut self.inner.sq
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

    /// What the peer needs to connect to this queue pair.
    #[must_use]
    pub fn address(&self) -> QpAddress {
        self.inner.address()
    }

    /// RESET to INIT: receives may be posted.
    ///
    /// # Errors
    /// The state is not RESET.
    pub fn initialize(&mut self) -> Result<(), ConnectError> {
        self.inner.transition(QpState::Reset, QpState::Init)
    }

    /// INIT to RTR, towards `remote`: messages of that queue pair are received from now on.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is unchanged.
    pub fn ready_to_receive(&mut self, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        options.check()?;
        self.inner.transition(QpState::Init, QpState::ReadyToReceive)?;
        let parts = ConnectParts { qpn: self.qpn(), remote: *remote, options: *options };
        self.inner.control().connect(&parts).inspect_err(|_| self.inner.set_state(QpState::Init))
    }

    /// RTR to RTS: operations may be posted.
    ///
    /// # Errors
    /// The state is not RTR.
    pub fn ready_to_send(&mut self) -> Result<(), ConnectError> {
        self.inner.transition(QpState::ReadyToReceive, QpState::ReadyToSend)
    }

    /// RESET to INIT to RTR to RTS, towards `remote`, from wherever on that way the queue pair is. Both ends do this; operations posted before
    /// the peer has done it are retried for the transport timeout.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is that of the last step that succeeded.
    pub fn connect(&mut self, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        options.check()?;
        if self.state() != QpState::Init {
            self.initialize()?;
        }
        self.ready_to_receive(remote, options)?;
        self.ready_to_send()
    }

    /// To the error state: everything posted completes with [`Syndrome::WorkRequestFlushed`](crate::Syndrome::WorkRequestFlushed), and the
    /// peer's operations are not answered any more. For an orderly end.
    pub fn fail(&mut self) {
        self.inner.fail();
    }

    /// Puts an operation into the send queue. `user` comes back from [`complete`](Self::complete) if the operation gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    pub fn post<O: RcOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
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

    /// Starts a batch of operations that are announced together through BlueFlame. What was posted before is announced now.
    pub fn blueflame_batch(&mut self) -> BlueflameBatch<'_> {
        BlueflameBatch::new(&mut self.inner)
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
