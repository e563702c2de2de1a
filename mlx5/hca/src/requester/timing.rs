//! Timing: WQEs are executed at once, after a constant or random delay, or at the times of a model
//! of the network. A WQE that is executed later is gathered later. So a source buffer that is
//! reused too early is sent wrongly, as by a NIC.

use std::sync::Arc;

use mlx5_wire::{FenceMode, Opcode, Piece};

use crate::deferred::Deferred;
use crate::network::{Network, Request, Times};
use crate::queues::in_flight::Announced;
use crate::queues::qp::{SoftQp, blocks};
use crate::random::Random;

/// The time at which a software HCA executes the WQEs of a doorbell, on the device's
/// [`Clock`](crate::Clock).
///
/// Unless the timing is immediate, the requester's device gathers, executes and delivers a WQE when
/// one of its empty CQs is polled, or in [`Hca::empty_poll`](crate::Hca::empty_poll). The
/// receiver's CQE is written in a poll of the receiver. So both ends must be polled.
#[derive(Clone, Debug, Default)]
pub enum Timing {
    /// WQEs are executed in the doorbell.
    #[default]
    Immediate,
    /// WQEs are executed after this delay, in the first poll of the device from then on. A fabric
    /// of one host takes 2 to 6 us.
    Delay {
        /// The delay, in ns.
        ns: u64,
    },
    /// Each WQE is executed after a random delay, but in the order of its queue, and its completion
    /// is visible after a further random delay.
    Random {
        /// The shortest and the longest delay, in ns.
        ns: (u64, u64),
        /// Seed of the delays. With the same seed, the WQE at the same place of a queue pair has
        /// the same delays.
        seed: u64,
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
            Self::Random { ns, seed } => {
                while counter != producer {
                    let place = (qp.index as u64) << 16 | u64::from(counter);
                    let mut random = Random::new(seed ^ place);
                    let mut delay_ns = || ns.0 + random.below((ns.1 - ns.0).max(1));
                    let (at_ns, acknowledge_ns) = (now_ns + delay_ns(), delay_ns());
                    let at_ns = at_ns.max(qp.in_flight.last_effect_ns);
                    qp.in_flight.last_effect_ns = at_ns;
                    counter = next(qp, counter, producer);
                    qp.in_flight.announced.push_back(Announced {
                        at_ns,
                        end: counter,
                        acknowledge_ns,
                    });
                    deferred.schedule(at_ns, qp.qpn);
                }
            }
            Self::Model(model) => {
                while counter != producer {
                    let ctrl = qp.sq.ctrl(counter);
                    let opcode = Opcode::from_repr(ctrl.opcode());
                    let (last_ns, is_nop) =
                        (qp.in_flight.last_effect_ns, opcode == Some(Opcode::Nop));
                    let has_response = opcode.is_some_and(Opcode::has_result);
                    let times = if is_nop {
                        // The NIC sends nothing for a NOP.
                        let ns = last_ns.max(now_ns);
                        Times {
                            effect_ns: ns,
                            acknowledged_ns: ns,
                        }
                    } else {
                        model.times(&request(qp, (lid, counter), now_ns, opcode))
                    };
                    counter = next(qp, counter, producer);
                    sends += u64::from(!is_nop && !has_response);
                    qp.in_flight.last_effect_ns = times.effect_ns;
                    if has_response {
                        qp.in_flight.last_response_ns = times.acknowledged_ns;
                    }
                    qp.in_flight.announced.push_back(Announced {
                        at_ns: times.effect_ns,
                        end: counter,
                        acknowledge_ns: times.acknowledged_ns - times.effect_ns,
                    });
                    deferred.schedule(times.effect_ns, qp.qpn);
                }
            }
        }
        sends
    }
}

/// Returns the counter after the WQE at `counter`, at most `producer`.
fn next(qp: &SoftQp, counter: u16, producer: u16) -> u16 {
    let outstanding = producer.wrapping_sub(counter);
    counter.wrapping_add(blocks(qp.sq.ctrl(counter).ds()).clamp(1, outstanding))
}

/// Describes the WQE at `counter`, whose doorbell rang at `now_ns`, to a model of the network.
fn request(
    qp: &SoftQp,
    (lid, counter): (u16, u16),
    now_ns: u64,
    opcode: Option<Opcode>,
) -> Request<'_> {
    let bytes = qp.with_wqe(counter, |wqe| {
        wqe.map_or(0, |wqe| wqe.pieces().map(Piece::len).sum())
    });
    let has_response = opcode.is_some_and(Opcode::has_result);
    let takes_receive = !qp.is_datagram() && opcode.is_some_and(Opcode::takes_receive);
    let is_fenced = qp.sq.ctrl(counter).fence() != FenceMode::None;
    let remote = qp.remote();
    Request {
        posted_ns: if is_fenced {
            now_ns.max(qp.in_flight.last_response_ns)
        } else {
            now_ns
        },
        after_ns: qp.in_flight.last_effect_ns,
        own: (lid, qp.qpn),
        peer: remote.map(|remote| (remote.peer.lid, remote.qpn)),
        bytes: if has_response { 0 } else { bytes },
        response: has_response.then_some(bytes),
        receives: remote
            .filter(|_| takes_receive)
            .map(|remote| (remote.rqn, &remote.receives)),
    }
}
