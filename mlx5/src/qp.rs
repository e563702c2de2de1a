//! Reliable-connected queue pairs.

use std::fmt;
use std::rc::Rc;

use crate::batch::BlueflameBatch;
use crate::control::{ConnectParts, Control, CreateError};
use crate::cq::{CqObject, Cqe};
use crate::device::PdObject;
use crate::doorbell::Doorbell;
use crate::ops::RcOperation;
use crate::sq::{Flags, PostError, SendQueue};
use crate::srq::SrqObject;
use crate::wire::CqeOpcode;

/// What kind of device a queue pair lives on. Two kinds never connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DeviceKind {
    /// The software HCA of this crate.
    Soft = 1,
}

/// Where a queue pair can be reached: what its peer needs to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAddress {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Local identifier of the port.
    pub lid: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// First packet sequence number, 24 bits; the software HCA has no packets and ignores it.
    pub psn: u32,
    /// Which incarnation of the device has that LID (soft): a LID is used again after its owner died, this number never.
    pub epoch: u64,
}

/// Attributes of a connection (`struct ibv_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Acknowledgement timeout: 4.096 us x 2^n; 1..=31. The default 14 is 67 ms.
    pub timeout: u8,
    /// Transport retries, 0..=7.
    pub retry_count: u8,
    /// Retries when the peer has no receive posted, 0..=7; 7 is without end.
    pub rnr_retry: u8,
    /// How long a sender waits before such a retry, in ns.
    pub rnr_timer_ns: u64,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { timeout: 14, retry_count: 7, rnr_retry: 7, rnr_timer_ns: 640_000 }
    }
}

impl ConnectOptions {
    fn check(&self) -> Result<(), ConnectError> {
        let option = |option, value, legal| Err(ConnectError::Option { option, value, legal });
        match self {
            Self { timeout: 0 | 32.., .. } => option("timeout", self.timeout, "1..=31"),
            Self { retry_count: 8.., .. } => option("retry_count", self.retry_count, "0..=7"),
            Self { rnr_retry: 8.., .. } => option("rnr_retry", self.rnr_retry, "0..=7"),
            _ => Ok(()),
        }
    }

    /// How long an unanswered operation is retried before it fails, in ns.
    #[must_use]
    pub fn transport_timeout_ns(&self) -> u64 {
        (4096u64 << self.timeout.min(31)) * (u64::from(self.retry_count.min(7)) + 1)
    }
}

/// States of a queue pair (InfiniBand specification, "Queue Pair States").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Created; not connected.
    Reset,
    /// Receives may be posted.
    Init,
    /// Receives.
    ReadyToReceive,
    /// Sends and receives.
    ReadyToSend,
    /// An operation failed; everything posted is flushed.
    Error,
}

/// Why a connection was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Only a new queue pair can be connected.
    #[error("the queue pair is in state {0:?}; connecting needs Reset (create a new one)")]
    WrongState(QpState),
    /// An option outside its range.
    #[error("{option} is {value}; legal is {legal}")]
    Option {
        /// The option.
        option: &'static str,
        /// What was asked for.
        value: u8,
        /// The range.
        legal: &'static str,
    },
    /// Nothing there.
    #[error("no soft device with LID {lid} in this fabric: {reason}")]
    NoSuchDevice {
        /// The LID asked for.
        lid: u16,
        /// What was found.
        reason: String,
    },
    /// The LID belongs to a later device.
    #[error("LID {lid} belongs to another device now: the one that gave this address is gone")]
    StaleDevice {
        /// The LID asked for.
        lid: u16,
    },
    /// The number names no queue pair there.
    #[error("QPN {qpn:#x} is no queue pair of the device with LID {lid}")]
    NoSuchQp {
        /// The LID asked for.
        lid: u16,
        /// The number asked for.
        qpn: u32,
    },
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpConfig {
    /// Send WQEBBs of 64 B, 1..=32768; rounded up to a power of two.
    pub max_send_wr: u32,
    /// Inline bytes of one operation, 0..=220.
    pub max_inline_data: usize,
}

impl Default for QpConfig {
    fn default() -> Self {
        Self { max_send_wr: 256, max_inline_data: 64 }
    }
}

/// The queues and keys a QP keeps alive; the device's object goes first, it is declared first.
struct QpObject {
    qpn: u32,
    control: Rc<Control>,
    _send_cq: Rc<CqObject>,
    _recv_cq: Rc<CqObject>,
    _srq: Rc<SrqObject>,
    _pd: Rc<PdObject>,
}

impl Drop for QpObject {
    fn drop(&mut self) {
        self.control.destroy_qp(self.qpn);
    }
}

/// A reliable-connected queue pair whose receives come from a shared receive queue.
///
/// Operations are posted with [`post`](Self::post) and start at [`ring`](Self::ring). They execute in order; a failure moves the queue
/// pair to [`QpState::Error`] and flushes what follows.
pub struct RcQp {
    sq: SendQueue,
    state: QpState,
    object: QpObject,
}

impl fmt::Debug for RcQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RcQp").field("qpn", &self.qpn()).field("state", &self.state).finish_non_exhaustive()
    }
}

impl RcQp {
    pub(crate) fn create(
        control: &Rc<Control>,
        pd: &Rc<PdObject>,
        send_cq: &Rc<CqObject>,
        recv_cq: &Rc<CqObject>,
        srq: &Rc<SrqObject>,
        config: &QpConfig,
    ) -> Result<Self, CreateError> {
        let parts = control.create_qp(pd.pdn, send_cq.cqn, recv_cq.cqn, srq.srqn, config)?;
        let object = QpObject {
            qpn: parts.qpn,
            control: Rc::clone(control),
            _send_cq: Rc::clone(send_cq),
            _recv_cq: Rc::clone(recv_cq),
            _srq: Rc::clone(srq),
            _pd: Rc::clone(pd),
        };
        let doorbell = Doorbell::new(&parts.uar, parts.record, control.hook());
        let mut qp = Self { sq: SendQueue::new(&parts, doorbell), state: QpState::Reset, object };
        qp.set_state(QpState::Reset);
        Ok(qp)
    }

    /// Queue pair number, 24 bits.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.object.qpn
    }

    /// State, as far as this end knows: an error is known once its completion was given to [`complete`](Self::complete).
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// WQEBBs of the send queue, as the device gave them.
    #[must_use]
    pub fn send_capacity(&self) -> usize {
        usize::from(self.sq.capacity())
    }

    /// Inline bytes of one operation, as the device gave them.
    #[must_use]
    pub fn max_inline_data(&self) -> usize {
        self.sq.max_inline()
    }

    /// What the peer needs to connect to this queue pair.
    #[must_use]
    pub fn address(&self) -> QpAddress {
        self.object.control.address(self.qpn())
    }

    /// RESET to INIT to RTR to RTS, towards `remote`. Both ends do this; operations posted before the peer has done it are retried
    /// for the transport timeout.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is unchanged.
    pub fn connect(&mut self, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        if self.state != QpState::Reset {
            return Err(ConnectError::WrongState(self.state));
        }
        options.check()?;
        self.object.control.connect(&ConnectParts { qpn: self.qpn(), remote: *remote, options: *options })?;
        self.set_state(QpState::ReadyToSend);
        Ok(())
    }

    /// Puts an operation into the send queue. `flags` are a [`Signal`](crate::Signal) or [`Flags`]. `user` comes back from
    /// [`complete`](Self::complete) if the operation gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    pub fn post<O: RcOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        self.sq.push(op, flags, user).map_err(|error| self.refusal(error))
    }

    /// Why a post was refused: the state first, which the send queue knows only as "closed".
    #[cold]
    fn refusal(&self, error: PostError) -> PostError {
        if self.state == QpState::ReadyToSend { error } else { PostError::WrongState(self.state) }
    }

    /// The only place that changes the state: the send queue is open in one of them.
    fn set_state(&mut self, state: QpState) {
        self.state = state;
        self.sq.set_open(state == QpState::ReadyToSend);
    }

    /// Rings the doorbell for everything posted since the last call: with the whole WQE through BlueFlame if there is only one and it has
    /// at most 256 bytes, else as [`ring_doorbell`](Self::ring_doorbell). On a soft device the operations have run when it returns, unless
    /// they must be retried.
    #[inline(always)]
    pub fn ring(&mut self) {
        self.sq.ring();
    }

    /// Rings the doorbell with 8 bytes; the device reads the WQEs from memory.
    #[inline(always)]
    pub fn ring_doorbell(&mut self) {
        self.sq.ring_doorbell();
    }

    /// Rings the doorbell with the whole last WQE through BlueFlame, however many are new; with 8 bytes if it has more than 256.
    #[inline(always)]
    pub fn ring_doorbell_bf(&mut self) {
        self.sq.ring_doorbell_bf();
    }

    /// Starts a batch of operations that are announced together through BlueFlame. What was posted before is announced now.
    pub fn blueflame_batch(&mut self) -> BlueflameBatch<'_> {
        BlueflameBatch::new(self)
    }

    pub(crate) fn sq(&mut self) -> &mut SendQueue {
        &mut self.sq
    }

    /// Takes a completion of this queue pair from its send CQ: frees the WQE and all before it, and returns what the poster attached.
    /// `None` if it is not of this queue pair's sends, or no such operation is outstanding. An error completion moves the state to [`QpState::Error`].
    #[inline(always)]
    pub fn complete(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        if self.takes(cqe) { self.sq.complete(cqe.wqe_counter()) } else { None }
    }

    /// As [`complete`](Self::complete), but hands to `each` what the posters of all operations that this completion finishes attached,
    /// unsignaled ones included, in posting order; returns how many there were. All but the last have succeeded; how the last ended is what
    /// the completion says. If `each` panics, the rest are not handed out.
    #[inline]
    pub fn complete_each(&mut self, cqe: &Cqe<'_>, each: impl FnMut(u64)) -> usize {
        if self.takes(cqe) { self.sq.complete_each(cqe.wqe_counter(), each) } else { 0 }
    }

    /// Whether this is a completion of this queue pair's sends.
    #[inline(always)]
    fn takes(&mut self, cqe: &Cqe<'_>) -> bool {
        if cqe.qpn() != self.qpn() {
            return false;
        }
        match cqe.opcode() {
            Some(CqeOpcode::Requester) => {}
            Some(CqeOpcode::RequesterError) => self.set_state(QpState::Error),
            _ => return false,
        }
        true
    }
}
