//! The deserializer, for bytes that a peer may have made up.

use std::any::Any;
use std::fmt::Display;

use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IntoDeserializer, MapAccess, SeqAccess,
    VariantAccess, Visitor,
};

use super::{MAX_DEPTH, Payload, PayloadError};

type Result<T> = std::result::Result<T, PayloadError>;

/// Values in bytes, one after another.
#[derive(Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    /// Number of elements that further sequences and maps may have together. Each sequence has a
    /// length and each element has at least a byte, so a message has more bytes than elements.
    elements: usize,
    levels: u32,
}

impl Error for PayloadError {
    fn custom<T: Display>(_: T) -> Self {
        Self::Refused
    }
}

impl<'a> Decoder<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            elements: bytes.len(),
            levels: MAX_DEPTH,
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Decodes the next value.
    ///
    /// # Errors
    /// [`PayloadError`].
    #[inline]
    pub fn value<T: Payload>(&mut self) -> Result<T> {
        let mut value: Result<T> = Err(PayloadError::Short);
        if let Some(bytes) = (&mut value as &mut dyn Any).downcast_mut::<Result<Vec<u8>>>() {
            *bytes = self.slice().map(<[u8]>::to_vec);
        } else {
            value = T::deserialize(self);
        }
        value
    }

    #[inline]
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (array, rest) = self.bytes.split_first_chunk().ok_or(PayloadError::Short)?;
        self.bytes = rest;
        Ok(*array)
    }

    #[inline]
    fn len(&mut self) -> Result<usize> {
        Ok(u32::from_le_bytes(self.take()?) as usize)
    }

    #[inline]
    fn chunk(&mut self, len: usize) -> Result<&'a [u8]> {
        let (chunk, rest) = self
            .bytes
            .split_at_checked(len)
            .ok_or(PayloadError::Short)?;
        self.bytes = rest;
        Ok(chunk)
    }

    /// Decodes a length and as many bytes.
    #[inline]
    fn slice(&mut self) -> Result<&'a [u8]> {
        let len = self.len()?;
        self.chunk(len)
    }

    #[inline]
    fn str(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.slice()?).map_err(|_| PayloadError::Malformed)
    }

    #[inline]
    fn deeper<T>(&mut self, decode: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.levels = self.levels.checked_sub(1).ok_or(PayloadError::TooDeep)?;
        let value = decode(self)?;
        self.levels += 1;
        Ok(value)
    }

    /// Decodes the number of elements of a sequence or a map.
    #[inline]
    fn elements(&mut self) -> Result<usize> {
        let len = self.len()?;
        self.elements = self
            .elements
            .checked_sub(len)
            .ok_or(PayloadError::TooMany)?;
        Ok(len)
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $type:ty;)*) => {$(
        #[inline]
        fn $method<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
            visitor.$visit(<$type>::from_le_bytes(self.take()?))
        }
    )*};
}

macro_rules! slices {
    ($($method:ident $visit:ident $take:ident)*) => {$(
        #[inline]
        fn $method<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
            visitor.$visit(self.$take()?)
        }
    )*};
}

macro_rules! unsupported {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'a>>(self, _: V) -> Result<V::Value> {
            Err(PayloadError::Unsupported)
        }
    )*};
}

impl<'a> Deserializer<'a> for &mut Decoder<'a> {
    type Error = PayloadError;

    fn is_human_readable(&self) -> bool {
        false
    }

    numbers! {
        deserialize_u8 visit_u8 u8;
        deserialize_u16 visit_u16 u16;
        deserialize_u32 visit_u32 u32;
        deserialize_u64 visit_u64 u64;
        deserialize_u128 visit_u128 u128;
        deserialize_i8 visit_i8 i8;
        deserialize_i16 visit_i16 i16;
        deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
        deserialize_i128 visit_i128 i128;
        deserialize_f32 visit_f32 f32;
        deserialize_f64 visit_f64 f64;
    }

    slices! {
        deserialize_str visit_borrowed_str str
        deserialize_string visit_borrowed_str str
        deserialize_bytes visit_borrowed_bytes slice
        deserialize_byte_buf visit_borrowed_bytes slice
    }

    unsupported! { deserialize_any deserialize_identifier deserialize_ignored_any }

    #[inline]
    fn deserialize_bool<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        match self.take()? {
            [0] => visitor.visit_bool(false),
            [1] => visitor.visit_bool(true),
            _ => Err(PayloadError::Malformed),
        }
    }

    fn deserialize_char<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        let len = match self.bytes.first() {
            Some(0xf0..) => 4,
            Some(0xe0..) => 3,
            Some(0x80..) => 2,
            _ => 1,
        };
        let char = self.chunk(len)?;
        let char = std::str::from_utf8(char).map_err(|_| PayloadError::Malformed)?;
        visitor.visit_char(char.chars().next().ok_or(PayloadError::Malformed)?)
    }

    #[inline]
    fn deserialize_option<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        match self.take()? {
            [0] => visitor.visit_none(),
            [1] => self.deeper(|decoder| visitor.visit_some(decoder)),
            _ => Err(PayloadError::Malformed),
        }
    }

    #[inline]
    fn deserialize_unit<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_unit_struct<V: Visitor<'a>>(self, _: &str, visitor: V) -> Result<V::Value> {
        visitor.visit_unit()
    }

    #[inline]
    fn deserialize_newtype_struct<V: Visitor<'a>>(self, _: &str, visitor: V) -> Result<V::Value> {
        self.deeper(|decoder| visitor.visit_newtype_struct(decoder))
    }

    #[inline]
    fn deserialize_seq<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        let left = self.elements()?;
        self.deserialize_tuple(left, visitor)
    }

    #[inline]
    fn deserialize_tuple<V: Visitor<'a>>(self, left: usize, visitor: V) -> Result<V::Value> {
        self.deeper(|decoder| visitor.visit_seq(Elements { decoder, left }))
    }

    #[inline]
    fn deserialize_tuple_struct<V: Visitor<'a>>(
        self,
        _: &str,
        len: usize,
        visitor: V,
    ) -> Result<V::Value> {
        self.deserialize_tuple(len, visitor)
    }

    #[inline]
    fn deserialize_map<V: Visitor<'a>>(self, visitor: V) -> Result<V::Value> {
        let left = self.elements()?;
        self.deeper(|decoder| visitor.visit_map(Elements { decoder, left }))
    }

    #[inline]
    fn deserialize_struct<V: Visitor<'a>>(
        self,
        _: &str,
        fields: &[&str],
        visitor: V,
    ) -> Result<V::Value> {
        self.deserialize_tuple(fields.len(), visitor)
    }

    #[inline]
    fn deserialize_enum<V: Visitor<'a>>(self, _: &str, _: &[&str], visitor: V) -> Result<V::Value> {
        self.deeper(|decoder| visitor.visit_enum(decoder))
    }
}

/// The fields or elements of a value.
struct Elements<'d, 'a> {
    decoder: &'d mut Decoder<'a>,
    left: usize,
}

impl<'a> SeqAccess<'a> for Elements<'_, 'a> {
    type Error = PayloadError;

    #[inline]
    fn next_element_seed<T: DeserializeSeed<'a>>(&mut self, seed: T) -> Result<Option<T::Value>> {
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => return Ok(None),
        }
        seed.deserialize(&mut *self.decoder).map(Some)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'a> MapAccess<'a> for Elements<'_, 'a> {
    type Error = PayloadError;

    #[inline]
    fn next_key_seed<K: DeserializeSeed<'a>>(&mut self, seed: K) -> Result<Option<K::Value>> {
        self.next_element_seed(seed)
    }

    #[inline]
    fn next_value_seed<V: DeserializeSeed<'a>>(&mut self, seed: V) -> Result<V::Value> {
        seed.deserialize(&mut *self.decoder)
    }

    #[inline]
    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'a> EnumAccess<'a> for &mut Decoder<'a> {
    type Error = PayloadError;
    type Variant = Self;

    #[inline]
    fn variant_seed<V: DeserializeSeed<'a>>(self, seed: V) -> Result<(V::Value, Self)> {
        let index = u32::from_le_bytes(self.take()?);
        Ok((seed.deserialize(index.into_deserializer())?, self))
    }
}

impl<'a> VariantAccess<'a> for &mut Decoder<'a> {
    type Error = PayloadError;

    #[inline]
    fn unit_variant(self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn newtype_variant_seed<T: DeserializeSeed<'a>>(self, seed: T) -> Result<T::Value> {
        seed.deserialize(self)
    }

    #[inline]
    fn tuple_variant<V: Visitor<'a>>(self, len: usize, visitor: V) -> Result<V::Value> {
        self.deserialize_tuple(len, visitor)
    }

    #[inline]
    fn struct_variant<V: Visitor<'a>>(self, fields: &[&str], visitor: V) -> Result<V::Value> {
        self.deserialize_tuple(fields.len(), visitor)
    }
}
