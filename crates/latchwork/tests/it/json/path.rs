//! Paths as they are written and parsed, and the values they lead to.

use latchwork::{Path, PathError, json};
use proptest::collection::vec;
use proptest::prelude::*;

#[test]
fn paths_are_written_and_read_with_escapes() {
    let cases: &[(&str, &[&str])] = &[
        ("a", &["a"]),
        ("data.address.city", &["data", "address", "city"]),
        (r"a\.b.c", &["a.b", "c"]),
        (r"a\\.b", &["a\\", "b"]),
        (r"\.", &["."]),
        (r"\\\.\\", &["\\.\\"]),
        ("größe. .0", &["größe", " ", "0"]),
    ];
    for (text, segments) in cases {
        let path = Path::parse(text).unwrap();
        assert_eq!(path.segments(), *segments);
        assert_eq!(path.to_string(), *text);
        assert_eq!(Path::new(segments.iter().copied()), Ok(path));
    }
}

#[test]
fn a_text_that_is_no_path_is_refused_with_the_position() {
    use PathError::{Backslash, Empty, EmptySegment};
    let cases = [
        ("", Empty),
        (".", EmptySegment { position: 0 }),
        (".a", EmptySegment { position: 0 }),
        ("a..b", EmptySegment { position: 2 }),
        ("ä.", EmptySegment { position: 3 }),
        (r"a\..", EmptySegment { position: 4 }),
        ("a\\", Backslash { position: 1 }),
        (r"a.\b", Backslash { position: 2 }),
        (r"ä\\\", Backslash { position: 4 }),
    ];
    for (text, expected) in cases {
        assert_eq!(Path::parse(text), Err(expected), "{text:?}");
    }
    assert_eq!(Path::new([""; 0]), Err(Empty));
    assert_eq!(Path::new([""]), Err(EmptySegment { position: 0 }));
    assert_eq!(Path::new(["ä", r".\", "", ""]), Err(EmptySegment { position: r"ä.\.\\.".len() }));
}

#[test]
fn keys_and_plain_indexes_lead_to_values() {
    let root = json!({"a": {"b": [10, {"c": null}, 12, 3, 4, 5, 6, 7, 8, 9, "ten"], "0": "zero"}, "x.y": {"é": 1}});
    let cases = [
        ("a.b.0", Some(json!(10))),
        ("a.b.10", Some(json!("ten"))),
        ("a.b.1.c", Some(json!(null))),
        ("a.0", Some(json!("zero"))),
        (r"x\.y.é", Some(json!(1))),
        ("a.b.11", None),
        ("a.b.00", None),
        ("a.b.02", None),
        ("a.b.+2", None),
        ("a.b.-1", None),
        ("a.b.-0", None),
        ("a.b. 2", None),
        ("a.b.2e0", None),
        ("a.b.٢", None),
        ("a.b.18446744073709551616", None),
        ("a.b.0.0", None),
        ("a.b.1.c.d", None),
        ("a.missing", None),
        ("x.y", None),
    ];
    for (text, expected) in cases {
        assert_eq!(Path::parse(text).unwrap().find(&root), expected.as_ref(), "{text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_path_reads_back_as_written(segments in vec(r"[.\\a-bé0 ]{1,4}|\PC{1,8}", 1..5)) {
        let path = Path::new(segments.clone()).unwrap();
        prop_assert_eq!(path.segments(), &segments[..]);
        let and_an_empty_one = Path::new(segments.iter().map(String::as_str).chain([""]));
        prop_assert_eq!(and_an_empty_one, Err(PathError::EmptySegment { position: path.to_string().len() + 1 }));
        prop_assert_eq!(Path::parse(&path.to_string()), Ok(path));
    }

    #[test]
    fn a_text_that_is_a_path_is_its_only_written_form(text in r"[.\\aé]{0,8}") {
        if let Ok(path) = Path::parse(&text) {
            prop_assert_eq!(path.to_string(), text);
            prop_assert_eq!(Path::new(path.segments().iter()), Ok(path));
        }
    }
}
