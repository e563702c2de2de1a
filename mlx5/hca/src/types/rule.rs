//! The rules that strict mode checks, and the reports of broken rules.

use std::fmt;

use mlx5_wire::SEGMENT;

syndromes! {
    /// A rule of the interface between driver and device.
    #[non_exhaustive]
    pub enum Rule {
        /// PRM "Posting a Work Request": the record is written before the register.
        RecordBehindRegister = 0x41: "the doorbell record does not cover the WQE that the register announces: it was not written, or written late",
        /// A store to the register announces the WQEs: the record alone starts nothing.
        RegisterNotWritten = 0x42: "the doorbell record moved and no register was written",
        /// The register holds the same bytes as the queue, because the device may take the WQE from
        /// either.
        RegisterBytes = 0x43: "the register does not hold what the send queue holds",
        /// The two halves of a BlueFlame register are used in turn.
        RegisterHalf = 0x44: "the same half of the BlueFlame register was written twice in a row",
        /// The bytes in a register contain the QPN of the queue pair to which the register belongs.
        RegisterQueue = 0x45: "the register names another queue pair than the one it belongs to",
        /// The register holds the last WQE that the doorbell record covers, or all new WQEs as one
        /// batch that ends with this WQE.
        RegisterNotLast = 0x46: "the register announces a WQE that is not the last one the doorbell record covers",
        /// The driver reuses a WQEBB only after the device has reported that the WQE in it is done.
        RecordBeyondRoom = 0x47: "the doorbell record is further ahead than there are free WQEBBs: WQEs were overwritten",
        /// A send queue holds at least one WQE that asks for a completion. Otherwise no completion
        /// would ever report that the queue has room again.
        NoCompletion = 0x48: "a whole send queue of WQEs without the completion bit",
        /// The index in a WQE is its place in the queue. A WQE with another index is stale.
        WqeIndex = 0x49: "the index in the WQE is not its place in the queue: a stale or unposted WQE",
        /// A WQE contains the QPN of its queue pair.
        WqeQueue = 0x4a: "the WQE names another queue pair",
        /// The length `ds` of a WQE is the number of its 16-byte segments.
        WqeLength = 0x4b: "the WQE's length is wrong: none, more than was posted, or not that of its segments",
        /// The opcode of a WQE belongs to a verb.
        WqeOpcode = 0x4c: "unknown opcode",
        /// Reserved bits of the control segment are 0.
        WqeReserved = 0x4d: "reserved bits of the control segment are set",
        /// A data segment does not have the length 0, which means 2^31 bytes.
        ZeroLength = 0x4e: "a data segment of length 0, which means 2^31 bytes",
        /// Inline data ends inside its WQE.
        InlineLength = 0x4f: "inline data reaches beyond the WQE",
        /// The link of a receive of a shared receive queue leads to another WQE of the queue, which
        /// is not posted.
        ReceiveLink = 0x50: "the link of a receive leads to itself, to one that is still posted, or outside",
        /// The receive record is at most as far ahead as the queue has WQEs. Otherwise the driver
        /// has overwritten posted receives.
        ReceiveBeyondRoom = 0x51: "the receive record is further ahead than the queue has WQEs",
        /// A data segment of a receive has the length 0 only if its lkey 0x100 ends the list. With
        /// any other lkey, the length 0 means 2^31 bytes.
        ReceiveZeroLength = 0x52: "a receive with a data segment of length 0 that does not end the list",
        /// The device owns a gathered buffer until the completion of its WQE, or of a later WQE, is
        /// visible. Changes are not detected on a device with immediate timing, nor for a WQE with
        /// a fence.
        SourceChanged = 0x53: "the source buffer changed between the doorbell and the completion",
        /// The consumer record covers only CQEs that were written.
        ConsumerAhead = 0x54: "the consumer record is ahead of the CQEs written",
        /// A completion queue has room for the CQEs of all posted operations.
        CompletionOverrun = 0x55: "a CQE was due and the completion queue was full: the queue is dead",
    }
}

impl Rule {
    /// Returns a description of the mistake.
    #[must_use]
    pub fn text(self) -> &'static str {
        let number = self as u8;
        let own = Self::TEXTS.iter().find(|text| text.0 == number);
        own.map_or("", |text| text.1)
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
