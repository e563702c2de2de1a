//! The packets that arrive: the requester of their connection takes responses, its responder
//! executes requests.

use std::net::SocketAddr;

use mlx5_wire::roce::{
    AtomicEth, Headers, Nak, Opcode as PacketKind, Reth, Syndrome as AckSyndrome, Transport,
};
use mlx5_wire::{Access, AtomicSegment, CqeOpcode, Syndrome};

use super::Wire;
use super::connection::Connection;
use super::requester::Taken;
use super::responder::{Completion, Target};
use super::send_queue::{complete, go_on, land};
use crate::queues::cq::SoftCq;
use crate::queues::data::scatter;
use crate::queues::qp::SoftQp;
use crate::queues::rqs::RqSlot;
use crate::responder::datagrams;
use crate::responder::deliver::{Sender, deliver, fail_receive, take_own_receive, trace};
use crate::shared::atomics;
use crate::shared::layout::{Message, Taking, qp_index};
use crate::types::outcome::refusal_of_receive;
use crate::{Hca, Queues, State};

/// Takes the packets that have arrived, and runs the queue pairs that they concern. Returns whether
/// there were some.
#[cold]
pub(crate) fn poll(hca: &Hca, state: &mut State) -> bool {
    let Some(Wire { port, .. }) = state.wire.as_deref_mut() else {
        return false;
    };
    port.flush();
    let (packets, count) = port.receive();
    for nth in 0..count {
        let Some(Wire { port, .. }) = state.wire.as_deref_mut() else {
            break;
        };
        let Some((from, bytes)) = packets.get(nth) else {
            port.counters.strangers += 1;
            continue;
        };
        if let Some((headers, payload)) = port.decode(&from, bytes) {
            take(hca, state, &from, &headers, payload);
        }
    }
    let Some(Wire { port, .. }) = state.wire.as_deref_mut() else {
        return false;
    };
    port.give_back(packets);
    let mut active = core::mem::take(&mut port.active);
    for index in active.drain(..) {
        let parts = Wire::parts(&mut state.wire, &mut state.queues.qps, index);
        if let Some((_, connection, _)) = parts {
            connection.is_active = false;
        }
        // The program may post an answer now, with which an ACK can leave: at the doorbell, or at
        // the next poll.
        go_on(hca, state, index);
    }
    if let Some(Wire { port, .. }) = state.wire.as_deref_mut() {
        active.append(&mut port.active);
        port.active = active;
    }
    count > 0
}

/// Handles a packet.
fn take(hca: &Hca, state: &mut State, from: &SocketAddr, headers: &Headers, payload: &[u8]) {
    let index = qp_index(headers.bth.qpn);
    if headers.opcode.transport == Transport::Ud {
        return datagrams::take_packet(hca, state, from, headers, payload);
    }
    let State {
        queues: Queues { qps, cqs, .. },
        wire,
        rqs,
        ..
    } = state;
    let is_response = headers.opcode.opcode.is_response();
    let parts = Wire::parts(wire, qps, index).filter(|(qp, connection, _)| {
        qp.qpn == headers.bth.qpn
            && headers.opcode.transport == connection.requester.options().transport()
            && connection.is_from_peer(from)
    });
    let Some((qp, connection, port)) = parts else {
        if let Some(Wire { port, .. }) = wire.as_deref_mut() {
            if is_response || !port.answer_for_gone(headers.bth.qpn, from) {
                port.counters.strangers += 1;
            }
        }
        return;
    };
    if qp.has_failed() {
        if let Some(answer) = connection.last_answer().filter(|_| !is_response) {
            port.answer(&connection.peer, &answer);
        }
        return;
    }
    let before = connection.progress();
    connection.activate(port, index);
    if is_response {
        connection.take_response(hca, qp, headers, payload);
    } else {
        if headers.bth.psn != connection.responder.expected() {
            port.counters.out_of_sequence += 1;
        }
        if let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) {
            connection.take_request(hca, (qp, cq, rqs), headers, payload);
        }
    }
    if before != connection.progress() {
        connection.learn_source(from);
    }
    if is_response {
        complete(hca, state, index);
    }
}

impl Connection {
    /// Handles a response of the peer.
    fn take_response(&mut self, hca: &Hca, qp: &SoftQp, headers: &Headers, payload: &[u8]) {
        if matches!(headers.aeth.syndrome, AckSyndrome::RnrNak { .. }) {
            hca.rnr_naks.set(hca.rnr_naks.get() + 1);
        }
        let now_ns = hca.clock.now_ns();
        let original;
        let (message, offset, bytes) =
            match self.requester.on_response(headers, payload.len(), now_ns) {
                Taken::Nothing => return,
                Taken::Place { message, offset } => (message, offset, payload),
                Taken::Original { message, value } => {
                    original = value.to_ne_bytes();
                    (message, 0, &original[..])
                }
            };
        let landed = self.wqe_of(message).map_or(Ok(()), |counter| {
            land(hca, qp, counter, offset as usize, bytes)
        });
        match landed {
            Ok(()) => self.requester.placed(headers.bth.psn, now_ns),
            Err(_) => self.requester.fail(Syndrome::LocalProtection),
        }
    }

    /// Handles a request of the peer.
    fn take_request(
        &mut self,
        hca: &Hca,
        (qp, cq, rqs): (&mut SoftQp, &mut SoftCq, &mut [Option<RqSlot>]),
        headers: &Headers,
        payload: &[u8],
    ) {
        let mut target = Responding {
            hca,
            qp,
            cq,
            rqs,
            open: &mut self.open,
            refused: None,
        };
        if target.qp.is_unreliable {
            return self.responder.on_unreliable(headers, payload, &mut target);
        }
        self.responder
            .on_request(headers, payload, &mut target, hca.clock.now_ns());
        if self.responder.fatal().is_some() {
            let (syndrome, vendor) = target.refused.unwrap_or((Syndrome::LocalQpOperation, 0));
            let Some(taking) = self.open.take() else {
                return qp.break_down(hca);
            };
            fail_receive(hca, qp, cq, taking, (syndrome as u8, vendor));
            qp.fail(hca);
        }
    }
}

/// A queue pair on which the responder executes messages.
struct Responding<'a> {
    hca: &'a Hca,
    qp: &'a mut SoftQp,
    cq: &'a mut SoftCq,
    rqs: &'a mut [Option<RqSlot>],
    open: &'a mut Option<Taking>,
    /// Why the receive failed.
    refused: Option<(Syndrome, u8)>,
}

impl Target for Responding<'_> {
    fn take_receive(&mut self) -> bool {
        // A receive whose message was lost on its way takes the next one.
        if self.open.is_none() {
            *self.open = take_own_receive(self.qp, self.rqs);
        }
        self.open.is_some()
    }

    fn place(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        let Some(taking) = *self.open else {
            return Err(Nak::RemoteOperational);
        };
        let (memory, receives) = (&self.hca.memory, &self.qp.receives);
        let part = [(bytes.as_ptr(), bytes.len())].into_iter();
        // SAFETY: the bytes are in the buffer of the packet.
        let placed = unsafe { scatter(memory, receives, taking.index(), offset as usize, part) };
        placed.map_err(|refused| {
            self.refused = Some(refused);
            refusal_of_receive(refused.0)
        })
    }

    fn check(&mut self, at: &Reth, is_read: bool) -> Result<(), Nak> {
        let needed = if is_read {
            Access::REMOTE_READ
        } else {
            Access::REMOTE_WRITE
        };
        if !self.qp.access.contains(needed) {
            return Err(Nak::InvalidRequest);
        }
        let checked = self
            .hca
            .memory
            .check(at.rkey, at.addr, at.len.into(), needed, self.qp.pd);
        checked.map(drop).map_err(Nak::from)
    }

    fn write(&mut self, at: &Reth, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        if bytes.is_empty() {
            return Ok(());
        }
        let addr = at.addr.wrapping_add(offset.into());
        let (len, access) = (bytes.len(), Access::REMOTE_WRITE);
        let memory = &self.hca.memory;
        let span = memory.resolve(at.rkey, addr, len as u64, access, self.qp.pd)?;
        // SAFETY: the bytes are in the buffer of the packet, and the span has as many.
        Ok(unsafe { span.write(0, bytes.as_ptr(), len) }?)
    }

    fn execute(&mut self, opcode: PacketKind, atomic: &AtomicEth) -> Result<u64, Nak> {
        if atomic.addr % 8 != 0 {
            return Err(Nak::InvalidRequest);
        }
        let word = atomics::word(
            &self.hca.memory,
            atomic.rkey,
            atomic.addr,
            (self.qp.access, self.qp.pd),
        )?;
        let operands = AtomicSegment {
            swap_add: atomic.swap_add,
            compare: atomic.compare,
        };
        Ok(atomics::execute(
            word,
            opcode == PacketKind::FetchAdd,
            &operands,
        ))
    }

    fn complete(&mut self, completion: Completion) {
        let Some(taking) = self.open.take() else {
            return;
        };
        let opcode = match (completion.is_write, completion.imm) {
            (true, _) => CqeOpcode::ResponderWriteImm,
            (false, Some(_)) => CqeOpcode::ResponderSendImm,
            (false, None) => CqeOpcode::ResponderSend,
        };
        let message = Message {
            payload: 0,
            byte_count: completion.len,
            imm: completion.imm.unwrap_or(0),
            taking,
            op_own: Message::op_own(opcode, completion.is_solicited),
        };
        trace(self.hca, self.qp, &message);
        deliver(self.hca, self.qp, self.cq, message, Sender::Connected);
    }
}
