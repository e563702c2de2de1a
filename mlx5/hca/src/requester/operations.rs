//! The operations of the requester: the effect of one WQE, verb by verb, on the memory and the lane
//! of the peer.

use core::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use mlx5_wire::roce::Nak;
use mlx5_wire::{
    Access, AtomicSegment, CqeOpcode, CtrlWords, FenceMode, Header, Opcode, RaddrSegment, Syndrome,
    Wqe,
};

use crate::packets::Wire;
use crate::queues::data::{check_local, pieces, scatter};
use crate::queues::qp::{SoftQp, Transport, Waiting};
use crate::requester::datagrams;
use crate::shared::atomics;
use crate::shared::layout::{Message, RECEIVES, REFUSED, allows};
use crate::shared::memory::{Keyed, Span};
use crate::shared::remote::Remote;
use crate::types::outcome::{Outcome, WaitFor, refusal_of_receive};
use crate::types::terms::{Difference, Term, violated};
use crate::types::vendor::Fault;
use crate::types::vendor::{Limit, Malformed};
use crate::{Hca, Links};

/// Maximum time in ns for which a message that found no receive waits until the peer's device
/// copies receives from the memory of its driver ([`no_receive`]). It is much longer than the
/// pauses of the peer's thread: a device that copies nothing for so long has stopped.
const COPY_WAIT_NS: u64 = 1_000_000_000;

/// Executes the WQE that consists of `bytes`, within the rights that a connected peer `granted`
/// ([`Remote::granted`]).
pub(crate) fn execute(
    hca: &Hca,
    (links, wire): (&mut Links, &mut Wire),
    qp: &mut SoftQp,
    ctrl: CtrlWords,
    bytes: &[u8],
    granted: u64,
) -> Outcome {
    match attempt(hca, (links, wire), qp, ctrl, bytes, granted) {
        Ok(byte_count) => Outcome::Done(byte_count),
        Err(outcome @ Outcome::Posted(_)) => outcome,
        Err(Outcome::Wait(WaitFor::Receive)) => not_done(qp, Outcome::Wait(no_receive(hca, qp))),
        Err(outcome) => not_done(qp, outcome),
    }
}

/// Reports to the peer that it has refused a request of this queue pair. The report is lost if the
/// lane is full: the peer has then taken no message for a long time.
fn report_refusal(qp: &mut SoftQp, syndrome: Syndrome, vendor: u8) {
    if let Transport::Connected(remote) = &mut qp.transport {
        if remote.has_room() {
            remote.publish(Message {
                imm: Message::error(syndrome, vendor),
                op_own: REFUSED,
                ..Message::default()
            });
        }
    }
}

/// Adapts the outcome of a WQE that was not executed. An unreliable connection loses a message that
/// its peer refuses or for which the peer has no receive. A destroyed queue pair does not answer,
/// so it refuses nothing.
#[cold]
fn not_done(qp: &mut SoftQp, outcome: Outcome) -> Outcome {
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
    let is_destroyed = || qp.remote().is_some_and(|remote| remote.granted() == 0);
    match outcome {
        _ if qp.is_unreliable && is_of_peer => Outcome::Done(0),
        _ if is_refused && is_destroyed() => Outcome::Wait(WaitFor::Peer),
        Outcome::Fail(syndrome, vendor) if is_of_peer => {
            report_refusal(qp, syndrome, vendor);
            outcome
        }
        outcome => outcome,
    }
}

/// Returns the reason to wait after a search that found no receive. The peer's driver may have
/// posted a receive that the peer's device has not copied yet: the copy that ran during the search
/// may have begun before the driver posted. So only another search, after the end of the next copy,
/// shows whether a receive is posted.
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

/// Executes the WQE. Returns the number of bytes that a READ or an atomic fetched.
fn attempt(
    hca: &Hca,
    (links, wire): (&mut Links, &mut Wire),
    qp: &mut SoftQp,
    ctrl: CtrlWords,
    bytes: &[u8],
    granted: u64,
) -> Result<u32, Outcome> {
    let opcode = Opcode::from_repr(ctrl.opcode()).ok_or(Malformed::Opcode)?;
    if opcode == Opcode::Nop {
        return Ok(0);
    }
    // No peer of an unreliable connection has resources for READs and atomics.
    if qp.is_unreliable && opcode.has_result() {
        return Err(Malformed::Opcode.into());
    }
    let (pd, is_datagram) = (qp.pd, qp.is_datagram());
    let local = || {
        let wqe = Wqe::parse(bytes, is_datagram)?;
        check_local(hca, pd, &wqe).map(|length| (wqe, length as u32))
    };
    match &mut qp.transport {
        Transport::Unconnected => Err(Malformed::NotConnected.into()),
        Transport::NoPeer => Err(Outcome::Wait(WaitFor::Peer)),
        Transport::Connected(remote) => {
            let (wqe, length) = local()?;
            if granted & RECEIVES == 0 {
                let reported = &mut qp.has_reported;
                differs(
                    hca,
                    (qp.qpn, qp.sq_limit, reported),
                    remote,
                    &wqe,
                    length,
                    granted,
                )?;
            }
            on_peer(remote, &wqe, length, granted)
        }
        Transport::Wire => {
            let (wqe, length) = local()?;
            Err(wire.post(qp, &wqe, length))
        }
        Transport::Datagram { qkey } => {
            let ((wqe, length), qkey) = (local()?, *qkey);
            datagrams::send(hca, (links, wire), qp, qkey, &wqe, length).map(|()| 0)
        }
    }
}

/// Checks a WQE of a queue pair whose peer is not there, or does not have the same terms.
#[cold]
fn differs(
    hca: &Hca,
    (qpn, sq_limit, has_reported): (u32, u16, &mut bool),
    remote: &mut Remote,
    wqe: &Wqe<'_>,
    length: u32,
    granted: u64,
) -> Result<(), Outcome> {
    let terms = remote.terms.zip(remote.expected());
    let Some((terms, expected)) = terms.filter(|_| granted != 0) else {
        return Err(Outcome::Wait(WaitFor::Peer));
    };
    // READs and atomics are executed one by one here, but a NIC sends those of one doorbell before
    // it has the first answer, except after a fence. So they are counted by doorbell.
    let is_read = wqe.opcode.has_result();
    let (mut reads, limit, last) = remote.reads;
    let at = wqe.ctrl.wqe_index();
    if limit != sq_limit || wqe.ctrl.fence() != FenceMode::None {
        reads = 0;
    }
    // A WQE that waits is tried several times.
    reads += u32::from(is_read && (reads == 0 || at != last));
    remote.reads = (reads, sq_limit, if is_read { at } else { last });
    let counted = if is_read { reads } else { 0 };
    let Some((term, sent, expected)) = violated(terms.sent(), expected, length, counted) else {
        return Ok(());
    };
    hca.report_difference(
        has_reported,
        Difference {
            from: qpn,
            to: remote.qpn,
            term,
            sent,
            expected,
        },
    );
    Err(match term {
        // The packets of the response have a length that this end does not expect.
        Term::Mtu if is_read => Limit::Terms.fails(Syndrome::LocalLength),
        Term::Mtu | Term::Reads => Limit::Terms.fails(Nak::InvalidRequest.into()),
        Term::Format | Term::Psn | Term::Qkey => Outcome::Wait(WaitFor::Peer),
    })
}

/// Executes a WQE on the memory and the lane of a connected peer.
fn on_peer(remote: &mut Remote, wqe: &Wqe<'_>, length: u32, granted: u64) -> Result<u32, Outcome> {
    let (at, needed) = match (wqe.header, wqe.opcode) {
        (Header::None | Header::Datagram(_), _) => return send(remote, wqe, length).map(|()| 0),
        (Header::Atomic(at, _), _) => (at, Access::REMOTE_ATOMIC),
        (Header::Memory(at), Opcode::RdmaRead) => (at, Access::REMOTE_READ),
        (Header::Memory(at), _) => (at, Access::REMOTE_WRITE),
    };
    // A responder checks the queue pair before the key.
    if !allows(granted, needed) {
        return Err(Fault::QueuePair.into());
    }
    if let Header::Atomic(_, operands) = wqe.header {
        return atomic(remote, wqe, &at, &operands, length);
    }
    // If no byte is accessed, the key is not checked.
    let memory = &remote.peer.memory;
    let span = match length {
        0 => None,
        _ => {
            let bytes = Keyed::new(at.rkey, at.addr, length.into());
            Some(memory.resolve(bytes, needed, remote.pd)?)
        }
    };
    match wqe.opcode {
        Opcode::RdmaRead => {
            // The effects of earlier operations are visible to the peer before anything is read,
            // like on the bus of a NIC.
            fence(Ordering::SeqCst);
            read(span, wqe)?;
            Ok(length)
        }
        Opcode::RdmaWrite => write(span, wqe).map(|()| 0),
        _ => write_imm(remote, span, wqe, at.addr, length).map(|()| 0),
    }
}

fn write(span: Option<Span>, wqe: &Wqe<'_>) -> Result<(), Outcome> {
    let Some(span) = span else { return Ok(()) };
    let mut offset = 0;
    for piece in pieces(wqe) {
        // SAFETY: the piece was checked against its region (or lies in the WQE), and the span was
        // resolved for the sum of the pieces.
        unsafe { span.write(offset, piece.at, piece.len) }?;
        offset += piece.len as u64;
    }
    Ok(())
}

fn read(span: Option<Span>, wqe: &Wqe<'_>) -> Result<(), Outcome> {
    let Some(span) = span else { return Ok(()) };
    let mut offset = 0;
    for piece in pieces(wqe) {
        // SAFETY: the piece was checked against a locally writable region, and the span was
        // resolved for the sum of the pieces.
        unsafe { span.read(offset, piece.at.cast_mut(), piece.len) }?;
        offset += piece.len as u64;
    }
    Ok(())
}

/// WRITE with immediate. If the copy can fail, the order is: room in the lane, payload, receive,
/// message. So nothing is undone, and a receive is taken only for a message that will be delivered.
/// If there is no receive, the retry writes such a payload again, like a NIC, which detects the
/// missing receive with the last packet. If the copy cannot fail, the receive is taken first, so
/// that nothing is written without a receive.
fn write_imm(
    remote: &mut Remote,
    span: Option<Span>,
    wqe: &Wqe<'_>,
    addr: u64,
    byte_count: u32,
) -> Result<(), Outcome> {
    if !remote.has_room() {
        return Err(Outcome::Wait(WaitFor::Room));
    }
    let is_sure = matches!(span, None | Some(Span::Mapped(_))) && wqe.pieces().nth(1).is_none();
    if !is_sure {
        write(span, wqe)?;
    }
    let taking = remote
        .take_receive()
        .ok_or(Outcome::Wait(WaitFor::Receive))?;
    if is_sure {
        // A single part, to mapped memory or of no bytes, cannot fail.
        let placed = write(span, wqe);
        debug_assert!(placed.is_ok());
    }
    remote.publish(Message {
        payload: addr,
        byte_count,
        imm: wqe.ctrl.imm(),
        taking,
        op_own: Message::op_own(CqeOpcode::ResponderWriteImm, wqe.ctrl.solicited()),
    });
    Ok(())
}

/// SEND: takes a receive and fills its buffers. Both ends fail if the message does not fit, or the
/// buffers cannot be written: an error message in the lane reports this to the responder.
fn send(remote: &mut Remote, wqe: &Wqe<'_>, byte_count: u32) -> Result<(), Outcome> {
    if !remote.has_room() {
        return Err(Outcome::Wait(WaitFor::Room));
    }
    let taking = remote
        .take_receive()
        .ok_or(Outcome::Wait(WaitFor::Receive))?;
    let parts = pieces(wqe).map(|piece| (piece.at, piece.len));
    let (memory, receives) = (&remote.peer.memory, &remote.receives);
    // SAFETY: the parts were checked against their regions (`check_local`), or lie in the WQE.
    let result = unsafe { scatter(memory, receives, taking.index(), 0, parts) };
    if result == Err((Syndrome::LocalProtection, Fault::Gone as u8)) {
        return Err(Outcome::Wait(WaitFor::Peer));
    }
    let payload = receives
        .segments(taking.index())
        .next()
        .map_or(0, |segment| segment.addr());
    let (opcode, imm, solicited) = match (result, wqe.opcode) {
        (Ok(()), Opcode::SendImm) => {
            let imm = wqe.ctrl.imm();
            (CqeOpcode::ResponderSendImm, imm, wqe.ctrl.solicited())
        }
        (Ok(()), _) => (CqeOpcode::ResponderSend, 0, wqe.ctrl.solicited()),
        (Err((syndrome, vendor)), _) => {
            let imm = Message::error(syndrome, vendor);
            (CqeOpcode::ResponderError, imm, false)
        }
    };
    remote.publish(Message {
        payload,
        byte_count,
        imm,
        taking,
        op_own: Message::op_own(opcode, solicited),
    });
    result.map_err(|(syndrome, vendor)| Outcome::Fail(refusal_of_receive(syndrome).into(), vendor))
}

/// Compare and swap, fetch and add: one locked operation on the peer's word. It is also atomic with
/// respect to the peer's CPU, which is more than `IBV_ATOMIC_HCA` promises. The old value is
/// written to the pieces, together 8 bytes. On memory that is not mapped in this process, the owner
/// of the memory executes the operation.
fn atomic(
    remote: &mut Remote,
    wqe: &Wqe<'_>,
    at: &RaddrSegment,
    operands: &AtomicSegment,
    length: u32,
) -> Result<u32, Outcome> {
    let is_add = wqe.opcode == Opcode::AtomicFetchAdd;
    if length != 8 {
        return Err(Malformed::AtomicLength.into());
    }
    if at.addr % 8 != 0 {
        // "Remote Invalid Request Error": the address of an atomic is not naturally aligned.
        return Err(Limit::AtomicAlignment.fails(Nak::InvalidRequest.into()));
    }
    let memory = &remote.peer.memory;
    let bytes = Keyed::new(at.rkey, at.addr, 8);
    let old = match memory.resolve(bytes, Access::REMOTE_ATOMIC, remote.pd)? {
        Span::Mapped(at) if at.addr().get() % 8 != 0 => return Err(Fault::Bounds.into()),
        // SAFETY: `at` is the aligned address of 8 bytes of a mapped region.
        Span::Mapped(at) => atomics::execute(unsafe { at.cast().as_ref() }, is_add, operands),
        Span::Foreign { .. } => atomics::ask(remote, at, is_add, operands)?,
    };
    read(Some(Span::Mapped(NonNull::from(&old).cast())), wqe)?;
    Ok(length)
}
