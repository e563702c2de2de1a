//! The receiver of unreliable datagrams: takes them out of the lanes of their senders, and fills
//! receives of its own.

use std::net::SocketAddr;
use std::rc::Rc;

use mlx5_wire::roce::{Headers, Nak};
use mlx5_wire::{AddressVector, GRH_BYTES};

use crate::packets::grh;
use crate::packets::interface::gid_of;
use crate::packets::responder::{Completion, Target};
use crate::queues::qp::{Transport, by_number};
use crate::queues::rqs::RqSlot;
use crate::responder::deliver::Sender;
use crate::responder::target::Responding;
use crate::shared::datagrams::{Incoming, ready_lids};
use crate::shared::layout::{DATAGRAM_SLOTS, DatagramHeader, GRH, MAX_MTU, SOLICITED};
use crate::shared::links::Links;
use crate::shared::peer::Peer;
use crate::types::terms::{Difference, Term};
use crate::{Gid, GidKind, Hca, Queues, State};

/// Hop limit in the GRH of a datagram that arrived as a packet.
const HOPS: u8 = 64;
/// The version in an IPv6 header.
const IPV6: u8 = 6;

/// Takes all announced datagrams. Returns the number of completed receives.
#[cold]
pub(crate) fn receive(hca: &Hca, state: &mut State) -> usize {
    let mut lids = core::mem::take(&mut state.links.ready);
    ready_lids(&hca.memory).drain(|lid| lids.push(lid as u16));
    let mut received = 0;
    for lid in lids.drain(..) {
        received += receive_from(hca, state, lid);
    }
    // Room for all known senders, so that nothing is allocated when all send at once.
    lids.reserve(state.links.incoming.len());
    state.links.ready = lids;
    received
}

fn receive_from(hca: &Hca, state: &mut State, lid: u16) -> usize {
    let known = state
        .links
        .incoming
        .iter()
        .position(|i| i.peer.lid == lid && !i.peer.is_gone() && i.is_own());
    if let Some(index) = known {
        return take_all(hca, state, index);
    }
    let received = forget_gone(hca, state);
    let Some(incoming) = find_lane(hca, &mut state.links, lid) else {
        return received;
    };
    state.links.incoming.push(incoming);
    received + take_all(hca, state, state.links.incoming.len() - 1)
}

/// Forgets the lanes of dead devices after taking their datagrams, since the mappings outlive the
/// devices. Also forgets lanes that now lead to other devices. Returns the number of completed
/// receives.
fn forget_gone(hca: &Hca, state: &mut State) -> usize {
    let mut received = 0;
    while let Some(index) = state
        .links
        .incoming
        .iter()
        .position(|i| i.peer.is_gone() || !i.is_own())
    {
        received += take_all(hca, state, index);
        state.links.incoming.swap_remove(index);
    }
    received
}

fn take_all(hca: &Hca, state: &mut State, index: usize) -> usize {
    let incoming = &mut state.links.incoming[index];
    let (mut received, mut is_any) = (0, false);
    // The slots bound the loop, even if the sender does not obey `consumed`.
    for _ in 0..DATAGRAM_SLOTS {
        let Some((header, payload)) = incoming.pop() else {
            break;
        };
        is_any = true;
        let grh = if header.flags & GRH != 0 {
            GRH_BYTES
        } else {
            0
        };
        // SAFETY: the payload is in the sender's memory, which `incoming` keeps mapped. The first
        // byte of a GRH has its IP version; before an IPv4 header there are zeros.
        let is_ipv4 = grh != 0 && unsafe { payload.as_ptr().read_volatile() } >> 4 != IPV6;
        let len = grh + header.byte_count as usize;
        let (queues, rqs) = (&mut state.queues, &mut state.rqs);
        let has_receive = arrive(hca, queues, rqs, &header, is_ipv4, |target| {
            // SAFETY: the payload is in the same memory, which has room for the longest datagram
            // after a GRH. The sender may overwrite the payload meanwhile, which only changes the
            // bytes that are copied.
            unsafe { target.copy(GRH_BYTES - grh, payload.as_ptr(), len) }
        });
        received += usize::from(has_receive);
    }
    if is_any {
        incoming.give_room();
    }
    received
}

/// Delivers a datagram. `place` copies its payload into its receive, after the bytes for a GRH, and
/// the GRH if the datagram has one. Returns whether the datagram found its queue pair and a
/// receive.
fn arrive(
    hca: &Hca,
    queues: &mut Queues,
    rqs: &mut [Option<RqSlot>],
    header: &DatagramHeader,
    is_ipv4: bool,
    place: impl FnOnce(&mut Responding<'_>) -> Result<(), Nak>,
) -> bool {
    // The sender wrote the header, so it is checked. A datagram whose opcode is not that of a SEND
    // is dropped, like a datagram for another device.
    let Queues { qps, cqs, .. } = queues;
    let qp = by_number(qps, header.qpn).filter(|qp| !qp.has_failed());
    let (Some(qp), Some(imm)) = (qp, header.imm()) else {
        return false;
    };
    let Transport::Datagram { qkey } = qp.transport else {
        return false;
    };
    if qkey != header.qkey {
        hca.report_difference(
            &mut qp.has_reported,
            Difference {
                from: header.source_qpn,
                to: qp.qpn,
                term: Term::Qkey,
                sent: header.qkey,
                expected: qkey,
            },
        );
        return false;
    }
    if !hca.memory.receives(qp.index) || header.byte_count as usize > MAX_MTU {
        return false;
    }
    let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else {
        return false;
    };
    let port = hca.port.as_ref();
    let sender = Sender::Datagram {
        qpn: header.source_qpn,
        slid: port.map_or(0, |port| port.lid_of(header.source_qpn)),
        grh: header.flags & GRH != 0,
        is_ipv4,
    };
    let mut target = Responding {
        hca,
        qp,
        cq,
        rqs,
        open: &mut None,
        sender,
        refused: None,
    };
    if !target.take_receive() {
        return false;
    }
    match place(&mut target) {
        Ok(()) => target.complete(Completion {
            len: header.byte_count + GRH_BYTES as u32,
            imm,
            is_write: false,
            is_solicited: header.flags & SOLICITED != 0,
        }),
        Err(nak) => target.fail(nak),
    }
    true
}

pub(crate) fn take_packet(
    hca: &Hca,
    state: &mut State,
    from: &SocketAddr,
    headers: &Headers,
    payload: &[u8],
) {
    let Some(port) = state.wire.port.as_deref_mut() else {
        return;
    };
    let has_imm = headers.opcode.opcode.has_imm();
    let header = DatagramHeader::new(
        (headers.bth.qpn, headers.deth.qkey),
        headers.deth.source_qpn,
        payload.len() as u32,
        has_imm.then_some(headers.imm),
        (headers.bth.is_solicited, true),
    );
    let source = Gid {
        bytes: gid_of(from.ip()),
        kind: GidKind::RoceV2,
    };
    // A socket does not report the type of service and the hop limit, so the GRH has fixed values.
    let vector = AddressVector {
        hop_limit: HOPS,
        rgid: gid_of(port.own().ip()),
        ..AddressVector::default()
    };
    let grh = grh::headers(&source, &vector, payload.len(), has_imm);
    let is_ipv4 = grh[0] >> 4 != IPV6;
    let (queues, rqs) = (&mut state.queues, &mut state.rqs);
    let has_receive = arrive(hca, queues, rqs, &header, is_ipv4, |target| {
        target.place(0, &grh)?;
        target.place(GRH_BYTES as u32, payload)
    });
    if !has_receive {
        port.counters.lost_datagrams += 1;
    }
}

/// Finds the lane of device `lid` that leads to this device. If that device is gone, and this
/// device has mapped it before, the lane still has the datagrams that it sent before its end.
fn find_lane(hca: &Hca, links: &mut Links, lid: u16) -> Option<Incoming> {
    let present = links.peer(&hca.membership, lid, None).ok();
    let is_it = |peer: &&Rc<Peer>| peer.lid == lid && peer.is_gone();
    let gone = links.peers().filter(is_it).cloned();
    let own = (hca.membership.lid, hca.membership.epoch);
    let mut peers = present.into_iter().chain(gone);
    peers.find_map(|peer| Incoming::find(peer, own))
}
