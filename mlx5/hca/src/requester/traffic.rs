//! Counts the traffic through shared memory.

use std::ops::Range;

use mlx5_wire::{CtrlWords, DatagramSegment, Opcode, SEGMENT, WQEBB};

use crate::Hca;
use crate::queues::qp::{SoftQp, Transport, bytes_of};
use crate::requester::data::{Data, has_result, header_bytes};

/// Longest packet of a message, in bytes.
const PACKET_BYTES: u64 = 4096;

/// Counts a WQE that succeeded, at the ports of both ends. A connection by packets counts its
/// packets.
#[cold]
pub(crate) fn count(hca: &Hca, qp: &SoftQp, ctrl: CtrlWords) {
    let (Some(counters), Some(port)) = (hca.counters, &hca.port) else {
        return;
    };
    let Some(opcode) = Opcode::from_repr(ctrl.opcode()).filter(|opcode| *opcode != Opcode::Nop)
    else {
        return;
    };
    let wqe = bytes_of(qp, ctrl.wqe_index(), 16 * WQEBB);
    let range = Range {
        start: SEGMENT + header_bytes(opcode, qp.is_datagram()),
        end: usize::from(ctrl.ds()) * SEGMENT,
    };
    let peer = match &qp.transport {
        Transport::Connected(remote) => Some(remote.peer.lid),
        Transport::Datagram { .. } => wqe[SEGMENT..]
            .first_chunk()
            .map(DatagramSegment::parse)
            .and_then(|to| hca.lid_of(to.qpn, &to.vector)),
        _ => None,
    };
    let (Some(data), Some(peer)) = (wqe.get(range).and_then(Data::parse), peer) else {
        return;
    };
    let (Some(own), Some(peer)) = (
        counters.get(port.index),
        counters.get(usize::from(peer) % counters.len().max(1)),
    ) else {
        return;
    };
    let mut bytes = 0;
    let _ = data.each(|piece| {
        bytes += piece.len as u64;
        Ok::<(), ()>(())
    });
    let packets = bytes.div_ceil(PACKET_BYTES).max(1);
    let (from, to) = if has_result(opcode) {
        (peer, own)
    } else {
        (own, peer)
    };
    from.sent(packets, bytes);
    to.received(packets, bytes);
    if has_result(opcode) {
        own.sent(1, 0);
        peer.received(1, 0);
    }
    let kind = match opcode {
        Opcode::RdmaWrite | Opcode::RdmaWriteImm => 0,
        Opcode::RdmaRead => 1,
        Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => 2,
        _ => return,
    };
    peer.requested(kind);
}
