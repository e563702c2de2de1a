//! The terms of a connection, in which its two ends have to agree. A NIC does not compare them: it
//! refuses, or does not understand, the packets of a peer that has other terms.

use core::fmt;

use crate::GidKind;

/// The terms that the driver of one end has set (`struct ibv_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Packet format of the GID from which this end sends.
    pub format: GidKind,
    /// Maximum payload of a packet, in bytes.
    pub mtu: u16,
    /// First packet sequence number that this end sends, 24 bits. An unreliable connection, which
    /// accepts any, has 0 here and in `rq_psn`.
    pub sq_psn: u32,
    /// First packet sequence number that this end expects, 24 bits.
    pub rq_psn: u32,
    /// Maximum number of READs and atomics of this end that the peer has not answered.
    pub max_rd_atomic: u8,
    /// Maximum number of unanswered READs and atomics of the peer that this end accepts.
    pub max_dest_rd_atomic: u8,
}

/// A term that a message can violate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    /// Packet format of the source GID (`enum ibv_gid_type`).
    Format,
    /// First packet sequence number.
    Psn,
    /// Path MTU, in bytes.
    Mtu,
    /// Number of READs and atomics that are not answered.
    Reads,
    /// Q_Key of a datagram.
    Qkey,
}

/// A message that a NIC would refuse or drop, because sender and receiver do not agree in a term.
/// Only the first such message between two queue pairs is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The sending queue pair.
    pub from: u32,
    /// The receiving queue pair.
    pub to: u32,
    /// The term.
    pub term: Term,
    /// Value of the term at the sender.
    pub sent: u32,
    /// Value of the term at the receiver.
    pub expected: u32,
}

/// The values of the terms of connections at one end, in the order of [`TERMS`].
pub(crate) type Values = [u32; 4];
const TERMS: [Term; 4] = [Term::Format, Term::Psn, Term::Mtu, Term::Reads];
/// Number of bits of each value in [`pack`].
const BITS: [u32; 4] = [8, 24, 16, 8];

impl Terms {
    /// Returns the values of this end as a sender.
    pub(crate) fn sent(&self) -> Values {
        let format = self.format as u32;
        [
            format,
            self.sq_psn,
            self.mtu.into(),
            self.max_rd_atomic.into(),
        ]
    }

    /// Returns the values of this end as a receiver.
    pub(crate) fn expected(&self) -> Values {
        Self {
            sq_psn: self.rq_psn,
            max_rd_atomic: self.max_dest_rd_atomic,
            ..*self
        }
        .sent()
    }
}

/// Packs the values into one word, which is not 0, because no MTU is 0.
pub(crate) fn pack(values: Values) -> u64 {
    let all = values.into_iter().zip(BITS);
    all.fold(0, |word, (value, bits)| {
        word << bits | u64::from(value) & ((1 << bits) - 1)
    })
}

/// Unpacks the values of a peer, which wrote the word. `None` for 0: the peer has no terms.
pub(crate) fn unpack(mut word: u64) -> Option<Values> {
    let is_some = word != 0;
    let mut values = Values::default();
    for (value, bits) in values.iter_mut().zip(BITS).rev() {
        *value = (word & ((1 << bits) - 1)) as u32;
        word >>= bits;
    }
    is_some.then_some(values)
}

/// Returns the first term that a message of `bytes` bytes violates, and the values of this term at
/// both ends. `reads` is the number of unanswered READs and atomics, including this message; 0 if
/// the message is neither.
pub(crate) fn violated(
    sent: Values,
    expected: Values,
    bytes: u32,
    reads: u32,
) -> Option<(Term, u32, u32)> {
    let values = sent.into_iter().zip(expected);
    let mut all = TERMS.into_iter().zip(values);
    let first = all.find(|&(term, (sent, expected))| match term {
        Term::Mtu => sent != expected && bytes > sent.min(expected),
        Term::Reads => reads.min(sent) > expected,
        Term::Format | Term::Psn | Term::Qkey => sent != expected,
    });
    first.map(|(term, (sent, expected))| (term, sent, expected))
}

/// Returns whether a message can violate a term.
pub(crate) fn may_violate(sent: Values, expected: Values) -> bool {
    violated(sent, expected, u32::MAX, u32::MAX).is_some()
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            from,
            to,
            term,
            sent,
            expected,
        } = *self;
        write!(f, "a message of queue pair {from:#x} to {to:#x}: ")?;
        let format = |number| {
            ["InfiniBand", "RoCE v1", "RoCE v2"]
                .get(number as usize)
                .unwrap_or(&"?")
        };
        match term {
            Term::Format => write!(
                f,
                "its source GID is of type {}, and the receiver's of type {}, so a NIC gets no answer",
                format(sent),
                format(expected)
            ),
            Term::Psn => write!(
                f,
                "the sender's sq_psn is {sent:#x}, and the receiver's rq_psn {expected:#x}, so a NIC gets no answer"
            ),
            Term::Mtu => write!(
                f,
                "path_mtu is {sent} at the sender and {expected} at the receiver, and the message is longer than one of them, so a NIC refuses it"
            ),
            Term::Reads => write!(
                f,
                "the sender's max_rd_atomic is {sent}, and the receiver's max_dest_rd_atomic {expected}, so a NIC refuses the next READ"
            ),
            Term::Qkey => write!(
                f,
                "it has the Q_Key {sent:#x}, and the receiver {expected:#x}, so it is dropped"
            ),
        }
    }
}
