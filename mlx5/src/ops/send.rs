//! SEND on a connected queue pair: the peer's receive determines the destination of the bytes.

use super::{Operation, Payload, RcOperation, sealed};
use crate::wire::Opcode;

/// SEND: the device writes the payload to the buffers of the peer's next receive, which it consumes and completes.
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

impl<P> sealed::Sealed for Send<P> {}
impl<P> sealed::Sealed for SendImm<P> {}
impl<P: Payload> RcOperation for Send<P> {}
impl<P: Payload> RcOperation for SendImm<P> {}

impl<P: Payload> Operation for Send<P> {
    const OPCODE: Opcode = Opcode::Send;
    type Payload = P;
    type Header = [u8; 0];
    #[inline(always)]
    fn payload(&self) -> &P {
        &self.payload
    }
    #[inline(always)]
    fn header(&self) -> Self::Header {
        []
    }
}

impl<P: Payload> Operation for SendImm<P> {
    const OPCODE: Opcode = Opcode::SendImm;
    type Payload = P;
    type Header = [u8; 0];
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
        []
    }
}
