//! The limits of a server by name: the one list of them for files, variables, flags and what is printed.

use std::time::Duration;

use latchwork_server::Limits;
use serde_json::{Value, json};

use crate::time;

/// How a limit is read and written.
#[derive(Clone, Copy)]
enum Place {
    Number(fn(&mut Limits) -> &mut usize),
    Time(fn(&mut Limits) -> &mut Duration),
}

/// All limits, in the order in which they are printed.
const ALL: [(&str, Place); 9] = [
    ("body_bytes", Place::Number(|limits| &mut limits.body_bytes)),
    ("body_time", Place::Time(|limits| &mut limits.body_time)),
    ("json_depth", Place::Number(|limits| &mut limits.json_depth)),
    ("header_bytes", Place::Number(|limits| &mut limits.header_bytes)),
    ("headers", Place::Number(|limits| &mut limits.headers)),
    ("header_time", Place::Time(|limits| &mut limits.header_time)),
    ("connections", Place::Number(|limits| &mut limits.connections)),
    ("wait", Place::Time(|limits| &mut limits.wait)),
    ("drain_time", Place::Time(|limits| &mut limits.drain_time)),
];

/// The names of all limits.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|(name, _)| *name)
}

/// Sets a limit from text. Returns its name.
pub(crate) fn set(limits: &mut Limits, name: &str, text: &str) -> Result<&'static str, String> {
    let found = ALL.iter().find(|(known, _)| *known == name);
    let (name, place) = found.ok_or_else(|| {
        format!("there is no limit {name:?}; the limits are {}", names().collect::<Vec<_>>().join(", "))
    })?;
    match place {
        Place::Number(place) => {
            let number = text.parse().ok().filter(|number| *number > 0);
            *place(limits) = number.ok_or_else(|| format!("limit {name}: {text:?} is not a number above 0"))?;
        }
        Place::Time(place) => {
            *place(limits) = time::duration(text).map_err(|why| format!("limit {name}: {why}"))?;
        }
    }
    Ok(name)
}

/// The same, from a value in a file.
pub(crate) fn set_value(limits: &mut Limits, name: &str, value: &toml::Value) -> Result<&'static str, String> {
    match value {
        toml::Value::String(text) => set(limits, name, text),
        toml::Value::Integer(number) => set(limits, name, &number.to_string()),
        _ => Err(format!("limit {name} is a number, or a duration such as \"30s\"")),
    }
}

/// A limit as it is printed.
pub(crate) fn shown(mut limits: Limits, name: &str) -> Value {
    match ALL.iter().find(|(known, _)| *known == name) {
        Some((_, Place::Number(place))) => json!(*place(&mut limits)),
        Some((_, Place::Time(place))) => json!(time::exact(*place(&mut limits))),
        None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_set_by_its_name() {
        let mut limits = Limits::default();
        assert_eq!(set(&mut limits, "body_bytes", "7"), Ok("body_bytes"));
        assert_eq!(set(&mut limits, "wait", "1m 30s"), Ok("wait"));
        assert_eq!((limits.body_bytes, limits.wait), (7, Duration::from_secs(90)));
        for (name, text) in [("body_bytes", "0"), ("body_bytes", "1s"), ("wait", "7"), ("waits", "7"), ("wait", "")] {
            assert!(set(&mut limits, name, text).is_err(), "{name}={text}");
        }
        for name in names() {
            let text = match shown(Limits::default(), name) {
                Value::String(text) => text,
                value => value.to_string(),
            };
            let mut limits = Limits::default();
            set(&mut limits, name, &text).unwrap();
            assert_eq!(limits, Limits::default(), "{name} is printed as it is read");
        }
    }
}
