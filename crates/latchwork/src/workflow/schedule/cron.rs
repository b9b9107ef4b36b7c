//! Cron expressions and the local times they match. This file parses them, reports where an error is, and finds the
//! next local time without a clock. It knows no time zones: `plan.rs` does.

use jiff::civil::{Date, DateTime, Time};

use super::error::ScheduleError;

/// The local times of a cron expression, as sets of bits.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Cron {
    seconds: u64,
    minutes: u64,
    hours: u64,
    /// From 1 to 31.
    days: u64,
    /// True if the last day of the month matches as well.
    last_day: bool,
    months: u64,
    /// From 0 (Sunday) to 6.
    weekdays: u64,
    /// True if the expression limits both the day of the month and the weekday. Then a day matches if either of them
    /// does.
    is_either: bool,
    /// True if the hour is open, as in `*` or `*/2`. Then the expression follows the clock when the clock changes.
    pub(crate) is_every_hour: bool,
}

/// The allowed values of one field of an expression.
struct CronField {
    name: &'static str,
    least: u64,
    most: u64,
    /// Names for the numbers from `least` on.
    names: &'static [&'static str],
}

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];

const FIELDS: [CronField; 6] = [
    CronField { name: "second", least: 0, most: 59, names: &[] },
    CronField { name: "minute", least: 0, most: 59, names: &[] },
    CronField { name: "hour", least: 0, most: 23, names: &[] },
    CronField { name: "day of the month", least: 1, most: 31, names: &[] },
    CronField { name: "month", least: 1, most: 12, names: &MONTHS },
    CronField { name: "day of the week", least: 0, most: 7, names: &WEEKDAYS },
];

/// The longest gap between two matching days: from 29 February 2096 to 29 February 2104.
const MOST_MONTHS: u32 = 8 * 12 + 1;

/// Names for expressions.
const NICKNAMES: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

impl Cron {
    /// Parses five fields, or six that begin with the second, or a name such as `@daily`.
    pub(crate) fn read(text: &str) -> Result<Cron, ScheduleError> {
        let meant = NICKNAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text.trim()));
        let expression = meant.map_or(text, |(_, meant)| meant);
        let wrong = |at: usize, reason: String| ScheduleError::Cron { text: text.into(), at, reason };
        let words: Vec<(usize, &str)> = words(expression).collect();
        let skipped = match words.len() {
            5 => 1,
            6 => 0,
            count => {
                let at = words.get(6).map_or(expression.len(), |(at, _)| *at);
                return Err(wrong(at, format!("there are {count} fields; write 5, or 6 that begin with the second")));
            }
        };
        let (mut bits, mut last_day) = ([1; 6], false);
        for (number, (at, word)) in words.iter().enumerate() {
            let field = &FIELDS[number + skipped];
            let (mut found, mut place) = (0, *at);
            for item in word.split(',') {
                if number + skipped == 3 && item.eq_ignore_ascii_case("L") {
                    last_day = true;
                } else {
                    found |= field.item(item).map_err(|reason| wrong(place, reason))?;
                }
                place += item.len() + 1;
            }
            bits[number + skipped] = found;
        }
        let [seconds, minutes, hours, days, months, weekdays] = bits;
        let is_open = |number: usize| words[number - skipped].1.starts_with('*');
        Ok(Cron {
            seconds,
            minutes,
            hours,
            days,
            last_day,
            months,
            // 7 also means Sunday.
            weekdays: (weekdays | weekdays >> 7) & 0x7f,
            is_either: !is_open(3) && !is_open(5),
            is_every_hour: is_open(2),
        })
    }

    /// Returns the first matching local time at or after this one. None if there is none.
    pub(crate) fn next(&self, from: DateTime) -> Option<DateTime> {
        let from = match from.subsec_nanosecond() {
            0 => from,
            _ => from.with().subsec_nanosecond(0).build().ok()?.checked_add(jiff::Span::new().seconds(1)).ok()?,
        };
        if self.is_day(from.date())
            && let Some(time) = self.next_time(from.time())
        {
            return Some(from.date().to_datetime(time));
        }
        let (first, mut date) = (self.next_time(Time::midnight())?, from.date().tomorrow().ok()?);
        for _ in 0..MOST_MONTHS {
            if self.months >> date.month() & 1 == 1 {
                let (month, mut day) = (date.month(), Some(date));
                while let Some(found) = day.filter(|day| day.month() == month) {
                    if self.is_day(found) {
                        return Some(found.to_datetime(first));
                    }
                    day = found.tomorrow().ok();
                }
            }
            date = date.last_of_month().tomorrow().ok()?;
        }
        None
    }

    fn is_day(&self, date: Date) -> bool {
        let is_last = self.last_day && date.day() == date.days_in_month();
        let is_number = is_last || self.days >> date.day() & 1 == 1;
        let is_weekday = self.weekdays >> date.weekday().to_sunday_zero_offset() & 1 == 1;
        let is_day = if self.is_either { is_number || is_weekday } else { is_number && is_weekday };
        is_day && self.months >> date.month() & 1 == 1
    }

    /// Returns the first matching time of day at or after this one.
    fn next_time(&self, from: Time) -> Option<Time> {
        let [hour, minute, second] = [from.hour(), from.minute(), from.second()].map(|number| number as u32);
        let least = |bits: u64| bits.trailing_zeros();
        let (hours, minutes, seconds) = (self.hours, self.minutes, self.seconds);
        let found = if hours >> hour & 1 == 1 {
            match (minutes >> minute & 1 == 1).then(|| at_least(seconds, second)).flatten() {
                Some(second) => Some((hour, minute, second)),
                None => at_least(minutes, minute + 1).map(|minute| (hour, minute, least(seconds))),
            }
        } else {
            None
        };
        let found = found.or_else(|| at_least(hours, hour + 1).map(|hour| (hour, least(minutes), least(seconds))));
        found.and_then(|(hour, minute, second)| Time::new(hour as i8, minute as i8, second as i8, 0).ok())
    }
}

/// Returns the first number of a set that is at least `from`.
fn at_least(bits: u64, from: u32) -> Option<u32> {
    let rest = bits.checked_shr(from)?;
    (rest != 0).then(|| from + rest.trailing_zeros())
}

/// The words of a text, each with its byte offset.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let place = |word: &str| word.as_ptr() as usize - text.as_ptr() as usize;
    text.split_whitespace().map(move |word| (place(word), word))
}

impl CronField {
    /// Returns the set of numbers of one list item: `*`, a number or a range, each with or without a step.
    fn item(&self, item: &str) -> Result<u64, String> {
        let (range, step) = match item.split_once('/') {
            None => (item, None),
            Some((range, step)) => {
                let read = step.parse::<u64>().ok().filter(|step| (1..=self.most).contains(step));
                let read = read.ok_or_else(|| format!("{step:?} is not a valid step; write 1 to {}", self.most))?;
                (range, Some(read))
            }
        };
        let (first, last) = match range.split_once('-') {
            _ if range == "*" => (self.least, self.last()),
            Some((first, last)) => (self.number(first)?, self.number(last)?),
            // As in `5/15`: every 15th from 5 on.
            None if step.is_some() => (self.number(range)?, self.last()),
            None => (self.number(range)?, self.number(range)?),
        };
        if first > last {
            return Err(format!("{range:?} ends before it begins"));
        }
        Ok((first..=last).step_by(step.unwrap_or(1) as usize).fold(0, |bits, number| bits | 1 << number))
    }

    /// The last number of `*`. It is 6 for weekdays, because 7 and 0 both mean Sunday.
    fn last(&self) -> u64 {
        if self.names.len() == WEEKDAYS.len() { 6 } else { self.most }
    }

    fn number(&self, text: &str) -> Result<u64, String> {
        let named = self.names.iter().position(|name| name.eq_ignore_ascii_case(text));
        let number = match named {
            Some(place) => Some(self.least + place as u64),
            None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
            None => None,
        };
        let allowed = number.filter(|number| (self.least..=self.most).contains(number));
        allowed.ok_or_else(|| format!("{text:?} is not a valid {}; write {} to {}", self.name, self.least, self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(text: &str, from: &str, count: usize) -> Vec<String> {
        let cron = Cron::read(text).unwrap();
        let mut from: DateTime = from.parse().unwrap();
        let next = || {
            let found = cron.next(from)?;
            from = found.checked_add(jiff::Span::new().seconds(1)).unwrap();
            Some(found.to_string())
        };
        std::iter::from_fn(next).take(count).collect()
    }

    #[test]
    fn expressions_match_local_times() {
        for (text, from, expected) in [
            ("0 2 * * *", "2026-01-01T02:00:00", ["2026-01-01T02:00:00", "2026-01-02T02:00:00"]),
            ("0 2 * * *", "2026-01-01T02:00:00.5", ["2026-01-02T02:00:00", "2026-01-03T02:00:00"]),
            ("*/20 * * * * *", "2026-12-31T23:59:21", ["2026-12-31T23:59:40", "2027-01-01T00:00:00"]),
            ("59 59 23 31 12 *", "2026-01-01T00:00:00", ["2026-12-31T23:59:59", "2027-12-31T23:59:59"]),
            ("0 0 29 2 *", "2096-03-01T00:00:00", ["2104-02-29T00:00:00", "2108-02-29T00:00:00"]),
            ("0 0 L * *", "2026-02-01T00:00:00", ["2026-02-28T00:00:00", "2026-03-31T00:00:00"]),
            ("0 0 13 * fri", "2026-03-01T00:00:00", ["2026-03-06T00:00:00", "2026-03-13T00:00:00"]),
            ("0 0 * * 5-7", "2026-03-02T00:00:00", ["2026-03-06T00:00:00", "2026-03-07T00:00:00"]),
            ("5/30 8-9 1,15 JAN-MAR/2 *", "2026-01-02T00:00:00", ["2026-01-15T08:05:00", "2026-01-15T08:35:00"]),
            ("@monthly", "2026-01-01T00:00:01", ["2026-02-01T00:00:00", "2026-03-01T00:00:00"]),
        ] {
            assert_eq!(times(text, from, 2), expected, "{text}");
        }
        for never in ["0 0 31 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *"] {
            assert!(times(never, "2026-01-01T00:00:00", 1).is_empty(), "{never}");
        }
    }

    #[test]
    fn an_error_names_its_place() {
        for (text, place, told) in [
            ("", 0, "there are 0 fields"),
            ("* * * *", 7, "there are 4 fields"),
            ("* * * * * * *", 12, "there are 7 fields"),
            ("60 * * * *", 0, "\"60\" is not a valid minute; write 0 to 59"),
            ("0 1,24 * * *", 4, "\"24\" is not a valid hour"),
            ("0 0 0 * *", 4, "\"0\" is not a valid day of the month"),
            ("0 0 * 13 *", 6, "\"13\" is not a valid month"),
            ("0 0 * * 8", 8, "\"8\" is not a valid day of the week"),
            ("0 0 * * 5-1", 8, "\"5-1\" ends before it begins"),
            ("*/0 * * * *", 0, "\"0\" is not a valid step"),
            ("0 0 * feb,x *", 10, "\"x\" is not a valid month"),
            ("0 0 1,, * *", 6, "\"\" is not a valid day of the month"),
            ("-1 * * * *", 0, "\"\" is not a valid minute"),
            ("@often", 6, "there are 1 fields"),
            ("0 0 * * \u{1f600}", 8, "is not a valid day of the week"),
        ] {
            match Cron::read(text) {
                Err(ScheduleError::Cron { at, reason, .. }) => {
                    assert!(at == place && reason.contains(told), "{text}: {at} {reason}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
    }
}
