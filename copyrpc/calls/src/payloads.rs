//! The values that travel with the methods of a service, and their bytes.

use std::cell::Cell;
use std::convert::Infallible;

/// A value that arguments and results consist of. [`payload!`](crate::payload!) implements it for
/// structs and enums.
pub trait Payload: Sized {
    /// Appends the bytes of the value. A sequence or a string has at most `u32::MAX` elements.
    fn encode(&self, into: &mut Vec<u8>);

    /// Takes a value from the front of `bytes`; `None` if the bytes are not a value of this type,
    /// or have sequences nested deeper than 128. The bytes may be anything.
    fn decode(bytes: &mut &[u8]) -> Option<Self>;

    /// Appends the bytes of all values.
    #[doc(hidden)]
    fn encode_all(values: &[Self], into: &mut Vec<u8>) {
        values.iter().for_each(|value| value.encode(into));
    }

    /// Decodes `count` values.
    #[doc(hidden)]
    fn decode_all(count: usize, bytes: &mut &[u8]) -> Option<Vec<Self>> {
        let mut values = || (0..count).map(|_| Self::decode(bytes)).collect();
        // Only a type that owns memory can contain values of itself, so only for such a type the
        // depth is counted.
        if std::mem::needs_drop::<Self>() {
            deeper(values)
        } else {
            values()
        }
    }
}

/// Maximum depth of sequences in sequences: a type may contain itself, and each level takes stack.
/// Deeper bytes are no value.
const MAX_DEPTH: u32 = 128;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Decodes one level deeper, unless that is too deep.
fn deeper<T>(decode: impl FnOnce() -> Option<T>) -> Option<T> {
    /// Ends the level, also when a payload's own function panics.
    struct Level(u32);
    impl Drop for Level {
        fn drop(&mut self) {
            DEPTH.set(self.0);
        }
    }
    let level = Level(DEPTH.get());
    DEPTH.set(level.0 + 1);
    if level.0 < MAX_DEPTH { decode() } else { None }
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Payload for $type {
            #[inline]
            fn encode(&self, into: &mut Vec<u8>) {
                into.extend_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn decode(bytes: &mut &[u8]) -> Option<Self> {
                let (number, rest) = bytes.split_first_chunk()?;
                *bytes = rest;
                Some(Self::from_le_bytes(*number))
            }
        }
    )*};
}
numbers!(u16 u32 u64 u128 i8 i16 i32 i64 i128 f32 f64);

impl Payload for u8 {
    #[inline]
    fn encode(&self, into: &mut Vec<u8>) {
        into.push(*self);
    }

    #[inline]
    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        Some(*byte)
    }

    fn encode_all(values: &[Self], into: &mut Vec<u8>) {
        into.extend_from_slice(values);
    }

    fn decode_all(count: usize, bytes: &mut &[u8]) -> Option<Vec<Self>> {
        let (values, rest) = bytes.split_at_checked(count)?;
        *bytes = rest;
        Some(values.to_vec())
    }
}

impl Payload for bool {
    #[inline]
    fn encode(&self, into: &mut Vec<u8>) {
        into.push((*self).into());
    }

    #[inline]
    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        match u8::decode(bytes)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

/// Encoded as the number of values, u32, and the values. Each value has at least one byte.
impl<T: Payload> Payload for Vec<T> {
    fn encode(&self, into: &mut Vec<u8>) {
        // For a sequence that is too long, the encoded number is too small, so the other end finds
        // bytes after the sequence.
        u32::try_from(self.len()).unwrap_or(u32::MAX).encode(into);
        T::encode_all(self, into);
    }

    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        let count = u32::decode(bytes)? as usize;
        // Each value has at least one byte, so a false number does not make the loop long.
        if count > bytes.len() {
            None
        } else {
            T::decode_all(count, bytes)
        }
    }
}

impl Payload for String {
    fn encode(&self, into: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).encode(into);
        into.extend_from_slice(self.as_bytes());
    }

    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        Self::from_utf8(Vec::decode(bytes)?).ok()
    }
}

impl<T: Payload> Payload for Option<T> {
    fn encode(&self, into: &mut Vec<u8>) {
        self.is_some().encode(into);
        self.iter().for_each(|value| value.encode(into));
    }

    fn decode(bytes: &mut &[u8]) -> Option<Self> {
        Some(if bool::decode(bytes)? {
            Some(T::decode(bytes)?)
        } else {
            None
        })
    }
}

/// The error of a method that cannot fail.
impl Payload for Infallible {
    fn encode(&self, _: &mut Vec<u8>) {
        match *self {}
    }

    fn decode(_: &mut &[u8]) -> Option<Self> {
        None
    }
}

macro_rules! tuples {
    ($(($($field:ident)*))*) => {$(
        #[allow(non_snake_case, unused_variables, clippy::unused_unit, reason = "the fields have the names of their types; there may be none")]
        impl<$($field: Payload),*> Payload for ($($field,)*) {
            fn encode(&self, into: &mut Vec<u8>) {
                let ($($field,)*) = self;
                $($field.encode(into);)*
            }

            fn decode(bytes: &mut &[u8]) -> Option<Self> {
                Some(($($field::decode(bytes)?,)*))
            }
        }
    )*};
}
tuples!(() (A) (A B) (A B C) (A B C D) (A B C D E) (A B C D E F));

/// Decodes a value from all of the bytes; `None` if bytes are left.
#[doc(hidden)]
#[must_use]
pub fn decode<T: Payload>(mut bytes: &[u8]) -> Option<T> {
    T::decode(&mut bytes).filter(|_| bytes.is_empty())
}

/// Makes a struct of payloads, or an enum without fields, a [`Payload`](crate::methods::Payload).
/// Both ends must agree on the order of the fields and on the numbers of the variants, 0 to 255.
/// [`methods`](crate::methods) has an example.
#[macro_export]
macro_rules! payload {
    ($(#[$attribute:meta])* $visibility:vis struct $name:ident {
        $($(#[$of_field:meta])* $of:vis $field:ident: $type:ty),* $(,)?
    }) => {
        $(#[$attribute])*
        $visibility struct $name {
            $($(#[$of_field])* $of $field: $type,)*
        }

        impl $crate::payloads::Payload for $name {
            fn encode(&self, into: &mut ::std::vec::Vec<u8>) {
                $($crate::payloads::Payload::encode(&self.$field, into);)*
            }

            fn decode(bytes: &mut &[u8]) -> ::std::option::Option<Self> {
                Some(Self { $($field: $crate::payloads::Payload::decode(bytes)?,)* })
            }
        }
    };
    ($(#[$attribute:meta])* $visibility:vis enum $name:ident {
        $($(#[$of_variant:meta])* $variant:ident = $number:literal),* $(,)?
    }) => {
        $(#[$attribute])*
        $visibility enum $name {
            $($(#[$of_variant])* $variant = $number,)*
        }

        impl $crate::payloads::Payload for $name {
            fn encode(&self, into: &mut ::std::vec::Vec<u8>) {
                let number: u8 = match self {
                    $(Self::$variant => $number,)*
                };
                into.push(number);
            }

            fn decode(bytes: &mut &[u8]) -> ::std::option::Option<Self> {
                match <u8 as $crate::payloads::Payload>::decode(bytes)? {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    payload! {
        #[derive(Debug, PartialEq)]
        enum Problem {
            Missing = 3,
        }
    }

    payload! {
        #[derive(Debug, PartialEq)]
        struct Tree {
            children: Vec<Tree>,
        }
    }

    /// Each level takes 4 bytes of a peer and a frame of the stack.
    #[test]
    fn a_value_that_is_too_deep_is_none() {
        let of_depth = |levels: usize| [[1, 0, 0, 0].repeat(levels - 1), vec![0; 4]].concat();
        let mut bytes = Vec::new();
        decode::<Tree>(&of_depth(128)).unwrap().encode(&mut bytes);
        assert_eq!(bytes, of_depth(128));
        for levels in [129, 1 << 20] {
            assert_eq!(decode::<Tree>(&of_depth(levels)), None);
            assert_eq!(DEPTH.get(), 0);
        }
    }

    #[test]
    fn bytes_that_are_no_value_are_none() {
        assert_eq!(
            decode::<Vec<()>>(&[0xff; 4]),
            None,
            "a number of elements is at most that of the bytes"
        );
        assert_eq!(
            decode::<Vec<u64>>(&[8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]),
            None
        );
        assert_eq!(decode::<String>(&[1, 0, 0, 0, 0xff]), None);
        assert_eq!(
            (
                decode::<bool>(&[2]),
                decode::<Problem>(&[4]),
                decode::<Infallible>(&[])
            ),
            (None, None, None)
        );
        assert_eq!(decode::<Problem>(&[3]), Some(Problem::Missing));
    }
}
