//! Packets that arrive. The requester of a packet's connection takes responses, and the responder
//! executes requests.

use std::net::SocketAddr;

use mlx5_wire::Syndrome;
use mlx5_wire::roce::{Headers, PacketOpcode, Syndrome as AckSyndrome, Transport};

use crate::packets::connection::Connection;
use crate::packets::requester::Taken;
use crate::queues::cq::SoftCq;
use crate::queues::data::land;
use crate::queues::qp::SoftQp;
use crate::queues::rqs::RqSlot;
use crate::requester::connection::{complete, go_on};
use crate::responder::datagrams;
use crate::responder::deliver::Sender;
use crate::responder::target::Responding;
use crate::shared::layout::qp_index;
use crate::{Hca, Queues, State};

/// Takes the packets that have arrived. Then advances the send queues of the queue pairs that got
/// them, and of all others with packets to send. Returns whether any packet arrived.
#[cold]
pub(crate) fn poll(hca: &Hca, state: &mut State) -> bool {
    let Some(port) = state.wire.port.as_deref_mut() else {
        return false;
    };
    port.flush();
    let Some((packets, count)) = port.receive() else {
        return false;
    };
    if port.has_reports() {
        state.wire.take_reports();
    }
    for nth in 0..count {
        let Some(port) = state.wire.port.as_deref_mut() else {
            break;
        };
        let Some((from, bytes)) = packets.get(nth) else {
            port.counters.strangers += 1;
            continue;
        };
        if let Some((mut headers, payload)) = port.decode(&from, bytes) {
            // RoCEv2 marks congestion in the IP header. InfiniBand has this bit of the BTH for it.
            headers.bth.has_fecn |= packets.is_marked(nth);
            take(hca, state, &from, &headers, payload);
        }
    }
    let Some(port) = state.wire.port.as_deref_mut() else {
        return false;
    };
    port.give_back(packets);
    let mut active = core::mem::take(&mut port.active);
    for index in active.drain(..) {
        let parts = state.wire.parts(&mut state.queues.qps, index);
        if let Some((_, connection, _)) = parts {
            connection.is_active = false;
        }
        // The packets that `go_on` makes are flushed at the next doorbell or poll, and not here:
        // the program may post an answer now, and the ACK is then sent together with the answer.
        go_on(hca, state, index);
    }
    if let Some(port) = state.wire.port.as_deref_mut() {
        active.append(&mut port.active);
        port.active = active;
    }
    count > 0
}

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
    let transport = headers.opcode.transport;
    let parts = wire.parts(qps, index).filter(|(qp, connection, _)| {
        qp.qpn == headers.bth.qpn
            && [
                connection.requester.options().transport(),
                Transport::Congestion,
            ]
            .contains(&transport)
            && connection.peer.is_from(from)
    });
    let Some((qp, connection, port)) = parts else {
        if let Some(port) = wire.port.as_deref_mut() {
            if is_response || !port.answer_for_gone(headers.bth.qpn, from) {
                port.counters.strangers += 1;
            }
        }
        return;
    };
    if qp.has_failed() {
        if let Some(answer) = connection.last_answer().filter(|_| !is_response) {
            port.answer(&connection.peer.to, &answer);
        }
        return;
    }
    if headers.opcode == PacketOpcode::CNP {
        return connection.requester.on_congestion();
    }
    if headers.bth.has_fecn {
        connection.notify(port, hca.clock.now_ns());
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
        connection.on_progress(from);
    }
    if is_response {
        complete(hca, state, index);
    }
}

impl Connection {
    fn take_response(&mut self, hca: &Hca, qp: &SoftQp, headers: &Headers, payload: &[u8]) {
        if matches!(headers.aeth.syndrome, AckSyndrome::RnrNak { .. }) {
            hca.rnr_naks.set(hca.rnr_naks.get() + 1);
        }
        let now_ns = hca.clock.now_ns();
        let original;
        let (message, offset, bytes) = match self.requester.on_response(headers, payload, now_ns) {
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
            Err(_) => self.requester.refuse(message, Syndrome::LocalProtection),
        }
    }

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
            sender: Sender::Connected,
            refused: None,
        };
        if target.qp.is_unreliable {
            return self.responder.on_unreliable(headers, payload, &mut target);
        }
        self.responder
            .on_request(headers, payload, &mut target, hca.clock.now_ns());
        if let Some(nak) = self.responder.fatal() {
            target.fail(nak);
        }
    }
}
