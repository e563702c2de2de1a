//! Queue pairs: the part that both kinds share.

use std::fmt;
use std::rc::Rc;

use crate::address::QpAddress;
use crate::completions::cq_object::CqObject;
use crate::completions::cqe::Cqe;
use crate::config::{QpConfig, QpState, RqSize};
use crate::control::Control;
use crate::error::{ConnectError, CreateError};
use crate::mr::Mr;
use crate::ops::{Operation, PostError, RcOperation, Sge, UdOperation};
use crate::pd::PdObject;
use crate::provider::parts::{QpRequest, Receives};
use crate::queues::doorbell::Doorbell;
use crate::queues::rq::{PostReceiveError, ReceiveQueue};
use crate::queues::sq::{Flags, SendQueue};
use crate::queues::srq::{Srq, SrqObject};
use crate::wire::{CqeOpcode, Service};

/// The source of a queue pair's receives.
#[derive(Clone, Copy, Debug)]
pub enum ReceiveSource<'a> {
    /// A shared receive queue: receives are posted to it, and every queue pair on it consumes them.
    Shared(&'a Srq),
    /// The queue pair's own receive queue.
    Own {
        /// Minimum number of receives that the queue holds,
        /// 1..=[`DeviceInfo::max_recv_wr`](crate::DeviceInfo::max_recv_wr).
        depth: u32,
        /// Maximum number of buffers of a receive,
        /// 0..=[`DeviceInfo::max_recv_sge`](crate::DeviceInfo::max_recv_sge).
        max_sge: usize,
    },
}

impl<'a> From<&'a Srq> for ReceiveSource<'a> {
    fn from(srq: &'a Srq) -> Self {
        Self::Shared(srq)
    }
}

/// The objects that a QP keeps alive. `drop` runs before the fields are dropped, so the queue pair
/// at the device is destroyed before these objects.
struct QpObject {
    qpn: u32,
    send_cq: Rc<CqObject>,
    recv_cq: Rc<CqObject>,
    _srq: Option<Rc<SrqObject>>,
    pd: Rc<PdObject>,
}

impl Drop for QpObject {
    fn drop(&mut self) {
        self.pd.control.queues().destroy_qp(self.qpn);
        // The completions are disowned after `destroy_qp`: from then on the device writes no
        // completion of this queue pair, and it does not reuse the number before this function
        // returns.
        self.send_cq.disown(self.qpn);
        self.recv_cq.disown(self.qpn);
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Connected {}
    impl Sealed for super::Datagram {}
}

/// The kind of a queue pair's peer: [`Connected`](crate::Connected) or
/// [`Datagram`](crate::Datagram). Sealed.
#[doc(hidden)]
pub trait Transport: sealed::Sealed + fmt::Debug {
    #[doc(hidden)]
    const SERVICE: Service;
}

/// Reliable connection to one other queue pair.
#[doc(hidden)]
#[derive(Debug)]
pub struct Connected;

impl Transport for Connected {
    const SERVICE: Service = Service::Connected;
}

/// Unreliable datagrams to and from any datagram queue pair.
#[doc(hidden)]
#[derive(Debug)]
pub struct Datagram {
    pub(crate) qkey: u32,
}

impl Transport for Datagram {
    const SERVICE: Service = Service::Datagram;
}

/// A kind of peer to which the operation `O` can be sent.
#[doc(hidden)]
pub trait Takes<O>: Transport {}
impl<O: RcOperation> Takes<O> for Connected {}
impl<O: UdOperation> Takes<O> for Datagram {}

/// A queue pair: [`RcQp`](crate::RcQp), connected to one peer, or [`UdQp`](crate::UdQp), which
/// sends datagrams to any peer.
///
/// Operations are posted, and start at [`ring`](Self::ring). They take effect at the peer, and
/// complete, in posting order. There is one exception: the next operation may start before the
/// bytes that a READ or an atomic returns have arrived ([`Signal::fence`](crate::Signal::fence)
/// prevents that). A failure moves the queue pair to [`QpState::Error`] and flushes the operations
/// after it.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::RcQp>();
/// ```
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::UdQp>();
/// ```
pub struct Qp<T: Transport> {
    pub(crate) sq: SendQueue,
    /// `None` with a shared receive queue.
    rq: Option<ReceiveQueue>,
    state: QpState,
    pub(crate) transport: T,
    object: QpObject,
}

impl<T: Transport> fmt::Debug for Qp<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            state, transport, ..
        } = self;
        f.debug_struct("Qp")
            .field("qpn", &self.qpn())
            .field("state", state)
            .field("transport", transport)
            .finish_non_exhaustive()
    }
}

impl<T: Transport> Qp<T> {
    pub(crate) fn create(
        pd: &Rc<PdObject>,
        [send_cq, recv_cq]: [&Rc<CqObject>; 2],
        receives: ReceiveSource<'_>,
        config: &QpConfig,
        transport: T,
    ) -> Result<Self, CreateError> {
        let control = &pd.control;
        let (receives, srq, max_sge) = match receives {
            ReceiveSource::Shared(srq) => (
                Receives::Shared(srq.object().srqn),
                Some(Rc::clone(srq.object())),
                0,
            ),
            ReceiveSource::Own { depth, max_sge } => {
                (Receives::Own(RqSize { depth, max_sge }), None, max_sge)
            }
        };
        let request = QpRequest {
            pd: pd.pdn,
            send_cq: send_cq.cqn,
            recv_cq: recv_cq.cqn,
            receives,
            service: T::SERVICE,
            config,
        };
        let parts = control.queues().create_qp(&request)?;
        let object = QpObject {
            qpn: parts.qpn,
            send_cq: Rc::clone(send_cq),
            recv_cq: Rc::clone(recv_cq),
            _srq: srq,
            pd: Rc::clone(pd),
        };
        let doorbell = Doorbell::new(&parts.uar, parts.sq.record, control.hook().clone());
        let rq = parts.rq.map(|memory| ReceiveQueue::new(&memory, max_sge));
        let mut qp = Self {
            sq: SendQueue::new(&parts, doorbell),
            rq,
            state: QpState::Reset,
            transport,
            object,
        };
        qp.set_state(QpState::Reset);
        Ok(qp)
    }

    /// Returns the queue pair number, 24 bits.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.object.qpn
    }

    pub(crate) fn control(&self) -> &Control {
        &self.object.pd.control
    }

    /// Returns the state as far as this end knows it. An error is known once its completion was
    /// passed to [`complete`](Self::complete) or [`complete_receive`](Self::complete_receive).
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns the number of WQEBBs of the send queue, as the device created it.
    #[must_use]
    pub fn send_capacity(&self) -> usize {
        usize::from(self.sq.capacity())
    }

    /// Returns the maximum number of inline bytes of one operation, as the device created the queue
    /// pair.
    #[must_use]
    pub fn max_inline_data(&self) -> usize {
        self.sq.max_inline()
    }

    /// Returns the address that peers need to reach this queue pair.
    #[must_use]
    pub fn address(&self) -> QpAddress {
        self.control().address(self.qpn())
    }

    /// Returns whether operations of this queue pair may use `region`: both must belong to the same
    /// protection domain.
    #[must_use]
    pub fn may_use(&self, region: &Mr) -> bool {
        Rc::ptr_eq(&self.object.pd, region.pd())
    }

    pub(crate) fn pdn(&self) -> u32 {
        self.object.pd.pdn
    }

    /// Moves the queue pair from state `needs` to state `to`; `make` does the transition at the
    /// device. If the device refuses, the state is unchanged.
    pub(crate) fn transition(
        &mut self,
        needs: QpState,
        to: QpState,
        make: impl FnOnce(&Control, u32) -> Result<(), ConnectError>,
    ) -> Result<(), ConnectError> {
        if self.state != needs {
            return Err(ConnectError::WrongState {
                from: self.state,
                needs,
            });
        }
        self.set_state(to);
        make(self.control(), self.qpn()).inspect_err(|_| self.set_state(needs))
    }

    /// Moves the queue pair to the error state: every posted operation completes with
    /// [`Syndrome::WorkRequestFlushed`](crate::Syndrome::WorkRequestFlushed), and messages of peers
    /// are not received any more. Use this function for an orderly end. No transition leads out of
    /// the error state, so the next connection needs a new queue pair.
    pub fn fail(&mut self) {
        self.set_state(QpState::Error);
        self.control().fail_qp(self.qpn());
    }

    /// Puts an operation into the send queue: an [`RcOperation`] of a connection, an
    /// [`UdOperation`] of datagrams. [`complete`](Self::complete) returns `user` if the operation
    /// gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    #[doc(alias = "emit_wqe")]
    pub fn post<O: Operation>(
        &mut self,
        op: &O,
        flags: impl Into<Flags>,
        user: u64,
    ) -> Result<(), PostError>
    where
        T: Takes<O>,
    {
        self.sq
            .push(op, flags, user)
            .map_err(|error| self.refusal(error))
    }

    /// Like [`post`](Self::post) and [`ring`](Self::ring), in fewer instructions.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written, and the doorbell was not rung.
    #[inline(always)]
    pub fn post_and_ring<O: Operation>(
        &mut self,
        op: &O,
        flags: impl Into<Flags>,
        user: u64,
    ) -> Result<(), PostError>
    where
        T: Takes<O>,
    {
        self.sq
            .push_and_ring(op, flags, user)
            .map_err(|error| self.refusal(error))
    }

    /// Returns the reason why a post was refused. The error of a closed send queue does not state
    /// the reason, so the state is checked first.
    #[cold]
    fn refusal(&self, error: PostError) -> PostError {
        if self.state == QpState::ReadyToSend {
            error
        } else {
            PostError::WrongState(self.state)
        }
    }

    /// Sets the state. No other function changes the state, so the send queue is open only in
    /// `ReadyToSend`.
    pub(crate) fn set_state(&mut self, state: QpState) {
        self.state = state;
        self.sq.set_open(state == QpState::ReadyToSend);
    }

    /// Rings the doorbell for all operations posted since the last call: with the whole WQE through
    /// BlueFlame if there is only one and it has at most 256 bytes, else like
    /// [`ring_doorbell`](Self::ring_doorbell). On the software HCA, operations to a peer in shared
    /// memory have run when this returns, unless they must be retried or the
    /// [`Timing`](crate::Timing) delays them.
    #[inline(always)]
    pub fn ring(&mut self) {
        self.sq.ring();
    }

    /// Rings the doorbell with 8 bytes; the device reads the WQEs from memory.
    #[inline(always)]
    pub fn ring_doorbell(&mut self) {
        self.sq.ring_with(0);
    }

    /// Rings the doorbell with the whole last WQE through BlueFlame, even if several WQEs are new.
    /// If that WQE has more than 256 bytes, rings with its first 8 bytes.
    #[inline(always)]
    pub fn ring_doorbell_bf(&mut self) {
        self.sq.ring_with(self.sq.last_bytes());
    }

    /// Takes a completion of this queue pair from its send CQ: frees the WQE and all before it, and
    /// returns the `user` value of the operation. Returns `None` if the completion does not belong
    /// to this queue pair's sends, or if no such operation is outstanding. An error completion
    /// moves the state to [`QpState::Error`].
    #[inline(always)]
    #[doc(alias = "CompletionSource")]
    pub fn complete(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        if self.takes(cqe) {
            self.sq.complete(cqe.wqe_counter())
        } else {
            None
        }
    }

    /// Like [`complete`](Self::complete), but passes to `each` the `user` values of all operations
    /// that this completion finishes, unsignaled ones included, in posting order. Returns the
    /// number of these operations. All but the last have succeeded; the completion has the outcome
    /// of the last. If `each` panics, the remaining values are not passed.
    pub fn complete_each(&mut self, cqe: &Cqe<'_>, each: impl FnMut(u64)) -> usize {
        if self.takes(cqe) {
            self.sq.complete_each(cqe.wqe_counter(), each)
        } else {
            0
        }
    }

    /// Returns whether `cqe` is a completion of this queue pair's sends. An error completion of a
    /// send also moves the state to [`QpState::Error`].
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

    /// Posts one receive into `buffers`, in this order, to the queue pair's own receive queue.
    /// [`complete_receive`](Self::complete_receive) returns `user`. The device sees the receive at
    /// the next [`ring_receives`](Self::ring_receives).
    ///
    /// # Errors
    /// See [`PostReceiveError`]; nothing was posted.
    pub fn post_receive(&mut self, buffers: &[Sge], user: u64) -> Result<(), PostReceiveError> {
        if self.state == QpState::Reset {
            return Err(PostReceiveError::WrongState);
        }
        self.rq
            .as_mut()
            .ok_or(PostReceiveError::Shared)?
            .post(buffers, user)
    }

    /// Makes all posted receives visible to the device.
    pub fn ring_receives(&mut self) {
        if let Some(rq) = &mut self.rq {
            rq.ring();
            self.object.pd.control.receives_posted();
        }
    }

    /// Takes a completion of this queue pair's own receive queue: frees the receive and returns its
    /// `user` value. Returns `None` if the completion does not belong to this queue pair's
    /// receives. An error completion moves the state to [`QpState::Error`].
    pub fn complete_receive(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        if cqe.qpn() != self.qpn() {
            return None;
        }
        let wqe_counter = match cqe.opcode() {
            Some(
                CqeOpcode::ResponderWriteImm
                | CqeOpcode::ResponderSend
                | CqeOpcode::ResponderSendImm,
            ) => Some(cqe.wqe_counter()),
            Some(CqeOpcode::ResponderError) => {
                self.set_state(QpState::Error);
                None
            }
            _ => return None,
        };
        self.rq.as_mut()?.complete(wqe_counter)
    }

    /// Returns the number of receives that can be posted now; 0 with a shared receive queue.
    #[must_use]
    pub fn free_receives(&self) -> usize {
        self.rq.as_ref().map_or(0, ReceiveQueue::free)
    }
}
