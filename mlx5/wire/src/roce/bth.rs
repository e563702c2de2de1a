//! Base transport header, 12 bytes.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | opcode |
//! | 1 | solicited event (bit 7), migration request (6), pad count (4..6), header version (0..4), which is 0 |
//! | 2..4 | P_Key |
//! | 4 | FECN (bit 7), BECN (6), reserved; the ICRC does not cover them |
//! | 5..8 | QPN of the destination |
//! | 8 | the requester asks for an ACK (bit 7) |
//! | 9..12 | PSN |

use super::psn::Psn;
use crate::{be16, be32};

const SOLICITED: u8 = 0x80;
const MIGRATION: u8 = 0x40;
const ACK_REQUEST: u32 = 1 << 31;
const BITS_24: u32 = 0xff_ffff;

/// Base transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bth {
    /// Opcode byte: the encoded [`PacketOpcode`](super::PacketOpcode).
    pub opcode: u8,
    /// Whether the receiver raises an event for the completion of this message.
    pub is_solicited: bool,
    /// Whether the path has migrated.
    pub has_migrated: bool,
    /// Number of pad bytes between payload and ICRC, 0 to 3.
    pub pad: u8,
    /// Header version; 0 is the only known version.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Whether the network announces congestion to the receiver (FECN).
    pub has_fecn: bool,
    /// Whether the receiver announces congestion to the sender (BECN).
    pub has_becn: bool,
    /// QPN of the destination, 24 bits.
    pub qpn: u32,
    /// Whether the requester asks for an ACK of this packet.
    pub asks_ack: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Length of the header in bytes.
    pub const LEN: usize = 12;

    /// Encodes the header.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        let mut b = [0; Self::LEN];
        b[0] = self.opcode;
        b[1] = bit(self.is_solicited, SOLICITED)
            | bit(self.has_migrated, MIGRATION)
            | (self.pad & 3) << 4
            | self.version & 0xf;
        b[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        b[4..8].copy_from_slice(&(self.qpn & BITS_24).to_be_bytes());
        b[4] = bit(self.has_fecn, 0x80) | bit(self.has_becn, 0x40);
        let ack = if self.asks_ack { ACK_REQUEST } else { 0 };
        b[8..12].copy_from_slice(&(ack | self.psn.get()).to_be_bytes());
        b
    }

    /// Decodes the header; any bytes are accepted.
    #[must_use]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        let (flags, sequence) = (b[1], be32(b, 8));
        Self {
            opcode: b[0],
            is_solicited: flags & SOLICITED != 0,
            has_migrated: flags & MIGRATION != 0,
            pad: flags >> 4 & 3,
            version: flags & 0xf,
            pkey: be16(b, 2),
            has_fecn: b[4] & 0x80 != 0,
            has_becn: b[4] & 0x40 != 0,
            qpn: be32(b, 4) & BITS_24,
            asks_ack: sequence & ACK_REQUEST != 0,
            psn: Psn::new(sequence),
        }
    }
}
