//! SEND on an unreliable-datagram queue pair: every message carries the address of its destination.
//! A message that the network or the peer cannot take is dropped.

use super::{Operation, Payload, UdOperation, operation, sealed};
use crate::wire::{AddressVector, DatagramSegment, Opcode};

/// The destination of a datagram: the path to the port of a queue pair, and the number and the
/// Q_Key of that queue pair. Stored as the bytes that go into the WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    segment: [u8; DatagramSegment::LEN],
}

impl Destination {
    /// Makes the destination of queue pair `qpn` (24 bits) at the end of the path `vector`. That
    /// queue pair accepts messages only with its own Q_Key, `qkey`.
    #[must_use]
    pub fn new(vector: AddressVector, qpn: u32, qkey: u32) -> Self {
        Self {
            segment: DatagramSegment { vector, qpn, qkey }.emit(),
        }
    }

    /// Returns the queue pair number, 24 bits.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        DatagramSegment::parse(&self.segment).qpn
    }

    /// Returns the path to the queue pair's port.
    #[must_use]
    pub fn vector(&self) -> AddressVector {
        DatagramSegment::parse(&self.segment).vector
    }
}

/// SEND of a datagram: the device writes the payload after the first 40 bytes of the next receive
/// of the queue pair `to`.
#[derive(Clone, Copy, Debug)]
pub struct UdSend<'a, P> {
    /// Destination.
    pub to: &'a Destination,
    /// Payload to send; maximum: the path's MTU.
    pub payload: P,
}

/// SEND of a datagram with immediate.
#[derive(Clone, Copy, Debug)]
pub struct UdSendImm<'a, P> {
    /// Destination.
    pub to: &'a Destination,
    /// Immediate, host order; the peer's [`Cqe::imm`](crate::Cqe::imm) returns the same value.
    pub imm: u32,
    /// Payload to send; maximum: the path's MTU.
    pub payload: P,
}

type Datagram = [u8; DatagramSegment::LEN];

operation!([P: Payload] UdSend<'_, P>: UdOperation = Send, |op| payload: P = op.payload, header: Datagram = op.to.segment);
operation!([P: Payload] UdSendImm<'_, P>: UdOperation = SendImm, |op| payload: P = op.payload, header: Datagram = op.to.segment, imm: op.imm);
