//! Atomics: the operation itself, and having it done by the owner of memory that nobody else can reach.
//!
//! A program's own memory can be copied to and from by other processes, but not operated on atomically. So the requester writes what is
//! to be done beside its lane, says so by a message in it, and its send queue waits; the owner does it when it comes to that message, which
//! is behind everything sent before, and tells the old value. A stopped owner stops those who want this of it, and nobody else.

use core::sync::atomic::{AtomicU64, Ordering};

use mlx5_wire::{Access, AtomicSegment, RaddrSegment};

use crate::Hca;
use crate::queues::qp::SoftQp;
use crate::requester::outcome::{Outcome, WaitFor};
use crate::shared::layout::{ATOMIC, Message, Told};
use crate::shared::memory::{Fault, Span};
use crate::shared::remote::Remote;

/// In [`AtomicRequest::kind_key`](crate::shared::layout::AtomicRequest::kind_key).
const FETCH_ADD: u64 = 1 << 32;

/// Executes fetch and add, or compare and swap, as one locked operation. Returns the old value.
pub(crate) fn execute(word: &AtomicU64, is_add: bool, operands: &AtomicSegment) -> u64 {
    if is_add {
        word.fetch_add(operands.swap_add, Ordering::SeqCst)
    } else {
        word.compare_exchange(operands.compare, operands.swap_add, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|old| old)
    }
}

/// Requests that the peer's owner execute the atomic at the head of the SQ: asks, or looks for the answer. Returns what was there.
pub(crate) fn ask(remote: &mut Remote, raddr: &RaddrSegment, is_add: bool, operands: &AtomicSegment) -> Result<u64, Outcome> {
    if !remote.is_asking {
        if !remote.has_room() {
            return Err(Outcome::Wait(WaitFor::Room));
        }
        let request = remote.atomic_request();
        let kind = if is_add { FETCH_ADD } else { 0 };
        request.kind_key.store(kind | u64::from(raddr.rkey), Ordering::Relaxed);
        request.addr.store(raddr.addr, Ordering::Relaxed);
        request.compare.store(operands.compare, Ordering::Relaxed);
        request.swap.store(operands.swap_add, Ordering::Relaxed);
        remote.atomics = remote.atomics.wrapping_add(1);
        remote.is_asking = true;
        remote.publish(Message { op_own: ATOMIC, imm: remote.atomics, ..Message::default() });
    }
    // H8
    let (number, fault) = Told::unpack(remote.told().answered.load(Ordering::Acquire));
    if number != remote.atomics {
        return Err(Outcome::Wait(WaitFor::Answer));
    }
    remote.is_asking = false;
    match Fault::from_wire(fault) {
        None => Ok(remote.told().old.load(Ordering::Relaxed)),
        Some(fault) => Err(fault.into()),
    }
}

/// Owner: executes the atomic that message `number` of the lane of a queue pair requests. The peer wrote the request, so everything is
/// checked.
#[cold]
pub(crate) fn answer(hca: &Hca, qp: &SoftQp, number: u32) {
    let request = &hca.memory.lane(qp.index).atomic;
    // Relaxed: the message came after (L1).
    let kind_key = request.kind_key.load(Ordering::Relaxed);
    let addr = request.addr.load(Ordering::Relaxed);
    let operands = AtomicSegment { swap_add: request.swap.load(Ordering::Relaxed), compare: request.compare.load(Ordering::Relaxed) };
    let told = &qp.entry().told;
    let fault = match word(hca, qp, kind_key as u32, addr) {
        Ok(word) => {
            told.old.store(execute(word, kind_key & FETCH_ADD != 0, &operands), Ordering::Relaxed);
            0
        }
        Err(fault) => fault as u8,
    };
    // H8
    told.answered.store(Told::pack(number, fault), Ordering::Release);
}

/// Returns the word of this process' memory at `addr` under `key`, for the peer of `qp`.
fn word<'a>(hca: &'a Hca, qp: &SoftQp, key: u32, addr: u64) -> Result<&'a AtomicU64, Fault> {
    if !qp.access.contains(Access::REMOTE_ATOMIC) {
        return Err(Fault::QueuePair);
    }
    let at = match hca.memory.resolve(key, addr, 8, Access::REMOTE_ATOMIC, qp.pd)? {
        Span::Mapped(at) => at.as_ptr(),
        Span::Foreign { addr, .. } => addr as *mut u8,
    };
    if at.addr() % 8 != 0 || at.is_null() {
        return Err(Fault::Bounds);
    }
    // SAFETY: 8 aligned bytes of a registered region: of the arena, or memory that stays mapped while it is registered, which it is: keys are
    // invalidated by this thread only.
    Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
}
