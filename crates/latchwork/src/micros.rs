//! Durations as numbers of microseconds, in JSON and in records: `#[serde(with = "crate::micros")]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer};

/// A duration that is too long is the longest one.
pub(crate) fn of(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(of(*duration))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    u64::deserialize(deserializer).map(Duration::from_micros)
}
