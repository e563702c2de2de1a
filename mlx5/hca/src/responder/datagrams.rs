//! The receiver of unreliable datagrams: takes them out of the lanes of their senders, and fills
//! receives of its own.

use std::net::SocketAddr;

use mlx5_wire::roce::Headers;
use mlx5_wire::{CqeOpcode, GRH_BYTES};

use crate::packets::Wire;
use crate::queues::cq::SoftCq;
use crate::queues::data::scatter;
use crate::queues::qp::{SoftQp, Transport, by_number};
use crate::queues::rqs::RqSlot;
use crate::requester::datagrams::Grh;
use crate::responder::deliver::{Sender, deliver, take_own_receive, trace};
use crate::shared::datagrams::{Incoming, ready_lids};
use crate::shared::layout::{DATAGRAM_SLOTS, DatagramHeader, GRH, MAX_MTU, Message, SOLICITED};
use crate::shared::links::Links;
use crate::{Hca, Queues, State};

/// Takes the datagrams of all devices whose ready bits are set. Returns the number of completed
/// receives.
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
/// devices. Also forgets lanes that now lead to other devices.
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

/// Takes the datagrams in the lane at `index` of the known lanes.
fn take_all(hca: &Hca, state: &mut State, index: usize) -> usize {
    let State {
        queues: Queues { qps, cqs, .. },
        links,
        rqs,
        ..
    } = state;
    let incoming = &mut links.incoming[index];
    let (mut received, mut is_any) = (0, false);
    // A sender that obeys `consumed` has no more datagrams than slots.
    for _ in 0..DATAGRAM_SLOTS {
        let Some((header, payload)) = incoming.pop() else {
            break;
        };
        is_any = true;
        // SAFETY: the payload is in the sender's mapping, which `incoming` keeps. The sender may
        // overwrite it, which only changes the bytes.
        received += usize::from(unsafe { arrive(hca, (qps, cqs, rqs), &header, payload.as_ptr()) });
    }
    if is_any {
        incoming.give_room();
    }
    received
}

/// Delivers a datagram, whose payload begins with a GRH if its flags say so. Returns whether it
/// found a receive.
///
/// # Safety
/// The payload is readable.
unsafe fn arrive(
    hca: &Hca,
    (qps, cqs, rqs): Parts<'_>,
    header: &DatagramHeader,
    payload: *const u8,
) -> bool {
    let qp = by_number(qps, header.qpn).filter(|qp| !qp.has_failed());
    // The sender wrote the header. A datagram with an opcode other than those of SENDs is dropped,
    // like a datagram for another device.
    let opcode = [CqeOpcode::ResponderSend, CqeOpcode::ResponderSendImm]
        .into_iter()
        .find(|&opcode| opcode as u32 == header.opcode);
    let (Some(qp), Some(opcode)) = (qp, opcode) else {
        return false;
    };
    let is_for = matches!(qp.transport, Transport::Datagram { qkey } if qkey == header.qkey);
    if !is_for || !hca.memory.receives(qp.index) || header.byte_count as usize > MAX_MTU {
        return false;
    }
    let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else {
        return false;
    };
    let Some(taking) = take_own_receive(qp, rqs) else {
        return false;
    };
    let grh = if header.flags & GRH != 0 {
        GRH_BYTES
    } else {
        0
    };
    // SAFETY: guaranteed by the caller. A GRH begins with the version, 6; an IPv4 header is behind
    // zeros.
    let is_ipv4 = grh != 0 && unsafe { payload.read_volatile() } >> 4 != 6;
    let part = [(payload, grh + header.byte_count as usize)].into_iter();
    let (memory, receives) = (&hca.memory, &qp.receives);
    // SAFETY: guaranteed by the caller.
    let result = unsafe { scatter(memory, receives, taking.index(), GRH_BYTES - grh, part) };
    let (opcode, imm) = match result {
        Ok(()) => (opcode, header.imm),
        Err((syndrome, vendor)) => (CqeOpcode::ResponderError, Message::error(syndrome, vendor)),
    };
    let message = Message {
        payload: 0,
        byte_count: header.byte_count + GRH_BYTES as u32,
        imm,
        taking,
        op_own: Message::op_own(opcode, header.flags & SOLICITED != 0),
    };
    trace(hca, qp, &message);
    let slid = hca
        .port
        .as_ref()
        .map_or(0, |port| port.lid_of(header.source_qpn));
    deliver(
        hca,
        qp,
        cq,
        message,
        Sender::Datagram {
            qpn: header.source_qpn,
            slid,
            grh: grh != 0,
            is_ipv4,
        },
    );
    true
}

/// Delivers a datagram that arrived as a packet.
pub(crate) fn take_packet(
    hca: &Hca,
    state: &mut State,
    from: &SocketAddr,
    headers: &Headers,
    payload: &[u8],
) {
    let State {
        queues: Queues { qps, cqs, .. },
        wire,
        rqs,
        ..
    } = state;
    let Some(Wire { port, .. }) = wire.as_deref_mut() else {
        return;
    };
    let has_imm = headers.opcode.opcode.has_imm();
    let header = DatagramHeader {
        qpn: headers.bth.qpn,
        qkey: headers.deth.qkey,
        source_qpn: headers.deth.source_qpn,
        byte_count: payload.len() as u32,
        imm: if has_imm { headers.imm } else { 0 },
        opcode: if has_imm {
            CqeOpcode::ResponderSendImm
        } else {
            CqeOpcode::ResponderSend
        } as u32,
        flags: GRH
            | if headers.bth.is_solicited {
                SOLICITED
            } else {
                0
            },
    };
    let mut bytes = [0; GRH_BYTES + MAX_MTU];
    let Some(room) = bytes.get_mut(GRH_BYTES..GRH_BYTES + payload.len()) else {
        return;
    };
    room.copy_from_slice(payload);
    let grh = Grh::of_packet((from.ip(), port.own().ip()), payload.len(), has_imm);
    bytes[..GRH_BYTES].copy_from_slice(grh.bytes());
    // SAFETY: the header describes `bytes`.
    if !unsafe { arrive(hca, (qps, cqs, rqs), &header, bytes.as_ptr()) } {
        port.counters.lost_datagrams += 1;
    }
}

/// The parts of a device that an arriving datagram changes.
type Parts<'a> = (
    &'a mut [Option<Box<SoftQp>>],
    &'a mut [Option<SoftCq>],
    &'a mut [Option<RqSlot>],
);

/// Finds the lane of device `lid` that leads to this device.
fn find_lane(hca: &Hca, links: &mut Links, lid: u16) -> Option<Incoming> {
    let peer = links.peer_of_lid(hca, lid).ok()?;
    Incoming::find(peer, (hca.membership.lid, hca.membership.epoch))
}
