//! Messages of the connection manager (CM): management datagrams (MADs), the payloads of UD packets
//! between the queue pairs 1 of two ports (InfiniBand Architecture Specification, volume 1, chapter
//! 12, "Communication Management"; 13.4.3 for the header of a MAD). Annex A11 defines the private
//! data of requests between IP addresses, [`IpAddresses`].
//!
//! A [`Mad`] holds the bytes of one message. Its fields are read and written one by one, because no
//! program needs all fields:
//!
//! ```
//! use mlx5_wire::roce::{CmKind, Mad, field};
//!
//! let mut reply = Mad::new(CmKind::Reply);
//! reply.set(field::REP_QPN, 0x11);
//! assert_eq!(Mad::parse(reply.bytes()).unwrap().get(field::REP_QPN), 0x11);
//! ```

use core::net::{IpAddr, Ipv6Addr};

use crate::{be16, bytes};

/// Length of a MAD in bytes.
pub const MAD_BYTES: usize = 256;
/// The number of the queue pair to which MADs are sent.
pub const MAD_QPN: u32 = 1;
/// Q_Key of MADs.
pub const MAD_QKEY: u32 = 0x8001_0000;

/// Length of the header of a MAD, in bytes. The specification counts the offsets of a message's
/// fields from the end of this header.
const HEADER: usize = 24;
/// The first four bytes of every message: version of MADs, class "communication management",
/// version of the class, method "send".
const START: [u8; 4] = [1, 7, 2, 3];
const KIND_AT: usize = 16;

/// The kind of a message, which is the attribute ID of its MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u16)]
pub enum CmKind {
    /// REQ: asks for a connection.
    Request = 0x10,
    /// MRA: the answer to the last message will take longer.
    Wait,
    /// REJ: rejects a request or a reply.
    Reject,
    /// REP: accepts a request.
    Reply,
    /// RTU: confirms a reply.
    ReadyToUse,
    /// DREQ: asks for the end of a connection.
    DisconnectRequest,
    /// DREP: confirms the end.
    DisconnectReply,
    /// SIDR_REQ: asks for the queue pair of a datagram service.
    ServiceRequest,
    /// SIDR_REP: the answer to SIDR_REQ.
    ServiceReply,
}

impl CmKind {
    /// Returns the offset of the private data, which extends to the end of the message.
    const fn private_at(self) -> usize {
        HEADER
            + match self {
                Self::Request => 140,
                Self::Wait => 10,
                Self::Reject => 84,
                Self::Reply => 36,
                Self::ReadyToUse | Self::DisconnectReply => 8,
                Self::DisconnectRequest => 12,
                Self::ServiceRequest => 16,
                Self::ServiceReply => 96,
            }
    }
}

/// A field of at most 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Number of the first bit, counted from the most significant bit of the MAD's first byte.
    first: usize,
    bits: usize,
}

impl Field {
    /// Describes a field that begins with bit `bit` of byte `byte` after the header, as the
    /// specification's tables do.
    const fn at(byte: usize, bit: usize, bits: usize) -> Self {
        Self {
            first: 8 * (HEADER + byte) + bit,
            bits,
        }
    }

    const fn bytes(self) -> core::ops::Range<usize> {
        self.first / 8..(self.first + self.bits).div_ceil(8)
    }

    /// Returns the number of bits after the field in its last byte.
    const fn shift(self) -> usize {
        8 * self.bytes().end - self.first - self.bits
    }

    const fn mask(self) -> u64 {
        u64::MAX >> (64 - self.bits)
    }
}

/// The fields of the messages. The prefix of a name is the message that has the field, under the
/// specification's name.
pub mod field {
    use super::{Field, HEADER};

    /// Number of the transaction. The end that begins an exchange of messages chooses it.
    pub const TRANSACTION: Field = Field {
        first: 8 * 8,
        bits: 64,
    };
    /// The sender's number of the connection; in a SIDR message, the number of the request.
    pub const LOCAL_ID: Field = Field::at(0, 0, 32);
    /// The receiver's number of the connection, in all messages except REQ and the SIDR messages.
    pub const REMOTE_ID: Field = Field::at(4, 0, 32);

    /// Service that is asked for.
    pub const REQ_SERVICE: Field = Field::at(8, 0, 64);
    /// GUID of the sender's device.
    pub const REQ_GUID: Field = Field::at(16, 0, 64);
    /// The sender's queue pair.
    pub const REQ_QPN: Field = Field::at(32, 0, 24);
    /// Number of READs and atomics that the sender takes at once.
    pub const REQ_RESPONDER_RESOURCES: Field = Field::at(35, 0, 8);
    /// Number of READs and atomics that the sender wants to have in flight at once.
    pub const REQ_INITIATOR_DEPTH: Field = Field::at(39, 0, 8);
    /// Exponent N of the time within which the receiver must answer, 4.096 us * 2^N.
    pub const REQ_REMOTE_TIMEOUT: Field = Field::at(43, 0, 5);
    /// Type of the connection: 0 for RC.
    pub const REQ_SERVICE_TYPE: Field = Field::at(43, 5, 2);
    /// Whether the sender's receive queue gives credits.
    pub const REQ_FLOW_CONTROL: Field = Field::at(43, 7, 1);
    /// First PSN that the sender expects.
    pub const REQ_PSN: Field = Field::at(44, 0, 24);
    /// Exponent N of the time within which the sender answers, 4.096 us * 2^N.
    pub const REQ_LOCAL_TIMEOUT: Field = Field::at(47, 0, 5);
    /// Number of retries of the connection.
    pub const REQ_RETRIES: Field = Field::at(47, 5, 3);
    /// Partition key.
    pub const REQ_PKEY: Field = Field::at(48, 0, 16);
    /// Exponent N of the path MTU, 128 B * 2^N.
    pub const REQ_MTU: Field = Field::at(50, 0, 4);
    /// Number of retries after RNR NAKs.
    pub const REQ_RNR_RETRIES: Field = Field::at(50, 5, 3);
    /// Number of times that the receiver may repeat its messages.
    pub const REQ_CM_RETRIES: Field = Field::at(51, 0, 4);
    /// Whether the sender has a shared receive queue.
    pub const REQ_SRQ: Field = Field::at(51, 4, 1);
    /// LID of the sender's port.
    pub const REQ_LOCAL_LID: Field = Field::at(52, 0, 16);
    /// LID of the receiver's port.
    pub const REQ_REMOTE_LID: Field = Field::at(54, 0, 16);
    /// GID of the sender's port, then GID of the receiver's port, each in two halves.
    pub const REQ_GIDS: [Field; 4] = [
        Field::at(56, 0, 64),
        Field::at(64, 0, 64),
        Field::at(72, 0, 64),
        Field::at(80, 0, 64),
    ];
    /// Flow label.
    pub const REQ_FLOW_LABEL: Field = Field::at(88, 0, 20);
    /// Hop limit.
    pub const REQ_HOP_LIMIT: Field = Field::at(93, 0, 8);
    /// Exponent N of the sender's acknowledge timeout, 4.096 us * 2^N.
    pub const REQ_ACK_TIMEOUT: Field = Field::at(95, 0, 5);

    /// The message whose answer takes longer: 0 for REQ, 1 for REP.
    pub const MRA_MESSAGE: Field = Field::at(8, 0, 2);
    /// Exponent N of the time within which the answer follows, 4.096 us * 2^N.
    pub const MRA_TIMEOUT: Field = Field::at(9, 0, 5);

    /// The rejected message: 0 for REQ, 1 for REP, 2 for any other message.
    pub const REJ_MESSAGE: Field = Field::at(8, 0, 2);
    /// Reason of the rejection, a code of the specification.
    pub const REJ_REASON: Field = Field::at(10, 0, 16);

    /// The sender's queue pair.
    pub const REP_QPN: Field = Field::at(12, 0, 24);
    /// First PSN that the sender expects.
    pub const REP_PSN: Field = Field::at(20, 0, 24);
    /// Number of READs and atomics that the sender takes at once.
    pub const REP_RESPONDER_RESOURCES: Field = Field::at(24, 0, 8);
    /// Number of READs and atomics that the sender will have in flight at once.
    pub const REP_INITIATOR_DEPTH: Field = Field::at(25, 0, 8);
    /// Exponent N of the time that the sender's device needs for an ACK, 4.096 us * 2^N.
    pub const REP_ACK_DELAY: Field = Field::at(26, 0, 5);
    /// Whether the sender's receive queue gives credits.
    pub const REP_FLOW_CONTROL: Field = Field::at(26, 7, 1);
    /// Number of retries after RNR NAKs.
    pub const REP_RNR_RETRIES: Field = Field::at(27, 0, 3);
    /// Whether the sender has a shared receive queue.
    pub const REP_SRQ: Field = Field::at(27, 3, 1);
    /// GUID of the sender's device.
    pub const REP_GUID: Field = Field::at(28, 0, 64);

    /// The receiver's queue pair.
    pub const DREQ_QPN: Field = Field::at(8, 0, 24);

    /// Partition key.
    pub const SIDR_REQ_PKEY: Field = Field::at(4, 0, 16);
    /// Service that is asked for.
    pub const SIDR_REQ_SERVICE: Field = Field::at(8, 0, 64);
    /// Status: 0 if the request is accepted, otherwise the code of the reason.
    pub const SIDR_REP_STATUS: Field = Field::at(4, 0, 8);
    /// Queue pair of the service.
    pub const SIDR_REP_QPN: Field = Field::at(8, 0, 24);
    /// Service that was asked for.
    pub const SIDR_REP_SERVICE: Field = Field::at(12, 0, 64);
    /// Q_Key of the queue pair.
    pub const SIDR_REP_QKEY: Field = Field::at(20, 0, 32);

    const _: () = assert!(REQ_GIDS[3].first / 8 == HEADER + 80);
}

/// The bytes of one message of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad([u8; MAD_BYTES]);

impl Mad {
    /// Makes a message of this kind whose fields are 0.
    #[must_use]
    pub fn new(kind: CmKind) -> Self {
        let mut mad = [0; MAD_BYTES];
        mad[..START.len()].copy_from_slice(&START);
        mad[KIND_AT..][..2].copy_from_slice(&(kind as u16).to_be_bytes());
        Self(mad)
    }

    /// Checks the bytes of a MAD. Returns `None` if their number is not [`MAD_BYTES`], or if they
    /// are not a message of the connection manager of a known kind.
    #[must_use]
    pub fn parse(mad: &[u8]) -> Option<Self> {
        let mad = Self(*<&[u8; MAD_BYTES]>::try_from(mad).ok()?);
        let is_known = mad.0.starts_with(&START) && CmKind::from_repr(mad.kind_id()).is_some();
        is_known.then_some(mad)
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; MAD_BYTES] {
        &self.0
    }

    fn kind_id(&self) -> u16 {
        be16(&self.0, KIND_AT)
    }

    /// Returns the kind of the message.
    #[must_use]
    pub fn kind(&self) -> CmKind {
        // The kind is known: `new` set it, or `parse` checked it.
        CmKind::from_repr(self.kind_id()).unwrap_or(CmKind::Reject)
    }

    /// Returns the value of a field.
    #[must_use]
    pub fn get(&self, field: Field) -> u64 {
        self.word(field) >> field.shift() & field.mask()
    }

    /// Sets a field to the lower bits of `value`.
    pub fn set(&mut self, field: Field, value: u64) {
        let others = self.word(field) & !(field.mask() << field.shift());
        let word = (others | (value & field.mask()) << field.shift()).to_be_bytes();
        let len = field.bytes().len();
        self.0[field.bytes()].copy_from_slice(&word[word.len() - len..]);
    }

    /// Returns the bytes that contain a field, as one big-endian number.
    fn word(&self, field: Field) -> u64 {
        let bytes = &self.0[field.bytes()];
        bytes
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Returns the private data. Its length depends on the kind of the message.
    #[must_use]
    pub fn private(&self) -> &[u8] {
        &self.0[self.kind().private_at()..]
    }

    /// Returns the private data, to be changed.
    pub fn private_mut(&mut self) -> &mut [u8] {
        let at = self.kind().private_at();
        &mut self.0[at..]
    }
}

/// The addresses at the beginning of the private data of a request between IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpAddresses {
    /// Port of the sender.
    pub source_port: u16,
    /// Address of the sender.
    pub source: IpAddr,
    /// Address of the receiver. Its port follows from the service.
    pub destination: IpAddr,
}

impl IpAddresses {
    /// Length in bytes.
    pub const LEN: usize = 36;

    /// Encodes the addresses.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[1] = if self.source.is_ipv4() { 4 } else { 6 } << 4;
        b[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            match address {
                IpAddr::V4(v4) => b[at + 12..at + 16].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => b[at..at + 16].copy_from_slice(&v6.octets()),
            }
        }
        b
    }

    /// Decodes the addresses. Returns `None` if the IP version is neither 4 nor 6.
    #[must_use]
    pub fn parse(private: &[u8]) -> Option<Self> {
        let address = |at| {
            let all: [u8; 16] = bytes(private, at);
            match private.get(1)? >> 4 {
                4 => Some(IpAddr::from(bytes::<4>(&all, 12))),
                6 => Some(IpAddr::from(Ipv6Addr::from(all))),
                _ => None,
            }
        };
        Some(Self {
            source_port: be16(private, 2),
            source: address(4)?,
            destination: address(20)?,
        })
    }
}
