//! Delivery of a message, or a datagram, as a CQE.

use core::sync::atomic::AtomicU64;

use copyrpc_shm::cache::prefetch;
use mlx5_wire::{CqeOpcode, ErrorCqe, ResponderCqe};

use crate::Hca;
use crate::debug::trace::What;
use crate::queues::cq::SoftCq;
use crate::queues::qp::SoftQp;
use crate::queues::rqs::RqSlot;
use crate::shared::atomics;
use crate::shared::layout::{ATOMIC, Message, REFUSED, Taking};

pub(crate) fn trace(hca: &Hca, qp: &SoftQp, message: &Message) {
    if let Some(trace) = &hca.trace {
        let Message {
            byte_count,
            imm,
            taking,
            op_own,
            ..
        } = *message;
        let data = u64::from(imm) << 32 | u64::from(byte_count);
        trace.record(What::Arrived, qp.qpn, taking.index(), op_own, data);
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Sender {
    /// The peer to which the queue pair is connected.
    Connected,
    /// The sending queue pair of a datagram, and its LID. The receive may begin with a GRH, or with
    /// an IPv4 header at the end of the GRH's place.
    Datagram {
        qpn: u32,
        slid: u16,
        grh: bool,
        is_ipv4: bool,
    },
}

#[inline(always)]
pub(crate) fn deliver(
    hca: &Hca,
    qp: &mut SoftQp,
    cq: &mut SoftCq,
    message: Message,
    sender: Sender,
) {
    prefetch(message.payload as usize);
    // The closure passes a pointer to a copy, so that the message itself can stay in registers.
    let other = |qp, cq| {
        let copy = message;
        deliver_other(hca, qp, cq, &copy, sender);
    };
    let Some(op_own) = arrived(&message) else {
        return other(qp, cq);
    };
    let Some(entry) = cq.known_free() else {
        return other(qp, cq);
    };
    // The peer wrote the message. A wrong opcode or index ends the connection, without a CQE.
    if !qp.taken.account(message.taking) {
        return qp.break_down(hca);
    }
    let (source_qpn, slid, grh, sl) = match sender {
        Sender::Connected => (0, 0, false, 0),
        Sender::Datagram {
            qpn,
            slid,
            grh,
            is_ipv4,
        } => (qpn, slid, grh, u8::from(is_ipv4) << 1),
    };
    let cqe = ResponderCqe {
        qpn: qp.qpn,
        srqn: qp.user_index,
        imm: message.imm,
        byte_count: message.byte_count,
        wqe_counter: qp.receives.wqe_counter(message.taking),
        source_qpn,
        slid,
        grh,
        sl,
    };
    entry.write_receive(&cqe, op_own);
}

/// Returns the op_own of a message that arrived without error.
#[inline(always)]
pub(crate) fn arrived(message: &Message) -> Option<u8> {
    // The three opcodes are 1, 2 and 3, so at least one of two bits is set.
    const WRITE_IMM: u64 = Message::op_own(CqeOpcode::ResponderWriteImm, false);
    const SEND: u64 = Message::op_own(CqeOpcode::ResponderSend, false);
    const ALL: u64 = Message::op_own(CqeOpcode::ResponderSendImm, true);
    const {
        assert!(
            WRITE_IMM.count_ones() == 1
                && SEND.count_ones() == 1
                && ALL == WRITE_IMM | SEND | Message::op_own(CqeOpcode::Requester, true)
        )
    };
    let is_one = message.op_own & !ALL == 0 && message.op_own & (WRITE_IMM | SEND) != 0;
    is_one.then_some(message.op_own as u8)
}

/// Handles the messages that [`deliver`] does not handle itself: an arrival without error, if no
/// entry is known to be free for its CQE; a request for an atomic; a refused request or a failed
/// receive, which fail the queue pair. Any message that is none of these is malformed.
#[cold]
#[inline(never)]
fn deliver_other(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: &Message, sender: Sender) {
    if arrived(message).is_some() {
        if !qp.taken.account(message.taking) {
            return qp.break_down(hca);
        }
        return match cq.find_room(1) {
            Ok(()) => deliver(hca, qp, cq, *message, sender),
            Err(overrun) => qp.overran(hca, qp.recv_cq, overrun),
        };
    }
    if message.op_own == ATOMIC {
        qp.answered = qp.answered.wrapping_add(1);
        return atomics::answer(&hca.memory, qp.index, message.imm, (qp.access, qp.pd));
    }
    let [raw_syndrome, vendor_syndrome, ..] = message.imm.to_le_bytes();
    if message.op_own == REFUSED {
        qp.answered = qp.answered.wrapping_add(1);
        return qp.refused(hca, raw_syndrome);
    }
    if message.op_own != Message::op_own(CqeOpcode::ResponderError, false) {
        return qp.break_down(hca);
    }
    fail_receive(hca, qp, cq, message.taking, (raw_syndrome, vendor_syndrome));
    qp.fail(hca);
}

/// Takes the next receive of a queue pair whose receives this device takes, and not a peer.
pub(crate) fn take_own_receive(qp: &SoftQp, rqs: &mut [Option<RqSlot>]) -> Option<Taking> {
    let pop = || qp.receives.pop(&AtomicU64::new(0));
    // The driver may have posted, in its own memory, a receive that is not copied yet.
    let refreshed = || {
        rqs.get_mut(qp.rqn as usize)
            .and_then(Option::as_mut)
            .is_some_and(RqSlot::refresh)
            .then(pop)
            .flatten()
    };
    pop().or_else(refreshed)
}

/// Accounts for a receive that failed, and writes its CQE with a syndrome and a vendor syndrome.
pub(crate) fn fail_receive(
    hca: &Hca,
    qp: &mut SoftQp,
    cq: &mut SoftCq,
    taking: Taking,
    (raw_syndrome, vendor_syndrome): (u8, u8),
) {
    if !qp.taken.account(taking) {
        return qp.break_down(hca);
    }
    let wqe_counter = qp.receives.wqe_counter(taking);
    let cqe = ErrorCqe {
        raw_syndrome,
        vendor_syndrome,
        wqe_opcode: 0,
        qpn: qp.qpn,
        wqe_counter,
        user_index: qp.user_index,
    };
    qp.wrote_receive(hca, cq.write(cqe.emit(), CqeOpcode::ResponderError));
}
