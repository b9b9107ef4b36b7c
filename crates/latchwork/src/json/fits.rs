//! Whether JSON can be read as a type, and if not, why and where in it. Knows nothing of what the JSON is for.

use serde::de::DeserializeOwned;
use serde_json::Deserializer;

use crate::json::JsonError;

/// Refuses JSON text that cannot be read as a `T`. The text is one line, as this library writes it.
pub(crate) fn fits<T: DeserializeOwned>(json: &str) -> Result<(), JsonError> {
    let Err(error) = serde_json::from_str::<T>(json) else { return Ok(()) };
    let (mut message, column) = (error.to_string(), error.column());
    if let Some((reason, _)) = message.rsplit_once(" at line ") {
        message.truncate(reason.len());
    }
    let misfit = JsonError::Misfit { path: String::new(), message };
    let steps = steps_to(&json.as_bytes()[..column.min(json.len())]);
    Err(steps.into_iter().rev().fold(misfit, |error, step| match step {
        Step::Object(None) => error,
        Step::Object(Some(key)) => error.under_key(&key),
        Step::Array(index) => error.under_index(index),
    }))
}

/// An array or object that is open, and what of it is being read.
enum Step {
    Object(Option<String>),
    Array(usize),
}

/// What is open where a text is cut off.
fn steps_to(json: &[u8]) -> Vec<Step> {
    let (mut steps, mut at) = (Vec::new(), 0);
    while at < json.len() {
        match (json[at], steps.last_mut()) {
            (b'{', _) => steps.push(Step::Object(None)),
            (b'[', _) => steps.push(Step::Array(0)),
            (b'}' | b']', _) => drop(steps.pop()),
            (b',', Some(Step::Object(key))) => *key = None,
            (b',', Some(Step::Array(index))) => *index += 1,
            (b'"', last) => {
                let mut strings = Deserializer::from_slice(&json[at..]).into_iter::<String>();
                let Some(Ok(string)) = strings.next() else { break };
                at += strings.byte_offset() - 1;
                if let Some(Step::Object(key)) = last {
                    key.get_or_insert(string);
                }
            }
            _ => {}
        }
        at += 1;
    }
    steps
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::{Value, json};

    use super::*;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)] // It is only read.
    struct Order {
        items: Vec<Item>,
        note: Option<String>,
    }

    #[derive(Deserialize)]
    #[allow(dead_code)] // It is only read.
    struct Item {
        price: u8,
        #[serde(default)]
        sizes: Vec<(u8, u8)>,
    }

    #[test]
    fn a_misfit_says_where_it_is() {
        let item = |item: Value| json!({"items": [{"price": 1, "sizes": [[1, 2]]}, item], "note": "], }\" {["});
        for (value, path, message) in [
            (json!(3), "", "invalid type: integer `3`"),
            (json!({}), "", "missing field `items`"),
            (json!({"items": {}}), "items", "invalid type: map"),
            (json!({"items": [], "note": 1}), "note", "invalid type: integer"),
            (json!({"a\"}": "],{", "items": []}), r#"["a\"}"]"#, "unknown field"),
            (item(json!({})), "items[1]", "missing field `price`"),
            (item(json!({"price": "[{ at line 7"})), "items[1].price", "invalid type: string \"[{ at line 7\""),
            (item(json!({"price": 256})), "items[1].price", "invalid value: integer `256`"),
            (item(json!({"price": [1]})), "items[1].price", "invalid type: sequence"),
            (item(json!({"price": 1, "sizes": [[1, 2], [3, -4]]})), "items[1].sizes[1][1]", "invalid value"),
            (item(json!({"price": 1, "sizes": [[1, 2], [3]]})), "items[1].sizes[1]", "invalid length 1"),
        ] {
            match fits::<Order>(&value.to_string()) {
                Err(JsonError::Misfit { path: at, message: why }) => {
                    assert_eq!(at, path, "{value}: {why}");
                    assert!(why.starts_with(message) && !why.contains("column"), "{value}: {why}");
                }
                other => panic!("{value}: {other:?}"),
            }
        }
        assert_eq!(fits::<Order>(&item(json!({"price": 2})).to_string()), Ok(()));
    }
}
