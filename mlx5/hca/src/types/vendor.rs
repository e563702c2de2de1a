//! The meanings of the software HCA's vendor syndromes, in one table.
//!
//! | range | meaning | type |
//! |---|---|---|
//! | 0x01.. | an access of a peer, or an access by key, was refused | [`Fault`] |
//! | 0x10.. | the WQE cannot be decoded | [`Malformed`] |
//! | 0x20.. | the WQE was decoded and cannot be executed | [`Limit`] |
//! | 0x40.. | strict mode: a rule was broken | [`Rule`] |

use crate::types::rule::Rule;

syndromes! {
    /// The reason why an access by a peer or by key is refused, as the vendor syndrome of its CQE.
    pub(crate) enum Fault {
        Key = 1: "no such key, or its region was deregistered",
        Bounds = 2: "not inside the memory region",
        Access = 3: "the memory region does not allow this access",
        Domain = 4: "the memory region is of another protection domain",
        Copy = 5: "the kernel refused the copy between processes",
        /// The peer's process is exiting: it has no memory, but may not be proven dead yet.
        Gone = 6: "the process has no memory any more",
        QueuePair = 7: "the peer's queue pair does not allow this access, or has no resources for READs and atomics",
    }

    /// Vendor syndromes of [`Syndrome::LocalQpOperation`]: the defect of the WQE.
    pub(crate) enum Malformed {
        Control = 0x10: "wrong index, queue pair number or length in the control segment",
        Opcode = 0x12: "an opcode that this kind of queue pair does not have",
        Header = 0x13: "a header segment is missing",
        InlineResult = 0x14: "the result of a READ or an atomic cannot go into the WQE",
        NotConnected = 0x15: "the queue pair is not connected",
        InlineLength = 0x16: "inline data reaches beyond the WQE",
        AtomicLength = 0x17: "the result of an atomic is 8 bytes",
    }

    /// The reason why a well-formed operation fails.
    pub(crate) enum Limit {
        ReceiveTooShort = 0x20: "the buffers of the receive end before the message",
        MessageTooLong = 0x21: "longer than 2^30 bytes",
        DatagramTooLong = 0x22: "a datagram longer than 4096 bytes",
        AtomicAlignment = 0x23: "the address of an atomic is not a multiple of 8",
        PacketTooLong = 0x24: "packets to the peer are longer than the MTU of the path to it: open the device of either end with a smaller mtu=N",
        Terms = 0x25: "the two ends of the connection have different path MTUs, or the responder keeps fewer READs and atomics",
        NoRoute = 0x26: "no route to the peer, or its network reports that it is unreachable",
        Forbidden = 0x27: "a firewall refuses packets to the peer: that of this host, or one that reports it",
        NoPort = 0x28: "the peer's host reports that no program has the peer's UDP port: the peer's program has ended, or a firewall rejects packets",
        Silent = 0x29: "no answer and no report: the peer's program is stopped or does not poll, its host is down, or a firewall drops packets",
        PeerGone = 0x2a: "the peer's queue pair has failed or was destroyed",
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
