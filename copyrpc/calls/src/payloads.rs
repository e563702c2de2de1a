//! The values that travel with the methods of a service, and their bytes.
//!
//! # The bytes
//! Each value has the bytes of [bincode 1](https://docs.rs/bincode/1), `bincode::serialize`, except
//! that lengths have 4 bytes: all is little-endian, without padding, and the bytes do not show the
//! types.
//!
//! | value | bytes |
//! |---|---|
//! | number | its own bytes; 8 for `usize` and `isize` |
//! | `bool` | 0 or 1 |
//! | `char` | its UTF-8 |
//! | `Option` | 0, or 1 and the value |
//! | string, bytes, sequence, map | the number of bytes or elements u32, and these; an element of a map is key and value |
//! | struct, tuple, array | its fields in their order |
//! | enum | the index of the variant from 0 u32, and its fields |
//!
//! Arguments are one after another, like the fields of a struct. So both ends must agree on the
//! order of arguments, fields and variants. A fixed length makes a number cost a copy of its bytes:
//! a call with three numbers takes about 240 instructions less than with the varints of Postcard.
//!
//! # What is refused
//! The bytes of a peer may be anything. They are refused, with a [`PayloadError`], if the value does
//! not take all of them, or if
//! - values are nested deeper than [`MAX_DEPTH`], as each level takes stack;
//! - the lengths of all sequences and maps add up to more elements than the message has bytes: so
//!   no message takes more memory or time for elements than a message of its length can need. Only
//!   a sequence of values without bytes, such as `Vec<()>`, may rightly have more.
//!
//! # Byte buffers
//! A `Vec<u8>` that is an argument or a result is copied as a whole. Inside of other types, serde
//! handles it byte by byte, which is slower and gives the same bytes, unless the field has
//! `#[serde(with = "serde_bytes")]` of the crate `serde_bytes`, or is a `bytes::Bytes`.

mod decoder;
mod encoder;

use std::any::Any;

pub use decoder::Decoder;
use encoder::Encoder;
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};

/// A value that a method takes or returns: any type with the traits of serde, such as by
/// `#[derive(Serialize, Deserialize)]`. Two kinds of types do not work: those that need a format
/// that shows the types of values (`#[serde(flatten)]`, `#[serde(untagged)]`, `#[serde(tag = ..)]`,
/// `serde_json::Value`), and those that leave out fields (`#[serde(skip_serializing_if = ..)]`).
pub trait Payload: Serialize + DeserializeOwned + 'static {}

impl<T: Serialize + DeserializeOwned + 'static> Payload for T {}

/// Maximum depth of nesting: number of structs, tuples, enums, `Option`s, sequences and maps that
/// contain a value.
pub const MAX_DEPTH: u32 = 256;

/// The reason why a value has no bytes, or bytes are no value of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum PayloadError {
    /// The bytes end before the value does.
    #[error("the bytes end before the value does")]
    Short = 1,
    /// Bytes are left behind the value.
    #[error("bytes are left behind the value")]
    Long = 2,
    /// A number, `bool`, `char`, string or `Option` has bytes that no value of its type has.
    #[error("a number, bool, char, string or Option has bytes that no value of its type has")]
    Malformed = 3,
    /// Values are nested deeper than [`MAX_DEPTH`].
    #[error("values are in values deeper than the {MAX_DEPTH} levels that are decoded")]
    TooDeep = 4,
    /// Sequences and maps have more elements than there are bytes, or one has more than `u32::MAX`.
    #[error(
        "there are more elements than bytes, each of which has to have one or more, or than {}",
        u32::MAX
    )]
    TooMany = 5,
    /// The type refuses: its `Serialize` refuses the value, or its `Deserialize` refuses the bytes,
    /// such as the index of a variant that it does not have.
    #[error("the type refuses the value, such as a variant that it does not have")]
    Refused = 6,
    /// The type needs a format that shows types or fields, or does not know the length of a
    /// sequence before its end.
    #[error(
        "the type needs a format that tells types or fields (serde's untagged, flatten, tag, skip_serializing_if, or deserialize_any)"
    )]
    Unsupported = 7,
    /// The server has a [`Reassembler`](crate::parts::Reassembler), and the request came as a whole.
    #[error("the server takes requests in parts: put a parts::Client around the client")]
    NotInParts = 8,
}

impl PayloadError {
    /// Returns the error that a peer sent as a byte.
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Short,
            Self::Long,
            Self::Malformed,
            Self::TooDeep,
            Self::TooMany,
            Self::Refused,
            Self::Unsupported,
            Self::NotInParts,
        ]
        .into_iter()
        .find(|error| *error as u8 == byte)
    }
}

/// Appends the bytes of a value.
///
/// # Errors
/// [`PayloadError::Refused`], [`PayloadError::Unsupported`], [`PayloadError::TooMany`].
#[inline]
pub fn encode<T: Payload>(value: &T, into: &mut Vec<u8>) -> Result<(), PayloadError> {
    let mut encoder = Encoder(into);
    match (value as &dyn Any).downcast_ref::<Vec<u8>>() {
        Some(bytes) => encoder.serialize_bytes(bytes),
        None => value.serialize(&mut encoder),
    }
}

/// Decodes a value from all of the bytes.
///
/// # Errors
/// [`PayloadError`].
#[inline]
pub fn decode<T: Payload>(bytes: &[u8]) -> Result<T, PayloadError> {
    decode_all(bytes, |from| from.value())
}

/// Decodes values from all of the bytes.
#[doc(hidden)]
#[inline]
pub fn decode_all<T>(
    bytes: &[u8],
    values: impl FnOnce(&mut Decoder<'_>) -> Result<T, PayloadError>,
) -> Result<T, PayloadError> {
    let mut decoder = Decoder::new(bytes);
    let values = values(&mut decoder)?;
    if decoder.is_empty() {
        Ok(values)
    } else {
        Err(PayloadError::Long)
    }
}

#[cfg(test)]
mod tests;
