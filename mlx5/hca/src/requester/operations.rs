//! The operations of the requester: the effect of one WQE, verb by verb, on the memory and the lane
//! of the peer.

use std::sync::atomic::{Ordering, fence};

use mlx5_wire::{
    Access, AtomicSegment, CqeOpcode, CtrlWords, Opcode, RaddrSegment, SEGMENT, Syndrome,
};

use crate::queues::qp::{SoftQp, Transport, Waiting};
use crate::requester::data::{Data, check_local, has_result, header_bytes, scatter};
use crate::requester::datagrams;
use crate::requester::outcome::{Limit, Malformed, Outcome, WaitFor};
use crate::responder::atomics;
use crate::shared::layout::{Message, RECEIVES, allows};
use crate::shared::memory::{Fault, Span};
use crate::shared::remote::Remote;
use crate::{Hca, Links};

/// Time in ns for which a message waits until a peer that runs another driver copies that driver's
/// receives: much longer than the pauses of its thread. A process that has stopped copies none.
const COPY_WAIT_NS: u64 = 1_000_000_000;

/// Executes one WQE within the rights that the connected peer `granted` ([`Remote::granted`]). A
/// destroyed queue pair does not answer. So it refuses nothing, even if its regions disappear
/// first.
pub(crate) fn execute(
    hca: &Hca,
    links: &mut Links,
    qp: &mut SoftQp,
    ctrl: CtrlWords,
    wqe: &[u8],
    granted: u64,
) -> Outcome {
    match attempt(hca, links, qp, ctrl, wqe, granted) {
        Outcome::Done(byte_count) => Outcome::Done(byte_count),
        Outcome::Wait(WaitFor::Receive) => not_done(qp, ctrl, Outcome::Wait(no_receive(hca, qp))),
        outcome => not_done(qp, ctrl, outcome),
    }
}

/// Returns the outcome of a WQE that was not done, by the peer's state and the kind of connection:
/// an unreliable one loses what its peer refuses or has no receive for.
#[cold]
fn not_done(qp: &SoftQp, ctrl: CtrlWords, outcome: Outcome) -> Outcome {
    let is_refused = matches!(outcome, Outcome::Fail(Syndrome::RemoteAccess, _));
    let is_of_peer = match outcome {
        Outcome::Fail(syndrome, _) => {
            is_refused
                || matches!(
                    syndrome,
                    Syndrome::RemoteInvalidRequest | Syndrome::RemoteOperation
                )
        }
        Outcome::Wait(reason) => matches!(reason, WaitFor::Peer | WaitFor::Receive),
        _ => false,
    };
    match Opcode::from_repr(ctrl.opcode()) {
        // No right to them is ever granted.
        Some(opcode) if qp.is_unreliable && has_result(opcode) => Malformed::Opcode.into(),
        _ if qp.is_unreliable && is_of_peer => Outcome::Done(0),
        _ if is_refused
            && qp
                .remote()
                .is_some_and(|remote| remote.granted() & RECEIVES == 0) =>
        {
            Outcome::Wait(WaitFor::Peer)
        }
        _ => outcome,
    }
}

/// Returns the reason to wait after the search for a receive: none is posted only once the owner
/// has copied those of its driver. The copy during which the search took place may have begun
/// before one was posted, so the next one must end too.
#[cold]
fn no_receive(hca: &Hca, qp: &SoftQp) -> WaitFor {
    let Some(remote) = qp.remote() else {
        return WaitFor::Receive;
    };
    let copies = remote.peer.copies();
    match &qp.waiting {
        Some(Waiting {
            reason: WaitFor::Copies(0),
            ..
        }) => WaitFor::Receive,
        Some(Waiting {
            reason: WaitFor::Copies(from),
            ..
        }) if copies.wrapping_sub(*from) >= 2 => WaitFor::Copies(0),
        Some(Waiting {
            reason: reason @ WaitFor::Copies(_),
            since_ns,
            ..
        }) => {
            let is_over = hca.clock.now_ns() >= since_ns.saturating_add(COPY_WAIT_NS);
            if is_over {
                remote.stopped_at.set(copies);
            }
            if is_over || remote.peer.is_gone() {
                WaitFor::Receive
            } else {
                *reason
            }
        }
        _ if copies == remote.stopped_at.get() => WaitFor::Receive,
        _ => WaitFor::Copies(copies),
    }
}

fn attempt(
    hca: &Hca,
    links: &mut Links,
    qp: &mut SoftQp,
    ctrl: CtrlWords,
    wqe: &[u8],
    granted: u64,
) -> Outcome {
    let Some(opcode) = Opcode::from_repr(ctrl.opcode()) else {
        return Malformed::Opcode.into();
    };
    if opcode == Opcode::Nop {
        return Outcome::Done(0);
    }
    let remote = match &mut qp.transport {
        Transport::Connected(remote) => remote.as_mut(),
        Transport::Unconnected => return Malformed::NotConnected.into(),
        Transport::NoPeer => return Outcome::Wait(WaitFor::Peer),
        // Runs its own WQEs.
        Transport::Wire(_) => return Outcome::Later,
        Transport::Datagram { qkey } => {
            let since_ns = qp.waiting.as_ref().map(|waiting| waiting.since_ns);
            let from = datagrams::Sender {
                qpn: qp.qpn,
                pd: qp.pd,
                qkey: *qkey,
                since_ns,
            };
            return datagrams::send(hca, links, &from, opcode, ctrl, wqe);
        }
    };
    let (header, data, length) = match local_part(hca, qp.pd, opcode, wqe) {
        Ok(part) => part,
        Err(outcome) => return outcome,
    };
    if granted & RECEIVES == 0 {
        return Outcome::Wait(WaitFor::Peer);
    }
    if header == SEGMENT {
        return done(send(remote, &data, length as u32, opcode, ctrl));
    }
    let needed = match opcode {
        Opcode::RdmaRead => Access::REMOTE_READ,
        Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => Access::REMOTE_ATOMIC,
        _ => Access::REMOTE_WRITE,
    };
    // A responder checks the queue pair before the key.
    if !allows(granted, needed) {
        return Fault::QueuePair.into();
    }
    let Some(raddr) = wqe[SEGMENT..].first_chunk() else {
        return Malformed::Header.into();
    };
    let raddr = RaddrSegment::parse(raddr);
    if header == 3 * SEGMENT {
        return atomic(remote, &raddr, &wqe[2 * SEGMENT..], opcode, &data, length);
    }
    let span = if length == 0 {
        // No byte is accessed, so the key is not checked.
        None
    } else {
        match remote
            .peer
            .memory
            .resolve(raddr.rkey, raddr.addr, length, needed, remote.pd)
        {
            Ok(span) => Some(span),
            Err(fault) => return fault.into(),
        }
    };
    match opcode {
        Opcode::RdmaRead => read(span, &data, length),
        Opcode::RdmaWrite => done(write(span, &data)),
        _ => write_imm(remote, span, &data, raddr.addr, length as u32, ctrl),
    }
}

/// Checks the local part of a WQE on a connection: returns the number of bytes before its data, the
/// data, and its length in bytes.
#[inline(always)]
pub(crate) fn local_part<'a>(
    hca: &Hca,
    pd: u32,
    opcode: Opcode,
    wqe: &'a [u8],
) -> Result<(usize, Data<'a>, u64), Outcome> {
    let header = SEGMENT + header_bytes(opcode, false);
    let Some(body) = wqe.get(header..) else {
        return Err(Malformed::Header.into());
    };
    let Some(data) = Data::parse(body) else {
        return Err(Malformed::InlineLength.into());
    };
    let length = check_local(hca, pd, &data, has_result(opcode))?;
    Ok((header, data, length))
}

fn done(result: Result<(), Outcome>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done(0),
        Err(outcome) => outcome,
    }
}

fn write(span: Option<Span>, data: &Data<'_>) -> Result<(), Outcome> {
    let Some(span) = span else { return Ok(()) };
    let mut offset = 0;
    data.each(|piece| {
        // SAFETY: the piece was checked against its region (or lies in the WQE), the span for the
        // sum of the pieces.
        unsafe { span.write(offset, piece.at, piece.len) }?;
        offset += piece.len as u64;
        Ok(())
    })
}

fn read(span: Option<Span>, data: &Data<'_>, length: u64) -> Outcome {
    let Some(span) = span else {
        return Outcome::Done(0);
    };
    // The effects of earlier operations are visible to the peer before anything is read, like on
    // the bus of a NIC.
    fence(Ordering::SeqCst);
    let mut offset = 0;
    let result = data.each(|piece| {
        // SAFETY: the piece was checked against a locally writable region, the span for the sum of
        // the pieces.
        unsafe { span.read(offset, piece.at.cast_mut(), piece.len) }?;
        offset += piece.len as u64;
        Ok(())
    });
    match result {
        Ok(()) => Outcome::Done(length as u32),
        Err(outcome) => outcome,
    }
}

/// WRITE with immediate. If the copy can fail, the order is: room in the lane, payload, receive,
/// message. So nothing is undone, and a receive is taken only for a message that will be delivered.
/// Without a receive the retry writes such a payload again, like a NIC, which detects it with the
/// last packet. If the copy cannot fail, the receive comes first, so that nothing is written
/// without one.
fn write_imm(
    remote: &mut Remote,
    span: Option<Span>,
    data: &Data<'_>,
    addr: u64,
    byte_count: u32,
    ctrl: CtrlWords,
) -> Outcome {
    if !remote.has_room() {
        return Outcome::Wait(WaitFor::Room);
    }
    let is_sure =
        matches!(span, None | Some(Span::Mapped(_))) && matches!(data, Data::None | Data::One(_));
    if !is_sure {
        if let Err(outcome) = write(span, data) {
            return outcome;
        }
    }
    let Some(taking) = remote.take_receive() else {
        return Outcome::Wait(WaitFor::Receive);
    };
    if is_sure {
        // A single part, to mapped memory or of no bytes, cannot fail.
        let placed = write(span, data);
        debug_assert!(placed.is_ok());
    }
    remote.publish(Message {
        payload: addr,
        byte_count,
        imm: ctrl.imm(),
        taking,
        op_own: Message::op_own(CqeOpcode::ResponderWriteImm, ctrl.solicited()),
    });
    Outcome::Done(0)
}

/// SEND: takes a receive and fills its buffers. Both ends fail if the message does not fit, or the
/// buffers cannot be written: an error message in the lane reports it to the responder.
fn send(
    remote: &mut Remote,
    data: &Data<'_>,
    byte_count: u32,
    opcode: Opcode,
    ctrl: CtrlWords,
) -> Result<(), Outcome> {
    if !remote.has_room() {
        return Err(Outcome::Wait(WaitFor::Room));
    }
    let Some(taking) = remote.take_receive() else {
        return Err(Outcome::Wait(WaitFor::Receive));
    };
    // SAFETY: the parts were checked against their regions, or lie in the WQE.
    let result = unsafe {
        scatter(
            &remote.peer.memory,
            &remote.receives,
            taking.index(),
            0,
            data,
        )
    };
    if result == Err((Syndrome::LocalProtection, Fault::Gone as u8)) {
        return Err(Outcome::Wait(WaitFor::Peer));
    }
    let payload = remote
        .receives
        .segments(taking.index())
        .next()
        .map_or(0, |segment| segment.addr());
    let has_imm = opcode == Opcode::SendImm;
    let arrived = if has_imm {
        CqeOpcode::ResponderSendImm
    } else {
        CqeOpcode::ResponderSend
    };
    let (opcode, imm, solicited) = match result {
        Ok(()) => (
            arrived,
            if has_imm { ctrl.imm() } else { 0 },
            ctrl.solicited(),
        ),
        Err((syndrome, vendor)) => (
            CqeOpcode::ResponderError,
            Message::error(syndrome, vendor),
            false,
        ),
    };
    remote.publish(Message {
        payload,
        byte_count,
        imm,
        taking,
        op_own: Message::op_own(opcode, solicited),
    });
    match result {
        Ok(()) => Ok(()),
        // InfiniBand specification, "Responder error behavior": NAK invalid request, NAK remote
        // operational error.
        Err((Syndrome::LocalLength, vendor)) => {
            Err(Outcome::Fail(Syndrome::RemoteInvalidRequest, vendor))
        }
        Err((_, vendor)) => Err(Outcome::Fail(Syndrome::RemoteOperation, vendor)),
    }
}

/// Compare and swap, fetch and add: one locked operation on the peer's word. It is also atomic with
/// respect to the peer's CPU, which is more than `IBV_ATOMIC_HCA` promises. The old value goes to
/// the pieces, together 8 bytes. On memory that is not mapped here, its owner executes the
/// operation.
fn atomic(
    remote: &mut Remote,
    raddr: &RaddrSegment,
    segment: &[u8],
    opcode: Opcode,
    data: &Data<'_>,
    length: u64,
) -> Outcome {
    let Some(segment) = segment.first_chunk() else {
        return Malformed::Header.into();
    };
    let segment = AtomicSegment::parse(segment);
    let is_add = opcode == Opcode::AtomicFetchAdd;
    if length != 8 {
        return Malformed::AtomicLength.into();
    }
    if raddr.addr % 8 != 0 {
        // "Remote Invalid Request Error": the address of an atomic is not naturally aligned.
        return Limit::AtomicAlignment.fails(Syndrome::RemoteInvalidRequest);
    }
    let span = match remote.peer.memory.resolve(
        raddr.rkey,
        raddr.addr,
        8,
        Access::REMOTE_ATOMIC,
        remote.pd,
    ) {
        Ok(span) => span,
        Err(fault) => return fault.into(),
    };
    let old = match span {
        Span::Mapped(at) if at.addr().get() % 8 != 0 => return Fault::Bounds.into(),
        // SAFETY: 8 bytes of the mapping, aligned.
        Span::Mapped(at) => atomics::execute(unsafe { at.cast().as_ref() }, is_add, &segment),
        Span::Foreign { .. } => match atomics::ask(remote, raddr, is_add, &segment) {
            Ok(old) => old,
            Err(outcome) => return outcome,
        },
    };
    let (old, mut offset) = (old.to_ne_bytes(), 0);
    let placed = data.each(|piece| {
        // SAFETY: the piece was checked against a locally writable region, and the pieces have 8
        // bytes together.
        unsafe {
            piece
                .at
                .cast_mut()
                .copy_from_nonoverlapping(old[offset..].as_ptr(), piece.len)
        };
        offset += piece.len;
        Ok(())
    });
    placed.map_or_else(|outcome| outcome, |()| Outcome::Done(8))
}
