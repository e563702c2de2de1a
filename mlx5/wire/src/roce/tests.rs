//! Packets that other implementations made. `rxe.pcap` was captured by tcpdump from the Linux
//! kernel's software RDMA (rdma_rxe 6.1): each kind of packet that it sends, and a few packets of
//! another sender with ICRCs that are wrong on purpose. `rxe.txt` has the output of another decoder
//! for each packet; it shares no code with this crate.

extern crate std;

use std::format;
use std::net::IpAddr;
use std::string::String;
use std::vec::Vec;

use super::*;
use crate::AtomicSegment;

mod mad;

const PCAP: &[u8] = include_bytes!("tests/rxe.pcap");
const DECODED: &str = include_str!("tests/rxe.txt");

/// A captured packet: its addresses with the identification that was sent, and the UDP payload.
struct Captured {
    flow: Flow,
    packet: &'static [u8],
}

fn be16(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

fn captured(pcap: &'static [u8]) -> Vec<Captured> {
    let (mut rest, mut packets) = (&pcap[24..], Vec::new());
    while !rest.is_empty() {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        // Without the Ethernet header.
        let ip = &rest[16 + 14..16 + len];
        rest = &rest[16 + len..];
        let header = if ip[0] == 0x45 { 20 } else { 40 };
        let udp = &ip[header..];
        assert_eq!(
            (be16(udp, 2), usize::from(be16(udp, 4))),
            (UDP_PORT, udp.len())
        );
        let address = |at: usize, len: usize| match header {
            20 => IpAddr::from(*ip[at..at + len].first_chunk::<4>().unwrap()),
            _ => IpAddr::from(*ip[at..at + len].first_chunk::<16>().unwrap()),
        };
        let (source, destination, identification) = match header {
            20 => (address(12, 4), address(16, 4), be16(ip, 4)),
            _ => (address(8, 16), address(24, 16), 0),
        };
        let flow = Flow {
            source: (source, be16(udp, 0)).into(),
            destination: (destination, be16(udp, 2)).into(),
            identification,
        };
        packets.push(Captured {
            flow,
            packet: &udp[8..],
        });
    }
    packets
}

fn without_identification(flow: Flow) -> (Flow, u16) {
    let unknown = Flow {
        identification: 0,
        ..flow
    };
    (unknown, flow.identification)
}

/// Returns the line that the other decoder writes for a packet with these headers.
fn text(headers: &Headers, payload: usize) -> String {
    let Headers {
        opcode: PacketOpcode { transport, opcode },
        bth,
        ..
    } = headers;
    let transport = match transport {
        Transport::Rc => "RC",
        Transport::Uc => "UC",
        Transport::Ud => "UD",
        Transport::Congestion => "CNP",
    };
    let kind = match opcode {
        Opcode::SendFirst => "SEND first",
        Opcode::SendMiddle => "SEND middle",
        Opcode::SendLast => "SEND last",
        Opcode::SendLastImm => "SEND last imm",
        Opcode::SendOnly => "SEND only",
        Opcode::SendOnlyImm => "SEND only imm",
        Opcode::WriteFirst => "WRITE first",
        Opcode::WriteMiddle => "WRITE middle",
        Opcode::WriteLast => "WRITE last",
        Opcode::WriteLastImm => "WRITE last imm",
        Opcode::WriteOnly => "WRITE only",
        Opcode::WriteOnlyImm => "WRITE only imm",
        Opcode::ReadRequest => "READ request",
        Opcode::ReadResponseFirst => "READ resp first",
        Opcode::ReadResponseMiddle => "READ resp middle",
        Opcode::ReadResponseLast => "READ resp last",
        Opcode::ReadResponseOnly => "READ resp only",
        Opcode::Acknowledge => "ACK",
        Opcode::AtomicAcknowledge => "ATOMIC ack",
        Opcode::CompareSwap => "CMP_SWAP",
        Opcode::FetchAdd => "FETCH_ADD",
        Opcode::SendLastInvalidate | Opcode::SendOnlyInvalidate => unreachable!("not captured"),
    };
    let mut said = format!(
        "{transport} {kind} qpn={:#x} psn=0x{:06x} pkey={:#x}",
        bth.qpn,
        bth.psn.get(),
        bth.pkey
    );
    let mut add = |part: String| said += &part;
    if bth.is_solicited {
        add(" SE".into());
    }
    if bth.pad > 0 {
        add(format!(" pad={}", bth.pad));
    }
    if bth.asks_ack {
        add(" ACKREQ".into());
    }
    if headers.opcode.transport == Transport::Ud {
        add(format!(
            " DETH qkey={:#x} srcqp={:#x}",
            headers.deth.qkey, headers.deth.source_qpn
        ));
    }
    if opcode.has_reth() {
        let Reth { addr, rkey, len } = headers.reth;
        add(format!(" RETH va={addr:#x} rkey={rkey:#x} len={len}"));
    }
    if opcode.has_atomic() {
        let AtomicEth {
            addr,
            rkey,
            operands: AtomicSegment { swap_add, compare },
        } = headers.atomic;
        add(format!(
            " AtomicETH va={addr:#x} rkey={rkey:#x} swap/add={swap_add} cmp={compare}"
        ));
    }
    if opcode.has_aeth() {
        let answer = match headers.aeth.syndrome {
            Syndrome::Ack { credits } => format!("ACK credit={credits}"),
            Syndrome::RnrNak { timer } => format!("RNR NAK timer={timer}"),
            Syndrome::Nak(Nak::Sequence) => "NAK 0 (PSN sequence error)".into(),
            Syndrome::Nak(Nak::InvalidRequest) => "NAK 1 (invalid request)".into(),
            Syndrome::Nak(Nak::RemoteAccess) => "NAK 2 (remote access error)".into(),
            Syndrome::Nak(Nak::RemoteOperational) => "NAK 3 (remote operational error)".into(),
            Syndrome::Reserved(_) => "?".into(),
        };
        add(format!(" AETH {answer} msn={}", headers.aeth.msn));
    }
    if *opcode == Opcode::AtomicAcknowledge {
        add(format!(" orig={}", headers.original));
    }
    if opcode.has_imm() {
        add(format!(" imm={:#x}", headers.imm));
    }
    add(format!(" payload={}", payload + usize::from(bth.pad)));
    said
}

#[test]
fn every_packet_of_rxe_reads_as_another_decoder_reads_it_and_is_emitted_with_its_bytes() {
    let packets = captured(PCAP);
    assert_eq!(packets.len(), DECODED.lines().count());
    for (Captured { packet, .. }, expected) in packets.iter().zip(DECODED.lines()) {
        let (headers, payload) = Headers::parse(packet).unwrap();
        assert_eq!(
            text(&headers, payload.len()),
            expected.trim_end_matches(" wrong ICRC")
        );
        let emitted = headers.emit();
        // The comparison fails if a captured packet sets a reserved bit, because `Bth` does not
        // keep these: bits 0 to 5 of byte 4, bits 0 to 6 of byte 8.
        assert_eq!(emitted[..], packet[..emitted.len()], "{expected}");
        assert_eq!(&packet[emitted.len()..][..payload.len()], payload);
    }
}

#[test]
fn every_icrc_of_rxe_is_right_also_when_the_identification_is_not_known() {
    for (Captured { flow, packet }, expected) in captured(PCAP).iter().zip(DECODED.lines()) {
        let (covered, icrc) = packet.split_at(packet.len() - ICRC_BYTES);
        let (unknown, identification) = without_identification(*flow);
        let is_right = !expected.ends_with("wrong ICRC");
        // Headers and payload may be in two places.
        let [whole, divided] = [
            flow.icrc(covered, &[]),
            flow.icrc(&covered[..12], &covered[12..]),
        ];
        assert_eq!((whole == icrc, divided), (is_right, whole), "{expected}");
        assert_eq!(
            unknown.check(packet) == Some(identification),
            is_right,
            "{expected}"
        );
    }
}

#[test]
fn a_damaged_packet_fails_its_check() {
    let is_right = |Captured { flow, packet }: &Captured| {
        let (unknown, identification) = without_identification(*flow);
        unknown.check(packet) == Some(identification)
    };
    for Captured { flow, packet } in captured(PCAP).into_iter().filter(is_right) {
        let (unknown, identification) = without_identification(flow);
        for bit in 0..8 * packet.len() {
            // The ICRC does not cover byte 4, which has the congestion bits, because the network
            // may change them.
            if bit / 8 == 4 {
                continue;
            }
            let mut damaged = packet.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(unknown.check(&damaged), Some(identification), "bit {bit}");
        }
    }
}

#[test]
fn sequence_numbers_are_circular() {
    let [low, high] = [Psn::new(2), Psn::new(0xff_fffe)];
    assert_eq!(
        (low.since(high), high.since(low), low.since(low)),
        (4, -4, 0)
    );
    assert_eq!(
        (high.after(4), Psn::new(0x1234_5678).get()),
        (low, 0x34_5678)
    );
    assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -0x80_0000);
}

#[test]
fn bytes_that_are_no_packet_are_refused_with_the_reason() {
    let packets = captured(PCAP);
    for Captured { packet, .. } in &packets {
        let (headers, payload) = Headers::parse(packet).unwrap();
        let least = packet.len() - payload.len();
        for len in 0..least {
            // The parser may take bytes of the headers for the payload or the ICRC, and must still
            // find that the packet is too short.
            assert_eq!(
                Headers::parse(&packet[..len]),
                Err(PacketError::Short(len)),
                "{headers:?}"
            );
        }
    }
    let mut packet = packets[0].packet.to_vec();
    for (opcode, error) in [
        (0x15, PacketError::Opcode(0x15)),
        // UC has no READs, UD no WRITEs; RD and XRC are unknown.
        (0x2c, PacketError::Opcode(0x2c)),
        (0x6a, PacketError::Opcode(0x6a)),
        (0x44, PacketError::Opcode(0x44)),
        (0xa4, PacketError::Opcode(0xa4)),
    ] {
        packet[0] = opcode;
        assert_eq!(Headers::parse(&packet), Err(error));
    }
    (packet[0], packet[1]) = (4, 1);
    assert_eq!(Headers::parse(&packet), Err(PacketError::Version(1)));
}

/// More bytes than a UDP datagram can hold are not a packet, and cause no panic.
#[test]
fn the_icrc_of_bytes_of_any_number_is_computed() {
    let flow = Flow {
        source: ([1; 4], 1).into(),
        destination: ([2; 4], UDP_PORT).into(),
        identification: 0,
    };
    for len in [0, 3, 4, 5, 65_510, 65_530, 70_000] {
        let mut bytes = std::vec![7; len];
        bytes.extend(flow.icrc(&bytes, &[]));
        assert_eq!(flow.check(&bytes), Some(0));
    }
    assert_eq!(flow.check(&[1, 2, 3]), None);
}

/// Random bytes with any opcode cause no panic. Bytes that are a packet are emitted as they were,
/// except for reserved bits.
#[test]
fn random_bytes_are_refused_or_read_back() {
    let mut seed = 1_u64;
    let mut random = || {
        seed = seed
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 56) as u8
    };
    let mut packets = 0;
    for _ in 0..100_000 {
        let len = usize::from(random()) % 64;
        let bytes: Vec<u8> = (0..len)
            .map(|at| if at == 1 { random() & 0xf0 } else { random() })
            .collect();
        if let Ok((headers, payload)) = Headers::parse(&bytes) {
            let emitted = headers.emit();
            let mut expected = bytes[..emitted.len()].to_vec();
            expected[4] &= 0xc0;
            expected[8] &= 0x80;
            if headers.opcode.transport == Transport::Ud {
                expected[16] = 0;
            }
            assert_eq!(emitted[..], expected);
            assert_eq!(
                emitted.len() + payload.len() + usize::from(headers.bth.pad) + ICRC_BYTES,
                bytes.len()
            );
            packets += 1;
        }
    }
    assert!(packets > 1000, "{packets}");
}
