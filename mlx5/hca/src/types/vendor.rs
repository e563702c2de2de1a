//! The meanings of the software HCA's vendor syndromes, in one table.
//!
//! | range | meaning | type |
//! |---|---|---|
//! | 0x01.. | a remote access, or one by key, was refused | [`Fault`] |
//! | 0x10.. | the WQE cannot be decoded | [`Malformed`] |
//! | 0x20.. | the WQE was decoded and cannot be executed | [`Limit`] |
//! | 0x40.. | strict mode: a rule was broken | [`Rule`] |

use crate::types::rule::Rule;

syndromes! {
    /// The reason why a remote access, or one by key, is refused; also the vendor syndrome of the
    /// completion.
    pub(crate) enum Fault {
        /// No region has this key, or the region was deregistered.
        Key = 1: "no such key, or its region was deregistered",
        /// The access is not inside the region.
        Bounds = 2: "not inside the memory region",
        /// The region does not allow the access.
        Access = 3: "the memory region does not allow this access",
        /// The region is of another protection domain.
        Domain = 4: "the memory region is of another protection domain",
        /// The kernel refused the cross-process copy.
        Copy = 5: "the kernel refused the copy between processes",
        /// The process is exiting: it has no memory any more, but may not be proven dead yet.
        Gone = 6: "the process has no memory any more",
        /// The queue pair does not allow the access.
        QueuePair = 7: "the peer's queue pair does not allow this access, or has no resources for READs and atomics",
    }

    /// Vendor syndromes of [`Syndrome::LocalQpOperation`]: the defect of the WQE.
    pub(crate) enum Malformed {
        /// Wrong WQE index, QPN or length.
        Control = 0x10: "wrong index, queue pair number or length in the control segment",
        /// An opcode that this device or this kind of queue pair does not support.
        Opcode = 0x12: "an opcode that this kind of queue pair does not have",
        /// A header segment is missing.
        Header = 0x13: "a header segment is missing",
        /// The result of a READ or an atomic would go into the WQE.
        InlineResult = 0x14: "the result of a READ or an atomic cannot go into the WQE",
        /// The queue pair is not connected.
        NotConnected = 0x15: "the queue pair is not connected",
        /// Inline data is longer than the WQE.
        InlineLength = 0x16: "inline data reaches beyond the WQE",
        /// The result of an atomic is not 8 bytes.
        AtomicLength = 0x17: "the result of an atomic is 8 bytes",
    }

    /// The reason why a well-formed operation fails.
    pub(crate) enum Limit {
        /// The message is longer than the receive's buffers.
        ReceiveTooShort = 0x20: "the buffers of the receive end before the message",
        /// The message is longer than the maximum.
        MessageTooLong = 0x21: "longer than 2^30 bytes",
        /// The datagram is longer than the path's MTU.
        DatagramTooLong = 0x22: "a datagram longer than 4096 bytes",
        /// The address of an atomic is not a multiple of 8.
        AtomicAlignment = 0x23: "the address of an atomic is not a multiple of 8",
        /// The kernel refuses packets to the peer.
        PacketsRefused = 0x24: "the kernel refuses packets to the peer: they are longer than the path's MTU (mtu=N), or there is no route",
        /// [`Faults::fail`](crate::Faults::fail) requests the failure.
        OnPurpose = 0x2f: "a fault that was asked for",
    }
}

impl Fault {
    /// Returns the fault in the answer of another process; `None` for 0. The result is never
    /// [`Fault::Gone`], because a process that answers is not gone.
    pub(crate) fn from_wire(byte: u8) -> Option<Self> {
        match byte {
            0 => None,
            2 => Some(Self::Bounds),
            3 => Some(Self::Access),
            4 => Some(Self::Domain),
            5 => Some(Self::Copy),
            7 => Some(Self::QueuePair),
            _ => Some(Self::Key),
        }
    }
}

/// Returns the meaning of `vendor`. `None` for 0 and for numbers that the software HCA does not
/// use.
#[must_use]
pub fn text(vendor: u8) -> Option<&'static str> {
    let tables = [Fault::TEXTS, Malformed::TEXTS, Limit::TEXTS, Rule::TEXTS];
    let mut all = tables.into_iter().flatten();
    all.find(|(number, _)| *number == vendor)
        .map(|(_, text)| *text)
}
