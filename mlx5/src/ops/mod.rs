//! Operations as values: a verb with its payload. [`SendQueue::push`](crate::queues::sq) is the
//! only function that turns them into WQEs.
//!
//! An operation is a verb over a [`Payload`] (`()`, [`Sge`], [`Inline`], `(Inline, Sge)`,
//! `(Inline, Inline)`). Any verb takes any payload that is valid for it, and a new verb or payload
//! is one `impl`. Verbs that return bytes ([`Read`], [`CompareSwap`], [`FetchAdd`]) take only an
//! [`Sge`].
//!
//! | WQE, in segments | verbs |
//! |---|---|
//! | control, payload | [`Send`], [`SendImm`] |
//! | control, remote address, payload | [`Write`], [`WriteImm`], [`Read`] |
//! | control, remote address, atomic, result | [`CompareSwap`], [`FetchAdd`] |
//! | control, datagram (3), payload | [`UdSend`], [`UdSendImm`] |

mod error;
mod payload;
mod rc;
mod ud;

use std::ptr;

use crate::wire::{DataSegment, InlineHeader, Opcode, SEGMENT};

pub use error::PostError;
pub use payload::{Inline, Sge};
pub use rc::{CompareSwap, FetchAdd, Read, Send, SendImm, Write, WriteImm};
pub use ud::{Destination, UdSend, UdSendImm};

mod sealed {
    pub trait Sealed {}
}

/// The content of a message: bytes that travel inside the WQE, then a buffer that the device
/// gathers. Sealed: the send queue trusts `segments` to bound the bytes that `emit` writes.
pub trait Payload: sealed::Sealed {
    /// Returns the bytes inside the WQE, in two parts.
    #[doc(hidden)]
    #[inline(always)]
    fn inline(&self) -> [&[u8]; 2] {
        [&[]; 2]
    }

    /// Returns the buffer. A buffer of 0 bytes means none.
    #[doc(hidden)]
    #[inline(always)]
    fn gathered(&self) -> Sge {
        Sge::NONE
    }

    /// Returns the number of the message's bytes that travel inside the WQE.
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        let [first, second] = self.inline();
        first.len() + second.len()
    }

    /// Returns the length of the message in bytes.
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.inline_bytes() as u64 + u64::from(self.gathered().len)
    }

    /// Returns the number of 16-byte segments in the WQE.
    #[inline(always)]
    fn segments(&self) -> usize {
        let inline = if self.inline_bytes() == 0 {
            0
        } else {
            InlineHeader::segments(self.inline_bytes())
        };
        inline + usize::from(self.gathered().len != 0)
    }

    /// Writes exactly `segments` segments.
    #[doc(hidden)]
    #[inline(always)]
    fn emit(&self, out: &mut Segments) {
        if self.inline_bytes() != 0 {
            out.put_inline(&self.inline());
        }
        let Sge { addr, len, lkey } = self.gathered();
        if len != 0 {
            out.put(
                &DataSegment {
                    byte_count: len,
                    lkey,
                    addr,
                }
                .emit(),
            );
        }
    }
}

/// A verb with its payload. Sealed, like [`Payload`].
#[doc(hidden)]
pub trait Operation: sealed::Sealed {
    /// WQE opcode.
    const OPCODE: Opcode;
    /// Type of the payload.
    type Payload: Payload;
    /// Returns the payload.
    fn payload(&self) -> &Self::Payload;
    /// Returns the immediate of the control segment, in host order.
    #[inline(always)]
    fn imm(&self) -> u32 {
        0
    }
    /// Refuses the mistakes of this verb that the driver can detect. The queue checks room, lengths
    /// and state.
    #[doc(hidden)]
    #[inline(always)]
    fn check(&self) -> Result<(), PostError> {
        Ok(())
    }
    /// The segments between the control segment and the payload, as an array of whole segments.
    #[doc(hidden)]
    type Header: Copy;
    /// Returns the segments between the control segment and the payload.
    #[doc(hidden)]
    fn header(&self) -> Self::Header;
}

macro_rules! operation {
    (
        [$($generics:tt)*] $name:ty: $kind:ident = $opcode:ident,
        |$op:ident| payload: $payload:ty = $field:expr, header: $header:ty = $segments:expr $(, imm: $imm:expr)? $(, check: $check:expr)?
    ) => {
        impl<$($generics)*> sealed::Sealed for $name {}
        impl<$($generics)*> $kind for $name {}
        impl<$($generics)*> Operation for $name {
            const OPCODE: Opcode = Opcode::$opcode;
            type Payload = $payload;
            type Header = $header;
            #[inline(always)]
            fn payload(&self) -> &$payload {
                let $op = self;
                &$field
            }
            #[inline(always)]
            fn header(&self) -> $header {
                #[allow(unused_variables, reason = "SEND has no such segments")]
                let $op = self;
                $segments
            }
            $(#[inline(always)]
            fn imm(&self) -> u32 {
                let $op = self;
                $imm
            })?
            $(#[inline(always)]
            fn check(&self) -> Result<(), PostError> {
                let $op = self;
                $check
            })?
        }
    };
}
use operation;

/// An operation of a reliable-connected queue pair.
///
/// ```
/// # use mlx5::{Inline, RcOperation, Send};
/// fn rc(_: impl RcOperation) {}
/// rc(Send { payload: Inline(b"hello") });
/// ```
/// A datagram needs an address, and a connected operation has none:
/// ```compile_fail,E0277
/// # use mlx5::{AddressVector, Destination, Inline, RcOperation, UdSend};
/// fn rc(_: impl RcOperation) {}
/// rc(UdSend { to: &Destination::new(AddressVector::local(1, 0), 2, 3), payload: Inline(b"hello") });
/// ```
pub trait RcOperation: Operation {}

/// An operation of an unreliable-datagram queue pair.
///
/// ```
/// # use mlx5::{AddressVector, Destination, Inline, UdOperation, UdSend};
/// fn ud(_: impl UdOperation) {}
/// ud(UdSend { to: &Destination::new(AddressVector::local(1, 0), 2, 3), payload: Inline(b"hello") });
/// ```
/// A datagram carries the address of its destination, and cannot access the peer's memory:
/// ```compile_fail,E0277
/// # use mlx5::{Inline, Send, UdOperation};
/// fn ud(_: impl UdOperation) {}
/// ud(Send { payload: Inline(b"hello") });
/// ```
/// ```compile_fail,E0277
/// # use mlx5::{Inline, UdOperation, Write};
/// fn ud(_: impl UdOperation) {}
/// ud(Write { addr: 1, rkey: 2, payload: Inline(b"hello") });
/// ```
pub trait UdOperation: Operation {}

/// The segments of a WQE in the SQ, written one after the other.
#[doc(hidden)]
#[derive(Debug)]
pub struct Segments {
    at: *mut u8,
}

impl Segments {
    /// # Safety
    /// `at` is valid for writes of as many segments as the operation and its payload declare.
    #[inline(always)]
    pub(crate) unsafe fn new(at: *mut u8) -> Self {
        Self { at }
    }

    #[inline(always)]
    pub(crate) fn put<T: Copy>(&mut self, segments: &T) {
        const { assert!(size_of::<T>() % SEGMENT == 0, "whole segments") };
        // SAFETY: the bytes are within the declared segments: the caller of `new` guarantees that
        // these are writable, and `Operation` and `Payload` are sealed and declare all segments
        // that they write.
        unsafe {
            self.at
                .copy_from_nonoverlapping(ptr::from_ref(segments).cast(), size_of::<T>());
            self.at = self.at.add(size_of::<T>());
        }
    }

    #[inline(always)]
    fn put_inline(&mut self, parts: &[&[u8]; 2]) {
        let len = parts.iter().map(|part| part.len()).sum();
        let header = InlineHeader {
            byte_count: len as u32,
        }
        .emit();
        let padded = InlineHeader::segments(len) * SEGMENT;
        // SAFETY: as in `put`; header, data and padding fill `segments(len)` segments. The padding
        // is in the last segment.
        unsafe {
            self.at
                .add(padded - SEGMENT)
                .cast::<[u8; SEGMENT]>()
                .write([0; SEGMENT]);
            self.at
                .copy_from_nonoverlapping(header.as_ptr(), InlineHeader::LEN);
            let mut to = self.at.add(InlineHeader::LEN);
            for part in parts {
                copy_short(to, part.as_ptr(), part.len());
                to = to.add(part.len());
            }
            self.at = self.at.add(padded);
        }
    }
}

/// Copies `len` bytes. A short copy consists of two parts that may overlap, because a call of
/// `memcpy` would cost more than the copy.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and the two do not overlap.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, len: usize) {
    let both_ends = |part: usize| {
        // SAFETY: `part` is at most `len` (see the calls below), so both copies stay inside the
        // `len` bytes.
        unsafe {
            to.copy_from_nonoverlapping(from, part);
            to.add(len - part)
                .copy_from_nonoverlapping(from.add(len - part), part);
        }
    };
    // The common lengths need the fewest comparisons.
    if len >= 16 {
        if len <= 32 {
            return both_ends(16);
        }
        if len <= 64 {
            return both_ends(32);
        }
        if len <= 128 {
            return both_ends(64);
        }
    } else if len >= 8 {
        return both_ends(8);
    } else if len >= 4 {
        return both_ends(4);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { to.copy_from_nonoverlapping(from, len) };
}
