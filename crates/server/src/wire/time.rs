//! Times and durations on the wire. A time is written as RFC 3339 in UTC with microseconds, as the command writes it.
//! A duration in a query is a number and a unit: `30s`, `500ms`.

use std::fmt;
use std::time::Duration;

use jiff::{SpanRelativeTo, Unit};
use latchwork::store::Timestamp;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// A time, such as `2026-11-30T12:00:00.000000Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(as = Time, value_type = String, format = DateTime)]
pub(crate) struct TimeWire(pub(crate) Timestamp);

impl From<Timestamp> for TimeWire {
    fn from(time: Timestamp) -> TimeWire {
        TimeWire(time)
    }
}

impl fmt::Display for TimeWire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A time after the end of the calendar is written as that end.
        let time = i64::try_from(self.0.0).ok().and_then(|us| jiff::Timestamp::from_microsecond(us).ok());
        write!(f, "{:.6}", time.unwrap_or(jiff::Timestamp::MAX))
    }
}

impl Serialize for TimeWire {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A duration as a number of milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Reads a duration: `30s`, `1m 30s`, `500ms`, `0s`.
pub(crate) fn duration(text: &str) -> Option<Duration> {
    let span = text.parse::<jiff::Span>().ok()?;
    let us = span.total((Unit::Microsecond, SpanRelativeTo::days_are_24_hours())).ok()?;
    (us >= 0.0).then(|| Duration::from_micros(us as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_with_microseconds() {
        let written = |us| TimeWire(Timestamp(us)).to_string();
        assert_eq!(written(1_700_000_000_000_001), "2023-11-14T22:13:20.000001Z");
        assert_eq!(written(0), "1970-01-01T00:00:00.000000Z");
        assert!(written(u64::MAX).starts_with("9999-12-"));
    }

    #[test]
    fn durations_have_a_unit() {
        for (text, ms) in [("30s", 30_000), ("1m 30s", 90_000), ("500ms", 500), ("0s", 0), ("PT2S", 2000)] {
            assert_eq!(duration(text), Some(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "30", "-1s", "soon"] {
            assert_eq!(duration(text), None, "{text}");
        }
    }
}
