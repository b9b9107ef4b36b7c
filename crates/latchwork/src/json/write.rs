//! Rust values as JSON values. The mapping is serde_json's, but values that it would change or that are dangerous are
//! refused: floats that are not finite, unbounded nesting, keys that are floats. Refused values are never stored, so
//! code that walks stored values may recurse.

use std::fmt::{Display, Write};

use serde::Serialize;
use serde::ser::{self, Error, Serializer};
use serde_json::{Map, Number, Value};

use super::error::JsonError;
use super::key::KeyWriter;

/// The most arrays and objects that a value may be nested in.
pub(crate) const MAX_DEPTH: usize = 128;

/// Length hints need not be true. More capacity than this is reserved only when it is needed.
const MAX_HINT: usize = 1024;

/// The JSON value of `value`.
pub(crate) fn to_value<T: Serialize + ?Sized>(value: &T) -> Result<Value, JsonError> {
    value.serialize(Writer { depth: 0 })
}

/// Checks whether `value` may be stored. Every result of [`to_value`] passes.
pub(crate) fn check(value: &Value) -> Result<(), JsonError> {
    check_under(0, value)
}

/// The same for a value that will be stored at a depth.
pub(crate) fn check_under(depth: usize, value: &Value) -> Result<(), JsonError> {
    if depth > MAX_DEPTH {
        return Err(JsonError::TooDeep { path: String::new(), limit: MAX_DEPTH });
    }
    match value {
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
        // Always true, unless serde_json's arbitrary_precision is turned on.
        Value::Number(number) if number.is_i64() || number.is_u64() || number.as_f64().is_some_and(f64::is_finite) => {
            Ok(())
        }
        Value::Number(_) => Err(JsonError::NotFinite { path: String::new() }),
        Value::Array(items) => {
            let depth = deeper(depth)?;
            let mut items = items.iter().enumerate();
            items.try_for_each(|(index, item)| check_under(depth, item).map_err(|error| error.under_index(index)))
        }
        Value::Object(fields) => {
            let depth = deeper(depth)?;
            fields.iter().try_for_each(|(key, field)| check_under(depth, field).map_err(|error| error.under_key(key)))
        }
    }
}

/// The depth inside an array or object at `depth`.
fn deeper(depth: usize) -> Result<usize, JsonError> {
    if depth < MAX_DEPTH { Ok(depth + 1) } else { Err(JsonError::TooDeep { path: String::new(), limit: MAX_DEPTH }) }
}

/// `to_string` would panic where `Display` fails.
pub(super) fn display<T: Display + ?Sized>(value: &T) -> Result<String, JsonError> {
    let mut text = String::new();
    write!(text, "{value}").map_err(|_| JsonError::custom("its Display failed"))?;
    Ok(text)
}

/// Writes one value that is nested in `depth` arrays and objects.
#[derive(Clone, Copy)]
struct Writer {
    depth: usize,
}

impl Writer {
    fn inside(self) -> Result<Writer, JsonError> {
        Ok(Writer { depth: deeper(self.depth)? })
    }

    fn items(self, length: usize) -> Result<Items, JsonError> {
        let items = Vec::with_capacity(length.min(MAX_HINT));
        Ok(Items { inside: self.inside()?, items, variant: None })
    }

    fn fields(self, length: usize) -> Result<ObjectWriter, JsonError> {
        let fields = Map::with_capacity(length.min(MAX_HINT));
        Ok(ObjectWriter { inside: self.inside()?, fields, key: None, variant: None })
    }
}

macro_rules! as_number {
    ($($method:ident($kind:ty))*) => {
        $(fn $method(self, value: $kind) -> Result<Value, JsonError> {
            Ok(value.into())
        })*
    };
}

impl Serializer for Writer {
    type Ok = Value;
    type Error = JsonError;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = Items;
    type SerializeMap = ObjectWriter;
    type SerializeStruct = ObjectWriter;
    type SerializeStructVariant = ObjectWriter;

    as_number! {
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64)
    }

    fn serialize_i128(self, value: i128) -> Result<Value, JsonError> {
        let unsigned = u64::try_from(value).map(Value::from);
        let number = unsigned.or_else(|_| i64::try_from(value).map(Value::from));
        number.map_err(|_| JsonError::Integer { path: String::new() })
    }

    fn serialize_u128(self, value: u128) -> Result<Value, JsonError> {
        u64::try_from(value).map(Value::from).map_err(|_| JsonError::Integer { path: String::new() })
    }

    fn serialize_f32(self, value: f32) -> Result<Value, JsonError> {
        self.serialize_f64(f64::from(value))
    }

    fn serialize_f64(self, value: f64) -> Result<Value, JsonError> {
        Number::from_f64(value).map(Value::Number).ok_or(JsonError::NotFinite { path: String::new() })
    }

    fn serialize_bool(self, value: bool) -> Result<Value, JsonError> {
        Ok(Value::Bool(value))
    }

    fn serialize_char(self, value: char) -> Result<Value, JsonError> {
        Ok(Value::String(value.to_string()))
    }

    fn serialize_str(self, value: &str) -> Result<Value, JsonError> {
        Ok(Value::String(value.to_string()))
    }

    fn collect_str<T: Display + ?Sized>(self, value: &T) -> Result<Value, JsonError> {
        display(value).map(Value::String)
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<Value, JsonError> {
        self.inside()?;
        Ok(value.iter().copied().map(Value::from).collect())
    }

    fn serialize_unit(self) -> Result<Value, JsonError> {
        Ok(Value::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Value, JsonError> {
        Ok(Value::Null)
    }

    fn serialize_none(self) -> Result<Value, JsonError> {
        Ok(Value::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Value, JsonError> {
        value.serialize(self)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<Value, JsonError> {
        value.serialize(self)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<Value, JsonError> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Value, JsonError> {
        let value = value.serialize(self.inside()?).map_err(|error| error.under_key(variant))?;
        Ok(of_variant(Some(variant), value))
    }

    fn serialize_seq(self, length: Option<usize>) -> Result<Items, JsonError> {
        self.items(length.unwrap_or(0))
    }

    fn serialize_tuple(self, length: usize) -> Result<Items, JsonError> {
        self.items(length)
    }

    fn serialize_tuple_struct(self, _: &'static str, length: usize) -> Result<Items, JsonError> {
        self.items(length)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Items, JsonError> {
        let items = self.inside()?.items(length).map_err(|error| error.under_key(variant))?;
        Ok(Items { variant: Some(variant), ..items })
    }

    fn serialize_map(self, length: Option<usize>) -> Result<ObjectWriter, JsonError> {
        self.fields(length.unwrap_or(0))
    }

    fn serialize_struct(self, name: &'static str, length: usize) -> Result<ObjectWriter, JsonError> {
        // RawValue, or a number under arbitrary_precision: text that only serde_json's own serializers can read.
        if name.starts_with("$serde_json::private::") {
            return Err(JsonError::custom("it is JSON text of serde_json's raw_value or arbitrary_precision"));
        }
        self.fields(length)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<ObjectWriter, JsonError> {
        let fields = self.inside()?.fields(length).map_err(|error| error.under_key(variant))?;
        Ok(ObjectWriter { variant: Some(variant), ..fields })
    }
}

/// `value` as the contents of a variant, if it is one: an object with the variant's name as its only key.
fn of_variant(variant: Option<&'static str>, value: Value) -> Value {
    match variant {
        Some(variant) => Value::Object(Map::from_iter([(variant.to_string(), value)])),
        None => value,
    }
}

fn under_variant(variant: Option<&'static str>, error: JsonError) -> JsonError {
    match variant {
        Some(variant) => error.under_key(variant),
        None => error,
    }
}

/// An array that is being written.
struct Items {
    inside: Writer,
    items: Vec<Value>,
    variant: Option<&'static str>,
}

impl Items {
    fn push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), JsonError> {
        let item = value.serialize(self.inside);
        self.items.push(item.map_err(|error| under_variant(self.variant, error.under_index(self.items.len())))?);
        Ok(())
    }

    fn finish(self) -> Result<Value, JsonError> {
        Ok(of_variant(self.variant, Value::Array(self.items)))
    }
}

/// An object that is being written.
struct ObjectWriter {
    inside: Writer,
    fields: Map<String, Value>,
    /// The key of the entry whose value comes next.
    key: Option<String>,
    variant: Option<&'static str>,
}

impl ObjectWriter {
    fn insert<T: Serialize + ?Sized>(&mut self, key: String, value: &T) -> Result<(), JsonError> {
        let field = value.serialize(self.inside);
        let field = field.map_err(|error| under_variant(self.variant, error.under_key(&key)))?;
        self.fields.insert(key, field);
        Ok(())
    }

    fn finish(self) -> Result<Value, JsonError> {
        Ok(of_variant(self.variant, Value::Object(self.fields)))
    }
}

macro_rules! array {
    ($($kind:ident::$method:ident)*) => {
        $(impl ser::$kind for Items {
            type Ok = Value;
            type Error = JsonError;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), JsonError> {
                self.push(value)
            }

            fn end(self) -> Result<Value, JsonError> {
                self.finish()
            }
        })*
    };
}

array! {
    SerializeSeq::serialize_element
    SerializeTuple::serialize_element
    SerializeTupleStruct::serialize_field
    SerializeTupleVariant::serialize_field
}

macro_rules! object {
    ($($kind:ident)*) => {
        $(impl ser::$kind for ObjectWriter {
            type Ok = Value;
            type Error = JsonError;

            fn serialize_field<T>(&mut self, key: &'static str, value: &T) -> Result<(), JsonError>
            where
                T: Serialize + ?Sized,
            {
                self.insert(key.to_string(), value)
            }

            fn end(self) -> Result<Value, JsonError> {
                self.finish()
            }
        })*
    };
}

object! { SerializeStruct SerializeStructVariant }

impl ser::SerializeMap for ObjectWriter {
    type Ok = Value;
    type Error = JsonError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), JsonError> {
        self.key = Some(key.serialize(KeyWriter)?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), JsonError> {
        let key = self.key.take().ok_or_else(|| JsonError::custom("a map's value was given before its key"))?;
        self.insert(key, value)
    }

    fn end(self) -> Result<Value, JsonError> {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::json::arbitrary;

    #[test]
    fn a_json_value_of_any_depth_is_checked_without_a_stack_overflow() {
        let mut deep = (0..100_000).fold(Value::Null, |value, _| Value::Array(vec![value]));
        let found = (check(&deep), to_value(&deep));
        // A drop of the whole value would need a deep stack, also in a failing assertion.
        while let Value::Array(mut items) = deep {
            deep = items.remove(0);
        }
        let expected = JsonError::TooDeep { path: "[0]".repeat(MAX_DEPTH), limit: MAX_DEPTH };
        assert_eq!(found, (Err(expected.clone()), Err(expected)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn json_values_become_themselves(value in arbitrary::value()) {
            prop_assert_eq!(check(&value), Ok(()));
            prop_assert_eq!(to_value(&value), Ok(value));
        }
    }
}
