//! The fields of a span or an event of `tracing`, collected so that attributes can be made of them.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write};

use tracing::field::{Field, Visit};

use crate::spans::SpanValue;

/// Bytes of a text, at most: what waits to be sent has a bound.
const TEXT: usize = 1024;

/// The fields of a span, by name.
#[derive(Debug, Default)]
pub(super) struct Fields(BTreeMap<&'static str, SpanValue>);

impl Fields {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.0.get(name)? {
            SpanValue::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        match self.0.get(name)? {
            SpanValue::Number(number) => u64::try_from(*number).ok(),
            _ => None,
        }
    }

    pub(super) fn take_text(&mut self, name: &str) -> Option<String> {
        match self.0.remove(name)? {
            SpanValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// All fields, in the order of their names.
    pub(super) fn into_all(self) -> impl Iterator<Item = (&'static str, SpanValue)> {
        self.0.into_iter()
    }

    /// Adds a field of an enclosing span, unless there is one of this name.
    pub(super) fn inherit(&mut self, name: &'static str, value: &str) {
        self.0.entry(name).or_insert_with(|| SpanValue::Text(value.into()));
    }

    fn put(&mut self, field: &Field, value: SpanValue) {
        self.0.insert(field.name(), value);
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        let text = &value[..value.floor_char_boundary(TEXT)];
        self.put(field, SpanValue::Text(text.into()));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, SpanValue::Number(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, SpanValue::Number(i64::try_from(value).unwrap_or(i64::MAX)));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, SpanValue::Flag(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = String::new();
        // A text takes all that is written into it.
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
    }
}
