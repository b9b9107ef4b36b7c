//! Tables about answers of the API. In JSON an answer is printed as it is; here a command says which of its fields are
//! shown to people, and how.

use latchwork::Value;
use latchwork::store::Timestamp;

use crate::output::{Cell, Table, Text, Tone, shortened};
use crate::time::{Time, absolute};

/// The longest text in a list, and of one item.
const IN_LIST: usize = 60;
const OF_ONE: usize = 400;

/// How a field is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// A text as it is, anything else as JSON.
    Plain,
    /// As JSON, also if it is a text.
    Json,
    /// A time, relative to now.
    Time,
    /// A status or a state, in its colour.
    State,
    /// What went wrong.
    Bad,
    /// A list of texts, one after the other.
    Words,
}

/// A field of an answer: its title, its place (as of a JSON pointer), and how it is shown.
pub(crate) type Field = (&'static str, &'static str, How);

/// A table with a row for each item.
pub(crate) fn table(items: &[Value], fields: &[Field], now: Timestamp) -> Table {
    let titles: Vec<&'static str> = fields.iter().map(|(title, ..)| *title).collect();
    let mut table = Table::new(&titles);
    for item in items {
        table.row(fields.iter().map(|(_, place, how)| {
            let found = item.pointer(place).unwrap_or(&Value::Null);
            cell(found, *how, IN_LIST, now)
        }));
    }
    table
}

/// A line for each field that has a value.
pub(crate) fn about(text: &mut Text, item: &Value, fields: &[Field], now: Timestamp) {
    let mut table = Table::new(&[]);
    for (title, place, how) in fields {
        let Some(found) = item.pointer(place).filter(|found| !is_nothing(found)) else { continue };
        let told = match (how, time_of(found)) {
            (How::Time, Some(time)) => format!("{} ({})", time.short(), time.relative_to(now)).into(),
            _ => cell(found, *how, OF_ONE, now),
        };
        table.row([Cell::new(*title, Tone::Dim), told]);
    }
    text.table(table);
}

/// JSON on as many lines as it needs.
pub(crate) fn document(text: &mut Text, value: &Value) {
    format!("{value:#}").lines().for_each(|line| text.line(line));
}

/// A field that is a text; empty if it is none.
pub(crate) fn word<'a>(item: &'a Value, name: &str) -> &'a str {
    item.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

fn cell(value: &Value, how: How, letters: usize, now: Timestamp) -> Cell {
    let plain = match value {
        Value::Null => String::new(),
        Value::String(text) if how != How::Json => text.clone(),
        Value::Array(items) if how == How::Words => {
            let words = items.iter().map(|item| item.as_str().map_or_else(|| item.to_string(), Into::into));
            words.collect::<Vec<String>>().join(", ")
        }
        value => value.to_string(),
    };
    match (how, time_of(value)) {
        (How::Time, Some(time)) => Cell::new(time.relative_to(now), Tone::Dim),
        (How::State, _) => Cell::new(plain.replace('_', " "), tone(&plain)),
        (How::Bad, _) => Cell::new(shortened(&plain, letters), Tone::Bad),
        _ => shortened(&plain, letters).into(),
    }
}

/// A time, which is a text or a number of microseconds.
fn time_of(value: &Value) -> Option<Time> {
    match value {
        Value::String(text) => absolute(text).ok().map(Time),
        value => value.as_u64().map(|us| Time(Timestamp(us))),
    }
}

/// The colour of a status or a state.
pub(crate) fn tone(state: &str) -> Tone {
    match state {
        "completed" | "done" | "added" => Tone::Good,
        "failed" | "timed_out" => Tone::Bad,
        "parked" | "retrying" => Tone::Attention,
        "cancelled" | "asleep" | "removed" => Tone::Dim,
        _ => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{Format, Output};
    use latchwork::json;

    fn drawn(draw: impl FnOnce(&mut Text)) -> String {
        let mut out = Vec::new();
        Output::new(Format::Table, &mut out).one(&Value::Null, draw).unwrap();
        String::from_utf8(out).unwrap()
    }

    const FIELDS: [Field; 4] = [
        ("ID", "/id", How::Plain),
        ("SINCE", "/at_us", How::Time),
        ("DATA", "/data", How::Json),
        ("TAGS", "/tags", How::Words),
    ];

    #[test]
    fn fields_are_columns_of_a_list() {
        let items = [json!({"id": "a", "at_us": 1_000_000, "data": "x", "tags": ["p", "q"]}), json!({"id": "b"})];
        let now = Timestamp(3_000_000);
        assert_eq!(
            drawn(|text| text.table(table(&items, &FIELDS, now))),
            "ID  SINCE   DATA  TAGS\na   2s ago  \"x\"   p, q\nb\n"
        );
    }

    #[test]
    fn fields_without_a_value_are_not_shown_of_one() {
        let item = json!({"id": "a", "at_us": 1_000_000, "data": null, "tags": []});
        assert_eq!(
            drawn(|text| about(text, &item, &FIELDS, Timestamp(3_000_000))),
            "ID     a\nSINCE  1970-01-01 00:00:01 UTC (2s ago)\n"
        );
    }
}
