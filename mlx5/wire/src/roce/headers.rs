//! All headers of a packet: the BTH, then the headers that its opcode determines, in this order:
//! DETH (UD); RETH or AtomicETH; AETH; the original value of an atomic operation; the immediate, or
//! the rkey to be invalidated.

use core::ops::Deref;

use thiserror::Error;

use super::ICRC_BYTES;
use super::aeth::Aeth;
use super::bth::Bth;
use super::opcode::{Opcode, PacketOpcode, Transport};
use super::psn::Psn;
use crate::{AtomicSegment, be32, be64, bytes};

/// Maximum length of all headers of a packet, in bytes: the length of an atomic request's headers.
pub const MAX_HEADER_BYTES: usize = Bth::LEN + AtomicEth::LEN;
/// The default partition key, with the bit for full membership.
const PKEY: u16 = 0xffff;

/// RDMA extended transport header, 16 bytes: address at 0, rkey at 8, length at 12.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address in the target's memory region.
    pub addr: u64,
    /// The region's rkey.
    pub rkey: u32,
    /// Length of the whole message in bytes.
    pub len: u32,
}

impl Reth {
    /// Length of the header in bytes.
    pub const LEN: usize = 16;
}

/// Atomic extended transport header, 28 bytes: address at 0, rkey at 8, value to store or add at
/// 12, value to compare at 20.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtomicEth {
    /// Virtual address in the target's memory region.
    pub addr: u64,
    /// The region's rkey.
    pub rkey: u32,
    /// Operands of the atomic operation.
    pub operands: AtomicSegment,
}

impl AtomicEth {
    /// Length of the header in bytes.
    pub const LEN: usize = 28;
}

/// Datagram extended transport header, 8 bytes: Q_Key at 0, QPN of the source at 5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deth {
    /// Q_Key of the destination.
    pub qkey: u32,
    /// QPN of the source, 24 bits.
    pub source_qpn: u32,
}

impl Deth {
    /// Length of the header in bytes.
    pub const LEN: usize = 8;
}

/// The reason why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacketError {
    /// The bytes end before the payload and the ICRC.
    #[error("packet of {0} bytes ends before its ICRC")]
    Short(usize),
    /// This crate does not know the opcode.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// The header version is not 0.
    #[error("header version {0}, known is 0")]
    Version(u8),
}

/// The headers of a packet. The opcode determines which of the extended headers are emitted;
/// [`Headers::parse`] sets the others to their defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// The decoded opcode.
    pub opcode: PacketOpcode,
    /// The base header. [`Headers::emit`] ignores its opcode.
    pub bth: Bth,
    /// Header of a datagram.
    pub deth: Deth,
    /// Header of a READ request, and of the first packet of a WRITE.
    pub reth: Reth,
    /// Header of an atomic request.
    pub atomic: AtomicEth,
    /// Header of a response.
    pub aeth: Aeth,
    /// Original value of the word of an atomic operation, in the response.
    pub original: u64,
    /// Immediate, or the rkey to be invalidated.
    pub imm: u32,
}

/// Encoded headers.
#[derive(Clone, Copy, Debug)]
pub struct HeaderBytes {
    bytes: [u8; MAX_HEADER_BYTES],
    len: usize,
}

impl HeaderBytes {
    fn push(&mut self, part: &[u8]) {
        self.bytes[self.len..][..part.len()].copy_from_slice(part);
        self.len += part.len();
    }
}

impl Deref for HeaderBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Headers {
    /// Makes the headers of a packet to this QPN: the default P_Key, no flags, no pad bytes,
    /// extended headers of zeros.
    #[must_use]
    pub fn new(opcode: PacketOpcode, qpn: u32, psn: Psn) -> Self {
        let bth = Bth {
            opcode: opcode.to_byte(),
            pkey: PKEY,
            qpn,
            psn,
            ..Bth::default()
        };
        Self {
            opcode,
            bth,
            deth: Deth::default(),
            reth: Reth::default(),
            atomic: AtomicEth::default(),
            aeth: Aeth::ack(0),
            original: 0,
            imm: 0,
        }
    }

    /// Encodes the headers.
    #[must_use]
    pub fn emit(&self) -> HeaderBytes {
        let PacketOpcode { transport, opcode } = self.opcode;
        let mut b = HeaderBytes {
            bytes: [0; MAX_HEADER_BYTES],
            len: 0,
        };
        b.push(
            &Bth {
                opcode: self.opcode.to_byte(),
                ..self.bth
            }
            .emit(),
        );
        if transport == Transport::Ud {
            b.push(&self.deth.qkey.to_be_bytes());
            b.push(&(self.deth.source_qpn & 0xff_ffff).to_be_bytes());
        }
        if opcode.has_reth() {
            b.push(&self.reth.addr.to_be_bytes());
            b.push(&self.reth.rkey.to_be_bytes());
            b.push(&self.reth.len.to_be_bytes());
        }
        if opcode.has_atomic() {
            b.push(&self.atomic.addr.to_be_bytes());
            b.push(&self.atomic.rkey.to_be_bytes());
            b.push(&self.atomic.operands.emit());
        }
        if opcode.has_aeth() {
            b.push(&self.aeth.emit());
        }
        if opcode == Opcode::AtomicAcknowledge {
            b.push(&self.original.to_be_bytes());
        }
        if opcode.has_imm() || opcode.has_invalidate() {
            b.push(&self.imm.to_be_bytes());
        }
        b
    }

    /// Decodes the headers of a UDP payload. Returns the headers, and the packet's payload without
    /// pad bytes and ICRC. Does not check the ICRC: [`Flow::check`](super::Flow::check) does.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn parse(packet: &[u8]) -> Result<(Self, &[u8]), PacketError> {
        let short = PacketError::Short(packet.len());
        let bth = Bth::parse(packet.first_chunk().ok_or(short)?);
        let opcode = PacketOpcode::from_byte(bth.opcode).ok_or(PacketError::Opcode(bth.opcode))?;
        if bth.version != 0 {
            return Err(PacketError::Version(bth.version));
        }
        let PacketOpcode {
            transport,
            opcode: kind,
        } = opcode;
        let mut headers = Self::new(opcode, 0, Psn::new(0));
        headers.bth = bth;
        // Reads past the end return zeros; the length is checked before the headers are returned.
        let mut at = Bth::LEN;
        let mut next = |len: usize| {
            at += len;
            at - len
        };
        if transport == Transport::Ud {
            let at = next(Deth::LEN);
            headers.deth = Deth {
                qkey: be32(packet, at),
                source_qpn: be32(packet, at + 4) & 0xff_ffff,
            };
        }
        if kind.has_reth() {
            let at = next(Reth::LEN);
            headers.reth = Reth {
                addr: be64(packet, at),
                rkey: be32(packet, at + 8),
                len: be32(packet, at + 12),
            };
        }
        if kind.has_atomic() {
            let at = next(AtomicEth::LEN);
            headers.atomic = AtomicEth {
                addr: be64(packet, at),
                rkey: be32(packet, at + 8),
                operands: AtomicSegment::parse(&bytes(packet, at + 12)),
            };
        }
        if kind.has_aeth() {
            headers.aeth = Aeth::parse(&bytes(packet, next(Aeth::LEN)));
        }
        if kind == Opcode::AtomicAcknowledge {
            headers.original = be64(packet, next(size_of::<u64>()));
        }
        if kind.has_imm() || kind.has_invalidate() {
            headers.imm = be32(packet, next(size_of::<u32>()));
        }
        let end = packet
            .len()
            .checked_sub(ICRC_BYTES + usize::from(bth.pad))
            .ok_or(short)?;
        let payload = packet.get(at..end).ok_or(short)?;
        Ok((headers, payload))
    }
}
