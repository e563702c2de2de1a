//! The local buffers of WQEs in flight, in any time but the immediate one. They belong to the
//! device until a CQE of their WQE, or of a later one, is visible.
//!
//! - Sources, in strict mode: checks that a source is unchanged from the doorbell to the
//!   completion. Until then a NIC may read it for the first time, or again for a retransmission. A
//!   WQE behind a fence is not checked: it may send the result of the READ before it.
//! - Results: the result of a READ or an atomic is placed in its buffer when the response arrives.
//!   Until then the buffer holds [`NOT_HERE`].

use mlx5_wire::{Access, FenceMode, Opcode, Wqe};

use crate::Hca;
use crate::hash::hash_of;
use crate::queues::data::{Piece, pieces};
use crate::queues::in_flight::{Landing, Source};
use crate::queues::qp::{SoftQp, blocks, head};
use crate::shared::memory::Keyed;
use crate::types::rule::{Queue, Rule, Violation};

/// Byte that fills a result's buffer between the effect and the response.
const NOT_HERE: u8 = 0xda;

/// Stores the hashes of the sources of the WQEBBs from `from` to `to`, just announced.
#[cold]
pub(crate) fn remember(hca: &Hca, qp: &mut SoftQp, from: u16, to: u16) {
    let mut counter = from;
    while counter != to {
        let ctrl = qp.sq.ctrl(counter);
        if let Some(hash) =
            source_hash(hca, qp, counter).filter(|_| ctrl.fence() == FenceMode::None)
        {
            qp.in_flight.sources.push_back(Source { counter, hash });
        }
        counter = counter.wrapping_add(blocks(ctrl.ds()).max(1).min(to.wrapping_sub(counter)));
    }
}

/// Compares the sources of WQE `completed`, whose CQE is about to be visible, and of all WQEs
/// before it. Their buffers belong to the program again.
#[cold]
pub(crate) fn release(
    hca: &Hca,
    qp: &mut SoftQp,
    completed: u16,
    has_succeeded: bool,
    violations: &mut Vec<Violation>,
) {
    while let Some(&Source { counter, hash }) = qp.in_flight.sources.front() {
        if completed.wrapping_sub(counter) > u16::MAX / 2 {
            break;
        }
        qp.in_flight.sources.pop_front();
        if has_succeeded && source_hash(hca, qp, counter) != Some(hash) {
            violations.push(Violation {
                queue: Queue::Send(qp.qpn),
                index: counter.into(),
                bytes: qp.sq.with_bytes(counter, 1, head),
                rule: Rule::SourceChanged,
            });
        }
    }
}

/// Removes the bytes that the READ or atomic at `counter` fetched. They are placed when its
/// completion is due. Returns `None` for other WQEs.
pub(crate) fn hold(hca: &Hca, qp: &SoftQp, counter: u16) -> Option<Landing> {
    let mut bytes = Vec::new();
    each_piece(hca, qp, counter, true, |piece| {
        let start = bytes.len();
        bytes.resize(start + piece.len, 0);
        // SAFETY: the piece was just checked against a locally writable region; both have its
        // length.
        unsafe {
            piece.at.copy_to(bytes[start..].as_mut_ptr(), piece.len);
            piece.at.cast_mut().write_bytes(NOT_HERE, piece.len);
        }
    })?;
    Some(Landing { counter, bytes })
}

/// Places the bytes of a result, unless the program has deregistered the memory.
pub(crate) fn land(hca: &Hca, qp: &SoftQp, landing: &Landing) {
    let mut left = &landing.bytes[..];
    each_piece(hca, qp, landing.counter, true, |piece| {
        let (here, behind) = left.split_at(piece.len.min(left.len()));
        // SAFETY: the piece was just checked against a locally writable region, and is not shorter.
        unsafe { piece.at.cast_mut().copy_from(here.as_ptr(), here.len()) };
        left = behind;
    });
}

/// Returns the hash of the bytes that a WQE gathers from memory. Returns `None` if it gathers none,
/// or may not access them.
fn source_hash(hca: &Hca, qp: &SoftQp, counter: u16) -> Option<u64> {
    let mut hashes = Vec::new();
    each_piece(hca, qp, counter, false, |piece| {
        hashes.push(hash_of((0..piece.len).step_by(8).map(|at| {
            let mut word = [0u8; 8];
            // SAFETY: inside the piece, which was just checked against its region. Others may write
            // it, which only changes the hash.
            unsafe {
                word.as_mut_ptr()
                    .copy_from(piece.at.add(at), (piece.len - at).min(8))
            };
            u64::from_le_bytes(word)
        })));
    })?;
    (!hashes.is_empty()).then(|| hash_of(hashes))
}

/// Calls `f` with the buffers of the WQE at `counter`, each checked. Returns `None` if the WQE has
/// no result (`of_result`) or no source, or as soon as access to one buffer is refused.
fn each_piece(
    hca: &Hca,
    qp: &SoftQp,
    counter: u16,
    of_result: bool,
    mut f: impl FnMut(&Piece),
) -> Option<()> {
    let access = if of_result {
        Access::LOCAL_WRITE
    } else {
        Access::empty()
    };
    qp.with_wqe(counter, |wqe| {
        let is_asked =
            |wqe: &Wqe<'_>| wqe.opcode != Opcode::Nop && wqe.opcode.has_result() == of_result;
        let wqe = wqe.ok().filter(is_asked)?;
        for piece in pieces(&wqe) {
            if let Some(key) = piece.key {
                let bytes = Keyed::new(key, piece.at as u64, piece.len as u64);
                hca.memory.resolve(bytes, access, qp.pd).ok()?;
                f(&piece);
            }
        }
        Some(())
    })
}
