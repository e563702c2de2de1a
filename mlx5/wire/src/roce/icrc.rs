//! Invariant CRC: a CRC-32 (with the polynomial of Ethernet), least significant byte first, of
//! everything in a packet that routers do not change (InfiniBand Architecture Specification, annex
//! A17, "ICRC").
//!
//! The ICRC covers 8 bytes of ones, the IP header, the UDP header, and the packet. These fields
//! count as ones: in the IP header type of service, time to live and header checksum (in an IPv6
//! header traffic class, flow label and hop limit), in the UDP header the checksum, and in the BTH
//! the byte with FECN.

use core::net::{IpAddr, SocketAddr};

use crc32fast::Hasher;

use super::Bth;
use crate::bytes;

/// Length of the ICRC in bytes.
pub const ICRC_BYTES: usize = 4;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
/// Number of bytes of ones.
const ONES: usize = 8;
/// Offsets of the UDP header and of the BTH behind the longest IP header.
const UDP_AT: usize = ONES + IPV6_BYTES;
const BTH_AT: usize = UDP_AT + UDP_BYTES;
/// Protocol number of UDP.
const UDP: u8 = 17;
/// Offset of FECN, BECN and reserved bits in the BTH.
const CONGESTION: usize = 4;
/// Offset of the end of the identification in the IPv4 header.
const IDENTIFICATION_END: usize = 6;
/// The polynomial, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The addresses of a packet and the IPv4 identification, on which the ICRC depends besides the
/// packet's bytes. The IPv4 header must have no options and the bit "do not fragment"; the IPv6
/// header must have no extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// IP address and UDP port of the sender.
    pub source: SocketAddr,
    /// IP address and UDP port of the receiver; RoCE hardware receives at
    /// [`UDP_PORT`](super::UDP_PORT) only.
    pub destination: SocketAddr,
    /// Identification in an IPv4 header; 0 over IPv6. Linux sends 0 from a socket that is not
    /// connected and has `IP_PMTUDISC_DO`.
    pub identification: u16,
}

/// Returns the bytes of an address in an IPv6 header.
const fn of_ipv6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Flow {
    /// Returns the ICRC of a packet: of its headers from the BTH on, and its payload with pad
    /// bytes. `headers` may end anywhere after the BTH, as long as `payload` continues there.
    #[must_use]
    pub fn icrc(&self, headers: &[u8], payload: &[u8]) -> [u8; ICRC_BYTES] {
        let udp_len = (UDP_BYTES + headers.len() + payload.len() + ICRC_BYTES) as u16;
        // All bytes begin as ones. The bytes before the IP header stay so, and so do the fields of
        // the IP and UDP headers that the code below does not set.
        let mut start = [0xff; BTH_AT + Bth::LEN];
        let ip_at = match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let ip = &mut start[UDP_AT - IPV4_BYTES..];
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_BYTES as u16).to_be_bytes());
                ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
                ip[6..8].copy_from_slice(&0x4000_u16.to_be_bytes());
                ip[9] = UDP;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                UDP_AT - IPV4_BYTES
            }
            (source, destination) => {
                let ip = &mut start[UDP_AT - IPV6_BYTES..];
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
                ip[6] = UDP;
                ip[8..24].copy_from_slice(&of_ipv6(source));
                ip[24..40].copy_from_slice(&of_ipv6(destination));
                UDP_AT - IPV6_BYTES
            }
        };
        let udp = &mut start[UDP_AT..];
        udp[0..2].copy_from_slice(&self.source.port().to_be_bytes());
        udp[2..4].copy_from_slice(&self.destination.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        let (bth, rest) = headers.split_at(Bth::LEN.min(headers.len()));
        let end = BTH_AT + bth.len();
        start[BTH_AT..end].copy_from_slice(bth);
        start[BTH_AT + CONGESTION] = 0xff;
        let mut crc = Hasher::new();
        crc.update(&start[ip_at - ONES..end]);
        crc.update(rest);
        crc.update(payload);
        crc.finalize().to_le_bytes()
    }

    /// Checks the ICRC of a received UDP payload. Returns the IPv4 identification with which the
    /// ICRC is right (0 over IPv6), or `None` if the ICRC is wrong for every identification.
    ///
    /// A receiver on a socket does not get the identification. A CRC is linear: a wrong
    /// identification changes the ICRC by a value from which the right identification follows. 16
    /// of the 32 bits still check the rest, so a damaged packet passes with probability 2^-16. The
    /// identification of this `Flow` is tried first: if the sender is known to send a certain
    /// value, set that value.
    #[must_use]
    pub fn check(&self, packet: &[u8]) -> Option<u16> {
        let covered = packet.len().checked_sub(ICRC_BYTES)?;
        let difference = u32::from_le_bytes(self.icrc(&packet[..covered], &[]))
            ^ u32::from_le_bytes(bytes(packet, covered));
        if difference == 0 {
            return Some(self.identification);
        }
        let behind = IPV4_BYTES - IDENTIFICATION_END + UDP_BYTES + covered;
        // If all other bytes are right, the difference comes from the identification alone.
        // Dividing the difference by x^(8 * n), where n is the number of bytes from the
        // identification to the end, gives the change of the identification's bytes.
        let change = divided(difference, behind + size_of::<u16>());
        let is_ipv4 = self.source.is_ipv4() && self.destination.is_ipv4();
        let change = u16::try_from(change).ok().filter(|_| is_ipv4)?;
        Some(self.identification ^ change.swap_bytes())
    }
}

/// Returns the CRC register that becomes `register` when `bytes` zero bytes follow: the quotient of
/// `register` by x^(8 * bytes).
fn divided(register: u32, bytes: usize) -> u32 {
    let mut quotient = register;
    let mut power = UNSHIFT_BYTE;
    let mut left = bytes;
    while left > 0 {
        if left & 1 != 0 {
            quotient = product(quotient, power);
        }
        power = product(power, power);
        left >>= 1;
    }
    quotient
}

/// x^-8, reflected: bit 31 is the coefficient of x^0.
const UNSHIFT_BYTE: u32 = {
    // The loop starts with register 1 (x^0), and undoes the shift by one byte of zeros.
    let (mut register, mut bit) = (1_u32 << 31, 0);
    while bit < 8 {
        register = if register & 1 << 31 != 0 {
            (register ^ POLYNOMIAL) << 1 | 1
        } else {
            register << 1
        };
        bit += 1;
    }
    register
};

/// Returns the product of two polynomials modulo the polynomial of the CRC, all reflected.
const fn product(a: u32, b: u32) -> u32 {
    let mut sum = 0;
    let mut shifted = b;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        if a & 1 << bit != 0 {
            sum ^= shifted;
        }
        shifted = if shifted & 1 != 0 {
            shifted >> 1 ^ POLYNOMIAL
        } else {
            shifted >> 1
        };
    }
    sum
}
