//! Counts the traffic through shared memory.

use mlx5_wire::{CtrlWords, Header, Opcode, Piece, Wqe};

use crate::Hca;
use crate::queues::qp::SoftQp;

/// Length, in bytes, of the packets as which the traffic is counted.
const PACKET_BYTES: u64 = 4096;

/// Counts a WQE that succeeded, at the ports of both ends. (The packets of connections by packets
/// are counted by the port that sends them.)
#[cold]
pub(crate) fn count(hca: &Hca, qp: &SoftQp, ctrl: CtrlWords) {
    qp.with_wqe(ctrl.wqe_index(), |wqe| {
        if let Ok(wqe) = wqe {
            count_wqe(hca, qp, &wqe);
        }
    });
}

fn count_wqe(hca: &Hca, qp: &SoftQp, wqe: &Wqe<'_>) {
    let peer = match wqe.header {
        _ if wqe.opcode == Opcode::Nop => None,
        Header::Datagram(to) => hca.lid_of(to.qpn, &to.vector),
        _ => qp.remote().map(|remote| remote.peer.lid),
    };
    let (Some(counters), Some(port), Some(peer)) = (hca.counters, &hca.port, peer) else {
        return;
    };
    let (Some(own), Some(peer)) = (
        counters.get(port.index),
        counters.get(usize::from(peer) % counters.len().max(1)),
    ) else {
        return;
    };
    let bytes = wqe.pieces().map(Piece::len).sum::<u64>();
    let packets = bytes.div_ceil(PACKET_BYTES).max(1);
    let (from, to) = if wqe.opcode.has_result() {
        (peer, own)
    } else {
        (own, peer)
    };
    from.sent(packets, bytes);
    to.received(packets, bytes);
    if wqe.opcode.has_result() {
        own.sent(1, 0);
        peer.received(1, 0);
    }
    match wqe.header {
        Header::Memory(_) => peer.requested(usize::from(wqe.opcode.has_result())),
        Header::Atomic(..) => peer.requested(2),
        Header::None | Header::Datagram(_) => {}
    }
}
