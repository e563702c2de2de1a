//! RDMA verbs, which name an address in the peer's memory.

use super::{Operation, Payload, RcOperation, Sge, sealed};
use crate::wire::{Opcode, RaddrSegment};

/// RDMA WRITE: the device writes the payload to `addr` in the peer's region `rkey`, without notice to the peer's CPU.
#[derive(Clone, Copy, Debug)]
pub struct Write<P> {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Payload to write.
    pub payload: P,
}

/// RDMA WRITE with immediate: a WRITE that also consumes one receive at the peer, whose CQE carries `imm`.
#[derive(Clone, Copy, Debug)]
pub struct WriteImm<P> {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Immediate, host order; the peer's [`Cqe::imm`](crate::Cqe::imm) returns the same value.
    pub imm: u32,
    /// Payload to write.
    pub payload: P,
}

/// RDMA READ from `addr` in the peer's region `rkey` into local memory.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Destination of the bytes; its region needs local write access.
    pub into: Sge,
}

impl<P> sealed::Sealed for Write<P> {}
impl<P> sealed::Sealed for WriteImm<P> {}
impl sealed::Sealed for Read {}
impl<P: Payload> RcOperation for Write<P> {}
impl<P: Payload> RcOperation for WriteImm<P> {}
impl RcOperation for Read {}

impl<P: Payload> Operation for Write<P> {
    const OPCODE: Opcode = Opcode::RdmaWrite;
    type Payload = P;
    type Header = [u8; RaddrSegment::LEN];
    #[inline(always)]
    fn payload(&self) -> &P {
        &self.payload
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        RaddrSegment { addr: self.addr, rkey: self.rkey }.emit()
    }
}

impl<P: Payload> Operation for WriteImm<P> {
    const OPCODE: Opcode = Opcode::RdmaWriteImm;
    type Payload = P;
    type Header = [u8; RaddrSegment::LEN];
    #[inline(always)]
    fn payload(&self) -> &P {
        &self.payload
    }
    #[inline(always)]
    fn imm(&self) -> u32 {
        self.imm
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        RaddrSegment { addr: self.addr, rkey: self.rkey }.emit()
    }
}

impl Operation for Read {
    const OPCODE: Opcode = Opcode::RdmaRead;
    type Payload = Sge;
    type Header = [u8; RaddrSegment::LEN];
    #[inline(always)]
    fn payload(&self) -> &Sge {
        &self.into
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        RaddrSegment { addr: self.addr, rkey: self.rkey }.emit()
    }
}
