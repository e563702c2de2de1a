//! Delivery of a message, or a datagram, as a CQE.

use mlx5_wire::{CqeOpcode, ErrorCqe, ResponderCqe};
use shm::cache::prefetch;

use super::Hca;
use super::atomics;
use super::cq::SoftCq;
use super::layout::{ATOMIC, GRH, Message, SOLICITED};
use super::queues::SoftQp;
use super::trace::What;

/// Records an arrival.
pub(crate) fn trace(hca: &Hca, qp: &SoftQp, message: &Message) {
    if let Some(trace) = &hca.trace {
        let Message { byte_count, imm, taking, opcode, flags, .. } = *message;
        let data = u64::from(imm) << 32 | u64::from(byte_count);
        trace.record(What::Arrived, qp.qpn, taking.index(), u64::from(opcode) << 8 | u64::from(flags), data);
    }
}

/// The sender of a message.
#[derive(Clone, Copy)]
pub(crate) enum Sender {
    /// The peer that the queue pair is connected to.
    Connected,
    /// The sending queue pair of a datagram.
    Datagram(u32),
}

/// A message becomes a CQE.
#[inline(always)]
pub(crate) fn deliver(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: Message, sender: Sender) {
    prefetch(message.payload as usize);
    let Some(opcode) = receive_opcode(&message) else {
        // A copy, so that the message itself need not be in memory.
        let copy = message;
        return deliver_other(hca, qp, cq, &copy);
    };
    // The peer wrote this. A wrong opcode or index makes no CQE: the connection ends instead.
    if !qp.taken.account(message.taking) {
        return qp.break_down(hca);
    }
    let (source_qpn, grh) = match sender {
        Sender::Connected => (0, false),
        Sender::Datagram(qpn) => (qpn, message.flags & GRH != 0),
    };
    let cqe = ResponderCqe {
        qpn: qp.qpn,
        srqn: qp.user_index,
        imm: message.imm,
        byte_count: message.byte_count,
        wqe_counter: qp.receives.wqe_counter(message.taking),
        source_qpn,
        grh,
    };
    if let Err(overrun) = cq.write_receive(&cqe, opcode, message.flags & SOLICITED != 0) {
        qp.overran(hca, qp.recv_cq, overrun);
    }
}

/// Returns the CQE opcode of a message that arrived well.
#[inline(always)]
pub(crate) fn receive_opcode(message: &Message) -> Option<CqeOpcode> {
    const WRITE_IMM: u32 = CqeOpcode::ResponderWriteImm as u32;
    const SEND: u32 = CqeOpcode::ResponderSend as u32;
    const SEND_IMM: u32 = CqeOpcode::ResponderSendImm as u32;
    match message.opcode {
        WRITE_IMM => Some(CqeOpcode::ResponderWriteImm),
        SEND => Some(CqeOpcode::ResponderSend),
        SEND_IMM => Some(CqeOpcode::ResponderSendImm),
        _ => None,
    }
}

/// An atomic that is to be done here; or the receive failed, and the queue pair with it; or the peer wrote what is no message.
#[cold]
#[inline(never)]
fn deliver_other(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: &Message) {
    if message.opcode == ATOMIC {
        qp.answered = qp.answered.wrapping_add(1);
        return atomics::answer(hca, qp, message.imm);
    }
    if message.opcode != CqeOpcode::ResponderError as u32 || !qp.taken.account(message.taking) {
        return qp.break_down(hca);
    }
    let [raw_syndrome, vendor_syndrome, ..] = message.imm.to_le_bytes();
    let wqe_counter = qp.receives.wqe_counter(message.taking);
    let cqe = ErrorCqe { raw_syndrome, vendor_syndrome, wqe_opcode: 0, qpn: qp.qpn, wqe_counter, user_index: qp.user_index };
    if let Err(overrun) = cq.write(cqe.emit(), CqeOpcode::ResponderError) {
        qp.overran(hca, qp.recv_cq, overrun);
    }
    qp.fail(hca);
}
