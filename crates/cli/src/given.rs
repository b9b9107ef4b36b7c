//! Values on a command line: JSON as it is, from a file (`@FILE`), or from the standard input (`-`).

use std::io::Read;

use latchwork::Value;

/// Reads JSON from an argument.
pub(crate) fn json(text: &str) -> Result<Value, String> {
    let text = match (text, text.strip_prefix('@')) {
        ("-", _) => {
            let mut read = String::new();
            std::io::stdin().read_to_string(&mut read).map_err(|error| format!("the standard input: {error}"))?;
            read
        }
        (_, Some(file)) => std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?,
        (text, None) => text.into(),
    };
    serde_json::from_str(&text).map_err(|error| format!("this is not JSON: {error}; a text is written as '\"text\"'"))
}

/// Reads a generation, or a time.
pub(crate) fn time_or_generation(text: &str) -> Result<AsOf, String> {
    match text.parse() {
        Ok(generation) => Ok(AsOf::Generation(generation)),
        Err(_) => {
            crate::time::absolute(text).map(|time| AsOf::Time(time.0)).map_err(|why| format!("{why}; or a generation"))
        }
    }
}

/// A point in the history of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AsOf {
    Generation(u64),
    /// In microseconds since 1970.
    Time(u64),
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    #[test]
    fn json_is_given_as_it_is_or_in_a_file() {
        assert_eq!(json("{\"a\": [1]}"), Ok(json!({"a": [1]})));
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.json");
        std::fs::write(&file, " \"text\"\n").unwrap();
        assert_eq!(json(&format!("@{}", file.display())), Ok(json!("text")));
        for wrong in ["", "text", "{", "@", "@/nothing/there"] {
            assert!(json(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_point_in_history_is_a_generation_or_a_time() {
        assert_eq!(time_or_generation("7"), Ok(AsOf::Generation(7)));
        assert_eq!(time_or_generation("1970-01-01T00:00:01Z"), Ok(AsOf::Time(1_000_000)));
        assert!(time_or_generation("soon").is_err());
    }
}
