//! Operations as values: what to do, with which payload. [`SendQueue::push`](crate::sq) is the one place that turns them into WQEs.
//!
//! An operation is a verb ([`Write`], [`WriteImm`], [`Read`]) over a [`Payload`] (`()`, [`Sge`], [`Inline`], `(Inline, Sge)`); any
//! verb takes any payload that makes sense for it, and a new verb or payload is one `impl`.

use crate::wire::{DataSegment, InlineHeader, Opcode, RaddrSegment, SEGMENT};

/// Longest message: 2^30 bytes (PRM: `log_max_msg` of every known device).
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;

/// A place in registered local memory. A length of 0 is legal and emits no data segment (on the wire 0 means 2^31 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address inside the region of `lkey`.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

/// Bytes carried inside the WQE: copied when posted, free for reuse at once.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

mod sealed {
    pub trait Sealed {}
    impl Sealed for () {}
    impl Sealed for super::Sge {}
    impl Sealed for super::Inline<'_> {}
    impl Sealed for (super::Inline<'_>, super::Sge) {}
    impl<P> Sealed for super::Write<P> {}
    impl<P> Sealed for super::WriteImm<P> {}
    impl Sealed for super::Read {}
}

/// What a message carries. Sealed: the send queue trusts `segments` to bound what `emit` writes.
pub trait Payload: sealed::Sealed {
    /// 16-byte segments in the WQE.
    fn segments(&self) -> usize;
    /// Bytes of the message.
    fn bytes(&self) -> u64;
    /// Bytes of it that travel inside the WQE.
    fn inline_bytes(&self) -> usize;
    /// Writes exactly `segments` segments.
    #[doc(hidden)]
    fn emit(&self, out: &mut Segments);
}

/// A verb with its payload. Sealed, as [`Payload`].
pub trait Operation: sealed::Sealed {
    /// WQE opcode.
    const OPCODE: Opcode;
    /// What it carries.
    type Payload: Payload;
    /// What it carries.
    fn payload(&self) -> &Self::Payload;
    /// The immediate of the control segment, host order.
    fn imm(&self) -> u32 {
        0
    }
    /// 16-byte segments between the control segment and the payload.
    #[doc(hidden)]
    fn header_segments(&self) -> usize;
    /// Writes exactly `header_segments` segments.
    #[doc(hidden)]
    fn emit_header(&self, out: &mut Segments);
}

/// The place in the SQ where a WQE's segments go, one after the other.
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
    pub(crate) fn put(&mut self, segment: &[u8; SEGMENT]) {
        // SAFETY: within the declared segments (contract of `new`; `Operation` and `Payload` are sealed and declare what they put).
        unsafe {
            self.at.copy_from_nonoverlapping(segment.as_ptr(), SEGMENT);
            self.at = self.at.add(SEGMENT);
        }
    }

    #[inline(always)]
    fn put_inline(&mut self, data: &[u8]) {
        let header = InlineHeader { byte_count: data.len() as u32 }.emit();
        let padded = InlineHeader::segments(data.len()) * SEGMENT;
        // SAFETY: as in `put`; header, data and padding fill `segments(data.len())` segments. The padding is in the last one.
        unsafe {
            self.at.add(padded - SEGMENT).cast::<[u8; SEGMENT]>().write([0; SEGMENT]);
            self.at.copy_from_nonoverlapping(header.as_ptr(), InlineHeader::LEN);
            copy_short(self.at.add(InlineHeader::LEN), data.as_ptr(), data.len());
            self.at = self.at.add(padded);
        }
    }
}

/// Copies `len` bytes. Few are copied here, as two parts that may overlap: a call costs more than the copy.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and the two do not overlap.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, len: usize) {
    let both_ends = |part: usize| {
        // SAFETY: `part` is at most `len` (below), so both are inside the `len` bytes.
        unsafe {
            to.copy_from_nonoverlapping(from, part);
            to.add(len - part).copy_from_nonoverlapping(from.add(len - part), part);
        }
    };
    // The common lengths with the fewest questions.
    if len >= 16 {
        if len <= 32 {
            return both_ends(16);
        }
    } else if len >= 8 {
        return both_ends(8);
    } else if len >= 4 {
        return both_ends(4);
    }
    // SAFETY: the caller's.
    unsafe { to.copy_from_nonoverlapping(from, len) };
}

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
            out.put_inline(self.0);
        }
    }
}

/// Hybrid: the first bytes inside the WQE, the rest gathered by the device.
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

/// RDMA WRITE: the payload goes to `addr` in the peer's region `rkey`; the peer's CPU notices nothing.
#[derive(Clone, Copy, Debug)]
pub struct Write<P> {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// What to write.
    pub payload: P,
}

/// RDMA WRITE with immediate: a WRITE that also consumes one receive at the peer and gives it a CQE with `imm`.
#[derive(Clone, Copy, Debug)]
pub struct WriteImm<P> {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Immediate, host order; the peer's [`Cqe::imm`](crate::Cqe::imm) returns the same value.
    pub imm: u32,
    /// What to write.
    pub payload: P,
}

/// RDMA READ from `addr` in the peer's region `rkey` into local memory.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Where the bytes go; its region needs local write access.
    pub into: Sge,
}

impl<P: Payload> Operation for Write<P> {
    const OPCODE: Opcode = Opcode::RdmaWrite;
    type Payload = P;
    #[inline(always)]
    fn payload(&self) -> &P {
        &self.payload
    }
    #[inline(always)]
    fn header_segments(&self) -> usize {
        1
    }
    #[inline(always)]
    fn emit_header(&self, out: &mut Segments) {
        out.put(&RaddrSegment { addr: self.addr, rkey: self.rkey }.emit());
    }
}

impl<P: Payload> Operation for WriteImm<P> {
    const OPCODE: Opcode = Opcode::RdmaWriteImm;
    type Payload = P;
    #[inline(always)]
    fn payload(&self) -> &P {
        &self.payload
    }
    #[inline(always)]
    fn imm(&self) -> u32 {
        self.imm
    }
    #[inline(always)]
    fn header_segments(&self) -> usize {
        1
    }
    #[inline(always)]
    fn emit_header(&self, out: &mut Segments) {
        out.put(&RaddrSegment { addr: self.addr, rkey: self.rkey }.emit());
    }
}

impl Operation for Read {
    const OPCODE: Opcode = Opcode::RdmaRead;
    type Payload = Sge;
    #[inline(always)]
    fn payload(&self) -> &Sge {
        &self.into
    }
    #[inline(always)]
    fn header_segments(&self) -> usize {
        1
    }
    #[inline(always)]
    fn emit_header(&self, out: &mut Segments) {
        out.put(&RaddrSegment { addr: self.addr, rkey: self.rkey }.emit());
    }
}
