//! The rules that strict mode checks, and the reports of broken rules.

use std::fmt;

use mlx5_wire::SEGMENT;

/// Base of the vendor syndromes of WQEs that failed because of a rule.
const VENDOR: u8 = 0x40;

/// Makes [`Rule`] from a table: each rule, and the text of the mistake that breaks it.
macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident: $text:literal,)*) => {
        /// A rule of the interface between driver and device.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Rule {
            $($(#[$doc])* $name,)*
        }

        impl Rule {
            pub(crate) const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns a description of the mistake.
            #[must_use]
            pub const fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

rules! {
    /// PRM "Posting a Work Request": the record is written before the register.
    RecordBehindRegister: "the doorbell record does not cover the WQE that the register announces: it was not written, or written late",
    /// The record alone starts nothing.
    RegisterNotWritten: "the doorbell record moved and no register was written",
    /// The device may take the WQE from the register instead of the queue.
    RegisterBytes: "the register does not hold what the send queue holds",
    /// The two halves of a BlueFlame register are used in turn.
    RegisterHalf: "the same half of the BlueFlame register was written twice in a row",
    /// A register names its queue pair.
    RegisterQueue: "the register names another queue pair than the one it belongs to",
    /// A doorbell announces everything up to the WQE that the register holds.
    RegisterNotLast: "the register announces a WQE that is not the last one the doorbell record covers",
    /// The device has not reported that those WQEs are done.
    RecordBeyondRoom: "the doorbell record is further ahead than there are free WQEBBs: WQEs were overwritten",
    /// No completion would ever report that the queue has room again.
    NoCompletion: "a whole send queue of WQEs without the completion bit",
    /// The WQE was written for another place in the queue: it is stale.
    WqeIndex: "the index in the WQE is not its place in the queue: a stale or unposted WQE",
    /// A WQE names its queue pair.
    WqeQueue: "the WQE names another queue pair",
    /// `ds` counts 16-byte segments.
    WqeLength: "the WQE's length is wrong: none, more than was posted, or not that of its segments",
    /// No such verb.
    WqeOpcode: "unknown opcode",
    /// Reserved bits of the control segment.
    WqeReserved: "reserved bits of the control segment are set",
    /// A length of 0 means 2^31 bytes.
    ZeroLength: "a data segment of length 0, which means 2^31 bytes",
    /// Inline data longer than the WQE.
    InlineLength: "inline data reaches beyond the WQE",
    /// The list of a shared receive queue.
    ReceiveLink: "the link of a receive leads to itself, to one that is still posted, or outside",
    /// The driver overwrote posted receives.
    ReceiveBeyondRoom: "the receive record is further ahead than the queue has WQEs",
    /// A length of 0 means 2^31 bytes; the list ends with lkey 0x100.
    ReceiveZeroLength: "a receive with a data segment of length 0 that does not end the list",
    /// The device owns a gathered buffer until a completion at or after its WQE is visible. Not
    /// found in immediate time, nor behind a fence.
    SourceChanged: "the source buffer changed between the doorbell and the completion",
    /// CQEs that were not written cannot have been consumed.
    ConsumerAhead: "the consumer record is ahead of the CQEs written",
    /// The completion queue has less room than there are operations posted.
    CompletionOverrun: "a CQE was due and the completion queue was full: the queue is dead",
}

impl Rule {
    /// Returns the vendor syndrome of a WQE that failed because of this rule.
    pub(crate) const fn vendor(self) -> u8 {
        VENDOR + 1 + self as u8
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// The queue of a violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue of this QPN.
    Send(u32),
    /// This receive queue.
    Receive(u32),
    /// This completion queue.
    Completion(u32),
}

/// A rule that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The queue.
    pub queue: Queue,
    /// Counter or index of the entry.
    pub index: u32,
    /// The first bytes of the WQE or of the register, or the record.
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
        self.bytes
            .iter()
            .try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}
