//! Reads and writes times for people and programs. The time of day comes from the caller.

use jiff::{SpanRelativeTo, Unit, civil};
use latchwork::store::Timestamp;
use latchwork::words;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A time that is written as RFC 3339, in UTC, with microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(pub(crate) Timestamp);

impl Time {
    /// With seconds, for people.
    pub(crate) fn short(self) -> String {
        words::time(self.0)
    }

    /// Relative to now, for people: `3m 12s ago`, `in 2d 4h`.
    pub(crate) fn relative_to(self, now: Timestamp) -> String {
        words::relative(self.0, now)
    }
}

impl std::fmt::Display for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A time after the end of the calendar is written as that end.
        let time = i64::try_from(self.0.0).ok().and_then(|us| jiff::Timestamp::from_microsecond(us).ok());
        write!(f, "{:.6}", time.unwrap_or(jiff::Timestamp::MAX))
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        let text = String::deserialize(deserializer)?;
        absolute(&text).map(Time).map_err(serde::de::Error::custom)
    }
}

/// A time on a command line: RFC 3339, or a date, with or without a time of day, in UTC.
pub(crate) fn absolute(text: &str) -> Result<Timestamp, String> {
    let utc = |time: civil::DateTime| time.to_zoned(jiff::tz::TimeZone::UTC).map(|zoned| zoned.timestamp());
    let time = text.parse::<jiff::Timestamp>().or_else(|_| text.parse::<civil::DateTime>().and_then(utc));
    let time = time.map_err(|_| format!("{text:?} is not a time: write 2026-11-30T12:00:00Z, or 2026-11-30"))?;
    u64::try_from(time.as_microsecond()).map(Timestamp).map_err(|_| format!("{text:?} is before 1970"))
}

/// The same, or how long ago it was, for example `2h 30m`.
pub(crate) fn parse(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let ago = text.parse::<jiff::Span>().and_then(|span| {
        // Days have 24 hours here, so the time zone does not matter.
        span.total((Unit::Microsecond, SpanRelativeTo::days_are_24_hours()))
    });
    match ago {
        Ok(us) if us >= 0.0 => Ok(Timestamp(now.0.saturating_sub(us as u64))),
        _ => absolute(text).map_err(|why| format!("{why}, or how long ago, for example 90m or 2d")),
    }
}

/// A duration on a command line: `2s`, `1m 30s`, `500ms`.
pub(crate) fn duration(text: &str) -> Result<std::time::Duration, String> {
    let span = text.parse::<jiff::Span>();
    let us = span.and_then(|span| span.total((Unit::Microsecond, SpanRelativeTo::days_are_24_hours())));
    match us {
        Ok(us) if us > 0.0 => Ok(std::time::Duration::from_micros(us as u64)),
        _ => Err(format!("{text:?} is not a duration: write 2s, or 500ms")),
    }
}

/// A duration as it is read: `30s`, `500ms`.
pub(crate) fn exact(duration: std::time::Duration) -> String {
    match (duration.as_micros(), duration.as_millis()) {
        (us, _) if us % 1000 != 0 => format!("{us}us"),
        (_, ms) if ms % 1000 != 0 => format!("{ms}ms"),
        _ => format!("{}s", duration.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_relative_to_now() {
        let now = Timestamp(1_000_000_000_000);
        let told = |seconds: i64| Time(Timestamp(now.0.saturating_add_signed(seconds * 1_000_000))).relative_to(now);
        for (seconds, text) in [
            (0, "just now"),
            (-1, "1s ago"),
            (-192, "3m 12s ago"),
            (-3600, "1h 0m ago"),
            (-90_000, "1d 1h ago"),
            (59, "in 59s"),
            (187_200, "in 2d 4h"),
        ] {
            assert_eq!(told(seconds), text);
        }
        assert_eq!(Time(Timestamp(now.0 + 1)).relative_to(now), "in less than 1s");
    }

    #[test]
    fn times_are_written_with_microseconds() {
        assert_eq!(Time(Timestamp(1_700_000_000_000_001)).to_string(), "2023-11-14T22:13:20.000001Z");
        assert_eq!(Time(Timestamp(0)).to_string(), "1970-01-01T00:00:00.000000Z");
        assert!(Time(Timestamp(u64::MAX)).to_string().starts_with("9999-12-"));
        assert_eq!(Time(Timestamp(1_700_000_000_000_001)).short(), "2023-11-14 22:13:20 UTC");
    }

    #[test]
    fn times_are_read() {
        let now = Timestamp(1_700_000_000_000_000);
        for (text, us) in [
            ("2023-11-14T22:13:20.5Z", 1_700_000_000_500_000),
            ("2023-11-15T00:13:20+02:00", 1_700_000_000_000_000),
            ("2023-11-14", 1_699_920_000_000_000),
            ("2023-11-14 22:13:20", 1_700_000_000_000_000),
            ("90m", 1_700_000_000_000_000 - 5_400_000_000),
            ("2d", 1_700_000_000_000_000 - 172_800_000_000),
            ("1h 30m", 1_700_000_000_000_000 - 5_400_000_000),
        ] {
            assert_eq!(parse(text, now), Ok(Timestamp(us)), "{text}");
        }
        for text in ["", "yesterday", "12", "-2h", "1969-12-31", "2023-13-01"] {
            assert!(parse(text, now).is_err(), "{text}");
        }
        assert_eq!(duration("1m 30s"), Ok(std::time::Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(std::time::Duration::from_millis(500)));
        for text in ["", "0s", "-2s", "2", "soon"] {
            assert!(duration(text).is_err(), "{text}");
        }
        for text in ["90s", "500ms", "7us"] {
            assert_eq!(exact(duration(text).unwrap()), text);
        }
        assert_eq!(absolute("2023-11-14"), Ok(Timestamp(1_699_920_000_000_000)));
        for text in ["2d", "90m", ""] {
            assert!(absolute(text).is_err(), "{text}");
        }
    }
}
