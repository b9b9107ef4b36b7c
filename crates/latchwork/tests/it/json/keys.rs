//! Keys of maps: those that become a JSON string, and those that are refused.

use std::collections::BTreeMap;

use latchwork::{JsonError, json};
use serde::{Serialize, Serializer};

use super::{custom, to_value};

/// A map with one key and nothing under it.
struct Keyed<'a, K>(&'a K);

impl<K: Serialize> Serialize for Keyed<'_, K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([(self.0, ())])
    }
}

#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct Name(String);

#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
enum Variant {
    Plain,
    #[serde(rename = "other name")]
    Renamed,
    Newtype(u8),
    Tuple(u8, u8),
    Struct {
        field: u8,
    },
}

#[test]
fn keys_become_the_strings_that_serde_json_makes_of_them() {
    fn check<K: Serialize + Ord>(key: K, expected: &str) {
        assert_eq!(to_value(&Keyed(&key)), Ok(json!({expected: null})));
        let object = serde_json::to_value(BTreeMap::from([(key, ())])).unwrap();
        assert_eq!(object.as_object().unwrap().keys().collect::<Vec<_>>(), [expected]);
    }
    check("a.b", "a.b");
    check("", "");
    check('é', "é");
    check(true, "true");
    check(-8i8, "-8");
    check(u64::MAX, "18446744073709551615");
    check(i128::MIN, "-170141183460469231731687303715884105728");
    check(u128::MAX, "340282366920938463463374607431768211455");
    check(Name("n".into()), "n");
    check(Variant::Plain, "Plain");
    check(Variant::Renamed, "other name");
    check(std::net::Ipv4Addr::LOCALHOST, "127.0.0.1");
}

#[test]
fn keys_without_a_json_string_are_refused() {
    fn check<K: Serialize>(key: K, found: &'static str) {
        assert_eq!(to_value(&Keyed(&key)), Err(JsonError::Key { path: String::new(), found: found.into() }));
    }
    check(1.5f32, "a float");
    check(f64::NAN, "a float");
    check(None::<&str>, "an option");
    check(Some("a"), "an option");
    check((), "a unit");
    check(["a"; 2], "a tuple");
    check(vec!["a"], "a sequence");
    check(BTreeMap::from([("a", "b")]), "a map");
    check(Variant::Newtype(1), "a variant with fields");
    check(Variant::Tuple(1, 2), "a variant with fields");
    check(Variant::Struct { field: 1 }, "a variant with fields");
}

#[test]
fn a_display_that_fails_is_an_error() {
    struct Broken;
    impl std::fmt::Display for Broken {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            Err(std::fmt::Error)
        }
    }
    impl Serialize for Broken {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_str(self)
        }
    }
    assert_eq!(to_value(&Keyed(&Broken)), Err(custom("", "its Display failed")));
}
