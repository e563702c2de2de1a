//! Every byte format of the protocol, as pure functions and plain values.
//!
//! All integers are little-endian. The tables are in `docs/scalerpc.md` ("Wire format"). The golden
//! vectors below were written from those tables by hand.

use mlx5_rendezvous::record::{field, put, u32_at, u64_at};

/// Bytes of a request header, and of a response header.
pub const HEADER_BYTES: usize = 32;
/// Bytes of the trailer that ends every message.
pub const TRAILER_BYTES: usize = 8;
/// Bytes of an endpoint entry.
pub const ENTRY_BYTES: usize = 64;
/// Bytes of an event slot.
pub const EVENT_SLOT_BYTES: usize = 64;
/// Number of event slots of a client.
pub const EVENT_SLOTS: usize = 3;
/// Bytes of a client's rest word.
pub const REST_WORD_BYTES: usize = 8;
/// Offset in an endpoint entry of the place to which the server READs the client's rest word.
pub const REST_ANSWER_AT: usize = 56;
/// The rest word of a client that rests (S26 of docs/scalerpc.md). It is 0 at any other client.
pub const RESTS: u64 = 1;
/// Magic of a request.
pub const REQUEST_MAGIC: u32 = 0xDEAD_BEEF;
/// Magic of a response.
pub const RESPONSE_MAGIC: u32 = 0xBEEF_DEAD;

const VALID: u32 = 1 << 31;

/// The last eight bytes of a slot, or of half an endpoint entry. A trailer that has arrived proves
/// that its whole message has arrived (S1 of docs/scalerpc.md). The trailer may arrive in two
/// parts, as a packet of a long message can end inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Bytes of the message before the trailer.
    pub len: u32,
    /// [`valid`] of the message's number, which is a sequence number, an epoch or the number of an
    /// announcement; 0: no message has arrived.
    pub valid: u32,
}

impl Trailer {
    /// Returns the trailer as one word.
    pub const fn to_word(self) -> u64 {
        self.len as u64 | (self.valid as u64) << 32
    }

    /// Decodes the word of [`to_word`](Self::to_word).
    pub const fn from_word(word: u64) -> Self {
        Self {
            len: word as u32,
            valid: (word >> 32) as u32,
        }
    }

    /// Returns whether the whole trailer has arrived in a word that was 0 before. The highest bit
    /// of a trailer, which is in its last byte, is always set.
    pub const fn is_whole(self) -> bool {
        self.valid & VALID != 0
    }
}

/// Returns the field `valid` of a trailer for a sequence number: never 0, and different for any two
/// of 2^31 consecutive numbers.
pub const fn valid(sequence: u32) -> u32 {
    VALID | sequence
}

/// The name of one request of one client: its slot, and how often the slot was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReqId {
    /// Number of the slot, which is the same at the client and in the zone.
    pub slot: u8,
    /// Number of the request among the requests of its slot; the first has number 1.
    pub sequence: u32,
}

impl ReqId {
    pub(crate) const fn of(slot: usize, sequence: u32) -> Self {
        Self {
            slot: slot as u8,
            sequence,
        }
    }

    /// Returns the number on the wire.
    pub const fn to_wire(self) -> u64 {
        self.slot as u64 | (self.sequence as u64) << 8
    }
}

/// The header at the start of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Number of the handler.
    pub rpc_type: u16,
    /// Slot and sequence number.
    pub req_id: u64,
    /// Address of the response's slot, which also proves whose request this is (S2).
    pub client_slot_addr: u64,
    /// Key of that memory.
    pub client_slot_rkey: u32,
    /// Bytes of payload after the header.
    pub payload_len: u32,
}

impl RequestHeader {
    /// Returns the header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, &REQUEST_MAGIC.to_le_bytes());
        put(&mut bytes, 4, &self.rpc_type.to_le_bytes());
        put(&mut bytes, 8, &self.req_id.to_le_bytes());
        put(&mut bytes, 16, &self.client_slot_addr.to_le_bytes());
        put(&mut bytes, 24, &self.client_slot_rkey.to_le_bytes());
        put(&mut bytes, 28, &self.payload_len.to_le_bytes());
        bytes
    }

    /// Returns the type of the request in a header, if every other field equals the field of
    /// `self`. Ignores `self.rpc_type`.
    #[inline]
    pub(crate) fn type_if_equal(&self, bytes: &[u8; HEADER_BYTES]) -> Option<u16> {
        let [rpc_type, zero] = [4, 6].map(|at| u16::from_le_bytes(field(bytes, at)));
        let is_equal = u32_at(bytes, 0) == REQUEST_MAGIC
            && zero == 0
            && u64_at(bytes, 8) == self.req_id
            && u64_at(bytes, 16) == self.client_slot_addr
            && u32_at(bytes, 24) == self.client_slot_rkey
            && u32_at(bytes, 28) == self.payload_len;
        is_equal.then_some(rpc_type)
    }
}

/// The outcome of a request at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::FromRepr)]
#[repr(u32)]
pub enum Status {
    /// Success: the payload is the handler's.
    Ok = 0,
    /// The server has no handler of that type.
    UnknownType = 1,
    /// The handler refused the request.
    Refused = 2,
    /// The handler's response is longer than a slot.
    ReplyTooLong = 3,
    /// The handler panicked, or its worker dropped the request.
    Dropped = 4,
}

/// The name of a zone: its pool, and its place in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ZoneId {
    /// Number of the pool: 0 or 1.
    pub pool: u8,
    /// Number of the zone in the pool.
    pub zone: u16,
}

impl ZoneId {
    /// Returns the zone of this number in the pool that serves an epoch (S9).
    pub const fn of(epoch: u64, zone: u16) -> Self {
        Self {
            pool: (epoch % 2) as u8,
            zone,
        }
    }
}

/// An event for a client. A response carries it in addition to its payload, or it is sent without a
/// response, as a bare event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The client may WRITE into this zone.
    Activate {
        /// Epoch of the slice.
        epoch: u64,
        /// The client's zone in the slice, in the epoch's pool.
        zone: u16,
    },
    /// The slice is over; the client must release its zone.
    Switch {
        /// Epoch of the slice.
        epoch: u64,
    },
    /// The server closes: this is its last message to the client (S27).
    Close,
}

/// The header at the start of every response. A bare event is a response header with `req_id` 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Outcome of the request.
    pub status: Status,
    /// `req_id` of the request.
    pub req_id: u64,
    /// Bytes of payload after the header.
    pub payload_len: u32,
    /// The event that the response carries, if any.
    pub event: Option<Event>,
}

impl ResponseHeader {
    /// Returns the header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (event, epoch, zone) = match self.event {
            None => (0_u16, 0, 0),
            Some(Event::Activate { epoch, zone }) => (1, epoch, zone),
            Some(Event::Switch { epoch }) => (2, epoch, 0),
            Some(Event::Close) => (3, 0, 0),
        };
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, &RESPONSE_MAGIC.to_le_bytes());
        put(&mut bytes, 4, &(self.status as u32).to_le_bytes());
        put(&mut bytes, 8, &self.req_id.to_le_bytes());
        put(&mut bytes, 16, &self.payload_len.to_le_bytes());
        put(&mut bytes, 20, &event.to_le_bytes());
        put(&mut bytes, 22, &zone.to_le_bytes());
        put(&mut bytes, 24, &epoch.to_le_bytes());
        bytes
    }

    /// Returns whether these bytes are the header of a successful response to request `req_id`,
    /// with `payload_len` bytes of payload and no event.
    #[inline]
    pub(crate) fn is_plain(bytes: &[u8; HEADER_BYTES], req_id: u64, payload_len: u32) -> bool {
        const _: () = assert!(Status::Ok as u32 == 0);
        u64_at(bytes, 0) == u64::from(RESPONSE_MAGIC)
            && u64_at(bytes, 8) == req_id
            && u64_at(bytes, 16) == u64::from(payload_len)
    }

    /// Reads a header. Returns `None` if this version does not define its magic, status or event.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        if u32_at(bytes, 0) != RESPONSE_MAGIC {
            return None;
        }
        let epoch = u64_at(bytes, 24);
        let event = match u16::from_le_bytes(field(bytes, 20)) {
            0 => None,
            1 => Some(Event::Activate {
                epoch,
                zone: u16::from_le_bytes(field(bytes, 22)),
            }),
            2 => Some(Event::Switch { epoch }),
            3 => Some(Event::Close),
            _ => return None,
        };
        Some(Self {
            status: Status::from_repr(u32_at(bytes, 4))?,
            req_id: u64_at(bytes, 8),
            payload_len: u32_at(bytes, 16),
            event,
        })
    }
}

/// First half of an entry: the client writes nothing more into the zone of this epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Release {
    /// The client.
    pub client: u32,
    /// The low 32 bits of the slice's epoch. They suffice: the server awaits one release of a
    /// client at a time, and knows its epoch.
    pub epoch: u32,
}

impl Release {
    /// Offset of the trailer in the entry.
    pub const TRAILER_AT: usize = 8;
    /// Bytes, the trailer included.
    pub const BYTES: usize = Self::TRAILER_AT + TRAILER_BYTES;

    /// Returns the trailer of the release of an epoch.
    pub const fn trailer(epoch: u32) -> Trailer {
        Trailer {
            len: Self::TRAILER_AT as u32,
            valid: valid(epoch),
        }
    }

    /// Returns the release's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &self.client.to_le_bytes());
        put(&mut bytes, 4, &self.epoch.to_le_bytes());
        put(
            &mut bytes,
            Self::TRAILER_AT,
            &Self::trailer(self.epoch).to_word().to_le_bytes(),
        );
        bytes
    }

    /// Reads a release. Any bytes are a release.
    pub fn decode(bytes: &[u8; Self::TRAILER_AT]) -> Self {
        Self {
            client: u32_at(bytes, 0),
            epoch: u32_at(bytes, 4),
        }
    }
}

/// The second half of an entry: the requests that wait at the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Announcement {
    /// Bit i: the call of slot i was given up. The client also writes this word by itself, at any
    /// time; the server reads it in the entry, without a copy (S28).
    pub given_up: u64,
    /// Bit i: slot i is offered.
    pub slots: u64,
    /// The client.
    pub client: u32,
    /// Number of the announcement among the client's announcements; the first has number 1.
    pub number: u32,
    /// Bytes of the longest message offered, trailer included.
    pub longest: u32,
}

impl Announcement {
    /// Offset in the entry.
    pub const AT: usize = Release::BYTES;
    /// Offset of the trailer in the entry.
    pub const TRAILER_AT: usize = Self::AT + Self::BODY_BYTES;
    /// Bytes without the trailer.
    pub const BODY_BYTES: usize = 32;
    /// Bytes, the trailer included.
    pub const BYTES: usize = Self::BODY_BYTES + TRAILER_BYTES;

    /// Returns the announcement's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        put(&mut bytes, 0, &self.given_up.to_le_bytes());
        put(&mut bytes, 8, &self.slots.to_le_bytes());
        put(&mut bytes, 16, &self.client.to_le_bytes());
        put(&mut bytes, 20, &self.number.to_le_bytes());
        put(&mut bytes, 24, &self.slots.count_ones().to_le_bytes());
        put(&mut bytes, 28, &self.longest.to_le_bytes());
        let trailer = Trailer {
            len: Self::BODY_BYTES as u32,
            valid: valid(self.number),
        };
        put(
            &mut bytes,
            Self::BODY_BYTES,
            &trailer.to_word().to_le_bytes(),
        );
        bytes
    }

    /// Reads an announcement. Returns `None` if the field `batch_size` (bytes 24 to 27) is not the
    /// number of bits in `slots`.
    pub fn decode(bytes: &[u8; Self::BODY_BYTES]) -> Option<Self> {
        let slots = u64_at(bytes, 8);
        (u32_at(bytes, 24) == slots.count_ones()).then_some(Self {
            given_up: u64_at(bytes, 0),
            slots,
            client: u32_at(bytes, 16),
            number: u32_at(bytes, 20),
            longest: u32_at(bytes, 28),
        })
    }
}

const _: () = assert!(HEADER_BYTES == 32 && Release::BYTES + Announcement::BYTES == REST_ANSWER_AT);
const _: () = assert!(REST_ANSWER_AT + REST_WORD_BYTES == ENTRY_BYTES);
const _: () = assert!(
    Announcement::TRAILER_AT == 48
        && Announcement::TRAILER_AT % 8 == 0
        && Release::TRAILER_AT % 8 == 0
);
const _: () = assert!(HEADER_BYTES + TRAILER_BYTES <= EVENT_SLOT_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_header_has_the_documented_bytes() {
        let header = RequestHeader {
            rpc_type: 0x1122,
            req_id: ReqId {
                slot: 7,
                sequence: 0x8765_4321,
            }
            .to_wire(),
            client_slot_addr: 0x0102_0304_0506_0708,
            client_slot_rkey: 0xa1b2_c3d4,
            payload_len: 0x0001_0002,
        };
        #[rustfmt::skip]
        let golden = [
            0xef, 0xbe, 0xad, 0xde, 0x22, 0x11, 0, 0,
            7, 0x21, 0x43, 0x65, 0x87, 0, 0, 0,
            8, 7, 6, 5, 4, 3, 2, 1,
            0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 1, 0,
        ];
        assert_eq!(header.encode(), golden);
        assert_eq!(header.type_if_equal(&golden), Some(0x1122));
        for at in (0..32).filter(|at| ![4, 5].contains(at)) {
            let mut bad = golden;
            bad[at] ^= 1;
            assert_eq!(header.type_if_equal(&bad), None, "byte {at}");
        }
    }

    #[test]
    fn a_response_header_has_the_documented_bytes() {
        let event = Some(Event::Activate {
            epoch: 0x0102_0304_0a0b_0c0d,
            zone: 0xfedc,
        });
        let header = ResponseHeader {
            status: Status::ReplyTooLong,
            req_id: 0x0305,
            payload_len: 9,
            event,
        };
        #[rustfmt::skip]
        let golden = [
            0xad, 0xde, 0xef, 0xbe, 3, 0, 0, 0,
            5, 3, 0, 0, 0, 0, 0, 0,
            9, 0, 0, 0, 1, 0, 0xdc, 0xfe,
            0x0d, 0x0c, 0x0b, 0x0a, 4, 3, 2, 1,
        ];
        assert_eq!(header.encode(), golden);
        assert_eq!(ResponseHeader::decode(&golden), Some(header));
        for magic_status_or_event in [0, 4, 20] {
            let mut bad = golden;
            bad[magic_status_or_event] = 7;
            assert_eq!(ResponseHeader::decode(&bad), None);
        }
        let switch = ResponseHeader {
            event: Some(Event::Switch { epoch: 3 }),
            ..header
        };
        assert_eq!(ResponseHeader::decode(&switch.encode()), Some(switch));
    }

    #[test]
    fn an_entry_has_the_documented_bytes() {
        let release = Release {
            client: 0x0102,
            epoch: 0x0304,
        };
        assert_eq!(
            release.encode(),
            [2, 1, 0, 0, 4, 3, 0, 0, 8, 0, 0, 0, 4, 3, 0, 0x80]
        );
        assert_eq!(Release::decode(&[2, 1, 0, 0, 4, 3, 0, 0]), release);
        let announcement = Announcement {
            given_up: 0x1000,
            slots: 0b1011,
            client: 5,
            number: 6,
            longest: 64,
        };
        #[rustfmt::skip]
        let golden = [
            0, 0x10, 0, 0, 0, 0, 0, 0,
            0b1011, 0, 0, 0, 0, 0, 0, 0,
            5, 0, 0, 0, 6, 0, 0, 0,
            3, 0, 0, 0, 64, 0, 0, 0,
            32, 0, 0, 0, 6, 0, 0, 0x80,
        ];
        assert_eq!(announcement.encode(), golden);
        let mut body = [0; 32];
        body.copy_from_slice(&golden[..32]);
        assert_eq!(Announcement::decode(&body), Some(announcement));
        body[24] = 2;
        assert_eq!(Announcement::decode(&body), None);
    }

    #[test]
    fn a_request_number_is_slot_and_sequence() {
        let id = ReqId {
            slot: 63,
            sequence: u32::MAX,
        };
        assert_eq!(id.to_wire(), 0xff_ffff_ff3f);
        assert_eq!(
            Trailer::from_word(
                Trailer {
                    len: 40,
                    valid: valid(1)
                }
                .to_word()
            ),
            Trailer {
                len: 40,
                valid: 0x8000_0001
            }
        );
    }
}
