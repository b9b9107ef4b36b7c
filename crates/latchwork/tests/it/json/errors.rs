//! What errors say about a value, and where in it they point.

use std::collections::BTreeMap;

use latchwork::JsonError;
use serde::{Serialize, Serializer};

use super::to_value;

enum Step {
    Key(&'static str),
    Index(usize),
}
use Step::{Index, Key};

/// An integer that JSON cannot hold, below these path steps.
struct TooLarge<'a>(&'a [Step]);

impl Serialize for TooLarge<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            [] => serializer.serialize_u128(u128::MAX),
            [Key(key), rest @ ..] => serializer.collect_map([(key, TooLarge(rest))]),
            [Index(index), rest @ ..] => {
                serializer.collect_seq((0..=*index).map(|at| (at == *index).then_some(TooLarge(rest))))
            }
        }
    }
}

#[test]
fn a_path_is_read_in_one_way_only() {
    let cases: &[(&[Step], &str)] = &[
        (&[], ""),
        (&[Key("items"), Index(3), Key("price")], "items[3].price"),
        (&[Index(0), Index(12), Key("a-b_c")], "[0][12].a-b_c"),
        (&[Key("a.b"), Key("c")], r#"["a.b"].c"#),
        (&[Key("a"), Key("[0]"), Index(0)], r#"a["[0]"][0]"#),
        (&[Key(""), Key("a\"\n")], r#"[""]["a\"\n"]"#),
        (&[Key("größe")], "größe"),
    ];
    for (steps, expected) in cases {
        assert_eq!(to_value(&TooLarge(steps)), Err(JsonError::Integer { path: expected.to_string() }));
    }
}

#[test]
fn messages_stay_readable() {
    let top = JsonError::NotFinite { path: String::new() };
    assert!(top.to_string().starts_with("the number at the top is not finite"), "{top}");
    let long = to_value(&BTreeMap::from([("é".repeat(1000), u128::MAX)]));
    assert_eq!(long, Err(JsonError::Integer { path: format!("[\"{}…\"]", "é".repeat(32)) }));
    let deep = JsonError::TooDeep { path: "ä.".repeat(128), limit: 128 };
    assert!(deep.to_string().starts_with(&format!("the value at {}… is nested", "ä.".repeat(21))), "{deep}");
}
