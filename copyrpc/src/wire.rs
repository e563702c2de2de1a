//! Every byte format of the protocol, as pure functions and plain values.
//!
//! All integers are little-endian. The tables are in `docs/copyrpc-protocol.md` (section "Wire
//! format"), and so are the invariants, such as R2. The golden vectors of the tests were written
//! from those tables by hand, never from this encoder.

/// Positions of batches and messages are multiples of this number of bytes, and so are their padded
/// sizes.
pub(crate) const ALIGNMENT: u64 = 32;
pub(crate) const HEADER_SIZE: usize = 12;
/// Bytes of the metadata that starts every batch, and of the published record.
pub(crate) const FLOW_METADATA_SIZE: usize = 32;
/// The bit of `call_id` that marks a response.
pub(crate) const RESPONSE_FLAG: u32 = 0x8000_0000;
pub(crate) const WRAP_MESSAGE_COUNT: u32 = u32::MAX;
/// The piggyback of a notice: the caller no longer waits for the call that the notice names (C5). A
/// request never has this value: its piggyback is its internal allowance in blocks, at least two.
pub(crate) const GIVEN_UP: u32 = 0;

/// [`FLOW_METADATA_SIZE`] as a `u64`, the type of positions.
pub(crate) const METADATA_SPAN: u64 = FLOW_METADATA_SIZE as u64;

/// Returns the ring bytes of a message with `payload_len` payload bytes: header + payload, rounded
/// up to [`ALIGNMENT`]. Saturates instead of overflowing.
#[inline]
pub(crate) const fn padded(payload_len: u64) -> u64 {
    payload_len.saturating_add(HEADER_SIZE as u64 + ALIGNMENT - 1) & !(ALIGNMENT - 1)
}

/// Returns the credit, in bytes, that a call with this `response_allowance` (payload bytes) costs:
/// the padded response and the metadata of the batch that it may have to open (invariant R2).
#[inline]
pub(crate) const fn internal_allowance(response_allowance: u64) -> u64 {
    padded(response_allowance).saturating_add(METADATA_SPAN)
}

/// Bytes of an internal allowance beyond the response's payload and padding.
pub(crate) const RESPONSE_OVERHEAD: u64 = METADATA_SPAN + HEADER_SIZE as u64;

/// Returns the maximum response payload of an internal allowance; 0 if not even an empty response
/// fits.
pub(crate) const fn response_capacity(internal_allowance: u64) -> u64 {
    internal_allowance.saturating_sub(RESPONSE_OVERHEAD)
}

/// Returns the immediate value of a batch that advances the receive ring by `span` bytes (a
/// multiple of [`ALIGNMENT`], at most one ring).
pub(crate) const fn encode_imm(span: u64) -> u32 {
    (span / ALIGNMENT) as u32
}

/// Returns the number of bytes that an immediate value announces.
pub(crate) const fn decode_imm(imm: u32) -> u64 {
    imm as u64 * ALIGNMENT
}

/// Message header. 12 bytes: `call_id`, `piggyback`, `len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Id of the call; [`RESPONSE_FLAG`] set in a response.
    pub(crate) call_id: u32,
    /// Request: internal allowance in 32-byte blocks. Notice of a call that was given up:
    /// [`GIVEN_UP`]. Response: [`Status`].
    pub(crate) piggyback: u32,
    pub(crate) len: u32,
}

impl Header {
    #[inline]
    pub(crate) fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..4].copy_from_slice(&self.call_id.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.piggyback.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Reads a header. Any bytes are a header; the receiver checks their meaning.
    #[inline]
    pub(crate) fn decode(bytes: &[u8; HEADER_SIZE]) -> Self {
        Self {
            call_id: le_u32(bytes, 0),
            piggyback: le_u32(bytes, 4),
            len: le_u32(bytes, 8),
        }
    }
}

/// The three flow-control words that one side reports to the other. All are cumulative or absolute
/// and never decrease, so repeated, late, or reordered words of the two channels, batches and READs
/// of the published record, are harmless (invariant F1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlowWords {
    /// Position up to which the sender of the words no longer needs its receive ring.
    pub(crate) consumer_pos: u64,
    /// Credit in bytes granted since the connection was made, the initial credit included.
    pub(crate) credit: u64,
    /// Batches that the sender of the words has received since the connection was made, and whose
    /// receives it has posted again.
    pub(crate) batches_received: u64,
}

impl FlowWords {
    pub(crate) fn min(self, other: Self) -> Self {
        Self {
            consumer_pos: self.consumer_pos.min(other.consumer_pos),
            credit: self.credit.min(other.credit),
            batches_received: self.batches_received.min(other.batches_received),
        }
    }
}

/// The 32 bytes that start every batch.
///
/// | offset | field | |
/// |---|---|---|
/// | 0 | `consumer_pos` u64 | |
/// | 8 | `credit` u64 | |
/// | 16 | `message_count` u32 | |
/// | 20 | flags u32 | bit 0: `is_closing`; the others are 0, checked |
/// | 24 | `batches_received` u64 | |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowMetadata {
    /// The words about the sender's own receive side.
    pub(crate) words: FlowWords,
    /// Messages in the batch, or [`WRAP_MESSAGE_COUNT`].
    pub(crate) message_count: u32,
    /// Whether the sender makes no more calls (invariant G1).
    pub(crate) is_closing: bool,
}

/// The 32 bytes that a peer may READ at any time.
///
/// | offset | field |
/// |---|---|
/// | 0 | `consumer_pos` u64 |
/// | 8 | `credit` u64 |
/// | 16 | `heartbeat` u32, bit 31 a flag |
/// | 20 | `batches_taken` u32 |
/// | 24 | `batches_received` u64 |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PublishedRecord {
    /// The words about the owner's receive side.
    pub(crate) words: FlowWords,
    /// Number that changes while the owner lives and the reader waits for the owner (invariant K3).
    /// With [`RESTS`](Self::RESTS), the lower bits are the credit that the owner's calls have
    /// spent, in blocks of 32 bytes (invariant K6).
    pub(crate) heartbeat: u32,
    /// Batches whose receive completion the owner has taken, modulo 2^32. `batches_received` counts
    /// a batch later: when the receive of the batch is posted again, too (invariant K2).
    pub(crate) batches_taken: u32,
}

impl PublishedRecord {
    /// Flag of a heartbeat: no call of the owner waits for a reply, but requests of calls that the
    /// owner gave up are unanswered.
    pub(crate) const RESTS: u32 = 1 << 31;
    pub(crate) const HEARTBEAT_OFFSET: usize = 16;
    pub(crate) const BATCHES_TAKEN_OFFSET: usize = 20;

    #[cfg(test)]
    pub(crate) fn encode(&self) -> [u8; FLOW_METADATA_SIZE] {
        encode_words(self.words, self.heartbeat, self.batches_taken)
    }

    /// Reads a record. Any bytes are a record; the receiver checks its words.
    pub(crate) fn decode(bytes: &[u8; FLOW_METADATA_SIZE]) -> Self {
        Self {
            words: decode_words(bytes),
            heartbeat: le_u32(bytes, 16),
            batches_taken: le_u32(bytes, 20),
        }
    }
}

/// Length in bytes of the activity word, which shows whether a context runs a handler (invariant
/// K7).
pub(crate) const ACTIVITY_SIZE: u32 = 8;

/// Decodes the activity word, which a READ put at the start of its destination.
pub(crate) fn decode_activity(bytes: &[u8; FLOW_METADATA_SIZE]) -> u64 {
    le_u64(bytes, 0)
}

/// Encodes the layout that a batch's metadata and the published record share.
#[inline]
fn encode_words(words: FlowWords, at_16: u32, at_20: u32) -> [u8; FLOW_METADATA_SIZE] {
    let mut bytes = [0; FLOW_METADATA_SIZE];
    bytes[0..8].copy_from_slice(&words.consumer_pos.to_le_bytes());
    bytes[8..16].copy_from_slice(&words.credit.to_le_bytes());
    bytes[16..20].copy_from_slice(&at_16.to_le_bytes());
    bytes[20..24].copy_from_slice(&at_20.to_le_bytes());
    bytes[24..32].copy_from_slice(&words.batches_received.to_le_bytes());
    bytes
}

#[inline]
fn decode_words(bytes: &[u8; FLOW_METADATA_SIZE]) -> FlowWords {
    FlowWords {
        consumer_pos: le_u64(bytes, 0),
        credit: le_u64(bytes, 8),
        batches_received: le_u64(bytes, 24),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReservedNotZero;

const CLOSING: u32 = 1;

impl FlowMetadata {
    #[inline]
    pub(crate) fn encode(&self) -> [u8; FLOW_METADATA_SIZE] {
        encode_words(self.words, self.message_count, u32::from(self.is_closing))
    }

    /// Reads metadata.
    ///
    /// # Errors
    /// [`ReservedNotZero`] for a flag that this version does not define.
    #[inline]
    pub(crate) fn decode(bytes: &[u8; FLOW_METADATA_SIZE]) -> Result<Self, ReservedNotZero> {
        let flags = le_u32(bytes, 20);
        if flags > CLOSING {
            return Err(ReservedNotZero);
        }
        Ok(Self {
            words: decode_words(bytes),
            message_count: le_u32(bytes, 16),
            is_closing: flags == CLOSING,
        })
    }
}

/// Identifier of one call of one endpoint: slab index and generation, without [`RESPONSE_FLAG`].
///
/// The next 2,047 calls in the same slot have other generations, and so other ids, so a late or
/// duplicate response finds no call (invariant C1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId(u32);

impl CallId {
    const INDEX_BITS: u32 = 20;
    const GENERATION_BITS: u32 = 11;
    /// Maximum number of outstanding calls on one endpoint.
    pub(crate) const MAX_CALLS: u32 = 1 << Self::INDEX_BITS;

    /// Makes the id of slot `index` (below [`CallId::MAX_CALLS`]) in its `generation` (taken modulo
    /// 2,048).
    pub(crate) const fn new(index: u32, generation: u32) -> Self {
        let generation = generation & ((1 << Self::GENERATION_BITS) - 1);
        Self(generation << Self::INDEX_BITS | index & (Self::MAX_CALLS - 1))
    }

    /// Reads the id in a header's `call_id`, with or without the response flag.
    pub(crate) const fn from_wire(call_id: u32) -> Self {
        Self(call_id & !RESPONSE_FLAG)
    }

    pub(crate) const fn to_request(self) -> u32 {
        self.0
    }

    pub(crate) const fn to_response(self) -> u32 {
        self.0 | RESPONSE_FLAG
    }

    /// Returns whether the id has this `generation` (taken modulo 2,048).
    #[inline(always)]
    pub(crate) const fn is_of(self, generation: u32) -> bool {
        (self.0 >> Self::INDEX_BITS ^ generation) & ((1 << Self::GENERATION_BITS) - 1) == 0
    }

    pub(crate) const fn index(self) -> u32 {
        self.0 & (Self::MAX_CALLS - 1)
    }
}

/// The piggyback of a response: the outcome of the call at the responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The payload is the handler's reply.
    Ok,
    Dropped,
    Refused,
    /// The responder closes the connection; no handler got the request.
    Closing,
    /// The handler's reply is longer than the call allowed, and is not sent. The value is the
    /// length of the reply in bytes, or [`MAX_TOLD`] if it is longer.
    TooLong(u32),
}

/// Marks a [`Status::TooLong`]; the other bits are the length of the reply in bytes.
const TOO_LONG: u32 = 1 << 31;
/// Maximum number of bytes that a [`Status::TooLong`] reports.
const MAX_TOLD: u32 = TOO_LONG - 1;

impl Status {
    pub(crate) fn too_long(len: usize) -> Self {
        Self::TooLong(u32::try_from(len).map_or(MAX_TOLD, |len| len.min(MAX_TOLD)))
    }

    #[inline(always)]
    pub(crate) const fn to_wire(self) -> u32 {
        match self {
            Self::Ok => 0,
            Self::Dropped => 1,
            Self::Refused => 2,
            Self::Closing => 3,
            Self::TooLong(len) => TOO_LONG | len,
        }
    }

    /// Reads a piggyback word. Returns `None` for a status that this version does not define.
    pub(crate) const fn from_wire(piggyback: u32) -> Option<Self> {
        match piggyback {
            0 => Some(Self::Ok),
            1 => Some(Self::Dropped),
            2 => Some(Self::Refused),
            3 => Some(Self::Closing),
            TOO_LONG.. => Some(Self::TooLong(piggyback & MAX_TOLD)),
            _ => None,
        }
    }
}

#[inline]
fn le_u32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

#[inline]
fn le_u64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of all bytes before a format is written, so that a byte that the encoder forgets is
    /// seen.
    const STALE: u8 = 0xa5;

    #[test]
    fn request_header_has_the_documented_bytes() {
        let mut buffer = [STALE; 16];
        let header = Header {
            call_id: 0x0123_4567,
            piggyback: 3,
            len: 0x0000_0215,
        };
        buffer[..HEADER_SIZE].copy_from_slice(&header.encode());
        let golden = [
            0x67, 0x45, 0x23, 0x01, 0x03, 0, 0, 0, 0x15, 0x02, 0, 0, STALE, STALE, STALE, STALE,
        ];
        assert_eq!(buffer, golden);
        let mut back = [0; HEADER_SIZE];
        back.copy_from_slice(&golden[..HEADER_SIZE]);
        assert_eq!(Header::decode(&back), header);
    }

    #[test]
    fn flow_metadata_has_the_documented_bytes() {
        let mut buffer = [STALE; 40];
        let metadata = FlowMetadata {
            words: FlowWords {
                consumer_pos: 0x0000_0001_0000_0020,
                credit: 0x4_0000,
                batches_received: 0x1122_3344_5566_7788,
            },
            message_count: 7,
            is_closing: true,
        };
        buffer[..FLOW_METADATA_SIZE].copy_from_slice(&metadata.encode());
        #[rustfmt::skip]
        let golden = [
            0x20, 0, 0, 0, 0x01, 0, 0, 0, // consumer_pos
            0, 0, 0x04, 0, 0, 0, 0, 0, // credit
            7, 0, 0, 0, // message_count
            1, 0, 0, 0, // flags
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, // batches_received
            STALE, STALE, STALE, STALE, STALE, STALE, STALE, STALE,
        ];
        assert_eq!(buffer, golden);
        let mut back = [0; FLOW_METADATA_SIZE];
        back.copy_from_slice(&golden[..FLOW_METADATA_SIZE]);
        assert_eq!(FlowMetadata::decode(&back), Ok(metadata));
    }

    #[test]
    fn published_record_has_the_documented_bytes() {
        let record = PublishedRecord {
            words: FlowWords {
                consumer_pos: 0x0000_0001_0000_0020,
                credit: 0x4_0000,
                batches_received: 0x1122_3344_5566_7788,
            },
            heartbeat: 0x0102_0304,
            batches_taken: 0x5566_7789,
        };
        #[rustfmt::skip]
        let golden = [
            0x20, 0, 0, 0, 0x01, 0, 0, 0, // consumer_pos
            0, 0, 0x04, 0, 0, 0, 0, 0, // credit
            4, 3, 2, 1, // heartbeat
            0x89, 0x77, 0x66, 0x55, // batches_taken
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, // batches_received
        ];
        assert_eq!(record.encode(), golden);
        assert_eq!(PublishedRecord::decode(&golden), record);
    }

    #[test]
    fn wrap_marker_has_the_documented_bytes() {
        let marker = FlowMetadata {
            words: FlowWords {
                consumer_pos: 32,
                credit: 64,
                batches_received: 1,
            },
            message_count: WRAP_MESSAGE_COUNT,
            is_closing: false,
        };
        #[rustfmt::skip]
        let golden = [
            32, 0, 0, 0, 0, 0, 0, 0,
            64, 0, 0, 0, 0, 0, 0, 0,
            0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0,
            1, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(marker.encode(), golden);
    }

    #[test]
    fn metadata_with_reserved_bytes_set_is_refused() {
        let metadata = FlowMetadata {
            words: FlowWords::default(),
            message_count: 1,
            is_closing: false,
        };
        for at in 20..24 {
            let mut bytes = metadata.encode();
            bytes[at] = STALE;
            assert_eq!(FlowMetadata::decode(&bytes), Err(ReservedNotZero));
        }
    }

    #[test]
    fn messages_are_padded_to_32_bytes() {
        for (payload, ring_bytes) in [(0, 32), (20, 32), (21, 64), (52, 64), (53, 96)] {
            assert_eq!(padded(payload), ring_bytes, "payload {payload}");
            assert_eq!(internal_allowance(payload), ring_bytes + 32);
        }
        assert_eq!(padded(u64::MAX) % ALIGNMENT, 0);
        assert!(internal_allowance(u64::MAX) > 1 << 63);
    }

    #[test]
    fn response_capacity_inverts_the_internal_allowance() {
        for payload in 0..300 {
            let allowance = internal_allowance(payload);
            let capacity = response_capacity(allowance);
            assert!(capacity >= payload);
            assert_eq!(internal_allowance(capacity), allowance);
            assert!(internal_allowance(capacity + 1) > allowance);
        }
        assert_eq!(response_capacity(32), 0);
    }

    #[test]
    fn imm_counts_32_byte_blocks() {
        assert_eq!(encode_imm(32), 1);
        assert_eq!(encode_imm(1 << 20), 32_768);
        assert_eq!(decode_imm(3), 96);
        assert_eq!(decode_imm(u32::MAX), 137_438_953_440);
    }

    #[test]
    fn call_id_is_response_flag_generation_index() {
        let id = CallId::new(0x2_0001, 0x403);
        assert_eq!(id.to_request(), 0x4032_0001);
        assert_eq!(id.to_response(), 0xc032_0001);
        assert_eq!(CallId::from_wire(0xc032_0001), id);
        assert_eq!(id.index(), 0x2_0001);
        assert_eq!(CallId::new(5, 2_048 + 3), CallId::new(5, 3));
    }

    #[test]
    fn unknown_status_is_no_status() {
        for (status, word) in [
            (Status::Ok, 0),
            (Status::Dropped, 1),
            (Status::Refused, 2),
            (Status::Closing, 3),
            (Status::too_long(0x1234), 0x8000_1234),
            (Status::too_long(usize::MAX), u32::MAX),
        ] {
            assert_eq!(
                (status.to_wire(), Status::from_wire(word)),
                (word, Some(status))
            );
        }
        assert_eq!(Status::from_wire(4), None);
    }
}
