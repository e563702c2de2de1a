//! The outcome of a WQE, and the vendor syndromes that give its reason.

use mlx5_wire::Syndrome;

use crate::shared::memory::Fault;

/// The outcome of a WQE.
pub(crate) enum Outcome {
    /// Done; this many bytes were read, for a READ or an atomic.
    Done(u32),
    /// Cannot run yet.
    Wait(WaitFor),
    /// Failed; the queue pair with it. The second value is the vendor syndrome.
    Fail(Syndrome, u8),
}

impl From<Fault> for Outcome {
    /// A fault on the remote side. A process that is gone does not answer.
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Gone => Self::Wait(WaitFor::Peer),
            // InfiniBand specification, "Responder error behavior": an operation that the queue pair is not configured for is an invalid request.
            Fault::QueuePair => Self::Fail(Syndrome::RemoteInvalidRequest, fault as u8),
            _ => Self::Fail(Syndrome::RemoteAccess, fault as u8),
        }
    }
}

/// Vendor syndromes of [`Syndrome::LocalQpOperation`]: the defect of the WQE.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Malformed {
    /// Wrong WQE index, QPN or length.
    Control = 0x10,
    /// An opcode this device or this kind of queue pair does not have.
    Opcode = 0x12,
    /// A header segment is missing.
    Header = 0x13,
    /// A READ or an atomic cannot go into the WQE.
    InlineResult = 0x14,
    /// The queue pair is not connected.
    NotConnected = 0x15,
    /// Inline data is longer than the WQE.
    InlineLength = 0x16,
    /// The result of an atomic has 8 bytes, in however many pieces.
    AtomicLength = 0x17,
}

impl From<Malformed> for Outcome {
    fn from(what: Malformed) -> Self {
        Self::Fail(Syndrome::LocalQpOperation, what as u8)
    }
}

/// Why the WQE at the head of an SQ has not run yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitFor {
    /// The peer does not answer: it is gone, or its queue pair is not connected to this one.
    Peer,
    /// The peer has no receive posted.
    Receive,
    /// The lane of the peer is full.
    Room,
    /// The peer's owner has not executed an atomic yet.
    Answer,
    /// A fault was asked for.
    Fault,
}

/// Why an operation that is well-formed fails.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Limit {
    /// The receive's buffers end before the message does.
    ReceiveTooShort = 0x20,
    /// Longer than any message.
    MessageTooLong = 0x21,
    /// Longer than the path's MTU.
    DatagramTooLong = 0x22,
    /// The address of an atomic is not a multiple of 8.
    AtomicAlignment = 0x23,
    /// [`Faults::fail`](crate::Faults::fail) asked for it.
    OnPurpose = 0x2f,
}

impl Limit {
    /// Returns the failure of an operation with this detail.
    pub(crate) fn fails(self, syndrome: Syndrome) -> Outcome {
        Outcome::Fail(syndrome, self as u8)
    }
}
