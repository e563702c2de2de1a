//! The local buffers of WQEs in flight, on a device whose timing is not immediate. The buffers
//! belong to the device until a CQE of their WQE, or of a later one, is visible.
//!
//! - Sources, if requested: checks that a source is unchanged from the doorbell to the
//!   completion. Until then a NIC may read it for the first time, or again for a retransmission. A
//!   WQE with a fence is not checked: it may send the result of the READ before it.
//! - Results: the result of a READ or an atomic is placed in its buffer when the response arrives.
//!   Until then the buffer holds [`NOT_HERE`].

use mlx5_wire::{FenceMode, Opcode, Piece, Wqe};

use crate::Hca;
use crate::hash::hash_of;
use crate::queues::data::{gather, land};
use crate::queues::in_flight::{Landing, Source};
use crate::queues::qp::{SoftQp, blocks, head};
use crate::types::rule::{Queue, Rule, Violation};

/// Byte that fills a result's buffer between the effect and the response.
const NOT_HERE: u8 = 0xda;

/// Stores the hashes of the sources of the WQEBBs from `from` to `to`, which were just announced.
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

/// Compares the sources of WQE `completed`, whose CQE is about to be visible, and of the WQEs
/// before it with their hashes. Their buffers belong to the program again.
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

/// Fills the buffers of the READ or atomic at `counter` with [`NOT_HERE`], and returns the bytes
/// that it has fetched. They are placed when the completion of the WQE is due. `None` for other
/// WQEs.
pub(crate) fn hold(hca: &Hca, qp: &SoftQp, counter: u16) -> Option<Landing> {
    let bytes = local_bytes(hca, qp, counter, true)?;
    land(hca, qp, counter, 0, &vec![NOT_HERE; bytes.len()]).ok()?;
    Some(Landing { counter, bytes })
}

/// Places the bytes of a result, unless the program has deregistered the memory.
pub(crate) fn place(hca: &Hca, qp: &SoftQp, Landing { counter, bytes }: &Landing) {
    let _: Result<(), _> = land(hca, qp, *counter, 0, bytes);
}

/// Returns the hash of the bytes that a WQE gathers. Returns `None` if it gathers none, or may not
/// access them.
fn source_hash(hca: &Hca, qp: &SoftQp, counter: u16) -> Option<u64> {
    let bytes = local_bytes(hca, qp, counter, false)?;
    Some(hash_of(bytes.chunks(8).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    })))
}

/// Returns the bytes in the result buffers of the WQE at `counter` (`of_result`), or in its source
/// buffers. Returns `None` if the WQE has no such buffers, or may not access them.
fn local_bytes(hca: &Hca, qp: &SoftQp, counter: u16, of_result: bool) -> Option<Vec<u8>> {
    let len = qp.with_wqe(counter, |wqe| {
        let is_asked =
            |wqe: &Wqe<'_>| wqe.opcode != Opcode::Nop && wqe.opcode.has_result() == of_result;
        let wqe = wqe.ok().filter(is_asked)?;
        Some(wqe.pieces().map(Piece::len).sum::<u64>())
    })?;
    let mut bytes = vec![0; len as usize];
    gather(hca, qp, counter, 0, &mut bytes).ok()?;
    (len > 0).then_some(bytes)
}
