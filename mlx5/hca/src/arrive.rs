//! The owner: turns the messages that peers left in its lanes into CQEs in its own completion queues.

use core::sync::atomic::{AtomicU32, Ordering};

use mlx5_wire::{CqeOpcode, ErrorCqe, ResponderCqe};
use shm::cache::prefetch;
use shm::ready::Lanes;

use super::atomics;
use super::compact;
use super::cq::SoftCq;
use super::faults::Injector;
use super::layout::{ATOMIC, GRH, LANE_SLOTS, Message, SOLICITED};
use super::queues::SoftQp;
use super::trace::What;
use super::{Hca, State};

/// Bytes of a cache line.
const LINE: u64 = 64;

/// The requester learns of its room once per quarter of the lane, and at least this often, in messages.
const CONSUMED_EVERY: u32 = 16;

/// One bounded pass over the lanes with traffic. Returns the number of messages taken.
#[inline(always)]
pub(crate) fn pass(hca: &Hca, state: &mut State) -> usize {
    let State { qps, cqs, hot, injector, .. } = state;
    let mut ready = super::objects::ready_words(&hca.memory);
    hot.pass(&mut ready, &mut Arrivals { hca, qps, cqs, injector }, || hca.clock.now_ns())
}

/// Everything in the lanes whose ready bits are set, in the order of the lanes. They stay armed, so that every message sets one.
#[cold]
pub(crate) fn exact_pass(hca: &Hca, state: &mut State) -> usize {
    let State { qps, cqs, injector, .. } = state;
    let ready = super::objects::ready_words(&hca.memory);
    let mut arrivals = Arrivals { hca, qps, cqs, injector };
    let mut taken = 0;
    ready.drain(|lane| {
        taken += arrivals.take::<true>(lane, LANE_SLOTS);
        if arrivals.is_ready(lane) {
            // It was passed over on purpose.
            ready.notify(lane);
        }
    });
    taken
}

/// Takes everything that is in one queue pair's lane: no more than it has slots, whatever the peer writes meanwhile.
pub(crate) fn drain(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) {
    let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else { return };
    for _ in 0..LANE_SLOTS {
        let Some(message) = qp.lane.pop() else { break };
        trace(hca, qp, &message);
        deliver(hca, qp, cq, &message, 0);
    }
    // L2
    hca.memory.qp(qp.index).told.consumed.store(qp.lane.position(), Ordering::Release);
}

pub(crate) struct Arrivals<'a> {
    pub(crate) hca: &'a Hca,
    pub(crate) qps: &'a mut [Option<Box<SoftQp>>],
    pub(crate) cqs: &'a mut [Option<SoftCq>],
    pub(crate) injector: &'a mut Option<Box<Injector>>,
}

impl Arrivals<'_> {
    /// Takes up to `budget` messages of a lane.
    #[inline(always)]
    fn take<const IS_EXACT: bool>(&mut self, lane: usize, budget: usize) -> usize {
        let Some(Some(qp)) = self.qps.get_mut(lane) else { return 0 };
        if self.injector.as_mut().is_some_and(|injector| injector.passes_over()) {
            // It counts as seen, so that the lane stays hot.
            return usize::from(qp.lane.is_ready());
        }
        let Some(Some(cq)) = self.cqs.get_mut(qp.recv_cq as usize) else { return 0 };
        let qp = &mut **qp;
        if cq.compresses() | qp.scatters {
            return compact::visit(self.hca, qp, cq, budget);
        }
        let mut taken = 0;
        while taken < budget {
            let Some(message) = qp.lane.pop() else {
                // The peer writes the payload before the message: its lines are fetched while the message's is waited for, and not after it.
                if taken == 0 {
                    prefetch(qp.next_payload as usize);
                    prefetch(qp.next_payload.wrapping_add(LINE) as usize);
                }
                break;
            };
            qp.next_payload = message.payload.wrapping_add(message.byte_count.into());
            if IS_EXACT {
                trace(self.hca, qp, &message);
            }
            deliver(self.hca, qp, cq, &message, 0);
            taken += 1;
            let told_every = (qp.lane_place.slots / 4).min(CONSUMED_EVERY);
            if qp.lane.position() & u64::from(told_every - 1) == 0 {
                // L2
                self.hca.memory.qp(lane).told.consumed.store(qp.lane.position(), Ordering::Release);
            }
        }
        taken
    }
}

impl Lanes for Arrivals<'_> {
    #[inline(always)]
    fn visit(&mut self, lane: usize, budget: usize) -> usize {
        self.take::<false>(lane, budget)
    }

    fn is_ready(&self, lane: usize) -> bool {
        matches!(self.qps.get(lane), Some(Some(qp)) if qp.lane.is_ready())
    }

    fn armed(&self, lane: usize) -> Option<&AtomicU32> {
        matches!(self.qps.get(lane), Some(Some(_))).then(|| &self.hca.memory.qp(lane).armed)
    }
}

/// Records an arrival.
pub(crate) fn trace(hca: &Hca, qp: &SoftQp, message: &Message) {
    if let Some(trace) = &hca.trace {
        let Message { byte_count, imm, wqe_index, opcode, flags, .. } = *message;
        let data = u64::from(imm) << 32 | u64::from(byte_count);
        trace.record(What::Arrived, qp.qpn, wqe_index, u64::from(opcode) << 8 | u64::from(flags), data);
    }
}

/// A message becomes a CQE.
#[inline(always)]
pub(crate) fn deliver(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: &Message, source_qpn: u32) {
    prefetch(message.payload as usize);
    let Some(opcode) = receive_opcode(message) else { return deliver_other(hca, qp, cq, message) };
    // The peer wrote this. A wrong opcode or index makes no CQE: the connection ends instead.
    if !qp.taken.account(message.wqe_index, message.pop) {
        return qp.fail(hca);
    }
    let cqe = ResponderCqe {
        qpn: qp.qpn,
        srqn: qp.user_index,
        imm: message.imm,
        byte_count: message.byte_count,
        wqe_counter: qp.receives.wqe_counter(message.wqe_index, message.pop),
        source_qpn,
        grh: message.flags & GRH != 0,
    };
    if cq.write_receive(&cqe, opcode, message.flags & SOLICITED != 0).is_err() {
        qp.fail(hca);
    }
}

/// The CQE opcode of a message that arrived well.
#[inline(always)]
pub(crate) fn receive_opcode(message: &Message) -> Option<CqeOpcode> {
    const WRITE_IMM: u8 = CqeOpcode::ResponderWriteImm as u8;
    const SEND: u8 = CqeOpcode::ResponderSend as u8;
    const SEND_IMM: u8 = CqeOpcode::ResponderSendImm as u8;
    match message.opcode {
        WRITE_IMM => Some(CqeOpcode::ResponderWriteImm),
        SEND => Some(CqeOpcode::ResponderSend),
        SEND_IMM => Some(CqeOpcode::ResponderSendImm),
        _ => None,
    }
}

/// An atomic that is to be done here; or the receive failed, and the queue pair with it; or the peer wrote what is no message.
#[cold]
fn deliver_other(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: &Message) {
    if message.opcode == ATOMIC {
        qp.answered = qp.answered.wrapping_add(1);
        return atomics::answer(hca, qp, message.imm);
    }
    if message.opcode != CqeOpcode::ResponderError as u8 || !qp.taken.account(message.wqe_index, message.pop) {
        return qp.fail(hca);
    }
    let [raw_syndrome, vendor_syndrome, ..] = message.imm.to_le_bytes();
    let wqe_counter = qp.receives.wqe_counter(message.wqe_index, message.pop);
    let cqe = ErrorCqe { raw_syndrome, vendor_syndrome, wqe_opcode: 0, qpn: qp.qpn, wqe_counter, user_index: qp.user_index };
    // An overrun CQ tells nobody anything more.
    let _ = cq.write(cqe.emit(), CqeOpcode::ResponderError);
    qp.fail(hca);
}
