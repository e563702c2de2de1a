//! The outcome of a WQE.

use mlx5_wire::roce::Nak;
use mlx5_wire::{Syndrome, WqeError};

use crate::types::vendor::{Fault, Limit, Malformed};

/// The end of a WQE that was taken off its send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// The WQE is done. The value is the number of bytes that a READ or an atomic has read, or 0.
    Done(u32),
    /// The WQE completes with its message, which is exchanged by packets. The value is as in
    /// `Done`.
    Message(u32),
    /// The WQE failed, with this syndrome and vendor syndrome.
    Failed(Syndrome, u8),
}

/// The outcome of a WQE.
pub(crate) enum Outcome {
    /// Like [`End::Done`].
    Done(u32),
    Wait(WaitFor),
    /// The WQE was posted to a connection by packets. The value is as in [`End::Done`].
    Posted(u32),
    /// The WQE failed, and the queue pair with it. The second value is the vendor syndrome.
    Fail(Syndrome, u8),
}

impl From<Fault> for Outcome {
    /// Returns the outcome of a fault on the remote side. After [`Fault::Gone`] the WQE waits,
    /// because a process that has exited does not answer.
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

/// Returns the answer of a responder whose receive fails with `syndrome`, because the message is
/// too long, or the buffers cannot be written (InfiniBand specification, "Responder error
/// behavior").
pub(crate) fn refusal_of_receive(syndrome: Syndrome) -> Nak {
    match syndrome {
        Syndrome::LocalLength => Nak::InvalidRequest,
        _ => Nak::RemoteOperational,
    }
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
    /// The peer has exited, its queue pair is not connected to this one, or this device is cut off.
    Peer,
    /// The peer has no receive posted.
    Receive,
    /// The peer's owner has to copy the receives that its driver has posted. The value is the
    /// owner's [`copies`](crate::shared::peer::Peer::copies) at the time when no receive was found.
    /// It is 0 once the owner has copied all receives that were posted at that time; then the queue
    /// has to be searched again.
    Copies(u64),
    /// The lane to the peer is full.
    Room,
    /// The peer's owner has not executed an atomic yet.
    Answer,
    /// A fault delays the WQE.
    Fault,
}

impl Limit {
    pub(crate) fn fails(self, syndrome: Syndrome) -> Outcome {
        Outcome::Fail(syndrome, self as u8)
    }
}
