//! Keys of maps as JSON strings. Floats are refused: a float has many spellings.

use std::fmt::Display;

use serde::Serialize;
use serde::ser::{Impossible, Serializer};

use super::error::JsonError;
use super::write::display;

/// Writes one key; [`JsonError::Key`] lists what a key can be.
pub(super) struct KeyWriter;

fn refused<T>(found: &'static str) -> Result<T, JsonError> {
    Err(JsonError::Key { path: String::new(), found: found.into() })
}

macro_rules! as_text {
    ($($method:ident($kind:ty))*) => {
        $(fn $method(self, value: $kind) -> Result<String, JsonError> {
            Ok(value.to_string())
        })*
    };
}

macro_rules! refuse {
    ($($method:ident($($kind:ty),*) -> $result:ident: $found:literal)*) => {
        $(fn $method(self, $(_: $kind),*) -> Result<Self::$result, JsonError> {
            refused($found)
        })*
    };
}

impl Serializer for KeyWriter {
    type Ok = String;
    type Error = JsonError;
    type SerializeSeq = Impossible<String, JsonError>;
    type SerializeTuple = Impossible<String, JsonError>;
    type SerializeTupleStruct = Impossible<String, JsonError>;
    type SerializeTupleVariant = Impossible<String, JsonError>;
    type SerializeMap = Impossible<String, JsonError>;
    type SerializeStruct = Impossible<String, JsonError>;
    type SerializeStructVariant = Impossible<String, JsonError>;

    as_text! {
        serialize_bool(bool) serialize_char(char) serialize_str(&str)
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64) serialize_u128(u128)
    }

    refuse! {
        serialize_f32(f32) -> Ok: "a float"
        serialize_f64(f64) -> Ok: "a float"
        serialize_bytes(&[u8]) -> Ok: "a string of bytes"
        serialize_none() -> Ok: "an option"
        serialize_unit() -> Ok: "a unit"
        serialize_unit_struct(&'static str) -> Ok: "a unit"
        serialize_seq(Option<usize>) -> SerializeSeq: "a sequence"
        serialize_tuple(usize) -> SerializeTuple: "a tuple"
        serialize_tuple_struct(&'static str, usize) -> SerializeTupleStruct: "a tuple"
        serialize_tuple_variant(&'static str, u32, &'static str, usize) -> SerializeTupleVariant:
            "a variant with fields"
        serialize_map(Option<usize>) -> SerializeMap: "a map"
        serialize_struct(&'static str, usize) -> SerializeStruct: "a struct"
        serialize_struct_variant(&'static str, u32, &'static str, usize) -> SerializeStructVariant:
            "a variant with fields"
    }

    fn serialize_some<T: Serialize + ?Sized>(self, _: &T) -> Result<String, JsonError> {
        refused("an option")
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<String, JsonError> {
        Ok(variant.to_string())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<String, JsonError> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<String, JsonError> {
        refused("a variant with fields")
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<String, JsonError> {
        display(value)
    }
}
