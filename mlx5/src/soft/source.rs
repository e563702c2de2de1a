//! Strict mode, in any time but the immediate: whether a source buffer stayed as it was from the doorbell to the completion.
//!
//! A gathered buffer belongs to the device until a CQE of its WQE, or of a later one, is visible: until then it may be read for the first
//! time, or again for a retransmission. A WQE behind a fence is left out: it may send what the READ before it brings.

use super::gather::Data;
use super::queues::SoftQp;
use super::rule::{Queue, Rule, Violation};
use super::strict::{bytes_of, head};
use super::trace::hash_of;
use super::{Hca, execute};
use crate::mr::Access;
use crate::wire::{CtrlSegment, CtrlWords, DatagramSegment, FenceMode, Opcode, RaddrSegment, SEGMENT, WQEBB};

/// What a WQE was to send when its doorbell rang.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    counter: u16,
    hash: u64,
}

/// Remembers what the WQEBBs from `from` to `to`, just announced, are to send.
#[cold]
pub(crate) fn remember(hca: &Hca, qp: &mut SoftQp, from: u16, to: u16) {
    let mut counter = from;
    while counter != to {
        let wqe = bytes_of(qp, counter, 16 * WQEBB);
        let ctrl = CtrlSegment::parse(&head(&wqe));
        if let Some(hash) = hash(hca, qp, &ctrl, &wqe).filter(|_| ctrl.fence == FenceMode::None) {
            qp.under_way.sources.push_back(Source { counter, hash });
        }
        counter = counter.wrapping_add(execute::blocks(CtrlWords::parse(&head(&wqe))).min(to.wrapping_sub(counter)));
    }
}

/// A CQE of WQE `completed` is about to be visible; `has_succeeded` says which. The buffers of that WQE and of all before it go back to the
/// program.
#[cold]
pub(crate) fn release(hca: &Hca, qp: &mut SoftQp, completed: u16, has_succeeded: bool, violations: &mut Vec<Violation>) {
    while let Some(&Source { counter, hash: before }) = qp.under_way.sources.front() {
        if completed.wrapping_sub(counter) > u16::MAX / 2 {
            break;
        }
        qp.under_way.sources.pop_front();
        let wqe = bytes_of(qp, counter, 16 * WQEBB);
        if has_succeeded && hash(hca, qp, &CtrlSegment::parse(&head(&wqe)), &wqe) != Some(before) {
            let queue = Queue::Send(qp.qpn);
            violations.push(Violation { queue, index: counter.into(), bytes: head(&wqe), rule: Rule::SourceChanged });
        }
    }
}

/// Hash of all that a WQE gathers from memory. `None`: nothing, or what it may not.
fn hash(hca: &Hca, qp: &SoftQp, ctrl: &CtrlSegment, wqe: &[u8; 16 * WQEBB]) -> Option<u64> {
    let header = CtrlSegment::LEN
        + match Opcode::from_wire(ctrl.opcode)? {
            Opcode::Send | Opcode::SendImm if qp.is_datagram() => DatagramSegment::LEN,
            Opcode::Send | Opcode::SendImm => 0,
            Opcode::RdmaWrite | Opcode::RdmaWriteImm => RaddrSegment::LEN,
            Opcode::Nop | Opcode::RdmaRead | Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => return None,
        };
    let data = Data::parse(wqe.get(header..usize::from(ctrl.ds) * SEGMENT)?)?;
    let mut hashes = Vec::new();
    data.each(|piece| {
        let Some(key) = piece.key else { return Ok(()) };
        hca.memory.resolve(key, piece.at as u64, piece.len as u64, Access::empty(), qp.pd)?;
        hashes.push(hash_of((0..piece.len).step_by(8).map(|at| {
            let mut word = [0u8; 8];
            // SAFETY: inside the piece, which was just checked against its region. Others may write it, which changes the hash only.
            unsafe { word.as_mut_ptr().copy_from(piece.at.add(at), (piece.len - at).min(8)) };
            u64::from_le_bytes(word)
        })));
        Ok::<(), super::memory::Fault>(())
    })
    .ok()?;
    (!hashes.is_empty()).then(|| hash_of(hashes))
}
