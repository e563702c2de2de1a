//! Timing: WQEs are executed at once, after a constant delay, or at the times of a model of the
//! network. A WQE that is executed later is gathered later. So a source buffer that is reused too
//! early is sent wrongly, as by a NIC.

use std::sync::Arc;

use mlx5_wire::{FenceMode, Opcode, Piece, Wqe};

use crate::deferred::Deferred;
use crate::network::{Network, Request, Times};
use crate::queues::in_flight::{Announced, InFlight};
use crate::queues::qp::{SoftQp, blocks};

/// The time at which a software HCA executes the WQEs of a doorbell, on the device's
/// [`Clock`](crate::Clock).
///
/// In every kind but the first, the requester's device gathers, executes and delivers a WQE when
/// one of its empty CQs is polled, or in [`Hca::empty_poll`](crate::Hca::empty_poll). The
/// receiver's CQE is written in a poll of the receiver. So both ends must be polled.
#[derive(Clone, Debug, Default)]
pub enum Timing {
    /// WQEs are executed in the doorbell.
    #[default]
    Immediate,
    /// WQEs are executed after this delay, in the first progress of the device from then on. A
    /// fabric of one host takes 2 to 6 us.
    Delay {
        /// Nanoseconds.
        ns: u64,
    },
    /// WQEs are executed at the times of a model of NICs. For virtual time, in one thread.
    Model(Arc<dyn Network>),
}

impl Timing {
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(self, Self::Immediate)
    }

    pub(crate) fn is_model(&self) -> bool {
        matches!(self, Self::Model(_))
    }

    /// Schedules the WQEs that a doorbell of `qp` announced. `lid` is the LID of this device.
    /// Returns the number of WRITEs and SENDs among them, or 0 without a model.
    #[cold]
    pub(crate) fn announce(
        &self,
        qp: &mut SoftQp,
        lid: u16,
        now_ns: u64,
        deferred: &mut Deferred,
    ) -> u64 {
        let mut sends = 0;
        let producer = qp.sq.producer();
        let mut counter = qp.announced();
        match self {
            Self::Immediate => {}
            Self::Delay { ns } => {
                let at_ns = now_ns.saturating_add(*ns);
                qp.in_flight.announced.push_back(Announced {
                    at_ns,
                    end: producer,
                    acknowledge_ns: 0,
                });
                deferred.schedule(at_ns, qp.qpn);
            }
            Self::Model(model) => {
                while counter != producer {
                    let load = Load::of(qp, counter, producer.wrapping_sub(counter));
                    counter = counter.wrapping_add(load.blocks);
                    sends += u64::from(!load.is_nop && load.response.is_none());
                    let Times {
                        effect_ns,
                        acknowledged_ns,
                    } = if load.is_nop {
                        let ns = qp.in_flight.last_effect_ns.max(now_ns);
                        Times {
                            effect_ns: ns,
                            acknowledged_ns: ns,
                        }
                    } else {
                        model.times(&load.request(qp, lid, now_ns))
                    };
                    qp.in_flight.last_effect_ns = effect_ns;
                    if load.response.is_some() {
                        qp.in_flight.last_response_ns = acknowledged_ns;
                    }
                    qp.in_flight.announced.push_back(Announced {
                        at_ns: effect_ns,
                        end: counter,
                        acknowledge_ns: acknowledged_ns - effect_ns,
                    });
                    deferred.schedule(effect_ns, qp.qpn);
                }
            }
        }
        sends
    }
}

/// The weight of one WQE.
struct Load {
    blocks: u16,
    /// Number of bytes sent.
    bytes: u64,
    /// Number of bytes returned.
    response: Option<u64>,
    takes_receive: bool,
    is_fenced: bool,
    /// Whether it is a NOP, which never leaves the NIC.
    is_nop: bool,
}

impl Load {
    /// Makes the load of the WQE at `counter`, which has at most `outstanding` WQEBBs.
    fn of(qp: &SoftQp, counter: u16, outstanding: u16) -> Self {
        let ctrl = qp.sq.ctrl(counter);
        let (opcode, bytes) = qp.with_wqe(counter, |wqe| {
            let bytes = |wqe: &Wqe<'_>| wqe.pieces().map(Piece::len).sum();
            (
                Opcode::from_repr(ctrl.opcode()),
                wqe.as_ref().map_or(0, bytes),
            )
        });
        let has_response = opcode.is_some_and(Opcode::has_result);
        Self {
            blocks: blocks(ctrl.ds()).clamp(1, outstanding.max(1)),
            bytes: if has_response { 0 } else { bytes },
            response: has_response.then_some(bytes),
            takes_receive: !qp.is_datagram() && opcode.is_some_and(Opcode::takes_receive),
            is_fenced: ctrl.fence() != FenceMode::None,
            is_nop: opcode == Some(Opcode::Nop),
        }
    }

    fn request<'a>(&self, qp: &'a SoftQp, lid: u16, now_ns: u64) -> Request<'a> {
        let InFlight {
            last_effect_ns,
            last_response_ns,
            ..
        } = qp.in_flight;
        let remote = qp.remote();
        Request {
            posted_ns: if self.is_fenced {
                now_ns.max(last_response_ns)
            } else {
                now_ns
            },
            after_ns: last_effect_ns,
            own: (lid, qp.qpn),
            peer: remote.map(|r| (r.peer.lid, r.qpn)),
            bytes: self.bytes,
            response: self.response,
            receives: remote
                .filter(|_| self.takes_receive)
                .map(|r| (r.rqn, &r.receives)),
        }
    }
}
