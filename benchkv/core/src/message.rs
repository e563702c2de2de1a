//! The messages: a 24-byte request and a 16-byte response, the same bytes on every path.
//!
//! They hold the first 8 bytes of a value. The rest of a longer value, its *tail*, is in a
//! [place](crate::values) of the rank while the message is within the rank. Between ranks, the tail
//! follows the message: after a put, and after the answer to a get that found a value.
//!
//! The structs hold any bytes. Only [`Request::op`] and [`Response::outcome`] decode the bytes,
//! once, to an enum. An enum on the wire would be undefined behaviour as soon as a peer wrote a tag
//! that does not exist.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

#[cfg(target_endian = "big")]
compile_error!("the wire format is the memory format of a little-endian machine");

const PUT: u32 = 1;
const GET: u32 = 2;
const OP_BITS: u32 = 8;

const PUT_OK: u64 = 1;
const GET_OK: u64 = 2;
const GET_NOT_FOUND: u64 = 3;
const REFUSED: u64 = 4;

/// A request to the store of one rank.
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 1 | operation: 1 put, 2 get |
/// | 1 | 3 | place of the tail in the rank where the message is; 0 if values have no tails |
/// | 4 | 4 | rank whose store is meant |
/// | 8 | 8 | key |
/// | 16 | 8 | value of a put, its first 8 bytes; 0 in a get |
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[doc(alias = "RemoteRequest")]
pub struct Request {
    op_and_place: u32,
    rank: u32,
    key: u64,
    value: u64,
}

/// The answer to a [`Request`].
///
/// | offset | size | field |
/// |---|---|---|
/// | 0 | 8 | status: 1 put done, 2 found, 3 not found, 4 refused |
/// | 8 | 8 | first 8 bytes of the value that a get found; else 0 |
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[doc(alias = "RemoteResponse")]
pub struct Response {
    status: u64,
    value: u64,
}

const _: () = assert!(size_of::<Request>() == 24 && align_of::<Request>() == 8);
const _: () = assert!(size_of::<Response>() == 16 && align_of::<Response>() == 8);

/// The operation of a valid request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Store `value` under `key`.
    Put {
        /// The key.
        key: u64,
        /// The first 8 bytes of the value.
        value: u64,
    },
    /// Return the value of `key`.
    Get {
        /// The key.
        key: u64,
    },
}

/// The outcome in a valid response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The value was stored.
    PutOk,
    /// The key has this value.
    GetOk {
        /// The first 8 bytes of the value.
        value: u64,
    },
    /// The key has no value.
    NotFound,
    /// The store does not hold the key, or the request was malformed.
    Refused,
}

impl Request {
    /// Makes a put to the store of `rank`.
    pub const fn put(rank: u32, key: u64, value: u64) -> Self {
        Self {
            op_and_place: PUT,
            rank,
            key,
            value,
        }
    }

    /// Makes a get from the store of `rank`.
    pub const fn get(rank: u32, key: u64) -> Self {
        Self {
            op_and_place: GET,
            rank,
            key,
            value: 0,
        }
    }

    /// Returns the request with the tail of its value at `place`, which must be below 2^24.
    pub const fn at(self, place: u32) -> Self {
        Self {
            op_and_place: (self.op_and_place % (1 << OP_BITS)) | (place << OP_BITS),
            ..self
        }
    }

    /// Returns the place of the tail of the request's value, as the sender claims.
    pub const fn place(&self) -> u32 {
        self.op_and_place >> OP_BITS
    }

    /// Returns whether the request is a put.
    pub const fn is_put(&self) -> bool {
        self.op_and_place % (1 << OP_BITS) == PUT
    }

    /// Returns the number of bytes that follow the request between ranks, in a job whose tails have
    /// `tail_bytes` bytes.
    pub const fn bytes_behind(&self, tail_bytes: usize) -> usize {
        if self.is_put() { tail_bytes } else { 0 }
    }

    /// Returns the rank whose store is addressed, as the sender claims: below the number of ranks
    /// only if the sender is sound.
    pub const fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the key, as the sender claims.
    pub const fn key(&self) -> u64 {
        self.key
    }

    /// Returns the operation; `None` if the bytes are not a request.
    pub const fn op(&self) -> Option<Op> {
        match self.op_and_place % (1 << OP_BITS) {
            PUT => Some(Op::Put {
                key: self.key,
                value: self.value,
            }),
            GET if self.value == 0 => Some(Op::Get { key: self.key }),
            _ => None,
        }
    }
}

impl Response {
    /// Makes the response that reports `outcome`.
    pub const fn new(outcome: Outcome) -> Self {
        let (status, value) = match outcome {
            Outcome::PutOk => (PUT_OK, 0),
            Outcome::GetOk { value } => (GET_OK, value),
            Outcome::NotFound => (GET_NOT_FOUND, 0),
            Outcome::Refused => (REFUSED, 0),
        };
        Self { status, value }
    }

    /// Returns the number of bytes that follow the answer between ranks, in a job whose tails have
    /// `tail_bytes` bytes.
    pub const fn bytes_behind(&self, tail_bytes: usize) -> usize {
        if self.status == GET_OK { tail_bytes } else { 0 }
    }

    /// Returns the outcome; `None` if the bytes are not a response.
    pub const fn outcome(&self) -> Option<Outcome> {
        match (self.status, self.value) {
            (GET_OK, value) => Some(Outcome::GetOk { value }),
            (PUT_OK, 0) => Some(Outcome::PutOk),
            (GET_NOT_FOUND, 0) => Some(Outcome::NotFound),
            (REFUSED, 0) => Some(Outcome::Refused),
            _ => None,
        }
    }

    /// Returns the outcome of a put (`is_put`) or a get; `None` if the request was refused, or if
    /// the bytes do not answer such a request.
    #[inline(always)]
    pub const fn answer_to(&self, is_put: bool) -> Option<Outcome> {
        match (is_put, self.status, self.value) {
            (true, PUT_OK, 0) => Some(Outcome::PutOk),
            (false, GET_OK, value) => Some(Outcome::GetOk { value }),
            (false, GET_NOT_FOUND, 0) => Some(Outcome::NotFound),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_bytes_are_those_of_the_table() {
        let bytes = [
            1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0x80, 4, 0, 0, 0, 0, 0, 0, 0x40,
        ];
        assert_eq!(
            Request::put(2, 0x8000_0000_0000_0003, 0x4000_0000_0000_0004).as_bytes(),
            bytes
        );
        let read = Request::read_from_bytes(&bytes).unwrap();
        assert_eq!(
            read.op(),
            Some(Op::Put {
                key: 0x8000_0000_0000_0003,
                value: 0x4000_0000_0000_0004
            })
        );
        assert_eq!(
            Request::get(7, 9).as_bytes()[..16],
            [2, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn every_outcome_reads_back() {
        for outcome in [
            Outcome::PutOk,
            Outcome::GetOk { value: u64::MAX },
            Outcome::NotFound,
            Outcome::Refused,
        ] {
            let response = Response::new(outcome);
            assert_eq!(
                Response::read_from_bytes(response.as_bytes())
                    .unwrap()
                    .outcome(),
                Some(outcome)
            );
        }
    }

    #[test]
    fn an_outcome_answers_a_put_or_a_get_and_a_refusal_neither() {
        for (outcome, put, get) in [
            (Outcome::PutOk, true, false),
            (Outcome::GetOk { value: 7 }, false, true),
            (Outcome::NotFound, false, true),
            (Outcome::Refused, false, false),
        ] {
            let answer = |is_put| Response::new(outcome).answer_to(is_put);
            assert_eq!(
                (answer(true), answer(false)),
                (put.then_some(outcome), get.then_some(outcome))
            );
            let garbled = Response {
                value: 9,
                ..Response::new(outcome)
            };
            let is_found = matches!(outcome, Outcome::GetOk { .. });
            assert_eq!(
                (garbled.answer_to(true), garbled.answer_to(false)),
                (None, is_found.then_some(Outcome::GetOk { value: 9 }))
            );
        }
    }

    #[test]
    fn garbage_has_no_meaning() {
        for seed in 0..=255 {
            let request = Request::read_from_bytes(&[seed; 24]).unwrap();
            let response = Response::read_from_bytes(&[seed; 16]).unwrap();
            assert_eq!(
                (request.op().is_some(), response.outcome()),
                (seed == PUT as u8, None),
                "{seed}"
            );
            assert_eq!(
                request.place(),
                u32::from(seed) * 0x0001_0101,
                "{seed}: a reader that takes it for a place looks whether there is one"
            );
        }
    }

    #[test]
    fn a_place_changes_nothing_else_and_only_values_have_tails() {
        let last = (1 << 24) - 1;
        for request in [Request::put(1, 2, 3), Request::get(1, 2)] {
            let placed = request.at(7).at(last);
            assert_eq!(
                (placed.place(), placed.op(), placed.rank(), placed.at(0)),
                (last, request.op(), 1, request)
            );
        }
        assert_eq!(
            [Request::put(1, 2, 3).at(last), Request::get(1, 2).at(last)]
                .map(|request| request.bytes_behind(9)),
            [9, 0]
        );
        let outcomes = [
            Outcome::PutOk,
            Outcome::GetOk { value: 0 },
            Outcome::NotFound,
            Outcome::Refused,
        ];
        assert_eq!(
            outcomes.map(|outcome| Response::new(outcome).bytes_behind(9)),
            [0, 9, 0, 0]
        );
    }
}
