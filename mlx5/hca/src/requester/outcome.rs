//! The outcome of a WQE, and the vendor syndromes that give its reason.

use mlx5_wire::roce::Nak;
use mlx5_wire::{Syndrome, WqeError};

use crate::shared::memory::Fault;

/// The end of a WQE that was taken off its send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// Done. The number of bytes read, for a READ or an atomic.
    Done(u32),
    /// Complete when its message is, which reads this number of bytes.
    Message(u32),
    /// Failed, with this syndrome and vendor syndrome.
    Failed(Syndrome, u8),
}

/// The outcome of a WQE.
pub(crate) enum Outcome {
    /// Done. The number of bytes read, for a READ or an atomic.
    Done(u32),
    /// Cannot run yet.
    Wait(WaitFor),
    /// Posted to a connection by packets, which completes it. The number of bytes that it reads.
    Posted(u32),
    /// Failed, and the queue pair with it. The second value is the vendor syndrome.
    Fail(Syndrome, u8),
}

impl From<Fault> for Outcome {
    /// Returns the outcome of a fault on the remote side. A process that has exited does not
    /// answer.
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Gone => Self::Wait(WaitFor::Peer),
            _ => Self::Fail(Nak::from(fault).into(), fault as u8),
        }
    }
}

/// Returns the answer of a responder that refuses an access to its memory. InfiniBand
/// specification, "Responder error behavior": an operation that the queue pair does not support is
/// an invalid request.
impl From<Fault> for Nak {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::QueuePair => Self::InvalidRequest,
            _ => Self::RemoteAccess,
        }
    }
}

/// Returns the answer of a responder whose receive fails with `syndrome`: the message is too long,
/// or the buffers cannot be written (the same chapter).
pub(crate) fn refusal_of_receive(syndrome: Syndrome) -> Nak {
    match syndrome {
        Syndrome::LocalLength => Nak::InvalidRequest,
        _ => Nak::RemoteOperational,
    }
}

/// Vendor syndromes of [`Syndrome::LocalQpOperation`]: the defect of the WQE.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Malformed {
    /// Wrong WQE index, QPN or length.
    Control = 0x10,
    /// An opcode that this device or this kind of queue pair does not support.
    Opcode = 0x12,
    /// A header segment is missing.
    Header = 0x13,
    /// The result of a READ or an atomic would go into the WQE.
    InlineResult = 0x14,
    /// The queue pair is not connected.
    NotConnected = 0x15,
    /// Inline data is longer than the WQE.
    InlineLength = 0x16,
    /// The result of an atomic is not 8 bytes.
    AtomicLength = 0x17,
}

impl From<Malformed> for Outcome {
    fn from(what: Malformed) -> Self {
        Self::Fail(Syndrome::LocalQpOperation, what as u8)
    }
}

impl From<WqeError> for Outcome {
    fn from(error: WqeError) -> Self {
        match error {
            WqeError::Opcode => Malformed::Opcode,
            WqeError::Header => Malformed::Header,
            WqeError::Inline => Malformed::InlineLength,
        }
        .into()
    }
}

/// The reason why the WQE at the head of an SQ has not run yet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitFor {
    /// The peer does not answer: it has exited, or its queue pair is not connected to this one.
    Peer,
    /// The peer has no receive posted.
    Receive,
    /// The peer's owner has to copy the receives that its driver has posted. Its
    /// [`copies`](crate::shared::fabric::Peer::copies) when none was found; 0 once it has copied
    /// all that were posted by then, and they are to be searched again.
    Copies(u64),
    /// The lane of the peer is full.
    Room,
    /// The peer's owner has not executed an atomic yet.
    Answer,
    /// A fault delays it.
    Fault,
}

/// The reason why a well-formed operation fails.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(crate) enum Limit {
    /// The message is longer than the receive's buffers.
    ReceiveTooShort = 0x20,
    /// The message is longer than the maximum.
    MessageTooLong = 0x21,
    /// The datagram is longer than the path's MTU.
    DatagramTooLong = 0x22,
    /// The address of an atomic is not a multiple of 8.
    AtomicAlignment = 0x23,
    /// The kernel refuses packets to the peer.
    PacketsRefused = 0x24,
    /// [`Faults::fail`](crate::Faults::fail) requests it.
    OnPurpose = 0x2f,
}

impl Limit {
    /// Returns the failure of an operation for this reason.
    pub(crate) fn fails(self, syndrome: Syndrome) -> Outcome {
        Outcome::Fail(syndrome, self as u8)
    }
}
