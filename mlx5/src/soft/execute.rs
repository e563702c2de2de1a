//! The requester: takes WQEs off a send queue and does what they say, to memory, lanes and its own send CQ.
//!
//! Everything happens in the caller's thread, in posting order, with no help from the target's CPU. A WQE that cannot run yet stops its
//! own send queue only, and is tried again on a later empty poll.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use super::cq::SoftCq;
use super::layout::Message;
use super::memory::{Fault, Span};
use super::queues::{Remote, SoftQp, WaitFor, Waiting};
use super::{Hca, State};
use crate::doorbell::BF_BYTES;
use crate::mr::Access;
use crate::ops::MAX_MESSAGE_BYTES;
use crate::wire::{
    CqeOpcode, CtrlSegment, DataSegment, ErrorCqe, InlineHeader, Opcode, RaddrSegment, RequesterCqe, SEGMENT, Syndrome, WQEBB,
};

/// A peer that does not answer is asked again this often.
const PEER_RETRY_NS: u64 = 1_000_000;
/// The RNR retry count that means "for ever".
const RNR_RETRY_WITHOUT_END: u8 = 7;
/// Longest WQE the device takes, in bytes: 16 WQEBBs.
const MAX_WQE: usize = 16 * WQEBB;

/// How a WQE ended.
enum Outcome {
    /// Done; this many bytes were read, for a READ.
    Done(u32),
    /// Cannot run yet.
    Wait(WaitFor),
    /// Failed; the queue pair with it.
    Fail(Syndrome, u8),
}

impl From<Fault> for Outcome {
    /// A fault on the remote side.
    fn from(fault: Fault) -> Self {
        Self::Fail(Syndrome::RemoteAccess, fault as u8)
    }
}

/// A BlueFlame register was written. It belongs to one queue pair, whose number its first 8 bytes repeat.
pub(crate) fn doorbell(hca: &Hca, state: &mut State, uar_offset: usize) {
    let State { qps, cqs, deferred, .. } = state;
    let Some(Some(qp)) = qps.get_mut(uar_offset / (2 * BF_BYTES)) else { return };
    // SAFETY: inside the register, which only the storing thread (this one) accesses.
    let bytes: [u8; SEGMENT] = unsafe { qp.memory.at::<[u8; SEGMENT]>(uar_offset % (2 * BF_BYTES)).read() };
    debug_assert_eq!(CtrlSegment::parse(&bytes).qpn, qp.qpn, "a doorbell of one queue pair in another's register");
    if qp.waiting.is_none() {
        if let Some(at_ns) = run(hca, qp, cqs) {
            deferred.schedule(at_ns, qp.qpn);
        }
    }
}

/// Looks again at the send queues whose time has come. Returns whether one was due.
#[cold]
pub(crate) fn run_deferred(hca: &Hca, state: &mut State) -> bool {
    let State { qps, cqs, deferred, .. } = state;
    let now_ns = hca.clock.now_ns();
    let mut any = false;
    // Those that schedule themselves again are for the next poll.
    for _ in 0..deferred.len() {
        let Some(qpn) = deferred.pop_due(now_ns) else { break };
        let Some(Some(qp)) = qps.get_mut(super::objects::qp_index(qpn)) else { continue };
        if qp.qpn == qpn && qp.waiting.is_some() {
            any = true;
            if let Some(at_ns) = run(hca, qp, cqs) {
                deferred.schedule(at_ns, qpn);
            }
        }
    }
    any
}

/// Runs a send queue up to its doorbell record. Returns when to look again, if it has to wait.
#[inline]
fn run(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>]) -> Option<u64> {
    let mut again = None;
    while qp.sq_consumer != qp.sq_producer() {
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
        let head = unsafe { qp.wqebb(qp.sq_consumer).cast::<[u8; SEGMENT]>().read() };
        let ctrl = CtrlSegment::parse(&head);
        let outcome = if qp.failed { Outcome::Fail(Syndrome::WorkRequestFlushed, 0) } else { run_wqe(hca, qp, &ctrl) };
        match outcome {
            Outcome::Done(bytes) => {
                qp.waiting = None;
                complete(qp, cqs, &ctrl, bytes);
                qp.sq_consumer = qp.sq_consumer.wrapping_add(blocks(&ctrl));
            }
            Outcome::Fail(syndrome, vendor) => fail(hca, qp, cqs, &ctrl, syndrome, vendor),
            Outcome::Wait(reason) => match wait(hca, qp, reason) {
                Ok(at_ns) => {
                    again = Some(at_ns);
                    break;
                }
                Err(syndrome) => fail(hca, qp, cqs, &ctrl, syndrome, 0),
            },
        }
    }
    announce(qp);
    again
}

/// WQEBBs of a WQE; at least one, so that a malformed one is passed over.
fn blocks(ctrl: &CtrlSegment) -> u16 {
    usize::from(ctrl.ds).div_ceil(WQEBB / SEGMENT).max(1) as u16
}

/// Decides how long a WQE may wait, and when to try it again.
#[cold]
fn wait(hca: &Hca, qp: &mut SoftQp, reason: WaitFor) -> Result<u64, Syndrome> {
    let now_ns = hca.clock.now_ns();
    let waiting = match &mut qp.waiting {
        Some(waiting) if waiting.reason == reason => waiting,
        // The first attempt, or the reason changed: the clock starts now.
        slot => slot.insert(Waiting { reason, since_ns: now_ns, rnr_left: qp.options.rnr_retry }),
    };
    match reason {
        WaitFor::Room => Ok(now_ns),
        WaitFor::Receive => {
            match waiting.rnr_left {
                0 => return Err(Syndrome::RnrRetryExceeded),
                RNR_RETRY_WITHOUT_END => {}
                _ => waiting.rnr_left -= 1,
            }
            Ok(now_ns.saturating_add(qp.options.rnr_timer_ns))
        }
        WaitFor::Peer => {
            let gone = qp.remote.as_ref().is_none_or(|r| r.peer.is_gone());
            let patience = qp.options.transport_timeout_ns();
            let patience = if gone { patience.min(hca.dead_peer_timeout_ns) } else { patience };
            let end_ns = waiting.since_ns.saturating_add(patience);
            if now_ns >= end_ns { Err(Syndrome::TransportRetryExceeded) } else { Ok(end_ns.min(now_ns + PEER_RETRY_NS)) }
        }
    }
}

/// A WQE succeeded: a CQE if it asked for one.
#[inline(always)]
fn complete(qp: &mut SoftQp, cqs: &mut [Option<SoftCq>], ctrl: &CtrlSegment, byte_count: u32) {
    if !ctrl.signaled {
        return;
    }
    let cqe = RequesterCqe { wqe_opcode: ctrl.opcode, qpn: qp.qpn, wqe_counter: ctrl.wqe_index, byte_count };
    if let Some(Some(cq)) = cqs.get_mut(qp.send_cq as usize) {
        qp.failed |= cq.write(cqe.emit(), CqeOpcode::Requester).is_err();
    }
}

/// A WQE failed: always a CQE, and the queue pair goes to the error state, in which it neither sends nor receives.
#[cold]
fn fail(hca: &Hca, qp: &mut SoftQp, cqs: &mut [Option<SoftCq>], ctrl: &CtrlSegment, syndrome: Syndrome, vendor: u8) {
    qp.waiting = None;
    qp.failed = true;
    hca.memory.qp(qp.index).identity.store(super::layout::QpEntry::pack_identity(qp.qpn, 0), Ordering::Release);
    let cqe = ErrorCqe {
        raw_syndrome: syndrome as u8,
        vendor_syndrome: vendor,
        wqe_opcode: ctrl.opcode,
        qpn: qp.qpn,
        wqe_counter: ctrl.wqe_index,
    };
    if let Some(Some(cq)) = cqs.get_mut(qp.send_cq as usize) {
        // An overrun CQ tells nobody anything; the queue pair is in error already.
        let _ = cq.write(cqe.emit(), CqeOpcode::RequesterError);
    }
    // A malformed WQE may claim to be longer than what was posted.
    let outstanding = qp.sq_producer().wrapping_sub(qp.sq_consumer);
    qp.sq_consumer = qp.sq_consumer.wrapping_add(blocks(ctrl).min(outstanding));
}

/// Tells the peer's owner about this doorbell's messages if it is not polling the lane.
#[inline(always)]
fn announce(qp: &mut SoftQp) {
    if let Some(remote) = qp.remote.as_mut().filter(|r| r.published) {
        remote.published = false;
        remote.ready.notify_if_armed(remote.index, &remote.entry().armed);
    }
}

/// Finds the WQE's bytes and runs it.
#[inline(always)]
fn run_wqe(hca: &Hca, qp: &mut SoftQp, ctrl: &CtrlSegment) -> Outcome {
    let malformed = |vendor| Outcome::Fail(Syndrome::LocalQpOperation, vendor);
    let outstanding = qp.sq_producer().wrapping_sub(qp.sq_consumer);
    if ctrl.wqe_index != qp.sq_consumer || ctrl.qpn != qp.qpn || ctrl.ds == 0 || blocks(ctrl) > outstanding {
        return malformed(0x10);
    }
    let bytes = usize::from(ctrl.ds) * SEGMENT;
    if bytes > MAX_WQE {
        return malformed(0x11);
    }
    let first = qp.sq_consumer & qp.sq_mask;
    let to_end = (usize::from(qp.sq_mask) + 1 - usize::from(first)) * WQEBB;
    let start = qp.wqebb(first);
    if bytes <= to_end {
        // SAFETY: `bytes` of the SQ, contiguous, untouched by the driver until completion.
        let wqe = unsafe { core::slice::from_raw_parts(start.as_ptr(), bytes) };
        return execute(hca, qp, ctrl, wqe);
    }
    // A driver may let a WQE wrap; the device reads it in two parts.
    let mut whole = [0; MAX_WQE];
    // SAFETY: the first part ends at the SQ's end, the second starts at its beginning; both are inside it.
    unsafe {
        whole.as_mut_ptr().copy_from_nonoverlapping(start.as_ptr(), to_end);
        whole.as_mut_ptr().add(to_end).copy_from_nonoverlapping(qp.wqebb(0).as_ptr(), bytes - to_end);
    }
    execute(hca, qp, ctrl, &whole[..bytes])
}

#[inline(always)]
fn execute(hca: &Hca, qp: &mut SoftQp, ctrl: &CtrlSegment, wqe: &[u8]) -> Outcome {
    let malformed = |vendor| Outcome::Fail(Syndrome::LocalQpOperation, vendor);
    let Some(opcode) = Opcode::from_wire(ctrl.opcode) else { return malformed(0x12) };
    if opcode == Opcode::Nop {
        return Outcome::Done(0);
    }
    if !matches!(opcode, Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead) {
        return malformed(0x12);
    }
    let (Some(raddr), Some(data)) = (wqe[SEGMENT..].first_chunk(), wqe.get(2 * SEGMENT..)) else { return malformed(0x13) };
    let raddr = RaddrSegment::parse(raddr);
    let data = match Data::parse(data) {
        Ok(data) => data,
        Err(vendor) => return malformed(vendor),
    };
    let is_read = opcode == Opcode::RdmaRead;
    let length = match check_local(hca, qp.pd, &data, is_read) {
        Ok(length) => length,
        Err(outcome) => return outcome,
    };
    let Some(remote) = qp.remote.as_mut() else { return malformed(0x15) };
    if !remote.answers() {
        return Outcome::Wait(WaitFor::Peer);
    }
    let span = if length == 0 {
        // Nothing is accessed, so the key is not looked at.
        None
    } else {
        let needed = if is_read { Access::REMOTE_READ } else { Access::REMOTE_WRITE };
        match remote.peer.memory.resolve(raddr.rkey, raddr.addr, length, needed, remote.pd) {
            Ok(span) => Some(span),
            Err(fault) => return fault.into(),
        }
    };
    let result = match opcode {
        Opcode::RdmaRead => return read(span, &data, length),
        Opcode::RdmaWrite => write(span, &data),
        _ => write_imm(remote, span, &data, raddr.addr, length as u32, ctrl.imm),
    };
    match result {
        Ok(()) => Outcome::Done(0),
        Err(outcome) => outcome,
    }
}

/// Checks the local side of a message, and returns its length in bytes.
#[inline(always)]
fn check_local(hca: &Hca, pd: u32, data: &Data<'_>, is_read: bool) -> Result<u64, Outcome> {
    let access = if is_read { Access::LOCAL_WRITE } else { Access::empty() };
    let mut length = 0u64;
    data.each(|piece| {
        length += piece.len as u64;
        match piece.key {
            None if is_read => Err(Outcome::Fail(Syndrome::LocalQpOperation, 0x14)),
            None => Ok(()),
            Some(key) => match hca.memory.resolve(key, piece.at as u64, piece.len as u64, access, pd) {
                Ok(_) => Ok(()),
                Err(fault) => Err(Outcome::Fail(Syndrome::LocalProtection, fault as u8)),
            },
        }
    })?;
    if length > MAX_MESSAGE_BYTES {
        return Err(Outcome::Fail(Syndrome::LocalLength, 0));
    }
    Ok(length)
}

#[inline(always)]
fn write(span: Option<Span>, data: &Data<'_>) -> Result<(), Outcome> {
    let Some(span) = span else { return Ok(()) };
    let mut offset = 0;
    data.each(|piece| {
        // SAFETY: the piece was checked against its region (or lies in the WQE), the span for the sum of the pieces.
        unsafe { span.write(offset, piece.at, piece.len) }?;
        offset += piece.len as u64;
        Ok(())
    })
}

fn read(span: Option<Span>, data: &Data<'_>, length: u64) -> Outcome {
    let Some(span) = span else { return Outcome::Done(0) };
    let mut offset = 0;
    let result = data.each(|piece| {
        // SAFETY: the piece was checked against a locally writable region, the span for the sum of the pieces.
        unsafe { span.read(offset, piece.at.cast_mut(), piece.len) }?;
        offset += piece.len as u64;
        Ok(())
    });
    match result {
        Ok(()) => Outcome::Done(length as u32),
        Err(outcome) => outcome,
    }
}

/// WRITE with immediate: room in the lane, the payload, a receive, the message; in this order, so that nothing is undone and a receive is
/// taken only for a message that will be delivered. Without a receive the payload is written again at the retry, as by a NIC, which finds
/// out with the last packet.
#[inline(always)]
fn write_imm(remote: &mut Remote, span: Option<Span>, data: &Data<'_>, addr: u64, byte_count: u32, imm: u32) -> Result<(), Outcome> {
    // L2; the entry outlives the lane's end, both being in the peer's memory.
    let consumed = NonNull::from(&remote.entry().consumed);
    // SAFETY: an atomic in the memory of `remote.peer`.
    if !remote.lane.has_room(unsafe { consumed.as_ref() }) {
        return Err(Outcome::Wait(WaitFor::Room));
    }
    write(span, data)?;
    let Some((pop, wqe_index)) = remote.pop_receive() else { return Err(Outcome::Wait(WaitFor::Receive)) };
    let opcode = CqeOpcode::ResponderWriteImm as u8;
    remote.lane.publish(Message { payload: addr, byte_count, imm, pop, wqe_index, opcode, _zero: 0 });
    remote.delivered();
    Ok(())
}

/// One contiguous part of a message.
struct Piece {
    at: *const u8,
    len: usize,
    /// lkey; `None` for inline data.
    key: Option<u32>,
}

/// The data segments of a WQE. Nearly all have one part at most, which is parsed once.
enum Data<'a> {
    None,
    One(Piece),
    Many(&'a [u8]),
}

impl<'a> Data<'a> {
    /// Parses the bytes behind the header segments, a multiple of 16; the error is a vendor syndrome.
    #[inline(always)]
    fn parse(bytes: &'a [u8]) -> Result<Self, u8> {
        match Piece::parse(bytes)? {
            None => Ok(Self::None),
            Some((piece, [])) => Ok(Self::One(piece)),
            Some(_) => Ok(Self::Many(bytes)),
        }
    }

    /// Calls `f` for each part, in order.
    #[inline(always)]
    fn each(&self, mut f: impl FnMut(&Piece) -> Result<(), Outcome>) -> Result<(), Outcome> {
        match self {
            Self::None => Ok(()),
            Self::One(piece) => f(piece),
            Self::Many(bytes) => {
                let mut rest = *bytes;
                loop {
                    match Piece::parse(rest) {
                        Ok(None) => return Ok(()),
                        Ok(Some((piece, behind))) => {
                            f(&piece)?;
                            rest = behind;
                        }
                        Err(vendor) => return Err(Outcome::Fail(Syndrome::LocalQpOperation, vendor)),
                    }
                }
            }
        }
    }
}

impl Piece {
    /// The first part of `bytes`, and what is behind it.
    #[inline(always)]
    fn parse(bytes: &[u8]) -> Result<Option<(Self, &[u8])>, u8> {
        let Some((segment, behind)) = bytes.split_first_chunk::<SEGMENT>() else { return Ok(None) };
        let Some(inline) = InlineHeader::parse(&[segment[0], segment[1], segment[2], segment[3]]) else {
            let pointer = DataSegment::parse(segment);
            // 0 means 2^31 on the wire.
            let len = if pointer.byte_count == 0 { 1 << 31 } else { pointer.byte_count as usize };
            return Ok(Some((Self { at: pointer.addr as *const u8, len, key: Some(pointer.lkey) }, behind)));
        };
        let len = inline.byte_count as usize;
        let Some(behind) = bytes.get(InlineHeader::segments(len) * SEGMENT..) else { return Err(0x16) };
        Ok(Some((Self { at: bytes[InlineHeader::LEN..].as_ptr(), len, key: None }, behind)))
    }
}
