//! JSON as Latchwork stores, compares and orders it.

mod error;
mod fits;
mod key;
mod merge;
mod order;
mod path;
#[cfg(feature = "schema")]
mod schema;
mod write;

/// Implements [`Record`] for types that are stored as JSON, so that they may hold any JSON values.
#[cfg(feature = "flow")]
macro_rules! json_record {
    ($($record:ty),*) => {$(
        impl $crate::record::Record for $record {
            fn encode(&self) -> $crate::store::Bytes {
                let mut bytes = vec![<Self as $crate::record::Record>::VERSION];
                serde_json::to_writer(&mut bytes, self).expect("a record can be written as JSON");
                bytes.into()
            }

            fn read(_: u8, fields: &[u8]) -> Option<Self> {
                $crate::json::parse_stored(fields)
            }
        }
    )*};
}
#[cfg(feature = "flow")]
pub(crate) use json_record;

#[cfg(test)]
mod arbitrary;

pub use error::JsonError;
pub(crate) use fits::fits;
pub(crate) use merge::merge;
pub(crate) use order::{compare, encode, encode_string_prefix, equal, is_missing_or_null, same_kind, skip};
pub use path::{Path, PathError};
pub(crate) use path::{array_index, find_in};
#[cfg(feature = "schema")]
pub(crate) use schema::check_schema;
pub(crate) use write::{check, check_under, to_value};

/// Reads JSON of any depth: stored JSON was checked before it was written.
pub(crate) fn parse_stored<'a, T: serde::Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
    let mut reader = serde_json::Deserializer::from_slice(json);
    reader.disable_recursion_limit();
    let value = T::deserialize(&mut reader).ok()?;
    reader.end().ok()?;
    Some(value)
}
