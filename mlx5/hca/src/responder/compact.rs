//! Two optional savings on receive completions: a compressed session for similar messages, and
//! short received data inside the CQE.

use core::sync::atomic::Ordering;

use mlx5_wire::{Access, CQE_BYTES, CqeOpcode, MiniCqe, OP_OWN_OFFSET, ResponderCqe};

use crate::Hca;
use crate::queues::cq::SoftCq;
use crate::queues::qp::SoftQp;
use crate::responder::deliver::{Sender, arrived, deliver, trace};
use crate::shared::layout::Message;
use crate::shared::memory::{Keyed, Span};

/// Maximum number of completions in a session that this device writes.
const LONGEST: usize = 64;
/// Byte that fills, in strict mode, a receive buffer whose data went into the CQE, because a NIC
/// does not write it.
const UNWRITTEN: u8 = 0xdb;

/// Takes up to `budget` messages of a lane. Consecutive messages become a session if they have the
/// same opcode and the same immediate, and their receives are neighbours.
#[cold]
pub(crate) fn visit(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, budget: usize) -> usize {
    let mut run = [Message::default(); LONGEST];
    let (mut length, mut taken) = (0, 0);
    while taken < budget {
        let Some(message) = qp.lane.pop() else { break };
        taken += 1;
        trace(hca, qp, &message);
        let is_next = length > 0
            && length < LONGEST
            && cq.compresses()
            && follows(&run[length - 1], &message)
            && !qp.scatters;
        if !is_next {
            complete(hca, qp, cq, &run[..length]);
            length = 0;
        }
        run[length] = message;
        length += 1;
    }
    complete(hca, qp, cq, &run[..length]);
    // L2 of docs/shm-protocols.md: the position is stored after the messages were copied out.
    qp.entry()
        .acks
        .consumed
        .store(qp.lane.position(), Ordering::Release);
    taken
}

fn follows(last: &Message, message: &Message) -> bool {
    message.taking.index() == last.taking.index().wrapping_add(1)
        && message.taking.index() != 0
        && (message.op_own, message.imm) == (last.op_own, last.imm)
        && arrived(message).is_some()
}

fn complete(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, run: &[Message]) {
    match run {
        [] => {}
        [only] if qp.scatters => scattered(hca, qp, cq, only),
        [only] => deliver(hca, qp, cq, *only, Sender::Connected),
        [first, ..] => {
            let Some(opcode) = arrived(first).and_then(CqeOpcode::from_op_own) else {
                return qp.break_down(hca);
            };
            if !run.iter().all(|message| qp.taken.account(message.taking)) {
                return qp.break_down(hca);
            }
            let mut minis = [MiniCqe {
                word: 0,
                byte_count: 0,
            }; LONGEST];
            for (mini, message) in minis.iter_mut().zip(run) {
                mini.byte_count = message.byte_count;
            }
            match cq.write_session(cqe(qp, first), opcode, &minis[..run.len()]) {
                Ok(()) => hca.compressed.set(hca.compressed.get() + run.len() as u64),
                Err(overrun) => qp.overran(hca, qp.recv_cq, overrun),
            }
        }
    }
}

fn cqe(qp: &SoftQp, message: &Message) -> [u8; CQE_BYTES] {
    let &Message {
        imm,
        byte_count,
        taking,
        ..
    } = message;
    let wqe_counter = qp.receives.wqe_counter(taking);
    let cqe = ResponderCqe {
        qpn: qp.qpn,
        srqn: qp.user_index,
        imm,
        byte_count,
        wqe_counter,
        ..ResponderCqe::default()
    };
    let mut bytes = cqe.emit();
    bytes[OP_OWN_OFFSET] = message.op_own as u8;
    bytes
}

/// Writes the CQE of a message, with its data inside if the data are short. The sender has put the
/// data into the first buffer of the receive, because only this process may write its completion
/// queue.
fn scattered(hca: &Hca, qp: &mut SoftQp, cq: &mut SoftCq, message: &Message) {
    let length = message.byte_count as usize;
    let opcode = arrived(message)
        .and_then(CqeOpcode::from_op_own)
        .filter(|opcode| *opcode != CqeOpcode::ResponderWriteImm);
    let Some(opcode) = opcode.filter(|_| length > 0 && length <= cq.scatter_room()) else {
        return deliver(hca, qp, cq, *message, Sender::Connected);
    };
    let first = qp
        .receives
        .segments(message.taking.index())
        .next()
        .filter(|segment| segment.byte_count() as usize >= length);
    let bytes = first.map(|first| Keyed::new(first.lkey(), first.addr(), length as u64));
    let (access, pd) = (Access::LOCAL_WRITE, qp.receives.pd);
    let place = bytes.and_then(|bytes| hca.memory.resolve(bytes, access, pd).ok());
    // Data stay in the buffers if there are several buffers, or if this device did not allocate the
    // memory.
    let Some(Span::Mapped(place)) = place else {
        return deliver(hca, qp, cq, *message, Sender::Connected);
    };
    if !qp.taken.account(message.taking) {
        return qp.break_down(hca);
    }
    let mut data = [0; CQE_BYTES];
    // SAFETY: `place` was resolved for `length` bytes of this device's memory, to which no
    // reference exists. `data` has room for `length` bytes, at most 64.
    unsafe {
        place
            .as_ptr()
            .copy_to_nonoverlapping(data.as_mut_ptr(), length);
        if hca.strict {
            place.as_ptr().write_bytes(UNWRITTEN, length);
        }
    }
    qp.wrote_receive(
        hca,
        cq.write_scattered(cqe(qp, message), opcode, &data[..length]),
    );
}
