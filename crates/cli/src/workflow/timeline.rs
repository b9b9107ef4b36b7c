//! The timeline of `latch workflow show`: a line for each event, with a bar from its begin to its end. It must fit into
//! the terminal, and is plain text without one.

use latchwork::store::Timestamp;
use latchwork::words;

use crate::output::{Cell, Table, Text, Tone, shortened};
use crate::workflow::fields::EventFields;

/// The width of all lines without a terminal.
const PLAIN_WIDTH: usize = 100;
/// The longest label, and the width of the lengths of time.
const LABEL: usize = 32;
const TOOK: usize = 18;
/// The bars have at least this width.
const NARROWEST: usize = 10;

/// What is drawn in a line.
#[derive(Debug, PartialEq)]
struct TimelineRow {
    label: String,
    bar: String,
    took: String,
    tone: Tone,
}

/// How bars look.
#[derive(Debug, Clone, Copy)]
struct Ink {
    works: char,
    waits: char,
}

const PLAIN: Ink = Ink { works: '=', waits: '-' };
const BLOCKS: Ink = Ink { works: '█', waits: '░' };

/// Draws the events. `end` is the end of the execution, or now.
pub(crate) fn write(text: &mut Text, events: &[EventFields], end: Timestamp) {
    let (width, ink) = match text.width() {
        Some(width) => (width, BLOCKS),
        None => (PLAIN_WIDTH, PLAIN),
    };
    let Some(begin) = events.iter().map(|event| event.since.0).min() else { return };
    let mut table = Table::new(&[]);
    for TimelineRow { label, bar, took, tone } in rows(events, begin, end, width, ink) {
        table.row([label.into(), Cell::new(bar, tone), Cell::new(took, Tone::Dim)]);
    }
    text.table(table);
}

fn rows(events: &[EventFields], begin: Timestamp, end: Timestamp, width: usize, ink: Ink) -> Vec<TimelineRow> {
    let label = |event: &EventFields| shortened(&format!("{} {}", event.place, event.words()), LABEL - 1);
    let labels = events.iter().map(|event| label(event).chars().count()).max().unwrap_or_default();
    // Between two columns are two spaces.
    let columns = width.saturating_sub(labels + TOOK + 4).max(NARROWEST) as u64;
    let whole = end.0.saturating_sub(begin.0).max(1);
    let column = |time: Timestamp| {
        let part = u128::from(time.0.saturating_sub(begin.0).min(whole)) * u128::from(columns) / u128::from(whole);
        u64::try_from(part).unwrap_or(columns)
    };
    let row = |event: &EventFields| {
        let (from, to) = (event.since.0, until(event, end));
        let first = column(from).min(columns - 1);
        let length = column(to).saturating_sub(first).max(1);
        let letter = if event.kind == "step" || event.kind == "transaction" { ink.works } else { ink.waits };
        let mut bar = " ".repeat(first as usize);
        bar.extend(std::iter::repeat_n(letter, length as usize));
        // The bars of all lines have one width, so that the lengths of time stand below each other.
        bar.extend(std::iter::repeat_n(' ', (columns - first).saturating_sub(length) as usize));
        TimelineRow { label: label(event), bar, took: took(event, from, to), tone: tone(event) }
    };
    events.iter().map(row).collect()
}

/// When an event ended: of one that goes on, the end of the whole.
fn until(event: &EventFields, end: Timestamp) -> Timestamp {
    match (&*event.state, event.due_at) {
        ("done" | "failed" | "timed_out" | "saw", _) => event.recorded_at.0.min(end),
        ("until", Some(due)) => due.0.min(end),
        _ => end,
    }
}

fn took(event: &EventFields, from: Timestamp, to: Timestamp) -> String {
    let us = to.0.saturating_sub(from.0);
    let span = match us {
        0..1_000 => "under 1ms".into(),
        1_000..1_000_000 => format!("{}ms", us / 1000),
        _ => words::span(us),
    };
    match &*event.state {
        "done" | "saw" => span,
        state => format!("{span}, {}", state.replace('_', " ")),
    }
}

fn tone(event: &EventFields) -> Tone {
    match &*event.state {
        "done" | "saw" => Tone::Good,
        "failed" => Tone::Bad,
        "retrying" | "timed_out" => Tone::Attention,
        _ => Tone::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    fn event(place: &str, kind: &str, state: &str, seconds: [u64; 2], due: Option<u64>) -> EventFields {
        let time = |second: u64| format!("2026-11-30T12:00:{second:02}Z");
        serde_json::from_value(json!({
            "place": place, "kind": kind, "name": "n", "state": state, "since": time(seconds[0]),
            "recorded_at": time(seconds[1]), "attempts": 1, "value": null, "failure": null,
            "due_at": due.map(time), "attempt_failures": [], "progress": null,
        }))
        .unwrap()
    }

    #[test]
    fn bars_are_scaled_and_go_on_to_the_end() {
        let events = [
            event("0", "step", "done", [0, 2], None),
            event("1", "sleep", "until", [2, 2], Some(6)),
            event("2", "step", "retrying", [6, 7], Some(9)),
            event("3", "signal", "begun", [10, 10], None),
        ];
        let begin = events[0].since.0;
        let end = Timestamp(begin.0 + 10_000_000);
        let drawn: Vec<String> = rows(&events, begin, end, 42, PLAIN)
            .into_iter()
            .map(|TimelineRow { label, bar, took, .. }| format!("{label}|{bar}|{took}"))
            .collect();
        let expected = [
            "0 step \"n\"|==        |2s",
            "1 sleep \"n\"|  ----    |4s, until",
            "2 step \"n\"|      ====|4s, retrying",
            "3 signal \"n\"|         -|under 1ms, begun",
        ];
        assert_eq!(drawn, expected);
        for width in [0, 20, 80, 200] {
            let lines = rows(&events, begin, end, width, BLOCKS);
            let lengths: Vec<usize> = lines.iter().map(|line| line.bar.chars().count()).collect();
            assert!(lengths.iter().all(|length| *length == lengths[0]), "{width}: {lengths:?}");
            assert!(width < 60 || lengths[0] + TOOK < width, "{width}: {lengths:?}");
        }
    }
}
