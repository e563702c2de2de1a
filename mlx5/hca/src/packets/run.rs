//! A connected queue pair whose peer is reached by packets: takes its WQEs, fills its receives, and
//! completes both.

use std::net::SocketAddr;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use mlx5_wire::roce::{
    AtomicEth, Headers, Nak, Opcode as PacketKind, Psn, Reth, Syndrome as AckSyndrome,
    Transport as Service, UDP_PORT,
};
use mlx5_wire::{
    Access, AtomicSegment, ConnectOptions, CqeOpcode, CtrlWords, FenceMode, Opcode, RaddrSegment,
    SEGMENT, Syndrome,
};

use super::connection::{Connection, End, PacketPath, Posted};
use super::port::WirePort;
use super::requester::{Request, Taken};
use super::responder::{Completion, Target};
use super::udp::BATCH;
use crate::error::ConnectError;
use crate::objects::request::Address;
use crate::objects::rqs::RqSlot;
use crate::queues::cq::SoftCq;
use crate::queues::qp::{Mode, SoftQp, Transport, blocks, bytes_of};
use crate::requester::complete::Completions;
use crate::requester::data::{Data, has_result, header_bytes, scatter};
use crate::requester::operations::local_part;
use crate::requester::outcome::{Malformed, Outcome};
use crate::requester::wqe::{exceptional_outcome, wait, wqe_bytes};
use crate::responder::deliver::{Sender, deliver, fail_receive, take_own_receive, trace};
use crate::responder::{atomics, datagrams};
use crate::shared::layout::{Message, Taking, qp_index, vf_of};
use crate::shared::memory::{Fault, Span};
use crate::{Hca, Queues, State};

impl Connection {
    /// Takes a WQE. `Ok`: its message was posted, and it returns so many bytes.
    fn post(&mut self, hca: &Hca, pd: u32, ctrl: CtrlWords, wqe: &[u8]) -> Result<u32, Outcome> {
        let opcode = Opcode::from_repr(ctrl.opcode()).ok_or(Malformed::Opcode)?;
        if opcode == Opcode::Nop {
            return Err(Outcome::Done(0));
        }
        let (header, _, length) = local_part(hca, pd, opcode, wqe)?;
        let len = length as u32;
        let (imm, is_solicited) = (ctrl.has_imm().then(|| ctrl.imm()), ctrl.solicited());
        if header == SEGMENT {
            self.requester.post(
                Request::Send {
                    len,
                    imm,
                    is_solicited,
                },
                ctrl.signaled(),
            );
            return Ok(0);
        }
        let raddr = RaddrSegment::parse(wqe[SEGMENT..].first_chunk().ok_or(Malformed::Header)?);
        let to = Reth {
            addr: raddr.addr,
            rkey: raddr.rkey,
            len,
        };
        let (request, byte_count) = match opcode {
            _ if has_result(opcode) && self.requester.options().is_unreliable => {
                return Err(Malformed::Opcode.into());
            }
            Opcode::RdmaRead => (Request::Read(to), len),
            Opcode::RdmaWrite | Opcode::RdmaWriteImm => (
                Request::Write {
                    to,
                    imm,
                    is_solicited,
                },
                0,
            ),
            _ => {
                let segment = AtomicSegment::parse(
                    wqe[2 * SEGMENT..].first_chunk().ok_or(Malformed::Header)?,
                );
                if length != 8 {
                    return Err(Malformed::AtomicLength.into());
                }
                let AtomicSegment { swap_add, compare } = segment;
                let atomic = AtomicEth {
                    addr: raddr.addr,
                    rkey: raddr.rkey,
                    swap_add,
                    compare,
                };
                let is_add = opcode == Opcode::AtomicFetchAdd;
                (
                    if is_add {
                        Request::FetchAdd(atomic)
                    } else {
                        Request::CompareSwap(atomic)
                    },
                    8,
                )
            }
        };
        self.requester.post(request, ctrl.signaled());
        Ok(byte_count)
    }

    /// Sends answers and packets, as far as there is room and the protocol allows.
    fn pump(&mut self, hca: &Hca, wire: &mut WirePort, qp: &mut SoftQp) {
        let now_ns = hca.clock.now_ns();
        // A peer may ask for any number of READ responses. After a batch it is the turn of other
        // queue pairs.
        for nth in 0.. {
            if !wire.has_room() || nth == BATCH {
                return self.activate(wire, qp.index);
            }
            let Some(reply) = self.responder.next_reply(now_ns) else {
                break;
            };
            let len = reply.from.map_or(0, |from| from.len as usize);
            let sent = wire.send(&self.peer, &reply.headers, len, |payload| {
                let Some(from) = reply.from.filter(|from| from.len > 0) else {
                    return Ok(());
                };
                let span = hca.memory.resolve(
                    from.rkey,
                    from.addr,
                    from.len.into(),
                    Access::REMOTE_READ,
                    qp.pd,
                )?;
                // SAFETY: the buffer and the span have this length.
                unsafe { span.read(0, payload.as_mut_ptr(), payload.len()) }
            });
            if sent.is_err() {
                // The region was deregistered since the request was checked.
                return qp.break_down(hca);
            }
        }
        while !qp.has_failed() {
            if !wire.has_room() {
                return self.activate(wire, qp.index);
            }
            let Some(packet) = self.requester.next_packet(now_ns) else {
                break;
            };
            let Some(counter) = self.wqe_of(packet.message) else {
                break;
            };
            let sent = wire.send(
                &self.peer,
                &packet.headers,
                packet.len as usize,
                |payload| {
                    if payload.is_empty() {
                        Ok(())
                    } else {
                        gather(hca, qp, counter, packet.offset as usize, payload)
                    }
                },
            );
            if sent.is_err() {
                self.requester
                    .refuse(packet.message, Syndrome::LocalProtection);
                // To complete it.
                self.activate(wire, qp.index);
                break;
            }
            self.requester.on_sent(now_ns);
        }
        wire.counters.retransmitted += self.requester.take_retransmitted();
    }
}

/// Calls `f` with the data segments of the WQE at `counter`.
fn with_data<R>(qp: &SoftQp, counter: u16, f: impl FnOnce(Data<'_>) -> R) -> Option<R> {
    // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the
    // completion.
    let head = unsafe { qp.sq.wqebb(counter).cast::<[u8; SEGMENT]>().read() };
    let ctrl = CtrlWords::parse(&head);
    let header = SEGMENT + header_bytes(Opcode::from_repr(ctrl.opcode())?, false);
    let len = usize::from(ctrl.ds()) * SEGMENT;
    let copy;
    let wqe = if blocks(ctrl.ds()) <= qp.sq.to_end(counter) {
        // SAFETY: as above; the WQE does not wrap.
        unsafe { core::slice::from_raw_parts(qp.sq.wqebb(counter).as_ptr(), len) }
    } else {
        copy = bytes_of(qp, counter, len);
        copy.get(..len)?
    };
    Some(f(Data::parse(wqe.get(header..)?)?))
}

/// Calls `f` with each part of `len` bytes of the local buffers of a WQE, from byte `offset` on:
/// its span, its place in those bytes, and its length. The keys are checked again: a region may be
/// deregistered while its message is under way, and a program's own memory be unmapped.
fn each_local(
    hca: &Hca,
    pd: u32,
    data: &Data<'_>,
    offset: usize,
    len: usize,
    access: Access,
    mut f: impl FnMut(Span, usize, usize) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let (mut skip, mut done) = (offset, 0);
    data.each(|piece| {
        if skip >= piece.len {
            skip -= piece.len;
            return Ok(());
        }
        let count = (piece.len - skip).min(len - done);
        if count == 0 {
            return Ok(());
        }
        // SAFETY: inside the part.
        let at = unsafe { piece.at.add(skip) };
        let span = match piece.key {
            Some(key) => hca
                .memory
                .resolve(key, at.addr() as u64, count as u64, access, pd)?,
            None if access.is_empty() => {
                Span::Mapped(NonNull::new(at.cast_mut()).ok_or(Fault::Bounds)?)
            }
            // A result does not go into a WQE.
            None => return Err(Fault::Access),
        };
        f(span, done, count)?;
        (skip, done) = (0, done + count);
        Ok(())
    })?;
    if done == len {
        Ok(())
    } else {
        Err(Fault::Bounds)
    }
}

/// Copies bytes of the message of the WQE at `counter`.
fn gather(
    hca: &Hca,
    qp: &SoftQp,
    counter: u16,
    offset: usize,
    out: &mut [u8],
) -> Result<(), Fault> {
    let copied = with_data(qp, counter, |data| {
        let to = out.as_mut_ptr();
        each_local(
            hca,
            qp.pd,
            &data,
            offset,
            out.len(),
            Access::empty(),
            |span, done, len| {
                // SAFETY: a registered region of this process, or the WQE, and a part of `out`.
                unsafe { span.read(0, to.add(done), len) }
            },
        )
    });
    copied.unwrap_or(Err(Fault::Bounds))
}

/// Writes bytes of a result into the buffers of the WQE at `counter`.
fn land(hca: &Hca, qp: &SoftQp, counter: u16, offset: usize, bytes: &[u8]) -> Result<(), Fault> {
    let copied = with_data(qp, counter, |data| {
        each_local(
            hca,
            qp.pd,
            &data,
            offset,
            bytes.len(),
            Access::LOCAL_WRITE,
            |span, done, len| {
                // SAFETY: a registered, writable region of this process, and a part of `bytes`.
                unsafe { span.write(0, bytes.as_ptr().add(done), len) }
            },
        )
    });
    copied.unwrap_or(Err(Fault::Bounds))
}

/// Runs `f` with a queue pair, its connection by packets, and the rest of the state. `None` if it
/// has no such connection.
fn with<R>(
    state: &mut State,
    index: usize,
    f: impl FnOnce(&mut State, &mut SoftQp, &mut Connection) -> R,
) -> Option<R> {
    let mut qp = state
        .queues
        .qps
        .get_mut(index)?
        .take_if(|qp| matches!(qp.transport, Transport::Wire(_)))?;
    let Transport::Wire(mut connection) =
        core::mem::replace(&mut qp.transport, Transport::Unconnected)
    else {
        return None;
    };
    let result = f(state, &mut qp, &mut connection);
    qp.transport = Transport::Wire(connection);
    state.queues.qps[index] = Some(qp);
    Some(result)
}

/// Takes WQEs up to the limit, completes those whose turn has come, and sends packets.
#[cold]
pub(crate) fn run(hca: &Hca, state: &mut State, index: usize) {
    go_on(hca, state, index);
    if let Some(wire) = &mut state.links.wire {
        wire.flush();
    }
}

/// Runs a queue pair, whose packets may wait for others in the socket's batch.
fn go_on(hca: &Hca, state: &mut State, index: usize) {
    with(state, index, |state, qp, connection| {
        loop {
            take_wqes(hca, state, qp, connection);
            if !complete(hca, state, qp, connection) || qp.sq_consumer == qp.sq_limit {
                break;
            }
        }
        let State {
            links, deferred, ..
        } = state;
        let Some(wire) = &mut links.wire else { return };
        connection.pump(hca, wire, qp);
        let due_ns = connection
            .requester
            .due_ns()
            .into_iter()
            .chain(connection.responder.due_ns())
            .min();
        if let Some(due_ns) =
            due_ns.filter(|due_ns| connection.scheduled_ns.is_none_or(|at_ns| *due_ns < at_ns))
        {
            connection.scheduled_ns = Some(due_ns);
            deferred.schedule(due_ns, qp.qpn);
        }
        // On an unreliable connection, messages that were just sent.
        complete(hca, state, qp, connection);
    });
}

/// Takes WQEs off the send queue.
fn take_wqes(hca: &Hca, state: &mut State, qp: &mut SoftQp, connection: &mut Connection) {
    let State {
        queues: Queues { injector, .. },
        deferred,
        ..
    } = state;
    if qp
        .waiting
        .as_ref()
        .is_some_and(|waiting| waiting.again_ns > hca.clock.now_ns())
    {
        return;
    }
    while qp.sq_consumer != qp.sq_limit && !connection.is_ending {
        let counter = qp.sq_consumer;
        let at = qp.sq.wqebb(counter);
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and
        // the completion.
        let ctrl = CtrlWords::parse(&unsafe { at.cast::<[u8; SEGMENT]>().read() });
        if ctrl.fence() != FenceMode::None && connection.requester.awaits_response() {
            return;
        }
        let exceptional = if qp.mode >= Mode::Exceptional {
            exceptional_outcome(hca, qp, injector, ctrl)
        } else {
            None
        };
        let taken = match (exceptional, wqe_bytes(qp, at, ctrl)) {
            (Some(outcome), _) => Err(outcome),
            // SAFETY: the WQE is in the SQ's memory, which the driver does not touch until
            // completion.
            (None, Ok(Some(wqe))) => connection.post(hca, qp.pd, ctrl, unsafe { wqe.as_ref() }),
            (None, Ok(None)) => {
                let bytes = usize::from(ctrl.ds()) * SEGMENT;
                bytes_of(qp, counter, bytes)
                    .get(..bytes)
                    .map_or(Err(Malformed::Control.into()), |wqe| {
                        connection.post(hca, qp.pd, ctrl, wqe)
                    })
            }
            (None, Err(what)) => Err(what.into()),
        };
        let (byte_count, end) = match taken {
            Ok(byte_count) => (byte_count, End::Message),
            Err(Outcome::Done(byte_count)) => (byte_count, End::Done),
            Err(Outcome::Fail(syndrome, vendor)) => (0, End::Failed(syndrome, vendor)),
            Err(Outcome::Later) => return,
            Err(Outcome::Wait(reason)) => match wait(
                hca,
                qp,
                reason,
                injector.as_ref().map_or(0, |i| i.delay_ns()),
            ) {
                Ok(at_ns) => return deferred.schedule(at_ns, qp.qpn),
                Err(syndrome) => (0, End::Failed(syndrome, 0)),
            },
        };
        qp.waiting = None;
        connection.is_ending = matches!(end, End::Failed(..)) && !qp.has_failed();
        if let End::Message = end {
            connection.messages.push_back(counter);
        }
        connection.posted.push_back(Posted {
            counter,
            byte_count,
            end,
        });
        let outstanding = qp.sq_limit.wrapping_sub(qp.sq_consumer);
        qp.sq_consumer = qp
            .sq_consumer
            .wrapping_add(blocks(ctrl.ds()).max(1).min(outstanding));
    }
}

/// Completes the WQEs whose turn has come. Returns whether a WQE failed, so that those behind it
/// are flushed.
fn complete(hca: &Hca, state: &mut State, qp: &mut SoftQp, connection: &mut Connection) -> bool {
    let State {
        queues: Queues { cqs, .. },
        links,
        deferred,
        violations,
        touched,
        ..
    } = state;
    let mut completions = Completions {
        hca,
        cqs,
        deferred,
        violations,
        touched,
    };
    let had_failed = qp.has_failed();
    while let Some(&Posted {
        counter,
        byte_count,
        end,
    }) = connection.posted.front()
    {
        let end = match (end, connection.requester.failure()) {
            (_, _) if qp.has_failed() => End::Failed(Syndrome::WorkRequestFlushed, 0),
            (End::Message, _) if connection.completed < connection.requester.completed() => {
                End::Done
            }
            (End::Message, Some(failure)) if failure.message == connection.completed => {
                let is_silent = failure.status == Syndrome::TransportRetryExceeded;
                let wire = links.wire.as_ref().filter(|_| is_silent);
                End::Failed(
                    failure.status,
                    wire.map_or(0, |wire| wire.why_silent(&connection.peer)),
                )
            }
            (End::Message, _) => break,
            (end, _) => end,
        };
        if matches!(
            connection.posted.pop_front(),
            Some(Posted {
                end: End::Message,
                ..
            })
        ) {
            connection.messages.pop_front();
            connection.completed += 1;
        }
        // SAFETY: as in `take_wqes`.
        let ctrl =
            CtrlWords::parse(&unsafe { qp.sq.wqebb(counter).cast::<[u8; SEGMENT]>().read() });
        match end {
            End::Failed(syndrome, vendor) => completions.fail_taken(qp, ctrl, syndrome, vendor),
            _ if hca.is_watched || ctrl.signaled() => {
                completions.succeed(qp, ctrl, byte_count);
                if ctrl.signaled() {
                    qp.watch.reported = counter.wrapping_add(blocks(ctrl.ds()));
                }
            }
            _ => {}
        }
    }
    if qp.has_failed() {
        connection.is_ending = false;
    }
    qp.has_failed() && !had_failed
}

/// Flushes everything of a failed queue pair.
pub(crate) fn flush(hca: &Hca, state: &mut State, index: usize) {
    run(hca, state, index);
    with(state, index, |state, qp, connection| {
        if let (Some(taking), Some(Some(cq))) = (
            connection.open.take(),
            state.queues.cqs.get_mut(qp.recv_cq as usize),
        ) {
            qp.taken.account(taking);
            fail_receive(hca, qp, cq, taking, (Syndrome::WorkRequestFlushed as u8, 0));
        }
    });
}

/// Gives the receive of an unfinished message back to a shared queue, and prepares to tell the
/// peer, before the queue pair is reset or destroyed.
pub(crate) fn abandon(wire: Option<&mut WirePort>, qp: &mut SoftQp) {
    let Transport::Wire(connection) = &mut qp.transport else {
        return;
    };
    if let (Some(wire), Some(answer)) = (wire, connection.last_answer()) {
        wire.remember_gone(qp.qpn, connection.peer, answer);
    }
    if let Some(taking) = connection.open.take().filter(|_| qp.receives.is_linked) {
        qp.receives.give_back(taking.index(), &qp.taken);
    }
}

/// Runs a queue pair at the time of its retry, of its ACK, or of its waiting WQE.
pub(crate) fn on_time(hca: &Hca, state: &mut State, index: usize, now_ns: u64) {
    with(state, index, |_, _, connection| {
        connection.scheduled_ns.take_if(|at_ns| *at_ns <= now_ns);
        connection.requester.on_time(now_ns);
    });
    run(hca, state, index);
}

/// Takes the packets that have arrived, and runs the queue pairs that they concern. Returns whether
/// there were some.
#[cold]
pub(crate) fn poll(hca: &Hca, state: &mut State) -> bool {
    let Some(wire) = &mut state.links.wire else {
        return false;
    };
    wire.flush();
    let (packets, count) = wire.receive();
    for nth in 0..count {
        let Some(wire) = &mut state.links.wire else {
            break;
        };
        let Some((from, bytes)) = packets.get(nth) else {
            wire.counters.strangers += 1;
            continue;
        };
        if let Some((headers, payload)) = wire.decode(&from, bytes) {
            take(hca, state, &from, &headers, payload);
        }
    }
    let Some(wire) = &mut state.links.wire else {
        return false;
    };
    wire.give_back(packets);
    let mut active = core::mem::take(&mut wire.active);
    for index in active.drain(..) {
        with(state, index, |_, _, connection| {
            connection.is_active = false
        });
        // The program may post an answer now, with which an ACK can leave: at the doorbell, or at
        // the next poll.
        go_on(hca, state, index);
    }
    if let Some(wire) = &mut state.links.wire {
        active.append(&mut wire.active);
        wire.active = active;
    }
    count > 0
}

/// Handles a packet.
fn take(hca: &Hca, state: &mut State, from: &SocketAddr, headers: &Headers, payload: &[u8]) {
    let index = qp_index(headers.bth.qpn);
    if headers.opcode.transport == Service::Ud {
        return datagrams::take_packet(hca, state, from, headers, payload);
    }
    let taken = with(state, index, |state, qp, connection| {
        let is_peers = qp.qpn == headers.bth.qpn
            && headers.opcode.transport == connection.requester.options().transport()
            && connection.is_from_peer(from);
        let is_response = headers.opcode.opcode.is_response();
        match (is_peers, qp.has_failed(), &mut state.links.wire) {
            (true, false, _) => {
                let before = (
                    connection.responder.expected(),
                    connection.requester.completed(),
                );
                connection.take(hca, state, qp, headers, payload);
                if before
                    != (
                        connection.responder.expected(),
                        connection.requester.completed(),
                    )
                {
                    connection.learn_source(from);
                }
            }
            (true, true, Some(wire)) if !is_response => {
                connection
                    .last_answer()
                    .iter()
                    .for_each(|answer| wire.answer(&connection.peer, answer));
            }
            _ => {}
        }
        is_peers
    });
    if let (false, Some(wire)) = (taken.unwrap_or(false), &mut state.links.wire) {
        let is_response = headers.opcode.opcode.is_response();
        if is_response || !wire.answer_for_gone(headers.bth.qpn, from) {
            wire.counters.strangers += 1;
        }
    }
}

impl Connection {
    /// Handles a packet of the peer.
    fn take(
        &mut self,
        hca: &Hca,
        state: &mut State,
        qp: &mut SoftQp,
        headers: &Headers,
        payload: &[u8],
    ) {
        let State {
            queues: Queues { cqs, .. },
            rqs,
            links,
            ..
        } = state;
        let Some(wire) = &mut links.wire else { return };
        self.activate(wire, qp.index);
        if headers.opcode.opcode.is_response() {
            if matches!(headers.aeth.syndrome, AckSyndrome::RnrNak { .. }) {
                hca.rnr_naks.set(hca.rnr_naks.get() + 1);
            }
            let now_ns = hca.clock.now_ns();
            let original;
            let result = match self.requester.on_response(headers, payload.len(), now_ns) {
                Taken::Nothing => None,
                Taken::Place { message, offset } => Some((message, offset, payload)),
                Taken::Original { message, value } => {
                    original = value.to_ne_bytes();
                    Some((message, 0, &original[..]))
                }
            };
            if let Some((message, offset, bytes)) = result {
                match self.wqe_of(message).map_or(Ok(()), |counter| {
                    land(hca, qp, counter, offset as usize, bytes)
                }) {
                    Ok(()) => self.requester.placed(headers.bth.psn, now_ns),
                    Err(_) => self.requester.fail(Syndrome::LocalProtection),
                }
            }
            complete(hca, state, qp, self);
            return;
        }
        if headers.bth.psn != self.responder.expected() {
            wire.counters.out_of_sequence += 1;
        }
        let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else {
            return;
        };
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
            qp.taken.account(taking);
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

/// Returns the NAK of a refused access.
fn nak(fault: Fault) -> Nak {
    match fault {
        Fault::QueuePair => Nak::InvalidRequest,
        _ => Nak::RemoteAccess,
    }
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
        let data = Data::of_memory(bytes.as_ptr(), bytes.len());
        // SAFETY: the bytes are in the buffer of the packet.
        let placed = unsafe {
            scatter(
                &self.hca.memory,
                &self.qp.receives,
                taking.index(),
                offset as usize,
                &data,
            )
        };
        placed.map_err(|refused| {
            self.refused = Some(refused);
            if refused.0 == Syndrome::LocalLength {
                Nak::InvalidRequest
            } else {
                Nak::RemoteOperational
            }
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
        checked.map(drop).map_err(nak)
    }

    fn write(&mut self, at: &Reth, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        if bytes.is_empty() {
            return Ok(());
        }
        let addr = at.addr.wrapping_add(offset.into());
        let span = self
            .hca
            .memory
            .resolve(
                at.rkey,
                addr,
                bytes.len() as u64,
                Access::REMOTE_WRITE,
                self.qp.pd,
            )
            .map_err(nak)?;
        // SAFETY: the bytes are in the buffer of the packet, and the span has as many.
        unsafe { span.write(0, bytes.as_ptr(), bytes.len()) }.map_err(nak)
    }

    fn execute(&mut self, opcode: PacketKind, atomic: &AtomicEth) -> Result<u64, Nak> {
        if atomic.addr % 8 != 0 {
            return Err(Nak::InvalidRequest);
        }
        let word = atomics::word(self.hca, self.qp, atomic.rkey, atomic.addr).map_err(nak)?;
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

impl Hca {
    /// Returns the address of the device's port for packets, and its RDMA MTU in bytes. `None` if
    /// it has none.
    #[must_use]
    pub fn wire_address(&self) -> Option<(SocketAddr, u16)> {
        self.state
            .borrow()
            .links
            .wire
            .as_ref()
            .map(|wire| (wire.own(), wire.mtu))
    }

    /// Returns whether devices of the same fabric are reached by packets, too.
    #[must_use]
    pub fn sends_packets_only(&self) -> bool {
        self.state
            .borrow()
            .links
            .wire
            .as_ref()
            .is_some_and(|wire| wire.is_for_all)
    }

    /// Returns the UDP port of the device with a queue pair, whose address tells none.
    #[must_use]
    pub fn packet_port(&self, qpn: u32) -> u16 {
        self.state
            .borrow()
            .links
            .wire
            .as_ref()
            .map_or(UDP_PORT, |wire| wire.port_of_number(qpn))
    }

    /// RTR to RTS of a queue pair whose peer is reached by packets: sends with these options from
    /// this PSN on, with so many READs and atomics that are not answered. Does nothing to others.
    pub fn start_packets(&self, qpn: u32, options: &ConnectOptions, psn: u32, rd_atomic: u8) {
        let qps = &mut self.state.borrow_mut().queues.qps;
        if let Some(Some(qp)) = qps
            .get_mut(qp_index(qpn))
            .filter(|qp| qp.as_ref().is_some_and(|qp| qp.qpn == qpn))
        {
            if let Transport::Wire(connection) = &mut qp.transport {
                connection.restart(options, psn, rd_atomic);
            }
        }
    }

    /// Returns whether the device that gave this address is reached through shared memory. Both
    /// ends find the same.
    #[must_use]
    pub fn shares_memory_with(&self, remote: &Address) -> bool {
        self.membership
            .shares_memory_with(remote.lid, Some(remote.epoch))
    }

    /// Returns whether the virtual function that has a queue pair is reached through shared memory.
    /// Both ends find the same.
    #[must_use]
    pub fn shares_memory_with_number(&self, qpn: u32) -> bool {
        self.membership.shares_memory_with(vf_of(qpn), None)
    }

    /// Returns the first PSN of a queue pair's packets; 0 without a port for them.
    #[must_use]
    pub fn first_psn(&self, qpn: u32) -> u32 {
        let state = self.state.borrow();
        let (Some(wire), Some(Some(qp))) = (&state.links.wire, state.queues.qps.get(qp_index(qpn)))
        else {
            return 0;
        };
        wire.first_psn(qpn, qp.generation).get()
    }

    /// INIT to RTR of a queue pair whose peer is reached by packets, which it sends from
    /// [`first_psn`](Self::first_psn) on.
    ///
    /// # Errors
    /// [`ConnectError::NoWire`], [`ConnectError::NotTheRocePort`]; nothing has changed.
    pub fn connect_by_packets(
        &self,
        qpn: u32,
        path: &PacketPath,
        options: &ConnectOptions,
        access: Access,
    ) -> Result<(), ConnectError> {
        let first = Psn::new(self.first_psn(qpn));
        let state = &mut *self.state.borrow_mut();
        if state.links.wire.is_none() {
            return Err(ConnectError::NoWire { to: path.to });
        }
        let qp = state
            .queues
            .qps
            .get_mut(qp_index(qpn))
            .and_then(Option::as_mut)
            .filter(|qp| qp.qpn == qpn);
        let Some(qp) = qp else {
            return Err(ConnectError::NoSuchQp {
                lid: self.lid(),
                qpn,
            });
        };
        state
            .links
            .wire
            .iter_mut()
            .for_each(|wire| wire.forget_gone(qpn));
        (qp.options, qp.access, qp.mode) = (*options, access, qp.mode.max(Mode::Ordinary));
        qp.version = qp.version.wrapping_add(1);
        qp.transport = Transport::Wire(Box::new(Connection::new(
            path,
            first,
            options,
            qp.is_unreliable,
        )));
        qp.entry()
            .identity
            .store(qp.connected_identity(), Ordering::Release);
        Ok(())
    }
}
