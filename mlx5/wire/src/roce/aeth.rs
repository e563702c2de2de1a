//! ACK extended transport header, 4 bytes: syndrome at 0, 24-bit message sequence number (MSN)
//! at 1.

use crate::be32;

/// Code that a responder sends if it does not count credits, as with an SRQ or in software.
const NO_CREDITS: u8 = 31;

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Kind and value of the answer.
    pub syndrome: Syndrome,
    /// Number of messages that the responder has completed, modulo 2^24.
    pub msn: u32,
}

/// The answer of a responder: the upper 3 bits of the byte are its kind, the lower 5 its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// Everything up to the PSN has arrived.
    Ack {
        /// Code of the number of messages for which receives are posted; 31 if the responder does
        /// not count them.
        credits: u8,
    },
    /// No receive is posted for the message with the PSN. The requester waits for a time, then
    /// sends that message again.
    RnrNak {
        /// Code of the time that the requester waits, 0 to 31
        /// ([`rnr_timer_ns`](crate::rnr_timer_ns)).
        timer: u8,
    },
    /// The request with the PSN is refused.
    Nak(Nak),
    /// The syndrome byte has a reserved value.
    Reserved(u8),
}

/// The reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Nak {
    /// Packets before the received packet are missing. The requester continues from the PSN of this
    /// answer.
    Sequence = 0,
    /// The responder cannot execute the request, for example because the message is longer than the
    /// receive.
    InvalidRequest = 1,
    /// The rkey is wrong, or does not permit the access.
    RemoteAccess = 2,
    /// The responder failed.
    RemoteOperational = 3,
}

/// Converts the reason to the syndrome of the requester's completion ("Requester error behavior").
/// A missing packet is no error of its own: it counts as a peer that does not answer.
impl From<Nak> for crate::Syndrome {
    fn from(nak: Nak) -> Self {
        match nak {
            Nak::Sequence => Self::TransportRetryExceeded,
            Nak::InvalidRequest => Self::RemoteInvalidRequest,
            Nak::RemoteAccess => Self::RemoteAccess,
            Nak::RemoteOperational => Self::RemoteOperation,
        }
    }
}

impl Syndrome {
    const fn to_byte(self) -> u8 {
        match self {
            Self::Ack { credits } => credits & 31,
            Self::RnrNak { timer } => 1 << 5 | timer & 31,
            Self::Nak(nak) => 3 << 5 | nak as u8,
            Self::Reserved(byte) => byte,
        }
    }

    const fn from_byte(byte: u8) -> Self {
        match (byte >> 5, byte & 31, Nak::from_repr(byte & 31)) {
            (0, credits, _) => Self::Ack { credits },
            (1, timer, _) => Self::RnrNak { timer },
            (3, _, Some(nak)) => Self::Nak(nak),
            _ => Self::Reserved(byte),
        }
    }
}

impl Aeth {
    /// Length of the header in bytes.
    pub const LEN: usize = 4;

    /// Makes an ACK without a credit count.
    #[must_use]
    pub const fn ack(msn: u32) -> Self {
        Self {
            syndrome: Syndrome::Ack {
                credits: NO_CREDITS,
            },
            msn,
        }
    }

    /// Encodes the header.
    #[must_use]
    pub const fn emit(&self) -> [u8; Self::LEN] {
        ((self.syndrome.to_byte() as u32) << 24 | self.msn & 0xff_ffff).to_be_bytes()
    }

    /// Decodes the header; any bytes are accepted.
    #[must_use]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        Self {
            syndrome: Syndrome::from_byte(b[0]),
            msn: be32(b, 0) & 0xff_ffff,
        }
    }
}
