//! Checks whether JSON can be read as a type, and if not, why and where. Knows nothing of the purpose of the JSON.

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
        OpenValue::Object(None) => error,
        OpenValue::Object(Some(key)) => error.under_key(&key),
        OpenValue::Array(index) => error.under_index(index),
    }))
}

/// An open array or object, and the part of it that is being read.
enum OpenValue {
    Object(Option<String>),
    Array(usize),
}

/// The arrays and objects that are open where a text is cut off.
fn steps_to(json: &[u8]) -> Vec<OpenValue> {
    let (mut steps, mut at) = (Vec::new(), 0);
    while at < json.len() {
        match (json[at], steps.last_mut()) {
            (b'{', _) => steps.push(OpenValue::Object(None)),
            (b'[', _) => steps.push(OpenValue::Array(0)),
            (b'}' | b']', _) => drop(steps.pop()),
            (b',', Some(OpenValue::Object(key))) => *key = None,
            (b',', Some(OpenValue::Array(index))) => *index += 1,
            (b'"', last) => {
                let mut strings = Deserializer::from_slice(&json[at..]).into_iter::<String>();
                let Some(Ok(string)) = strings.next() else { break };
                at += strings.byte_offset() - 1;
                if let Some(OpenValue::Object(key)) = last {
                    key.get_or_insert(string);
                }
            }
            _ => {}
        }
        at += 1;
    }
    steps
}
