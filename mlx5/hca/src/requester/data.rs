//! The bytes of a message: gathers them from the buffers of a WQE, and scatters them to the buffers
//! of a receive.

use mlx5_wire::{
    Access, AtomicSegment, DataWords, DatagramSegment, InlineHeader, MAX_MESSAGE_BYTES, Opcode,
    RaddrSegment, SEGMENT, Syndrome,
};

use crate::Hca;
use crate::requester::outcome::{Limit, Malformed, Outcome};
use crate::shared::memory::{DeviceMemory, Fault};
use crate::shared::receives::Receives;

/// A contiguous part of a message.
pub(crate) struct Piece {
    pub(crate) at: *const u8,
    pub(crate) len: usize,
    /// The lkey; `None` for inline data.
    pub(crate) key: Option<u32>,
}

/// The data segments of a WQE. Nearly all WQEs have at most one part, which is parsed once.
pub(crate) enum Data<'a> {
    None,
    One(Piece),
    Many(&'a [u8]),
}

impl<'a> Data<'a> {
    /// Parses the bytes after the header segments, a multiple of 16. `None` if an inline part is
    /// longer than the WQE.
    #[inline(always)]
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        match Piece::parse(bytes)? {
            None => Some(Self::None),
            Some((piece, [])) => Some(Self::One(piece)),
            Some((_, mut rest)) => {
                while let Some((_, behind)) = Piece::parse(rest)? {
                    rest = behind;
                }
                Some(Self::Many(bytes))
            }
        }
    }

    /// Makes one part of the `len` bytes at `at`.
    pub(crate) fn of_memory(at: *const u8, len: usize) -> Data<'static> {
        if len == 0 {
            Data::None
        } else {
            Data::One(Piece { at, len, key: None })
        }
    }

    /// Calls `f` for each part, in order.
    #[inline(always)]
    pub(crate) fn each<E>(&self, mut f: impl FnMut(&Piece) -> Result<(), E>) -> Result<(), E> {
        match self {
            Self::None => Ok(()),
            Self::One(piece) => f(piece),
            Self::Many(bytes) => {
                let mut rest = *bytes;
                while let Some(Some((piece, behind))) = Piece::parse(rest) {
                    f(&piece)?;
                    rest = behind;
                }
                Ok(())
            }
        }
    }
}

impl Piece {
    /// Returns the first part of `bytes`, and the bytes after it. `None` if it does not fit.
    #[inline(always)]
    #[expect(clippy::option_option, reason = "malformed, at the end, or a part")]
    fn parse(bytes: &[u8]) -> Option<Option<(Self, &[u8])>> {
        let Some((segment, behind)) = bytes.split_first_chunk::<SEGMENT>() else {
            return Some(None);
        };
        let data = DataWords::parse(segment);
        if !data.is_inline() {
            return Some(Some((
                Self {
                    at: data.addr() as *const u8,
                    len: pointer_bytes(data),
                    key: Some(data.lkey()),
                },
                behind,
            )));
        }
        let len = data.byte_count() as usize;
        let behind = bytes.get(InlineHeader::segments(len) * SEGMENT..)?;
        Some(Some((
            Self {
                at: bytes[InlineHeader::LEN..].as_ptr(),
                len,
                key: None,
            },
            behind,
        )))
    }
}

/// Returns the number of bytes between the control segment and the data of a WQE.
pub(crate) fn header_bytes(opcode: Opcode, is_datagram: bool) -> usize {
    match opcode {
        Opcode::Send | Opcode::SendImm if is_datagram => DatagramSegment::LEN,
        Opcode::Nop | Opcode::Send | Opcode::SendImm => 0,
        Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => RaddrSegment::LEN,
        Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => {
            RaddrSegment::LEN + AtomicSegment::LEN
        }
    }
}

/// Returns whether an operation writes a result to its local buffers.
pub(crate) fn has_result(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::RdmaRead | Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd
    )
}

/// Returns whether an operation on a connection takes a receive.
pub(crate) fn takes_receive(opcode: Opcode) -> bool {
    matches!(
        opcode,
        Opcode::RdmaWriteImm | Opcode::Send | Opcode::SendImm
    )
}

/// Returns the number of bytes of a pointer segment. 0 means 2^31 on the wire.
fn pointer_bytes(segment: DataWords) -> usize {
    if segment.byte_count() == 0 {
        1 << 31
    } else {
        segment.byte_count() as usize
    }
}

/// Writes the parts of a message into the buffers of receive `index` of the device that owns
/// `memory`, from byte `offset` of the buffers on. Returns the errors of a responder.
///
/// # Safety
/// Every part is readable: it was checked against its region, or lies in the WQE.
pub(crate) unsafe fn scatter(
    memory: &DeviceMemory,
    receives: &Receives,
    index: u16,
    offset: usize,
    data: &Data<'_>,
) -> Result<(), (Syndrome, u8)> {
    let mut segments = receives.segments(index);
    // The remainder of the current buffer.
    let mut key = 0;
    let mut addr = 0;
    let mut room = 0;
    let mut skip = offset;
    let too_short = (Syndrome::LocalLength, Limit::ReceiveTooShort as u8);
    data.each(|piece| {
        let (mut from, mut left) = (piece.at, piece.len);
        while left > 0 {
            if room == 0 {
                let Some(segment) = segments.next() else {
                    return Err(too_short);
                };
                (key, addr, room) = (segment.lkey(), segment.addr(), pointer_bytes(segment));
                let skipped = skip.min(room);
                (addr, room, skip) = (
                    addr.wrapping_add(skipped as u64),
                    room - skipped,
                    skip - skipped,
                );
                continue;
            }
            let n = left.min(room);
            let local = |fault: Fault| (Syndrome::LocalProtection, fault as u8);
            let span = memory
                .resolve(key, addr, n as u64, Access::LOCAL_WRITE, receives.pd)
                .map_err(local)?;
            // SAFETY: the part is readable (caller), and the span was resolved for `n` bytes.
            unsafe { span.write(0, from, n) }.map_err(local)?;
            (addr, room, left) = (addr.wrapping_add(n as u64), room - n, left - n);
            // SAFETY: inside the part.
            from = unsafe { from.add(n) };
        }
        Ok(())
    })?;
    // The bytes before the data need room even for a message without data.
    while skip > 0 {
        let Some(segment) = segments.next() else {
            return Err(too_short);
        };
        skip -= skip.min(pointer_bytes(segment));
    }
    Ok(())
}

/// Checks the local side of a message, and returns its length in bytes.
pub(crate) fn check_local(
    hca: &Hca,
    pd: u32,
    data: &Data<'_>,
    is_result: bool,
) -> Result<u64, Outcome> {
    let access = if is_result {
        Access::LOCAL_WRITE
    } else {
        Access::empty()
    };
    let mut length = 0u64;
    data.each(|piece| {
        length += piece.len as u64;
        match piece.key {
            None if is_result => Err(Malformed::InlineResult.into()),
            None => Ok(()),
            Some(key) => match hca
                .memory
                .check(key, piece.at as u64, piece.len as u64, access, pd)
            {
                Ok(_) => Ok(()),
                Err(fault) => Err(Outcome::Fail(Syndrome::LocalProtection, fault as u8)),
            },
        }
    })?;
    if length > MAX_MESSAGE_BYTES {
        return Err(Limit::MessageTooLong.fails(Syndrome::LocalLength));
    }
    Ok(length)
}
