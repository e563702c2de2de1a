//! The content of a message: nothing, bytes inside the WQE, memory that the device gathers, or both.

use super::{Payload, Segments, sealed};
use crate::wire::{DataSegment, InlineHeader};

/// A buffer in registered local memory. A length of 0 is legal and emits no data segment (on the wire 0 means 2^31 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address inside the region of `lkey`.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

/// Bytes carried inside the WQE: they are copied when posted, and the source may be reused at once.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

impl sealed::Sealed for () {}
impl sealed::Sealed for Sge {}
impl sealed::Sealed for Inline<'_> {}
impl sealed::Sealed for (Inline<'_>, Inline<'_>) {}
impl sealed::Sealed for (Inline<'_>, Sge) {}

impl Payload for () {
    #[inline(always)]
    fn segments(&self) -> usize {
        0
    }
    #[inline(always)]
    fn bytes(&self) -> u64 {
        0
    }
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        0
    }
    #[inline(always)]
    fn emit(&self, _: &mut Segments) {}
}

impl Payload for Sge {
    #[inline(always)]
    fn segments(&self) -> usize {
        usize::from(self.len != 0)
    }
    #[inline(always)]
    fn bytes(&self) -> u64 {
        u64::from(self.len)
    }
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        0
    }
    #[inline(always)]
    fn emit(&self, out: &mut Segments) {
        if self.len != 0 {
            out.put(&DataSegment { byte_count: self.len, lkey: self.lkey, addr: self.addr }.emit());
        }
    }
}

impl Payload for Inline<'_> {
    #[inline(always)]
    fn segments(&self) -> usize {
        if self.0.is_empty() { 0 } else { InlineHeader::segments(self.0.len()) }
    }
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        self.0.len()
    }
    #[inline(always)]
    fn emit(&self, out: &mut Segments) {
        if !self.0.is_empty() {
            out.put_inline(&[self.0]);
        }
    }
}

/// Both inside the WQE, the one after the other.
impl Payload for (Inline<'_>, Inline<'_>) {
    #[inline(always)]
    fn segments(&self) -> usize {
        if self.inline_bytes() == 0 { 0 } else { InlineHeader::segments(self.inline_bytes()) }
    }
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.inline_bytes() as u64
    }
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        self.0.0.len() + self.1.0.len()
    }
    #[inline(always)]
    fn emit(&self, out: &mut Segments) {
        if self.inline_bytes() != 0 {
            out.put_inline(&[self.0.0, self.1.0]);
        }
    }
}

/// Both: the first bytes inside the WQE, the rest gathered by the device.
impl Payload for (Inline<'_>, Sge) {
    #[inline(always)]
    fn segments(&self) -> usize {
        self.0.segments() + self.1.segments()
    }
    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.0.bytes() + self.1.bytes()
    }
    #[inline(always)]
    fn inline_bytes(&self) -> usize {
        self.0.inline_bytes()
    }
    #[inline(always)]
    fn emit(&self, out: &mut Segments) {
        self.0.emit(out);
        self.1.emit(out);
    }
}
