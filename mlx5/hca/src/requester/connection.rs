//! The send queue of a connection by packets: its WQEs are posted, sent, and completed.

use mlx5_wire::roce::{AtomicEth, Reth};
use mlx5_wire::{Access, CtrlWords, FenceMode, Header, Opcode, Syndrome, Wqe};

use crate::packets::Wire;
use crate::packets::connection::{Connection, Posted};
use crate::packets::message::Request;
use crate::packets::port::WirePort;
use crate::packets::udp::BATCH;
use crate::queues::data::gather;
use crate::queues::qp::{SoftQp, Transport};
use crate::requester::complete::Completions;
use crate::requester::take::take_wqes;
use crate::shared::memory::Keyed;
use crate::types::outcome::{End, Outcome};
use crate::types::vendor::Malformed;
use crate::{Hca, Queues, State};

impl Wire {
    /// Returns a queue pair's connection by packets. `None` if its peer is not reached by packets.
    fn connection(&mut self, qp: &SoftQp) -> Option<&mut Connection> {
        match qp.transport {
            Transport::Wire => self.connections.get_mut(qp.index)?.as_deref_mut(),
            _ => None,
        }
    }

    /// Returns whether the connection of a queue pair does not take this WQE yet: an earlier WQE
    /// has failed and is not complete, or this WQE has a fence and waits for responses.
    pub(crate) fn holds_back(&mut self, qp: &SoftQp, ctrl: CtrlWords) -> bool {
        self.connection(qp).is_some_and(|connection| {
            connection.is_ending
                || ctrl.fence() != FenceMode::None && connection.requester.awaits_response()
        })
    }

    /// Notes that the WQE at `counter` was taken, so that the connection by packets of its queue
    /// pair completes it. Returns `false` if the queue pair has no such connection.
    pub(crate) fn takes(&mut self, qp: &SoftQp, counter: u16, end: End) -> bool {
        let Some(connection) = self.connection(qp) else {
            return false;
        };
        connection.is_ending = matches!(end, End::Failed(..)) && !qp.has_failed();
        if let End::Message(_) = end {
            connection.messages.push_back(counter);
        }
        connection.posted.push_back(Posted { counter, end });
        true
    }

    /// Posts the message of a WQE, of `len` bytes.
    pub(crate) fn post(&mut self, qp: &SoftQp, wqe: &Wqe<'_>, len: u32) -> Outcome {
        let Some(connection) = self.connection(qp) else {
            return Malformed::NotConnected.into();
        };
        let imm = wqe.ctrl.has_imm().then(|| wqe.ctrl.imm());
        let is_solicited = wqe.ctrl.solicited();
        let (request, byte_count) = match wqe.header {
            Header::None | Header::Datagram(_) => {
                let request = Request::Send {
                    len,
                    imm,
                    is_solicited,
                };
                (request, 0)
            }
            Header::Memory(at) => {
                let to = Reth {
                    addr: at.addr,
                    rkey: at.rkey,
                    len,
                };
                match wqe.opcode {
                    Opcode::RdmaRead => (Request::Read(to), len),
                    _ => {
                        let request = Request::Write {
                            to,
                            imm,
                            is_solicited,
                        };
                        (request, 0)
                    }
                }
            }
            Header::Atomic(..) if len != 8 => return Malformed::AtomicLength.into(),
            Header::Atomic(at, operands) => {
                let atomic = AtomicEth {
                    addr: at.addr,
                    rkey: at.rkey,
                    operands,
                };
                match wqe.opcode {
                    Opcode::AtomicFetchAdd => (Request::FetchAdd(atomic), len),
                    _ => (Request::CompareSwap(atomic), len),
                }
            }
        };
        connection.requester.post(request, wqe.ctrl.signaled());
        Outcome::Posted(byte_count)
    }

    pub(crate) fn flush(&mut self) {
        if let Some(port) = &mut self.port {
            port.flush();
        }
    }

    /// Returns queue pair `index`, its connection by packets, and the port; `None` without these.
    pub(crate) fn parts<'a>(
        &'a mut self,
        qps: &'a mut [Option<Box<SoftQp>>],
        index: usize,
    ) -> Option<(&'a mut SoftQp, &'a mut Connection, &'a mut WirePort)> {
        let qp = qps.get_mut(index)?.as_deref_mut()?;
        let connection = self.connections.get_mut(index)?.as_deref_mut()?;
        let port = self.port.as_deref_mut()?;
        matches!(qp.transport, Transport::Wire).then_some((qp, connection, port))
    }
}

impl Connection {
    /// Sends answers and packets, as far as there is room and the protocol allows.
    fn pump(&mut self, hca: &Hca, wire: &mut WirePort, qp: &mut SoftQp) {
        let now_ns = hca.clock.now_ns();
        // A peer may ask for any number of READ responses. So after a batch of them, other queue
        // pairs get their turn.
        for nth in 0.. {
            if !wire.has_room(&self.peer.to) || nth == BATCH {
                return self.activate(wire, qp.index);
            }
            let Some(reply) = self.responder.next_reply(now_ns) else {
                break;
            };
            let len = reply
                .from
                .map_or(reply.report.len(), |from| from.len as usize);
            let sent = wire.send(&self.peer.to, &reply.headers, len, |payload| {
                let Some(from) = reply.from.filter(|from| from.len > 0) else {
                    payload.copy_from_slice(&reply.report);
                    return Ok(());
                };
                let bytes = Keyed::new(from.rkey, from.addr, from.len.into());
                let span = hca.memory.resolve(bytes, Access::REMOTE_READ, qp.pd)?;
                // SAFETY: `payload` is writable, and has the length for which the span was
                // resolved.
                unsafe { span.read(0, payload.as_mut_ptr(), payload.len()) }
            });
            if let Err(fault) = sent {
                // The region was deregistered, or its memory unmapped, since the request was
                // checked. The next reply reports that.
                self.responder.refuse(reply.headers.bth.psn, fault.into());
                qp.break_down(hca);
            }
        }
        while !qp.has_failed() {
            if !wire.has_room(&self.peer.to) {
                return self.activate(wire, qp.index);
            }
            let Some(packet) = self.requester.next_packet(now_ns) else {
                break;
            };
            let Some(counter) = self.wqe_of(packet.message) else {
                break;
            };
            let (len, offset) = (packet.len as usize, packet.offset as usize);
            let sent = wire.send(&self.peer.to, &packet.headers, len, |payload| {
                if payload.is_empty() {
                    return Ok(());
                }
                gather(hca, qp, counter, offset, payload)
            });
            if sent.is_err() {
                self.requester
                    .refuse(packet.message, Syndrome::LocalProtection);
                // The connection is activated so that the failed message is completed.
                self.activate(wire, qp.index);
                break;
            }
            self.requester.on_sent(now_ns);
        }
        wire.counters.retransmitted += self.requester.take_retransmitted();
    }
}

/// Takes WQEs up to the limit, completes the WQEs that are due, and sends packets.
#[cold]
pub(crate) fn run(hca: &Hca, state: &mut State, index: usize) {
    go_on(hca, state, index);
    state.wire.flush();
}

/// Like [`run`], but does not flush the batch of the port.
pub(crate) fn go_on(hca: &Hca, state: &mut State, index: usize) {
    loop {
        let Some((qp, ..)) = state.wire.parts(&mut state.queues.qps, index) else {
            return;
        };
        let waiting = qp.waiting.as_ref();
        let is_due = || waiting.is_none_or(|waiting| waiting.again_ns <= hca.clock.now_ns());
        if qp.sq_consumer != qp.sq_limit && is_due() {
            take_wqes(hca, state, index);
        }
        if !complete(hca, state, index) {
            break;
        }
    }
    let parts = state.wire.parts(&mut state.queues.qps, index);
    let Some((qp, connection, port)) = parts else {
        return;
    };
    connection.pump(hca, port, qp);
    let requester = connection.requester.due_ns().into_iter();
    let due_ns = requester.chain(connection.responder.due_ns()).min();
    if let Some(due_ns) =
        due_ns.filter(|due_ns| connection.scheduled_ns.is_none_or(|at_ns| *due_ns < at_ns))
    {
        connection.scheduled_ns = Some(due_ns);
        state.deferred.schedule(due_ns, qp.qpn);
    }
    // On an unreliable connection, messages that were just sent are complete.
    if qp.is_unreliable || qp.has_failed() {
        complete(hca, state, index);
    }
}

/// Completes the WQEs that are due, in order. Returns whether a WQE failed and WQEs after it have
/// to be flushed.
pub(crate) fn complete(hca: &Hca, state: &mut State, index: usize) -> bool {
    let State {
        queues: Queues { qps, cqs, .. },
        wire,
        deferred,
        violations,
        touched,
        ..
    } = state;
    let Some((qp, connection, _)) = wire.parts(qps, index) else {
        return false;
    };
    let mut completions = Completions {
        hca,
        cqs,
        deferred,
        violations,
        touched,
    };
    let had_failed = qp.has_failed();
    while let Some(&Posted { counter, end }) = connection.posted.front() {
        let is_message = matches!(end, End::Message(_));
        let end = match (end, connection.requester.failure()) {
            (_, _) if qp.has_failed() => End::Failed(Syndrome::WorkRequestFlushed, 0),
            (End::Message(_), failure)
                if connection.completed == connection.requester.completed() =>
            {
                match failure.filter(|failure| failure.message == connection.completed) {
                    Some(failure) => End::Failed(
                        failure.status,
                        match failure.status {
                            Syndrome::TransportRetryExceeded => connection.why_silent() as u8,
                            _ => 0,
                        },
                    ),
                    None => break,
                }
            }
            (end, _) => end,
        };
        connection.posted.pop_front();
        if is_message {
            connection.messages.pop_front();
            connection.completed += 1;
        }
        completions.complete(qp, qp.sq.ctrl(counter), end);
    }
    if qp.has_failed() {
        connection.is_ending = false;
    }
    qp.has_failed() && !had_failed && qp.sq_consumer != qp.sq_limit
}

/// Runs a queue pair at the time of its retry, of its ACK, or of its waiting WQE.
pub(crate) fn on_time(hca: &Hca, state: &mut State, index: usize, now_ns: u64) {
    let parts = state.wire.parts(&mut state.queues.qps, index);
    if let Some((_, connection, port)) = parts {
        // Reports before the repeat count for it, also on packets from a port that receives nothing.
        if connection.requester.is_late(now_ns) {
            port.read_reports(&connection.peer.to);
            state.wire.take_reports();
        }
    }
    let parts = state.wire.parts(&mut state.queues.qps, index);
    if let Some((_, connection, _)) = parts {
        connection.scheduled_ns.take_if(|at_ns| *at_ns <= now_ns);
        connection.requester.on_time(now_ns);
    }
    run(hca, state, index);
}

/// Puts the receive of an unfinished message back into a shared queue, and keeps the last answer
/// for the peer, before the queue pair is reset or destroyed.
pub(crate) fn abandon(wire: &mut Wire, qp: &SoftQp) {
    let connection = wire.connections.get_mut(qp.index).and_then(Option::take);
    let (Some(mut connection), Some(port)) = (connection, &mut wire.port) else {
        return;
    };
    if let Some(answer) = connection.last_answer() {
        port.remember_gone(qp.qpn, connection.peer, answer);
    }
    if let Some(taking) = connection.open.take().filter(|_| qp.receives.is_linked) {
        qp.receives.give_back(taking.index(), &qp.taken);
    }
}
