//! The loop that takes WQEs off a send queue, in order. All work on shared memory happens in the
//! caller's thread, without help from the target's CPU; only atomics on memory that this process
//! has not mapped are executed by the target. A WQE that cannot run yet stops only its own send
//! queue, and is tried again on a later empty poll.

use crate::queues::qp::{Mode, Transport, blocks};
use crate::requester::complete::Completions;
use crate::requester::operations::execute;
use crate::requester::wqe::{check_place, exceptional_outcome, wait};
use crate::shared::remote::Remote;
use crate::types::outcome::{End, Outcome};
use crate::{Hca, Queues, State};

/// Takes the WQEs up to the limit off a send queue. Each WQE is executed and completed, or posted
/// to its connection by packets.
pub(crate) fn take_wqes(hca: &Hca, state: &mut State, index: usize) {
    let State {
        queues: Queues { qps, cqs, injector },
        deferred,
        links,
        wire,
        violations,
        touched,
        ..
    } = state;
    let Some(Some(qp)) = qps.get_mut(index) else {
        return;
    };
    let qp = &mut **qp;
    let granted = qp.remote().map_or(0, Remote::granted);
    while qp.sq_consumer != qp.sq_limit {
        let counter = qp.sq_consumer;
        let ctrl = qp.sq.ctrl(counter);
        if wire.holds_back(qp, ctrl) {
            break;
        }
        let exceptional = if qp.mode >= Mode::Exceptional {
            exceptional_outcome(hca, qp, injector, ctrl)
        } else {
            None
        };
        let outcome = match (exceptional, check_place(qp, ctrl)) {
            (Some(outcome), _) => outcome,
            (None, Ok(())) => qp.sq.with_bytes(counter, ctrl.ds(), |bytes| {
                execute(hca, (links, wire), qp, ctrl, bytes, granted)
            }),
            (None, Err(what)) => what.into(),
        };
        let end = match outcome {
            Outcome::Done(byte_count) => End::Done(byte_count),
            Outcome::Posted(byte_count) => End::Message(byte_count),
            Outcome::Fail(syndrome, vendor) => End::Failed(syndrome, vendor),
            Outcome::Wait(reason) => {
                let fault_ns = injector.as_ref().map_or(0, |i| i.delay_ns());
                match wait(hca, qp, reason, fault_ns) {
                    Ok(at_ns) => {
                        deferred.schedule(at_ns, qp.qpn);
                        break;
                    }
                    Err(syndrome) => End::Failed(syndrome, 0),
                }
            }
        };
        qp.waiting = None;
        // A malformed WQE may claim to be longer than the posted WQEBBs.
        let outstanding = qp.sq_limit.wrapping_sub(counter);
        qp.sq_consumer = counter.wrapping_add(blocks(ctrl.ds()).max(1).min(outstanding));
        if !wire.takes(qp, counter, end) {
            Completions {
                hca,
                cqs,
                deferred,
                violations,
                touched,
            }
            .complete(qp, ctrl, end);
        }
    }
    match &mut qp.transport {
        Transport::Connected(remote) => remote.announce(hca.barrier),
        Transport::Datagram { .. } => wire.flush(),
        _ => {}
    }
}
