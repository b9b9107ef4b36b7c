//! Keys of maps as the strings they are in JSON. Floats are refused as well: one has many spellings.

use std::fmt::Display;

use serde::Serialize;
use serde::ser::{Impossible, Serializer};

use super::error::JsonError;
use super::write::display;

/// Writes one key; see [`JsonError::Key`] for what can be one.
pub(super) struct KeyWriter;

fn refused<T>(found: &'static str) -> Result<T, JsonError> {
    Err(JsonError::Key { path: String::new(), found })
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

#[cfg(test)]
mod tests {
    use serde::ser::Error;
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
    struct Name(String);

    #[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
    enum Variant {
        Plain,
        #[serde(rename = "other name")]
        Renamed,
        Newtype(u8),
        Tuple(u8, u8),
        Struct {
            field: u8,
        },
    }

    #[test]
    fn keys_become_the_strings_that_serde_json_makes_of_them() {
        fn check<K: Serialize + Ord>(key: K, expected: &str) {
            assert_eq!(key.serialize(KeyWriter).as_deref(), Ok(expected));
            let object = serde_json::to_value(BTreeMap::from([(key, ())])).unwrap();
            assert_eq!(object.as_object().unwrap().keys().collect::<Vec<_>>(), [expected]);
        }
        check("a.b", "a.b");
        check("", "");
        check('é', "é");
        check(true, "true");
        check(-8i8, "-8");
        check(u64::MAX, "18446744073709551615");
        check(i128::MIN, "-170141183460469231731687303715884105728");
        check(u128::MAX, "340282366920938463463374607431768211455");
        check(Name("n".into()), "n");
        check(Variant::Plain, "Plain");
        check(Variant::Renamed, "other name");
        check(std::net::Ipv4Addr::LOCALHOST, "127.0.0.1");
    }

    #[test]
    fn what_is_no_string_in_json_is_refused() {
        fn check<K: Serialize>(key: K, found: &'static str) {
            assert_eq!(key.serialize(KeyWriter), Err(JsonError::Key { path: String::new(), found }));
        }
        check(1.5f32, "a float");
        check(f64::NAN, "a float");
        check(None::<&str>, "an option");
        check(Some("a"), "an option");
        check((), "a unit");
        check(["a"; 2], "a tuple");
        check(vec!["a"], "a sequence");
        check(BTreeMap::from([("a", "b")]), "a map");
        check(Variant::Newtype(1), "a variant with fields");
        check(Variant::Tuple(1, 2), "a variant with fields");
        check(Variant::Struct { field: 1 }, "a variant with fields");
    }

    #[test]
    fn a_display_that_fails_is_an_error() {
        struct Broken;
        impl Display for Broken {
            fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                Err(std::fmt::Error)
            }
        }
        let expected = JsonError::custom("its Display failed");
        assert_eq!(KeyWriter.collect_str(&Broken), Err(expected));
    }
}
