//! Operations of connected queue pairs: SEND, RDMA and atomics.

use super::{Operation, Payload, PostError, RcOperation, Sge, operation, sealed};
use crate::wire::{ATOMIC_BYTES, AtomicSegment, Opcode, RaddrSegment, SEGMENT};

/// SEND: the payload is written to the buffers of the peer's next receive, which is consumed and
/// completed.
#[derive(Clone, Copy, Debug)]
pub struct Send<P> {
    /// Payload to send.
    pub payload: P,
}

/// SEND with immediate: the completion of the peer's receive carries `imm`.
#[derive(Clone, Copy, Debug)]
pub struct SendImm<P> {
    /// Immediate, host order; the peer's [`Cqe::imm`](crate::Cqe::imm) returns the same value.
    pub imm: u32,
    /// Payload to send.
    pub payload: P,
}

/// RDMA WRITE: the device writes the payload to `addr` in the peer's region `rkey`, without a
/// completion for the peer's CPU.
#[derive(Clone, Copy, Debug)]
pub struct Write<P> {
    /// Virtual address in the peer's region.
    pub addr: u64,
    /// Remote key of the region.
    pub rkey: u32,
    /// Payload to write.
    pub payload: P,
}

/// RDMA WRITE with immediate: a WRITE that also consumes one receive of the peer. The CQE of that
/// receive carries `imm`.
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

/// Compare-and-swap: stores `swap` at `addr` if the value there is `compare`. The previous value is
/// written to `into`; the swap happened if that value equals `compare`.
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

/// Fetch-and-add: adds `add` to the 8 bytes at `addr`, modulo 2^64. The regions need the same
/// access as for [`CompareSwap`].
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

type Raddr = [u8; RaddrSegment::LEN];
type RaddrAtomic = [[u8; SEGMENT]; 2];

#[inline(always)]
fn raddr(addr: u64, rkey: u32) -> Raddr {
    RaddrSegment { addr, rkey }.emit()
}

#[inline(always)]
fn check_atomic(addr: u64, into: &Sge) -> Result<(), PostError> {
    if addr % u64::from(ATOMIC_BYTES) != 0 {
        return Err(PostError::AtomicMisaligned { addr });
    }
    if into.len != ATOMIC_BYTES {
        return Err(PostError::AtomicResult { bytes: into.len });
    }
    Ok(())
}

operation!([P: Payload] Send<P>: RcOperation = Send, |op| payload: P = op.payload, header: [u8; 0] = []);
operation!([P: Payload] SendImm<P>: RcOperation = SendImm, |op| payload: P = op.payload, header: [u8; 0] = [], imm: op.imm);
operation!([P: Payload] Write<P>: RcOperation = RdmaWrite, |op| payload: P = op.payload, header: Raddr = raddr(op.addr, op.rkey));
operation!([P: Payload] WriteImm<P>: RcOperation = RdmaWriteImm, |op| payload: P = op.payload, header: Raddr = raddr(op.addr, op.rkey), imm: op.imm);
operation!([] Read: RcOperation = RdmaRead, |op| payload: Sge = op.into, header: Raddr = raddr(op.addr, op.rkey));
operation!([] CompareSwap: RcOperation = AtomicCompareSwap, |op| payload: Sge = op.into,
    header: RaddrAtomic = [raddr(op.addr, op.rkey), AtomicSegment { swap_add: op.swap, compare: op.compare }.emit()],
    check: check_atomic(op.addr, &op.into));
operation!([] FetchAdd: RcOperation = AtomicFetchAdd, |op| payload: Sge = op.into,
    header: RaddrAtomic = [raddr(op.addr, op.rkey), AtomicSegment { swap_add: op.add, compare: 0 }.emit()],
    check: check_atomic(op.addr, &op.into));
