//! The serializer.

use std::fmt::Display;

use serde::Serialize;
use serde::ser::{
    Error, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant, Serializer,
};

use super::PayloadError;

type Result<T> = std::result::Result<T, PayloadError>;

/// A serializer that appends the bytes of a value to the vector.
pub(super) struct Encoder<'a>(pub(super) &'a mut Vec<u8>);

impl Error for PayloadError {
    fn custom<T: Display>(_: T) -> Self {
        Self::Refused
    }
}

impl Encoder<'_> {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) -> Result<()> {
        self.0.extend_from_slice(&bytes);
        Ok(())
    }

    #[inline]
    fn put_len(&mut self, len: Option<usize>) -> Result<()> {
        let len = len.ok_or(PayloadError::Unsupported)?;
        let len = u32::try_from(len).map_err(|_| PayloadError::TooMany)?;
        self.put(len.to_le_bytes())
    }
}

macro_rules! numbers {
    ($($method:ident $type:ty)*) => {$(
        #[inline]
        fn $method(self, value: $type) -> Result<()> {
            self.put(value.to_le_bytes())
        }
    )*};
}

/// Methods that begin a value with fields or elements. Each method writes the number that comes
/// before the fields or elements, if any: the number of elements, or the index of the variant.
macro_rules! values {
    ($($method:ident($($before:ident: $type:ty),*) |$encoder:ident| $number:expr;)*) => {$(
        #[inline]
        fn $method(self, $($before: $type),*) -> Result<Self> {
            let $encoder = self;
            $number?;
            Ok($encoder)
        }
    )*};
}

impl Serializer for &mut Encoder<'_> {
    type Ok = ();
    type Error = PayloadError;
    type SerializeSeq = Self;
    type SerializeTuple = Self;
    type SerializeTupleStruct = Self;
    type SerializeTupleVariant = Self;
    type SerializeMap = Self;
    type SerializeStruct = Self;
    type SerializeStructVariant = Self;

    fn is_human_readable(&self) -> bool {
        false
    }

    numbers! {
        serialize_u8 u8 serialize_u16 u16 serialize_u32 u32 serialize_u64 u64 serialize_u128 u128
        serialize_i8 i8 serialize_i16 i16 serialize_i32 i32 serialize_i64 i64 serialize_i128 i128
        serialize_f32 f32 serialize_f64 f64
    }

    values! {
        serialize_seq(len: Option<usize>) |to| to.put_len(len);
        serialize_map(len: Option<usize>) |to| to.put_len(len);
        serialize_tuple(_len: usize) |to| Ok(());
        serialize_tuple_struct(_name: &str, _len: usize) |to| Ok(());
        serialize_struct(_name: &str, _len: usize) |to| Ok(());
        serialize_tuple_variant(_name: &str, index: u32, _variant: &str, _len: usize)
            |to| to.serialize_u32(index);
        serialize_struct_variant(_name: &str, index: u32, _variant: &str, _len: usize)
            |to| to.serialize_u32(index);
    }

    #[inline]
    fn serialize_bool(self, value: bool) -> Result<()> {
        self.put([value.into()])
    }

    fn serialize_char(self, value: char) -> Result<()> {
        let mut utf8 = [0; 4];
        self.0
            .extend_from_slice(value.encode_utf8(&mut utf8).as_bytes());
        Ok(())
    }

    #[inline]
    fn serialize_str(self, value: &str) -> Result<()> {
        self.serialize_bytes(value.as_bytes())
    }

    #[inline]
    fn serialize_bytes(self, value: &[u8]) -> Result<()> {
        self.put_len(Some(value.len()))?;
        self.0.extend_from_slice(value);
        Ok(())
    }

    #[inline]
    fn serialize_none(self) -> Result<()> {
        self.put([0])
    }

    #[inline]
    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<()> {
        self.put([1])?;
        value.serialize(self)
    }

    #[inline]
    fn serialize_unit(self) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn serialize_unit_struct(self, _: &str) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn serialize_unit_variant(self, _: &str, index: u32, _: &str) -> Result<()> {
        self.serialize_u32(index)
    }

    #[inline]
    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &str, value: &T) -> Result<()> {
        value.serialize(self)
    }

    #[inline]
    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &str,
        index: u32,
        _: &str,
        value: &T,
    ) -> Result<()> {
        self.put(index.to_le_bytes())?;
        value.serialize(self)
    }
}

/// The traits of values with fields or elements. A skipped field would leave no trace: the decoder
/// would take the next field for the skipped field.
macro_rules! compounds {
    ($($trait:ident $($method:ident($($key:ident)?))* $(, no $skip:ident)?;)*) => {$(
        impl $trait for &mut Encoder<'_> {
            type Ok = ();
            type Error = PayloadError;

            $(#[inline]
            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<()> {
                value.serialize(&mut **self)
            })*

            $(fn $skip(&mut self, _: &'static str) -> Result<()> {
                Err(PayloadError::Unsupported)
            })?

            #[inline]
            fn end(self) -> Result<()> {
                Ok(())
            }
        }
    )*};
}
compounds! {
    SerializeSeq serialize_element();
    SerializeTuple serialize_element();
    SerializeTupleStruct serialize_field();
    SerializeTupleVariant serialize_field();
    SerializeMap serialize_key() serialize_value();
    SerializeStruct serialize_field(_key), no skip_field;
    SerializeStructVariant serialize_field(_key), no skip_field;
}
