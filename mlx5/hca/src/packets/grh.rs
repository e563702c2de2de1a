//! The headers in the first bytes of the receive of a datagram.

use std::net::Ipv6Addr;

use etherparse::{
    IpDscp, IpEcn, IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, UdpHeader, ip_number,
};
use mlx5_wire::roce::ICRC_BYTES;
use mlx5_wire::{AddressVector, GRH_BYTES};

use crate::{Gid, GidKind};

const BTH_BYTES: usize = 12;
const DETH_BYTES: usize = 8;
const IMM_BYTES: usize = 4;
/// Value of the field "next header" of a GRH: an InfiniBand transport header.
const TRANSPORT: IpNumber = IpNumber(0x1b);

/// Returns the headers of a message of `len` bytes from `source` to the address `vector`: a Global
/// Route Header (InfiniBand specification, "Global Route Header"). For a datagram that is sent as
/// UDP over IPv4 they are 20 unused bytes and an IPv4 header (annex A17, "RoCEv2").
pub(crate) fn headers(
    source: &Gid,
    vector: &AddressVector,
    len: usize,
    has_imm: bool,
) -> [u8; GRH_BYTES] {
    // The length of the packet from the BTH to the ICRC.
    let imm_bytes = if has_imm { IMM_BYTES } else { 0 };
    let packet = BTH_BYTES + DETH_BYTES + imm_bytes + len.next_multiple_of(4) + ICRC_BYTES;
    let to = Ipv6Addr::from(vector.rgid).to_ipv4_mapped();
    let (GidKind::RoceV2, Some(from), Some(to)) = (source.kind, source.ipv4(), to) else {
        let header = Ipv6Header {
            traffic_class: vector.tclass,
            flow_label: Ipv6FlowLabel::try_new(vector.grh_gid_fl & 0xf_ffff).unwrap_or_default(),
            payload_length: packet as u16,
            next_header: TRANSPORT,
            hop_limit: vector.hop_limit,
            source: source.bytes,
            destination: vector.rgid,
        };
        return header.to_bytes();
    };
    let mut header = Ipv4Header {
        dscp: IpDscp::try_new(vector.tclass >> 2).unwrap_or_default(),
        ecn: IpEcn::try_new(vector.tclass & 3).unwrap_or_default(),
        total_len: (Ipv4Header::MIN_LEN + UdpHeader::LEN + packet) as u16,
        time_to_live: vector.hop_limit,
        protocol: ip_number::UDP,
        source: from,
        destination: to.octets(),
        ..Ipv4Header::default()
    };
    header.header_checksum = header.calc_header_checksum();
    let mut bytes = [0; GRH_BYTES];
    bytes[GRH_BYTES - Ipv4Header::MIN_LEN..].copy_from_slice(&header.to_bytes());
    bytes
}
