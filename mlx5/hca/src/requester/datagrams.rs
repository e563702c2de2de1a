//! The sender of unreliable datagrams. It writes a datagram to a lane in its *own* memory, and sets a ready bit of the receiver. It has one
//! lane for each device that it sends to. The receiver maps the sender, takes a receive of its own and fills it. So the senders to one
//! queue pair share only the ready bits, and a sender that dies leaves nothing half done. As on a network, a datagram is dropped if it
//! finds no room, queue pair or receive, or has a wrong Q_Key. Under another driver it waits for room, for a bounded time.

use std::net::Ipv6Addr;

use mlx5_wire::{AddressVector, CqeOpcode, CtrlWords, DatagramSegment, GRH_BYTES, Opcode, SEGMENT, Syndrome};

use crate::Hca;
use crate::options::GidKind;
use crate::requester::data::{Data, check_local};
use crate::requester::outcome::{Limit, Malformed, Outcome, WaitFor};
use crate::shared::layout::{DatagramHeader, GRH, MAX_MTU, SOLICITED};
use crate::shared::links::Links;
use crate::shared::memory::Fault;

/// A Q_Key with this bit in a WQE stands for the Q_Key of the sending queue pair.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// The headers in the first bytes of a receive: a Global Route Header (InfiniBand specification, "Global Route Header"). For a datagram
/// that was sent as UDP over IPv4 they are 20 unused bytes and an IPv4 header (annex A17, "RoCEv2").
struct Grh([u8; GRH_BYTES]);

const BTH_BYTES: usize = 12;
const DETH_BYTES: usize = 8;
const IMM_BYTES: usize = 4;
const ICRC_BYTES: usize = 4;
const UDP_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;

impl Grh {
    /// Makes the headers of a message of `length` bytes to the address `vector`.
    fn new(hca: &Hca, vector: &AddressVector, length: usize, opcode: Opcode) -> Self {
        let headers = BTH_BYTES + DETH_BYTES + if opcode == Opcode::SendImm { IMM_BYTES } else { 0 };
        let length = headers + length.next_multiple_of(4) + ICRC_BYTES;
        let source = hca.source_gid(vector);
        match (source.kind, source.ipv4(), Ipv6Addr::from(vector.rgid).to_ipv4_mapped()) {
            (GidKind::RoceV2, Some(from), Some(to)) => Self::ipv4(vector, from, to.octets(), length),
            _ => Self::ipv6(vector, &source.bytes, length),
        }
    }

    fn ipv6(vector: &AddressVector, from: &[u8; 16], length: usize) -> Self {
        const NEXT_IS_TRANSPORT: u8 = 0x1b;
        let version_class_flow = 6 << 28 | u32::from(vector.tclass) << 20 | vector.grh_gid_fl & 0xf_ffff;
        let mut b = [0; GRH_BYTES];
        b[0..4].copy_from_slice(&version_class_flow.to_be_bytes());
        b[4..6].copy_from_slice(&(length as u16).to_be_bytes());
        b[6] = NEXT_IS_TRANSPORT;
        b[7] = vector.hop_limit;
        b[8..24].copy_from_slice(from);
        b[24..40].copy_from_slice(&vector.rgid);
        Self(b)
    }

    fn ipv4(vector: &AddressVector, from: [u8; 4], to: [u8; 4], length: usize) -> Self {
        const VERSION_AND_WORDS: u8 = (4 << 4) | (IPV4_BYTES as u8 / 4);
        const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
        const NEXT_IS_UDP: u8 = 17;
        let mut b = [0; GRH_BYTES];
        let header = &mut b[GRH_BYTES - IPV4_BYTES..];
        header[0] = VERSION_AND_WORDS;
        header[1] = vector.tclass;
        header[2..4].copy_from_slice(&((IPV4_BYTES + UDP_BYTES + length) as u16).to_be_bytes());
        header[6..8].copy_from_slice(&DONT_FRAGMENT);
        header[8] = vector.hop_limit;
        header[9] = NEXT_IS_UDP;
        header[12..16].copy_from_slice(&from);
        header[16..20].copy_from_slice(&to);
        let sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let folded = (sum & 0xffff) + (sum >> 16);
        header[10..12].copy_from_slice(&(!(folded + (folded >> 16)) as u16).to_be_bytes());
        Self(b)
    }
}

/// Time in ns for which a datagram under another driver waits until the receiver's device has taken earlier ones. The links of InfiniBand
/// have flow control, and programs rely on losing nothing there.
const LINK_WAIT_NS: u64 = 100_000_000;

/// The sender of a datagram.
pub(crate) struct Sender {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    pub(crate) qkey: u32,
    /// Time since which it waits.
    pub(crate) since_ns: Option<u64>,
}

/// Runs a SEND of a datagram queue pair. It is complete once the datagram has left, even if the datagram is lost.
#[cold]
pub(crate) fn send(hca: &Hca, links: &mut Links, from: &Sender, opcode: Opcode, ctrl: CtrlWords, wqe: &[u8]) -> Outcome {
    let cqe_opcode = match opcode {
        Opcode::Send => CqeOpcode::ResponderSend,
        Opcode::SendImm => CqeOpcode::ResponderSendImm,
        _ => return Malformed::Opcode.into(),
    };
    let Some((segment, body)) = wqe[SEGMENT..].split_first_chunk() else { return Malformed::Header.into() };
    let to = DatagramSegment::parse(segment);
    let Some(data) = Data::parse(body) else { return Malformed::InlineLength.into() };
    let length = match check_local(hca, from.pd, &data, false) {
        Ok(length) => length as usize,
        Err(outcome) => return outcome,
    };
    if length > MAX_MTU {
        return Limit::DatagramTooLong.fails(Syndrome::LocalLength);
    }
    let grh = (to.vector.rgid != [0; 16]).then(|| Grh::new(hca, &to.vector, length, opcode));
    let header = DatagramHeader {
        qpn: to.qpn,
        qkey: if to.qkey & CONTROLLED_QKEY == 0 { to.qkey } else { from.qkey },
        source_qpn: from.qpn,
        byte_count: length as u32,
        imm: if opcode == Opcode::SendImm { ctrl.imm() } else { 0 },
        opcode: cqe_opcode as u32,
        flags: if ctrl.solicited() { SOLICITED } else { 0 } | if grh.is_some() { GRH } else { 0 },
    };
    let lid = hca.lid_of(to.qpn, &to.vector);
    let Some(peer) = lid.and_then(|lid| links.peer_of_lid(&hca.membership, lid).ok()) else { return Outcome::Done(0) };
    let lane = links.lane_to(&hca.memory, &peer);
    let place = lane.and_then(|lane| links.outgoing[lane].next_payload(hca.memory.datagram_lane(lane)).map(|to| (lane, to)));
    let Some((lane, mut to)) = place else {
        let waits = hca.port.is_some() && hca.clock.now_ns() < from.since_ns.map_or(u64::MAX, |since| since.saturating_add(LINK_WAIT_NS));
        return if waits { Outcome::Wait(WaitFor::Room) } else { Outcome::Done(0) };
    };
    if let Some(Grh(bytes)) = grh {
        // SAFETY: this device's own lane, with room for a GRH and the longest payload. The receiver reads it only after the slot is
        // published (L1), and has finished with its last content (L2, `next_payload`).
        unsafe {
            to.cast().write(bytes);
            to = to.add(GRH_BYTES);
        }
    }
    let copied = data.each(|piece| {
        // SAFETY: the piece is readable, and all pieces together fit (checked above).
        unsafe {
            to.as_ptr().copy_from(piece.at, piece.len);
            to = to.add(piece.len);
        }
        Ok::<(), Fault>(())
    });
    if copied.is_ok() {
        links.sent += 1;
        links.outgoing[lane].last = links.sent;
        links.outgoing[lane].publish(header, hca.membership.lid);
    }
    Outcome::Done(0)
}
