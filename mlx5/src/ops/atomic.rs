//! Atomics on 8 bytes of the peer's memory. The previous value arrives in the result's [`Sge`], in host byte order.

use super::{Operation, PostError, RcOperation, Sge, sealed};
use crate::wire::{ATOMIC_BYTES, AtomicSegment, Opcode, RaddrSegment, SEGMENT};

/// Compare-and-swap: stores `swap` at `addr` if the value there is `compare`. The store happened if the result equals `compare`.
///
/// The remote region needs remote atomic access; the result's region needs local write access.
#[derive(Clone, Copy, Debug)]
pub struct CompareSwap {
    /// Virtual address in the peer's region; a multiple of 8.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Expected value.
    pub compare: u64,
    /// Value to store.
    pub swap: u64,
    /// Destination of the previous value: 8 bytes.
    pub into: Sge,
}

/// Fetch-and-add: adds `add` to the 8 bytes at `addr`, modulo 2^64. The regions need the same access as for [`CompareSwap`].
#[derive(Clone, Copy, Debug)]
pub struct FetchAdd {
    /// Virtual address in the peer's region; a multiple of 8.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Value to add.
    pub add: u64,
    /// Destination of the previous value: 8 bytes.
    pub into: Sge,
}

impl sealed::Sealed for CompareSwap {}
impl sealed::Sealed for FetchAdd {}
impl RcOperation for CompareSwap {}
impl RcOperation for FetchAdd {}

#[inline(always)]
fn check(addr: u64, into: &Sge) -> Result<(), PostError> {
    if addr % u64::from(ATOMIC_BYTES) != 0 {
        return Err(PostError::AtomicMisaligned { addr });
    }
    if into.len != ATOMIC_BYTES {
        return Err(PostError::AtomicResult { bytes: into.len });
    }
    Ok(())
}

impl Operation for CompareSwap {
    const OPCODE: Opcode = Opcode::AtomicCompareSwap;
    type Payload = Sge;
    type Header = [[u8; SEGMENT]; 2];
    #[inline(always)]
    fn payload(&self) -> &Sge {
        &self.into
    }
    #[inline(always)]
    fn check(&self) -> Result<(), PostError> {
        check(self.addr, &self.into)
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        let atomic = AtomicSegment { swap_add: self.swap, compare: self.compare };
        [RaddrSegment { addr: self.addr, rkey: self.rkey }.emit(), atomic.emit()]
    }
}

impl Operation for FetchAdd {
    const OPCODE: Opcode = Opcode::AtomicFetchAdd;
    type Payload = Sge;
    type Header = [[u8; SEGMENT]; 2];
    #[inline(always)]
    fn payload(&self) -> &Sge {
        &self.into
    }
    #[inline(always)]
    fn check(&self) -> Result<(), PostError> {
        check(self.addr, &self.into)
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        let atomic = AtomicSegment { swap_add: self.add, compare: 0 };
        [RaddrSegment { addr: self.addr, rkey: self.rkey }.emit(), atomic.emit()]
    }
}
