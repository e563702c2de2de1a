//! Unreliable datagrams. The sender leaves a datagram in a lane of its *own* memory, one for each device it sends to; the receiver, told by
//! a ready bit, maps the sender, takes a receive of its own and fills it. So many senders of one queue pair share no word but the ready
//! bits, and one that dies leaves nothing half-done. What finds no room, no queue pair, no receive or a wrong Q_Key is dropped, as on a
//! network; under another driver it waits for room, for a while.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::net::Ipv6Addr;
use std::rc::Rc;

use mlx5_wire::{AddressVector, CqeOpcode, CtrlWords, DatagramSegment, GRH_BYTES, Opcode, SEGMENT, Syndrome};
use shm::lane::{LaneRx, LaneTx};
use shm::ready::ReadyWords;

use super::deliver::{self, deliver, trace};
use super::fabric::Peer;
use super::gather::{Data, check_local, scatter};
use super::layout::{DATAGRAM_SLOTS, DatagramHeader, GRH, LID_BITS, MAX_DATAGRAM_LANES, MAX_LIDS, MAX_MTU, Message, SOLICITED, qp_index};
use super::links::{Incoming, Outgoing};
use super::memory::{DeviceMemory, Fault, commit};
use super::options::GidKind;
use super::outcome::{Limit, Malformed, Outcome, WaitFor};
use super::queues::Transport;
use super::rqs::RqSlot;
use super::{Hca, Links, Queues, State};

/// A Q_Key with this bit in a WQE stands for the sending queue pair's own.
const CONTROLLED_QKEY: u32 = 1 << 31;

/// The headers in a receive's first bytes: a Global Route Header (InfiniBand specification, "Global Route Header"); or, for a datagram
/// that came as UDP over IPv4, 20 bytes without meaning and an IPv4 header (annex A17, "RoCEv2").
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

/// Time that a datagram under another driver waits for the receiver's device to take earlier ones, in ns: the links of InfiniBand have
/// flow control, and programs rely on losing nothing there.
const LINK_WAIT_NS: u64 = 100_000_000;

/// The sender of a datagram.
pub(crate) struct Sender {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    pub(crate) qkey: u32,
    /// Since when it waits.
    pub(crate) since_ns: Option<u64>,
}

pub(crate) fn ready_lids(memory: &DeviceMemory) -> ReadyWords {
    // SAFETY: the lanes segment holds the words for MAX_LIDS; views do not outlive the memory they are made from.
    unsafe { ReadyWords::new(NonNull::from(&memory.lanes().datagram_ready).cast(), MAX_LIDS) }
}

/// Runs a SEND of a datagram queue pair. It is complete once the datagram has left, whatever becomes of it.
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
    let Some(peer) = lid.and_then(|lid| links.peer_of_lid(hca, lid).ok()) else { return Outcome::Done(0) };
    let place = outgoing(hca, links, &peer).map(|index| (hca.memory.datagram_lane(index), &mut links.outgoing[index]));
    let Some((lane, out)) = place.and_then(|(lane, out)| out.tx.has_room(&lane.consumed).then_some((lane, out))) else {
        let waits = hca.port.is_some() && hca.clock.now_ns() < from.since_ns.map_or(u64::MAX, |since| since.saturating_add(LINK_WAIT_NS));
        return if waits { Outcome::Wait(WaitFor::Room) } else { Outcome::Done(0) };
    };
    let slot = out.tx.position() as usize % DATAGRAM_SLOTS;
    // SAFETY: the place of this slot in this device's own lane; the receiver does not read it before the slot is published (L1) and is
    // done with its last content (L2, `has_room`).
    let mut to = unsafe { NonNull::from(&lane.payloads).cast::<[u8; GRH_BYTES + MAX_MTU]>().add(slot).cast::<u8>() };
    if let Some(Grh(bytes)) = grh {
        // SAFETY: the place has room for a GRH and the longest payload.
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
        out.last = links.sent;
        out.tx.publish(header);
        ready_lids(&out.peer.memory).notify(usize::from(hca.membership.lid()));
        out.peer.memory.wake();
    }
    Outcome::Done(0)
}

/// Returns the number of the lane towards `peer`. `None` if all lanes are those of other devices, which have not taken all that is there.
fn outgoing(hca: &Hca, links: &mut Links, peer: &Rc<Peer>) -> Option<usize> {
    if let Some(index) = links.outgoing.iter().position(|out| Rc::ptr_eq(&out.peer, peer)) {
        return Some(index);
    }
    let is_full = links.outgoing.len() == MAX_DATAGRAM_LANES;
    let is_empty = |index, out: &Outgoing| {
        // L2
        is_full && hca.memory.datagram_lane(index).consumed.load(Ordering::Acquire) == out.tx.position()
    };
    // The lane of a device that is gone, or a new one, or that of the device that was not sent to for the longest time.
    let lanes = links.outgoing.iter().enumerate().filter(|&(index, out)| out.peer.is_gone() || is_empty(index, out));
    let index = lanes.min_by_key(|(_, out)| out.last).map_or(links.outgoing.len(), |(index, _)| index);
    if index == MAX_DATAGRAM_LANES {
        return None;
    }
    let lane = hca.memory.datagram_lane(index);
    commit(hca.memory.lanes_memfd(), lane).ok()?;
    match links.outgoing.get_mut(index) {
        Some(out) => out.peer = Rc::clone(peer),
        None => {
            // SAFETY: the slots live as long as the device; this is the only producing end, and they were never used.
            let tx = unsafe { LaneTx::new(NonNull::from(&lane.slots).cast(), DATAGRAM_SLOTS as u64, 0) };
            links.outgoing.push(Outgoing { peer: Rc::clone(peer), tx, last: 0 });
        }
    }
    lane.consumed.store(links.outgoing[index].tx.position(), Ordering::Relaxed);
    lane.target_epoch.store(peer.epoch, Ordering::Relaxed);
    let number = (lane.target.load(Ordering::Relaxed) >> LID_BITS) + 1;
    lane.target.store(number << LID_BITS | u64::from(peer.lid), Ordering::Release);
    links.forget_unused();
    Some(index)
}

/// Returns whether a device has said that it has datagrams for this one.
pub(crate) fn any_ready(memory: &DeviceMemory) -> bool {
    ready_lids(memory).any()
}

/// Takes the datagrams of all devices whose ready bits are set. Returns how many receives completed.
#[cold]
pub(crate) fn receive(hca: &Hca, state: &mut State) -> usize {
    let mut lids = core::mem::take(&mut state.links.ready);
    ready_lids(&hca.memory).drain(|lid| lids.push(lid as u16));
    let mut received = 0;
    for lid in lids.drain(..) {
        received += receive_from(hca, state, lid);
    }
    // So that nothing is allocated when all that have sent send at once.
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

/// Forgets the lanes of devices that are gone, after taking what these had sent: the mappings outlive them. And those that are for other devices now.
fn forget_gone(hca: &Hca, state: &mut State) -> usize {
    let mut received = 0;
    while let Some(index) = state.links.incoming.iter().position(|i| i.peer.is_gone() || !i.is_own()) {
        received += take_all(hca, state, index);
        state.links.incoming.swap_remove(index);
    }
    received
}

/// Takes the datagrams in lane `index` of those that are known.
fn take_all(hca: &Hca, state: &mut State, index: usize) -> usize {
    let State { queues: Queues { qps, cqs, .. }, links, rqs, .. } = state;
    let incoming = &mut links.incoming[index];
    let Incoming { peer, lane, .. } = incoming;
    let peer = Rc::clone(peer);
    let lane = peer.memory.datagram_lane(*lane);
    let (mut received, mut taken) = (0, None);
    // A sender that obeys `consumed` has no more than these.
    for _ in 0..DATAGRAM_SLOTS {
        let position = incoming.rx.position() as usize;
        let Some(header) = incoming.rx.pop().filter(|_| incoming.is_own()) else { break };
        taken = Some(incoming.rx.position());
        let payload = NonNull::from(&lane.payloads[position % DATAGRAM_SLOTS]).cast::<u8>();
        let qp = qps.get_mut(qp_index(header.qpn)).and_then(Option::as_deref_mut).filter(|qp| qp.qpn == header.qpn && !qp.failed);
        // The sender wrote this. What no SEND leaves is dropped, like anything else that is not for this device.
        let opcode = [CqeOpcode::ResponderSend, CqeOpcode::ResponderSendImm].into_iter().find(|&opcode| opcode as u32 == header.opcode);
        let (Some(qp), Some(opcode)) = (qp, opcode) else { continue };
        let is_for = matches!(qp.transport, Transport::Datagram { qkey } if qkey == header.qkey);
        if !is_for || !hca.memory.receives(qp.index) || header.byte_count as usize > MAX_MTU {
            continue;
        }
        let Some(Some(cq)) = cqs.get_mut(qp.recv_cq as usize) else { continue };
        let pop = || qp.receives.pop(&AtomicU64::new(0));
        // Another driver's receive that was posted before the datagram was sent, but after the last look at its queue, is there all the same.
        let refreshed = || rqs.get_mut(qp.rqn as usize).and_then(Option::as_mut).is_some_and(RqSlot::refresh).then(pop).flatten();
        let Some(taking) = pop().or_else(refreshed) else { continue };
        let grh = if header.flags & GRH != 0 { GRH_BYTES } else { 0 };
        let data = Data::of_memory(payload.as_ptr(), grh + header.byte_count as usize);
        // SAFETY: the payload is in the sender's mapping, which `peer` keeps; the sender may overwrite it, which spoils bytes only.
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
        deliver(hca, qp, cq, message, deliver::Sender::Datagram { qpn: header.source_qpn, grh: header.flags & GRH != 0 });
        received += 1;
    }
    if let Some(position) = taken {
        // L2
        lane.consumed.store(position, Ordering::Release);
    }
    received
}

/// Returns the lane of device `lid` that is for this device.
fn find_lane(hca: &Hca, links: &mut Links, lid: u16) -> Option<Incoming> {
    let peer = links.peer_of_lid(hca, lid).ok()?;
    let own = (hca.membership.lid(), hca.membership.epoch());
    let lanes = (0..MAX_DATAGRAM_LANES).map(|index| (index, peer.memory.datagram_lane(index)));
    let mut used = lanes.map(|(index, lane)| (index, lane, lane.target.load(Ordering::Acquire))).take_while(|lane| lane.2 != 0);
    let (index, lane, target) = used.find(|(_, lane, target)| (*target as u16, lane.target_epoch.load(Ordering::Relaxed)) == own)?;
    let (slots, consumed) = (NonNull::from(&lane.slots).cast(), lane.consumed.load(Ordering::Acquire));
    // SAFETY: the slots live as long as `peer`; this device, the lane's target, is its only consumer. Any bytes are a valid header.
    let rx = unsafe { LaneRx::new(slots, DATAGRAM_SLOTS as u64, consumed) };
    drop(used);
    Some(Incoming { peer, lane: index, target, rx })
}
