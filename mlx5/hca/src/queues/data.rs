//! The bytes of a message: gathers them from the buffers of a WQE, and scatters them to the buffers
//! of a receive.

use core::ptr::NonNull;

use mlx5_wire::{self as wire, Access, MAX_MESSAGE_BYTES, Syndrome, Wqe};

use crate::Hca;
use crate::queues::qp::SoftQp;
use crate::shared::memory::{DeviceMemory, Keyed, Span};
use crate::shared::receives::Receives;
use crate::types::outcome::Outcome;
use crate::types::vendor::Fault;
use crate::types::vendor::{Limit, Malformed};

/// A contiguous part of a message.
pub(crate) struct Piece {
    pub(crate) at: *const u8,
    pub(crate) len: usize,
    /// The lkey; `None` for inline data.
    pub(crate) key: Option<u32>,
}

impl From<wire::Piece<'_>> for Piece {
    #[inline(always)]
    fn from(piece: wire::Piece<'_>) -> Self {
        match piece {
            wire::Piece::Buffer { lkey, addr, len } => Self {
                at: addr as *const u8,
                len,
                key: Some(lkey),
            },
            wire::Piece::Inline(bytes) => Self {
                at: bytes.as_ptr(),
                len: bytes.len(),
                key: None,
            },
        }
    }
}

#[inline(always)]
pub(crate) fn pieces<'a>(wqe: &Wqe<'a>) -> impl Iterator<Item = Piece> + use<'a> {
    wqe.pieces().map(Piece::from)
}

/// Writes the parts of a message into the buffers of receive `index` of the device that owns
/// `memory`, from byte `offset` of the buffers on. An error is the syndrome and the vendor syndrome
/// of the responder.
///
/// # Safety
/// Every part is readable: it was checked against its region, or lies in the WQE.
pub(crate) unsafe fn scatter(
    memory: &DeviceMemory,
    receives: &Receives,
    index: u16,
    offset: usize,
    pieces: impl Iterator<Item = (*const u8, usize)>,
) -> Result<(), (Syndrome, u8)> {
    let mut segments = receives.segments(index);
    // Key, address and length of the remainder of the current buffer.
    let mut key = 0;
    let mut addr = 0;
    let mut room = 0;
    let mut skip = offset;
    let too_short = (Syndrome::LocalLength, Limit::ReceiveTooShort as u8);
    for (mut from, mut left) in pieces {
        while left > 0 {
            if room == 0 {
                let Some(segment) = segments.next() else {
                    return Err(too_short);
                };
                (key, addr, room) = (segment.lkey(), segment.addr(), segment.buffer_bytes());
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
            let bytes = Keyed::new(key, addr, n as u64);
            let span = memory.resolve(bytes, Access::LOCAL_WRITE, receives.pd);
            let span = span.map_err(local)?;
            // SAFETY: the part is readable (caller), and the span was resolved for `n` bytes.
            unsafe { span.write(0, from, n) }.map_err(local)?;
            (addr, room, left) = (addr.wrapping_add(n as u64), room - n, left - n);
            // SAFETY: the new address is inside the part, or at its end.
            from = unsafe { from.add(n) };
        }
    }
    // The bytes before the data (`skip`) need room even for a message without data.
    while skip > 0 {
        let Some(segment) = segments.next() else {
            return Err(too_short);
        };
        skip -= skip.min(segment.buffer_bytes());
    }
    Ok(())
}

/// Checks the local buffers of a message, and returns their length in bytes.
pub(crate) fn check_local(hca: &Hca, pd: u32, wqe: &Wqe<'_>) -> Result<u64, Outcome> {
    let is_result = wqe.opcode.has_result();
    let access = if is_result {
        Access::LOCAL_WRITE
    } else {
        Access::empty()
    };
    let mut length = 0u64;
    for piece in pieces(wqe) {
        let len = piece.len as u64;
        length += len;
        match piece.key {
            None if is_result => return Err(Malformed::InlineResult.into()),
            None => {}
            Some(key) => {
                let bytes = Keyed::new(key, piece.at as u64, len);
                let checked = hca.memory.check(bytes, access, pd);
                checked.map_err(|fault| Outcome::Fail(Syndrome::LocalProtection, fault as u8))?;
            }
        }
    }
    if length > MAX_MESSAGE_BYTES {
        return Err(Limit::MessageTooLong.fails(Syndrome::LocalLength));
    }
    Ok(length)
}

/// Calls `f` with each part of `len` bytes of the local buffers of the WQE at `counter`, from byte
/// `offset` on. The arguments are the span of the part, its offset in the `len` bytes, and its
/// length. The keys are checked again: while the message is in flight, its region may be
/// deregistered, and a program's own memory may be unmapped.
fn each_local(
    hca: &Hca,
    qp: &SoftQp,
    counter: u16,
    (offset, len): (usize, usize),
    access: Access,
    mut f: impl FnMut(Span, usize, usize) -> Result<(), Fault>,
) -> Result<(), Fault> {
    qp.with_wqe(counter, |wqe| {
        // On an error, the driver has overwritten the WQE since it was posted.
        let wqe = wqe.map_err(|_| Fault::Bounds)?;
        let (mut skip, mut done) = (offset, 0);
        for piece in pieces(&wqe) {
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let count = (piece.len - skip).min(len - done);
            if count == 0 {
                break;
            }
            let at = piece.at.wrapping_add(skip);
            let span = match piece.key {
                Some(key) => {
                    let bytes = Keyed::new(key, at.addr() as u64, count as u64);
                    hca.memory.resolve(bytes, access, qp.pd)?
                }
                None if access.is_empty() => {
                    Span::Mapped(NonNull::new(at.cast_mut()).ok_or(Fault::Bounds)?)
                }
                // A result does not go into a WQE.
                None => return Err(Fault::Access),
            };
            f(span, done, count)?;
            (skip, done) = (0, done + count);
        }
        if done == len {
            Ok(())
        } else {
            Err(Fault::Bounds)
        }
    })
}

/// Fills `out` with bytes of the message of the WQE at `counter`, from byte `offset` on.
pub(crate) fn gather(
    hca: &Hca,
    qp: &SoftQp,
    counter: u16,
    offset: usize,
    out: &mut [u8],
) -> Result<(), Fault> {
    let (to, part) = (out.as_mut_ptr(), (offset, out.len()));
    let read = |span: Span, done, len| {
        // SAFETY: the span was resolved for `len` bytes of a registered region, or is in the WQE.
        // `done..done + len` is inside `out`.
        unsafe { span.read(0, to.add(done), len) }
    };
    each_local(hca, qp, counter, part, Access::empty(), read)
}

/// Writes bytes of a result into the buffers of the WQE at `counter`, from byte `offset` on.
pub(crate) fn land(
    hca: &Hca,
    qp: &SoftQp,
    counter: u16,
    offset: usize,
    bytes: &[u8],
) -> Result<(), Fault> {
    let write = |span: Span, done, len| {
        // SAFETY: the span was resolved for `len` bytes of a writable registered region.
        // `done..done + len` is inside `bytes`.
        unsafe { span.write(0, bytes.as_ptr().add(done), len) }
    };
    let part = (offset, bytes.len());
    each_local(hca, qp, counter, part, Access::LOCAL_WRITE, write)
}
