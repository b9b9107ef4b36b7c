//! Times as people read them, for every `Display` of this crate and for the command. Knows no layer.

use crate::store::Timestamp;

/// A time to the second: `2026-11-30 12:00:00 UTC`.
pub fn time(time: Timestamp) -> String {
    match i64::try_from(time.0).ok().and_then(|us| jiff::Timestamp::from_microsecond(us).ok()) {
        Some(time) => time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
        None => "the end of time".into(),
    }
}

/// A time as it is told from another: `3m 12s ago`, `in 2d 4h`.
pub fn relative(time: Timestamp, now: Timestamp) -> String {
    match (time.0, now.0) {
        (then, now) if then <= now && now - then < 1_000_000 => "just now".into(),
        (then, now) if then <= now => format!("{} ago", span(now - then)),
        (then, now) => format!("in {}", span(then - now)),
    }
}

/// How long something takes, in microseconds, by its two largest units.
pub fn span(us: u64) -> String {
    let seconds = us / 1_000_000;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes, seconds % 60) {
        (0, 0, 0, 0) => "less than 1s".into(),
        (0, 0, 0, seconds) => format!("{seconds}s"),
        (0, 0, minutes, seconds) => format!("{minutes}m {seconds}s"),
        (0, hours, minutes, _) => format!("{hours}h {minutes}m"),
        (days, hours, ..) => format!("{days}d {hours}h"),
    }
}
