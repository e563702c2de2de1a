//! A send WQE as a whole: its control segment, the segments that its opcode determines, and its
//! data.

use super::{
    AtomicSegment, CtrlSegment, CtrlWords, DataWords, DatagramSegment, InlineHeader, Opcode,
    RaddrSegment, SEGMENT,
};

/// A send WQE.
#[derive(Clone, Copy, Debug)]
pub struct Wqe<'a> {
    /// The control segment.
    pub ctrl: CtrlWords,
    /// Opcode of the WQE.
    pub opcode: Opcode,
    /// The segments between control segment and data.
    pub header: Header,
    /// The data segments. `parse` has checked that the WQE contains all their inline bytes.
    data: &'a [u8],
}

/// The segments between the control segment and the data of a WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// No segment: a SEND on a connection, or a NOP.
    None,
    /// The memory that a WRITE or a READ accesses.
    Memory(RaddrSegment),
    /// The remote word and the operands of an atomic.
    Atomic(RaddrSegment, AtomicSegment),
    /// The destination of a datagram.
    Datagram(DatagramSegment),
}

/// A contiguous part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A buffer in registered memory.
    Buffer {
        /// The lkey of the region.
        lkey: u32,
        /// Virtual address inside the region.
        addr: u64,
        /// Length in bytes, 1 to 2^31.
        len: usize,
    },
    /// Bytes inside the WQE.
    Inline(&'a [u8]),
}

impl Piece<'_> {
    /// Returns the length of the part in bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "the length of one part says nothing"
    )]
    pub const fn len(self) -> u64 {
        match self {
            Self::Buffer { len, .. } => len as u64,
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// The reason why bytes are no WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WqeError {
    /// This crate does not know the opcode.
    #[error("unknown opcode")]
    Opcode,
    /// The bytes end before the segments that the opcode determines.
    #[error("a header segment is missing")]
    Header,
    /// Inline data is longer than the WQE.
    #[error("inline data reaches beyond the WQE")]
    Inline,
}

impl<'a> Wqe<'a> {
    /// Decodes the bytes of a WQE, all `ds` segments. `is_datagram` is whether the queue pair sends
    /// datagrams: then a SEND has a datagram segment. The bytes after the control segment of a NOP
    /// have no meaning.
    ///
    /// # Errors
    /// See [`WqeError`].
    #[inline(always)]
    pub fn parse(bytes: &'a [u8], is_datagram: bool) -> Result<Self, WqeError> {
        fn head<const N: usize>(bytes: &[u8]) -> Result<(&[u8; N], &[u8]), WqeError> {
            bytes.split_first_chunk().ok_or(WqeError::Header)
        }
        let (ctrl, rest) = head::<{ CtrlSegment::LEN }>(bytes)?;
        let ctrl = CtrlWords::parse(ctrl);
        let opcode = Opcode::from_repr(ctrl.opcode()).ok_or(WqeError::Opcode)?;
        let (header, data) = match opcode {
            Opcode::Nop => (Header::None, &[][..]),
            Opcode::Send | Opcode::SendImm if is_datagram => {
                let (to, data) = head(rest)?;
                (Header::Datagram(DatagramSegment::parse(to)), data)
            }
            Opcode::Send | Opcode::SendImm => (Header::None, rest),
            Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => {
                let (at, data) = head(rest)?;
                (Header::Memory(RaddrSegment::parse(at)), data)
            }
            Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => {
                let (at, rest) = head(rest)?;
                let (operands, data) = head(rest)?;
                let operands = AtomicSegment::parse(operands);
                (Header::Atomic(RaddrSegment::parse(at), operands), data)
            }
        };
        let mut unread = data;
        while let Some((_, behind)) = split(unread)? {
            unread = behind;
        }
        Ok(Self {
            ctrl,
            opcode,
            header,
            data,
        })
    }

    /// Returns the parts of the message, in order. The result of a READ or an atomic is written to
    /// these parts.
    #[must_use]
    #[inline(always)]
    pub const fn pieces(&self) -> Pieces<'a> {
        Pieces(self.data)
    }
}

/// The parts of a message, in order.
#[derive(Clone, Debug)]
pub struct Pieces<'a>(&'a [u8]);

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Piece<'a>> {
        let (piece, behind) = split(self.0).ok().flatten()?;
        self.0 = behind;
        Some(piece)
    }
}

/// Returns the first of the data segments, and the segments after it; `None` if no segment is left.
#[inline(always)]
fn split(data: &[u8]) -> Result<Option<(Piece<'_>, &[u8])>, WqeError> {
    let Some((segment, behind)) = data.split_first_chunk::<SEGMENT>() else {
        return Ok(None);
    };
    let words = DataWords::parse(segment);
    let len = words.byte_count() as usize;
    if !words.is_inline() {
        let piece = Piece::Buffer {
            lkey: words.lkey(),
            addr: words.addr(),
            len: words.buffer_bytes(),
        };
        return Ok(Some((piece, behind)));
    }
    let (Some(bytes), Some(behind)) = (
        data.get(InlineHeader::LEN..InlineHeader::LEN + len),
        data.get(InlineHeader::segments(len) * SEGMENT..),
    ) else {
        return Err(WqeError::Inline);
    };
    Ok(Some((Piece::Inline(bytes), behind)))
}

impl Opcode {
    /// Returns whether the operation writes a result to its local buffers.
    #[must_use]
    pub const fn has_result(self) -> bool {
        matches!(
            self,
            Self::RdmaRead | Self::AtomicCompareSwap | Self::AtomicFetchAdd
        )
    }

    /// Returns whether the operation consumes a receive of the connected peer.
    #[must_use]
    pub const fn takes_receive(self) -> bool {
        matches!(self, Self::RdmaWriteImm | Self::Send | Self::SendImm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataSegment, FenceMode};

    extern crate std;
    use std::vec::Vec;

    const BUFFER: DataSegment = DataSegment {
        byte_count: 7,
        lkey: 0x123,
        addr: 0x4567,
    };

    fn wqe(opcode: Opcode, segments: &[&[u8]]) -> Vec<u8> {
        let body = segments.concat();
        let ctrl = CtrlSegment {
            opcode: opcode as u8,
            wqe_index: 3,
            qpn: 0x4001,
            ds: 1 + body.len().div_ceil(SEGMENT) as u8,
            signaled: true,
            fence: FenceMode::None,
            solicited: false,
            imm: 9,
        };
        [&ctrl.emit()[..], &body].concat()
    }

    #[test]
    fn each_opcode_has_its_segments_and_the_data_behind_them() {
        let raddr = RaddrSegment {
            addr: 0x1_0000,
            rkey: 0x500,
        };
        let operands = AtomicSegment {
            swap_add: 5,
            compare: 6,
        };
        let to = DatagramSegment {
            vector: crate::AddressVector::local(4, 0),
            qpn: 5,
            qkey: 6,
        };
        let raddr_bytes = raddr.emit();
        let (operand_bytes, to_bytes) = (operands.emit(), to.emit());
        let cases: [(Opcode, bool, Header, &[&[u8]]); 8] = [
            (Opcode::Send, false, Header::None, &[]),
            (Opcode::SendImm, true, Header::Datagram(to), &[&to_bytes]),
            (
                Opcode::RdmaWrite,
                false,
                Header::Memory(raddr),
                &[&raddr_bytes],
            ),
            (
                Opcode::RdmaWriteImm,
                false,
                Header::Memory(raddr),
                &[&raddr_bytes],
            ),
            (
                Opcode::RdmaRead,
                false,
                Header::Memory(raddr),
                &[&raddr_bytes],
            ),
            (
                Opcode::AtomicCompareSwap,
                false,
                Header::Atomic(raddr, operands),
                &[&raddr_bytes, &operand_bytes],
            ),
            (
                Opcode::AtomicFetchAdd,
                false,
                Header::Atomic(raddr, operands),
                &[&raddr_bytes, &operand_bytes],
            ),
            (Opcode::Send, true, Header::Datagram(to), &[&to_bytes]),
        ];
        for (opcode, is_datagram, header, segments) in cases {
            let inline = InlineHeader { byte_count: 14 }.emit();
            let data = BUFFER.emit();
            let tail = [&inline[..], &[0xa5; 28], &data].concat();
            let bytes = wqe(opcode, &[&segments.concat(), &data, &tail]);
            let wqe = Wqe::parse(&bytes, is_datagram).unwrap();
            assert_eq!((wqe.opcode, wqe.header), (opcode, header));
            assert_eq!((wqe.ctrl.wqe_index(), wqe.ctrl.imm()), (3, 9));
            let buffer = Piece::Buffer {
                lkey: 0x123,
                addr: 0x4567,
                len: 7,
            };
            let expected = [buffer, Piece::Inline(&[0xa5; 14]), buffer];
            assert!(wqe.pieces().eq(expected), "{opcode:?}");
            let missing = &bytes[..SEGMENT + segments.concat().len() - SEGMENT.min(segments.len())];
            let is_short = Wqe::parse(missing, is_datagram).err() == Some(WqeError::Header);
            assert_eq!(is_short, !segments.is_empty());
        }
    }

    #[test]
    fn a_length_of_zero_is_two_to_the_31_and_a_nop_has_no_data() {
        let zero = DataSegment {
            byte_count: 0,
            ..BUFFER
        };
        let bytes = wqe(Opcode::Send, &[&zero.emit()]);
        let mut pieces = Wqe::parse(&bytes, false).unwrap().pieces();
        assert!(matches!(pieces.next(), Some(Piece::Buffer { len, .. }) if len == 1 << 31));
        let nop = wqe(Opcode::Nop, &[&[0xff; 32]]);
        assert_eq!(Wqe::parse(&nop, false).unwrap().pieces().count(), 0);
    }

    #[test]
    fn inline_data_beyond_the_wqe_and_unknown_opcodes_are_refused() {
        for (byte_count, is_legal) in [(12, true), (13, false), (u32::MAX >> 1, false)] {
            let header = InlineHeader { byte_count }.emit();
            let bytes = wqe(Opcode::Send, &[&BUFFER.emit(), &header, &[0; 12]]);
            let refused = Wqe::parse(&bytes, false).err();
            assert_eq!(refused, (!is_legal).then_some(WqeError::Inline));
        }
        let mut bytes = wqe(Opcode::Send, &[]);
        bytes[3] = 0x7f;
        assert_eq!(Wqe::parse(&bytes, false).err(), Some(WqeError::Opcode));
    }
}
