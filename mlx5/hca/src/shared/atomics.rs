//! Atomics: the operation itself, and its execution by the owner of memory that peers do not map.
//!
//! Other processes can copy a program's own memory, but not operate on it atomically. So the
//! requester stores the request next to its lane and sends a message, and its send queue waits. The
//! owner executes the request in order, when it takes that message, and returns the old value. A
//! stopped owner stops only the requesters that sent it such a request.

use core::sync::atomic::{AtomicU64, Ordering};

use mlx5_wire::{Access, AtomicSegment, RaddrSegment};

use crate::shared::layout::{ATOMIC, Acks, Message};
use crate::shared::memory::{DeviceMemory, Keyed, Span};
use crate::shared::remote::Remote;
use crate::types::outcome::{Outcome, WaitFor};
use crate::types::vendor::Fault;

/// Flag of fetch-and-add in
/// [`AtomicRequest::kind_key`](crate::shared::layout::AtomicRequest::kind_key).
const FETCH_ADD: u64 = 1 << 32;

/// Executes fetch-and-add or compare-and-swap as one locked operation. Returns the old value.
pub(crate) fn execute(word: &AtomicU64, is_add: bool, operands: &AtomicSegment) -> u64 {
    if is_add {
        word.fetch_add(operands.swap_add, Ordering::SeqCst)
    } else {
        word.compare_exchange(
            operands.compare,
            operands.swap_add,
            Ordering::SeqCst,
            Ordering::SeqCst,
        )
        .unwrap_or_else(|old| old)
    }
}

/// Requests that the peer's owner execute the atomic at the head of the SQ, or checks for the
/// answer. Returns the old value.
pub(crate) fn ask(
    remote: &mut Remote,
    raddr: &RaddrSegment,
    is_add: bool,
    operands: &AtomicSegment,
) -> Result<u64, Outcome> {
    if !remote.is_asking {
        if !remote.has_room() {
            return Err(Outcome::Wait(WaitFor::Room));
        }
        let request = remote.atomic_request();
        let kind = if is_add { FETCH_ADD } else { 0 };
        request
            .kind_key
            .store(kind | u64::from(raddr.rkey), Ordering::Relaxed);
        request.addr.store(raddr.addr, Ordering::Relaxed);
        request.compare.store(operands.compare, Ordering::Relaxed);
        request.swap.store(operands.swap_add, Ordering::Relaxed);
        remote.atomics = remote.atomics.wrapping_add(1);
        remote.is_asking = true;
        remote.publish(Message {
            op_own: ATOMIC,
            imm: remote.atomics,
            ..Message::default()
        });
    }
    // H8 of `shared::layout`: the old value is stored before the answer.
    let (number, fault) = Acks::unpack(remote.acks().answered.load(Ordering::Acquire));
    if number != remote.atomics {
        return Err(Outcome::Wait(WaitFor::Answer));
    }
    remote.is_asking = false;
    match Fault::from_wire(fault) {
        None => Ok(remote.acks().old.load(Ordering::Relaxed)),
        Some(fault) => Err(fault.into()),
    }
}

/// Owner: executes atomic `number` of the connection, which a message in the lane of queue pair
/// `index` requests. `of` has the rights and the protection domain of the queue pair. The peer
/// wrote the request, so every field is checked.
#[cold]
pub(crate) fn answer(memory: &DeviceMemory, index: usize, number: u32, of: (Access, u32)) {
    let request = &memory.lane(index).atomic;
    // Relaxed: the peer stored the request before it published the message, which this thread has
    // read (L1 of docs/shm-protocols.md).
    let kind_key = request.kind_key.load(Ordering::Relaxed);
    let addr = request.addr.load(Ordering::Relaxed);
    let operands = AtomicSegment {
        swap_add: request.swap.load(Ordering::Relaxed),
        compare: request.compare.load(Ordering::Relaxed),
    };
    let acks = &memory.qp(index).acks;
    let fault = match word(memory, kind_key as u32, addr, of) {
        Ok(word) => {
            acks.old.store(
                execute(word, kind_key & FETCH_ADD != 0, &operands),
                Ordering::Relaxed,
            );
            0
        }
        Err(fault) => fault as u8,
    };
    // H8: the answer is stored after the old value.
    acks.answered
        .store(Acks::pack(number, fault), Ordering::Release);
}

/// Returns the word at `addr` under `key` in this process, for the peer of a queue pair that grants
/// `access` and has the protection domain `pd`.
pub(crate) fn word(
    memory: &DeviceMemory,
    key: u32,
    addr: u64,
    (access, pd): (Access, u32),
) -> Result<&AtomicU64, Fault> {
    if !access.contains(Access::REMOTE_ATOMIC) {
        return Err(Fault::QueuePair);
    }
    let span = memory.resolve(Keyed::new(key, addr, 8), Access::REMOTE_ATOMIC, pd)?;
    let at = match &span {
        Span::Mapped(at) => at.as_ptr(),
        Span::Foreign { addr, .. } => *addr as *mut u8,
    };
    if at.addr() % 8 != 0 || at.is_null() {
        return Err(Fault::Bounds);
    }
    if let Span::Foreign { .. } = span {
        // The program may have unmapped the memory, which a copy by the kernel detects.
        let mut probe = [0; 8];
        // SAFETY: `probe` is writable for 8 bytes, and `span` was resolved for 8 bytes.
        unsafe { span.read(0, probe.as_mut_ptr(), probe.len())? };
    }
    // SAFETY: `at` is the aligned address of 8 bytes of a registered region: in the arena, or in
    // memory that was mapped at the probe. A program that unmaps its memory after the probe, or has
    // made it read-only, gets SIGSEGV. The region stays registered during the access, because only
    // this thread invalidates keys.
    Ok(unsafe { AtomicU64::from_ptr(at.cast()) })
}
