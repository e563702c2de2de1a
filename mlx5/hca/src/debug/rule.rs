//! The rules that strict mode watches over, and what breaking one looks like.

use std::fmt;

use mlx5_wire::SEGMENT;

/// Vendor syndromes of WQEs that failed by a rule: this plus the rule.
pub(crate) const VENDOR: u8 = 0x40;

/// A rule of the interface between driver and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Rule {
    /// PRM "Posting a Work Request": first the record, then the register.
    RecordBehindRegister = 1,
    /// The record alone starts nothing.
    RegisterNotWritten,
    /// The device may take the WQE from the register instead of the queue.
    RegisterBytes,
    /// The two halves of a BlueFlame register are used in turn.
    RegisterHalf,
    /// A register names its queue pair.
    RegisterQueue,
    /// A doorbell announces everything up to the WQE that the register holds.
    RegisterNotLast,
    /// The device has not told that those WQEs are done.
    RecordBeyondRoom,
    /// No completion would ever tell that the queue has room again.
    NoCompletion,
    /// The WQE was not written for this place: it is stale.
    WqeIndex,
    /// A WQE names its queue pair.
    WqeQueue,
    /// `ds` counts 16-byte segments.
    WqeLength,
    /// No such verb.
    WqeOpcode,
    /// Reserved bits of the control segment.
    WqeReserved,
    /// A length of 0 means 2^31 bytes.
    ZeroLength,
    /// Inline data longer than the WQE.
    InlineLength,
    /// The list of a shared receive queue.
    ReceiveLink,
    /// Receives overwritten.
    ReceiveBeyondRoom,
    /// A length of 0 means 2^31 bytes; the list ends with lkey 0x100.
    ReceiveZeroLength,
    /// A gathered buffer is the device's until a completion at or after its WQE is visible. Not found in immediate time, nor behind a fence.
    SourceChanged,
    /// CQEs that were not written cannot have been consumed.
    ConsumerAhead,
    /// The completion queue has less room than there are operations posted.
    CompletionOverrun,
}

impl Rule {
    pub(crate) const ALL: [Self; 21] = [
        Self::RecordBehindRegister,
        Self::RegisterNotWritten,
        Self::RegisterBytes,
        Self::RegisterHalf,
        Self::RegisterQueue,
        Self::RegisterNotLast,
        Self::RecordBeyondRoom,
        Self::NoCompletion,
        Self::WqeIndex,
        Self::WqeQueue,
        Self::WqeLength,
        Self::WqeOpcode,
        Self::WqeReserved,
        Self::ZeroLength,
        Self::InlineLength,
        Self::ReceiveLink,
        Self::ReceiveBeyondRoom,
        Self::ReceiveZeroLength,
        Self::SourceChanged,
        Self::ConsumerAhead,
        Self::CompletionOverrun,
    ];

    /// Returns a description of the mistake.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::RecordBehindRegister => {
                "the doorbell record does not cover the WQE that the register announces: it was not written, or written late"
            }
            Self::RegisterNotWritten => "the doorbell record moved and no register was written",
            Self::RegisterBytes => "the register does not hold what the send queue holds",
            Self::RegisterHalf => "the same half of the BlueFlame register was written twice in a row",
            Self::RegisterQueue => "the register names another queue pair than the one it belongs to",
            Self::RegisterNotLast => "the register announces a WQE that is not the last one the doorbell record covers",
            Self::RecordBeyondRoom => "the doorbell record is further ahead than there are free WQEBBs: WQEs were overwritten",
            Self::NoCompletion => "a whole send queue of WQEs without the completion bit",
            Self::WqeIndex => "the index in the WQE is not its place in the queue: a stale or unposted WQE",
            Self::WqeQueue => "the WQE names another queue pair",
            Self::WqeLength => "the WQE's length is wrong: none, more than was posted, or not that of its segments",
            Self::WqeOpcode => "unknown opcode",
            Self::WqeReserved => "reserved bits of the control segment are set",
            Self::ZeroLength => "a data segment of length 0, which means 2^31 bytes",
            Self::InlineLength => "inline data reaches beyond the WQE",
            Self::ReceiveLink => "the link of a receive leads to itself, to one that is still posted, or outside",
            Self::ReceiveBeyondRoom => "the receive record is further ahead than the queue has WQEs",
            Self::ReceiveZeroLength => "a receive with a data segment of length 0 that does not end the list",
            Self::SourceChanged => "the source buffer changed between the doorbell and the completion",
            Self::ConsumerAhead => "the consumer record is ahead of the CQEs written",
            Self::CompletionOverrun => "a CQE was due and the completion queue was full: the queue is dead",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Which queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue of this QPN.
    Send(u32),
    /// This receive queue.
    Receive(u32),
    /// This completion queue.
    Completion(u32),
}

/// A rule broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The queue.
    pub queue: Queue,
    /// Counter or index of the entry.
    pub index: u32,
    /// The bytes found there: the start of the WQE or of the register, or the record.
    pub bytes: [u8; SEGMENT],
    /// The broken rule.
    pub rule: Rule,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.queue {
            Queue::Send(qpn) => write!(f, "send queue of QPN {qpn:#x}"),
            Queue::Receive(rqn) => write!(f, "receive queue {rqn:#x}"),
            Queue::Completion(cqn) => write!(f, "completion queue {cqn:#x}"),
        }?;
        write!(f, ", index {}: {}; found", self.index, self.rule)?;
        self.bytes.iter().try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}
