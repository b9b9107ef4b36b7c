//! A span that has ended, as it is handed to what sends it. The names of attributes are those of the semantic
//! conventions of OpenTelemetry where there are some.

use std::borrow::Cow;

use latchwork::store::Timestamp;

use crate::spans::SpanContext;

/// A span that has ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct EndedSpan {
    /// What was done, without names that each call chooses anew.
    pub name: String,
    /// Which side of a call it is.
    pub kind: SpanKind,
    /// Its identity.
    pub context: SpanContext,
    /// The span in the same trace that it is a part of.
    pub parent: Option<u64>,
    /// When it began.
    pub started: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
    /// What is known of it, by name.
    pub attributes: Vec<(&'static str, SpanValue)>,
    /// Spans of other traces that belong to it.
    pub links: Vec<SpanContext>,
    /// Why it has failed, if it has. The text may be empty.
    pub error: Option<Cow<'static, str>>,
}

/// Which side of a call a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpanKind {
    /// Work of this process.
    Internal,
    /// A request that was answered.
    Server,
    /// A request that was sent.
    Client,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum SpanValue {
    /// A text. A long one is cut off.
    Text(String),
    /// A number.
    Number(i64),
    /// Yes or no.
    Flag(bool),
}
