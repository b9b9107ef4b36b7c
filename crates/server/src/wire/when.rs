//! Times that clients write: RFC 3339, or a date in UTC; in queries also how long ago it was. The time of day comes
//! from the caller.

use jiff::civil;
use latchwork::store::Timestamp;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::duration;

/// A time in a body, such as `2026-11-30T12:00:00Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(as = GivenTime, value_type = String, format = DateTime)]
pub(crate) struct GivenTime(pub(crate) Timestamp);

impl<'de> Deserialize<'de> for GivenTime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<GivenTime, D::Error> {
        let text = String::deserialize(deserializer)?;
        absolute(&text).map(GivenTime).map_err(serde::de::Error::custom)
    }
}

/// Reads a time: RFC 3339, or a date, with or without a time of day, in UTC.
pub(crate) fn absolute(text: &str) -> Result<Timestamp, String> {
    let utc = |time: civil::DateTime| time.to_zoned(jiff::tz::TimeZone::UTC).map(|zoned| zoned.timestamp());
    let time = text.parse::<jiff::Timestamp>().or_else(|_| text.parse::<civil::DateTime>().and_then(utc));
    let time = time.map_err(|_| format!("{text:?} is not a time: write 2026-11-30T12:00:00Z, or 2026-11-30"))?;
    u64::try_from(time.as_microsecond()).map(Timestamp).map_err(|_| format!("{text:?} is before 1970"))
}

/// Reads a time from a query: the same, or how long ago it was, for example `2h 30m`.
pub(crate) fn in_query(text: &str, now: Timestamp) -> Result<Timestamp, Problem> {
    let wrong = |why| format!("{why}, or how long ago, for example 90m or 48h");
    let time = duration(text).map(|ago| now.minus(ago)).map_or_else(|| absolute(text).map_err(wrong), Ok);
    time.map_err(|why| Problem::new(ProblemCode::InvalidQuery, why))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_absolute_or_in_a_query_relative() {
        let now = Timestamp(1_700_000_000_000_000);
        for (text, us) in [
            ("2023-11-14T22:13:20.5Z", 1_700_000_000_500_000),
            ("2023-11-15T00:13:20+02:00", 1_700_000_000_000_000),
            ("2023-11-14", 1_699_920_000_000_000),
        ] {
            assert_eq!(absolute(text), Ok(Timestamp(us)));
            assert_eq!(in_query(text, now).unwrap(), Timestamp(us));
        }
        assert_eq!(in_query("90m", now).unwrap(), Timestamp(now.0 - 5_400_000_000));
        for wrong in ["", "soon", "12", "-2h", "1969-12-31"] {
            assert!(absolute(wrong).is_err(), "{wrong}");
            assert_eq!(in_query(wrong, now).unwrap_err().code(), ProblemCode::InvalidQuery);
        }
        assert!(absolute("90m").is_err());
    }
}
