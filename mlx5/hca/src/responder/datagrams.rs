//! The receiver of unreliable datagrams: takes them out of the lanes of their senders, and fills receives of its own.

use core::sync::atomic::AtomicU64;

use mlx5_wire::{CqeOpcode, GRH_BYTES};

use crate::objects::rqs::RqSlot;
use crate::queues::qp::Transport;
use crate::requester::data::{Data, scatter};
use crate::responder::deliver::{Sender, deliver, trace};
use crate::shared::datagrams::{Incoming, ready_lids};
use crate::shared::layout::{DATAGRAM_SLOTS, GRH, MAX_MTU, Message, SOLICITED, qp_index};
use crate::shared::links::Links;
use crate::{Hca, Queues, State};

/// Takes the datagrams of all devices whose ready bits are set. Returns the number of completed receives.
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
    let known = state.links.incoming.iter().position(|i| i.peer.lid == lid && !i.peer.is_gone() && i.is_own());
    if let Some(index) = known {
        return take_all(hca, state, index);
    }
    let received = forget_gone(hca, state);
    let Some(incoming) = find_lane(hca, &mut state.links, lid) else { return received };
    state.links.incoming.push(incoming);
    received + take_all(hca, state, state.links.incoming.len() - 1)
}

/// Forgets the lanes of dead devices after taking their datagrams, since the mappings outlive the devices. Also forgets lanes that now lead
/// to other devices.
fn forget_gone(hca: &Hca, state: &mut State) -> usize {
    let mut received = 0;
    while let Some(index) = state.links.incoming.iter().position(|i| i.peer.is_gone() || !i.is_own()) {
        received += take_all(hca, state, index);
        state.links.incoming.swap_remove(index);
    }
    received
}

/// Takes the datagrams in the lane at `index` of the known lanes.
fn take_all(hca: &Hca, state: &mut State, index: usize) -> usize {
    let State { queues: Queues { qps, cqs, .. }, links, rqs, .. } = state;
    let incoming = &mut links.incoming[index];
    let (mut received, mut is_any) = (0, false);
    // A sender that obeys `consumed` has no more datagrams than slots.
    for _ in 0..DATAGRAM_SLOTS {
        let Some((header, payload)) = incoming.pop() else { break };
        is_any = true;
        let qp = qps.get_mut(qp_index(header.qpn)).and_then(Option::as_deref_mut).filter(|qp| qp.qpn == header.qpn && !qp.has_failed());
        // The sender wrote the header. A datagram with an opcode other than those of SENDs is dropped, like a datagram for another device.
        let opcode = [CqeOpcode::ResponderSend, CqeOpcode::ResponderSendImm].into_iter().find(|&opcode| opcode as u32 == header.opcode);
        let (Some(qp), Some(opcode)) = (qp, opcode) else { continue };
        let is_for = matches!(qp.transport, Transport::Datagram { qkey } if qkey == header.qkey);
        if !is_for || !hca.memory.receives(qp.index) || header.byte_count as usize > MAX_MTU {
            continue;
        }
        let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else { continue };
        let pop = || qp.receives.pop(&AtomicU64::new(0));
        // Another driver may have posted a receive before the datagram was sent, which was not copied yet.
        let refreshed = || rqs.get_mut(qp.rqn as usize).and_then(Option::as_mut).is_some_and(RqSlot::refresh).then(pop).flatten();
        let Some(taking) = pop().or_else(refreshed) else { continue };
        let grh = if header.flags & GRH != 0 { GRH_BYTES } else { 0 };
        // SAFETY: in the sender's mapping, like the rest of the payload. A GRH begins with the version, 6; an IPv4 header is behind zeros.
        let is_ipv4 = grh != 0 && unsafe { payload.cast::<u8>().read_volatile() } >> 4 != 6;
        let data = Data::of_memory(payload.as_ptr(), grh + header.byte_count as usize);
        // SAFETY: the payload is in the sender's mapping, which `incoming` keeps. The sender may overwrite it, which only changes the
        // bytes.
        let result = unsafe { scatter(&hca.memory, &qp.receives, taking.index(), GRH_BYTES - grh, &data) };
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
        deliver(hca, qp, cq, message, Sender::Datagram { qpn: header.source_qpn, grh: grh != 0, is_ipv4 });
        received += 1;
    }
    if is_any {
        incoming.give_room();
    }
    received
}

/// Finds the lane of device `lid` that leads to this device.
fn find_lane(hca: &Hca, links: &mut Links, lid: u16) -> Option<Incoming> {
    let peer = links.peer_of_lid(&hca.membership, lid).ok()?;
    Incoming::find(peer, (hca.membership.lid, hca.membership.epoch))
}
