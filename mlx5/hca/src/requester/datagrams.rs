//! The sender of unreliable datagrams. It writes a datagram to a lane in its *own* memory, and sets
//! a ready bit of the receiver. It has one lane for each device that it sends to. The receiver maps
//! the sender, takes a receive of its own and fills it. So the senders to one queue pair share only
//! the ready bits, and the death of a sender leaves no partial operation. As on a network, a
//! datagram is dropped if there is no room, queue pair or receive for it, or it has a wrong Q_Key.
//! On a device that is a virtual function, it first waits for room, for a bounded time.

use mlx5_wire::roce::{
    Deth, Headers, Opcode as PacketKind, PacketOpcode, Psn, Transport as Service,
};
use mlx5_wire::{DatagramSegment, GRH_BYTES, Header, Opcode, Syndrome, Wqe};

use crate::Hca;
use crate::packets::interface::{address_of, peer_socket};
use crate::packets::port::WirePort;
use crate::packets::source::flow_label;
use crate::packets::udp::Receiver;
use crate::packets::{Wire, grh};
use crate::queues::data::pieces;
use crate::queues::qp::SoftQp;
use crate::shared::layout::{DatagramHeader, MAX_MTU, SOLICITED};
use crate::shared::links::Links;
use crate::types::outcome::{Outcome, WaitFor};
use crate::types::vendor::Fault;
use crate::types::vendor::{Limit, Malformed};

/// Bit of a Q_Key in a WQE; if it is set, the Q_Key of the sending queue pair is used.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// The bits of the flow label in an address vector; 0 means that the program gives none.
const FLOW_LABEL: u32 = 0xf_ffff;

/// Maximum time in ns for which a datagram of a virtual function waits for room: until the
/// receiver's device takes an earlier datagram. The links of InfiniBand have flow control, and
/// programs rely on losing nothing on these links.
const LINK_WAIT_NS: u64 = 100_000_000;

/// Runs a SEND of a datagram queue pair whose Q_Key is `qkey`. The SEND is complete once the
/// datagram was sent, even if the datagram is lost.
#[cold]
pub(crate) fn send(
    hca: &Hca,
    (links, wire): (&mut Links, &mut Wire),
    qp: &SoftQp,
    qkey: u32,
    wqe: &Wqe<'_>,
    byte_count: u32,
) -> Result<(), Outcome> {
    let Header::Datagram(to) = wqe.header else {
        return Err(Malformed::Opcode.into());
    };
    let length = byte_count as usize;
    if length > MAX_MTU {
        return Err(Limit::DatagramTooLong.fails(Syndrome::LocalLength));
    }
    let has_imm = wqe.opcode == Opcode::SendImm;
    let source = hca.source_gid(&to.vector);
    let grh =
        (to.vector.rgid != [0; 16]).then(|| grh::headers(&source, &to.vector, length, has_imm));
    let qkey = if to.qkey & CONTROLLED_QKEY == 0 {
        to.qkey
    } else {
        qkey
    };
    let header = DatagramHeader::new(
        (to.qpn, qkey),
        qp.qpn,
        byte_count,
        has_imm.then(|| wqe.ctrl.imm()),
        (wqe.ctrl.solicited(), grh.is_some()),
    );
    // A vector with LID 0, which no device has, leads to a receiver that is reached by packets.
    let lid = hca.lid_of(to.qpn, &to.vector).filter(|lid| *lid != 0);
    let peer = lid.and_then(|lid| links.peer(&hca.membership, lid, None).ok());
    let Some(peer) = peer else {
        if let (Some(port), true) = (&mut wire.port, hca.is_port_up.get()) {
            send_packet(port, &to, &header, wqe);
        }
        return Ok(());
    };
    let lane = links.lane_to(&hca.memory, &peer);
    let place = lane.and_then(|lane| {
        links.outgoing[lane]
            .next_payload(hca.memory.datagram_lane(lane))
            .map(|to| (lane, to))
    });
    let Some((lane, mut to)) = place else {
        let is_over = qp.waiting.as_ref().is_some_and(|waiting| {
            hca.clock.now_ns() >= waiting.since_ns.saturating_add(LINK_WAIT_NS)
        });
        let waits =
            |lane: usize| links.outgoing[lane].waits(hca.memory.datagram_lane(lane), is_over);
        return if hca.port.is_some() && lane.map_or(!is_over, waits) {
            Err(Outcome::Wait(WaitFor::Room))
        } else {
            Ok(())
        };
    };
    if let Some(bytes) = grh {
        // SAFETY: `to` is in this device's own lane, with room for a GRH and the longest payload.
        // The receiver reads it only after the slot is published (L1 of docs/shm-protocols.md), and
        // has finished with the last content of the slot (L2, `next_payload`).
        unsafe {
            to.cast().write(bytes);
            to = to.add(GRH_BYTES);
        }
    }
    // SAFETY: `execute` has checked that the pieces are readable. Together they are not longer than
    // `MAX_MTU`, for which there is room.
    unsafe { gather(wqe, to.as_ptr()) };
    links.sent += 1;
    links.outgoing[lane].last = links.sent;
    links.outgoing[lane].publish(header, hca.membership.lid);
    Ok(())
}

/// Copies the message of a WQE.
///
/// # Safety
/// The pieces are readable, and there is room for all of them at `to`.
unsafe fn gather(wqe: &Wqe<'_>, mut to: *mut u8) {
    for piece in pieces(wqe) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            to.copy_from(piece.at, piece.len);
            to = to.add(piece.len);
        }
    }
}

/// Sends a datagram as a packet, if there is room for it, to a GID that is an IP address.
fn send_packet(wire: &mut WirePort, to: &DatagramSegment, header: &DatagramHeader, wqe: &Wqe<'_>) {
    let Some(address) = address_of(&to.vector.rgid) else {
        return;
    };
    let label = match to.vector.grh_gid_fl & FLOW_LABEL {
        0 => flow_label(header.source_qpn, to.qpn),
        label => label,
    };
    let receiver = Receiver {
        socket: peer_socket(&wire.own(), address, wire.port_of(to)),
        class: to.vector.tclass,
        source: wire.source_of(label),
    };
    if !wire.has_room(&receiver) || header.byte_count > u32::from(wire.mtu) {
        wire.counters.refused += 1;
        return;
    }
    let kind = if wqe.opcode == Opcode::SendImm {
        PacketKind::SendOnlyImm
    } else {
        PacketKind::SendOnly
    };
    let packet = PacketOpcode {
        transport: Service::Ud,
        opcode: kind,
    };
    let mut headers = Headers::new(packet, to.qpn, Psn::new(wire.counters.sent as u32));
    headers.deth = Deth {
        qkey: header.qkey,
        source_qpn: header.source_qpn,
    };
    headers.imm = header.imm;
    headers.bth.is_solicited = header.flags & SOLICITED != 0;
    headers.bth.pad = (header.byte_count.wrapping_neg() & 3) as u8;
    let _: Result<(), Fault> =
        wire.send(&receiver, &headers, header.byte_count as usize, |payload| {
            // SAFETY: `execute` has checked that the pieces are readable. Together they have the
            // length of the payload.
            unsafe { gather(wqe, payload.as_mut_ptr()) };
            Ok(())
        });
}
