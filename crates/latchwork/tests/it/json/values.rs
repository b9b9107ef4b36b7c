//! What becomes of values that are stored: the same as with serde_json, or an error that says where.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;

use latchwork::state::{MutationError, StateError};
use latchwork::{JsonError, Value, json};
use serde::ser::{Error, SerializeMap, SerializeTupleVariant};
use serde::{Serialize, Serializer};

use super::{block_on, custom, to_value};
use crate::state::states;

/// How deep arrays and objects of a value may nest.
const MAX_DEPTH: usize = 128;

/// Checks whether a mutator may return this value, which is JSON already.
fn check_json(value: &Value) -> Result<(), JsonError> {
    let value = value.clone();
    let mutator = move |_| ready(Ok::<_, Infallible>(Some(value.clone())));
    match block_on(async { states().await.sequencer("q").atomic_state(mutator).await }) {
        Ok(_) => Ok(()),
        Err(MutationError::State(StateError::Value { cause, .. })) => Err(cause),
        Err(other) => panic!("{other}"),
    }
}

#[derive(Serialize)]
struct Unit;

#[derive(Serialize)]
struct Newtype<T>(T);

#[derive(Serialize)]
struct Pair<T>(u8, T);

#[derive(Serialize)]
struct Price<T> {
    name: &'static str,
    price: T,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<T>,
}

#[derive(Serialize)]
enum External<T> {
    Unit,
    #[serde(rename = "new type")]
    Newtype(T),
    Tuple(u8, T),
    Struct {
        field: T,
    },
}

#[derive(Serialize)]
#[serde(tag = "kind")]
enum Internal<T> {
    Unit,
    Newtype(Price<T>),
    Struct { field: T },
}

#[derive(Serialize)]
#[serde(tag = "kind", content = "content")]
enum Adjacent<T> {
    Unit,
    Newtype(T),
    Tuple(u8, T),
}

#[derive(Serialize)]
#[serde(untagged)]
enum Untagged<T> {
    Unit,
    Newtype(T),
    Struct { field: T },
}

#[derive(Serialize)]
struct Flat<T> {
    id: u8,
    #[serde(flatten)]
    rest: BTreeMap<&'static str, T>,
    #[serde(flatten)]
    variant: External<T>,
}

struct Bytes(&'static [u8]);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

fn price<T>(price: T) -> Price<T> {
    Price { name: "n", price, note: None }
}

#[test]
fn values_become_what_serde_json_makes_of_them() {
    fn check<T: Serialize>(value: T) {
        let written = to_value(&value).unwrap();
        let expected = serde_json::to_value(&value).unwrap();
        assert_eq!(written, expected);
        assert_eq!(written.to_string(), expected.to_string(), "the sign of zero counts as well");
        assert_eq!(check_json(&written), Ok(()));
    }
    check((true, 'é', "text", String::from("\0"), ()));
    check((i8::MIN, i16::MIN, i32::MIN, i64::MIN, i64::MAX, u8::MAX, u16::MAX, u32::MAX, u64::MAX));
    check((i128::from(i64::MIN), i128::from(u64::MAX), -1i128, 1i128, u128::from(u64::MAX), 0u128));
    check((0.1f32, f32::MAX, 1.0f32, 0.1f64, -0.0f64, f64::MAX, f64::MIN_POSITIVE / 8.0, 1.0f64, 1e300f64));
    check((None::<u8>, Some(1), Some(Some("a")), Some(None::<u8>)));
    check((Unit, Newtype(1), Newtype(Newtype("a")), Pair(1, "a"), Pair(1, Unit)));
    check(Bytes(&[0, 127, 255]));
    check(vec![vec![], vec![1, 2], vec![3]]);
    check([price(1.5), Price { name: "é", price: 2.0, note: Some(3.0) }]);
    check([External::Unit, External::Newtype(1), External::Tuple(1, 2), External::Struct { field: 3 }]);
    check([Internal::Unit, Internal::Newtype(price(1)), Internal::Struct { field: 3 }]);
    check([Adjacent::Unit, Adjacent::Newtype(1), Adjacent::Tuple(1, 2)]);
    check([Untagged::Unit, Untagged::Newtype(1), Untagged::Struct { field: 3 }]);
    check(Flat { id: 1, rest: BTreeMap::from([("a", 1), ("b", 2)]), variant: External::Struct { field: 3 } });
    check(Flat { id: 1, rest: BTreeMap::from([("id", 9)]), variant: External::Tuple(1, 2) });
    check(BTreeMap::from([((1u8), "a"), (2, "b")]));
    check(BTreeMap::from([('a', BTreeMap::from([(true, ())]))]));
    check(std::net::Ipv6Addr::LOCALHOST);
    check(std::time::Duration::from_millis(1500));
    check(json!({"a": [1, -1, 1.5, null, true, "s", {}], "": []}));
    assert_eq!(to_value("unsized").unwrap(), json!("unsized"));
    assert_eq!(to_value(&0.1f32).unwrap(), json!(0.10000000149011612));
}

#[test]
fn errors_say_where_they_are() {
    fn check<T: Serialize>(value: T, expected: JsonError) {
        assert_eq!(to_value(&value), Err(expected));
    }
    let path = String::from;
    let not_finite = |at| JsonError::NotFinite { path: path(at) };
    check(f64::NAN, not_finite(""));
    check(f32::NEG_INFINITY, not_finite(""));
    check(BTreeMap::from([("items", [0.0, 1.0, 2.0, f64::INFINITY].map(price))]), not_finite("items[3].price"));
    check(Some(Newtype(Pair(1, f32::NAN))), not_finite("[1]"));
    check(External::Newtype(f64::NAN), not_finite(r#"["new type"]"#));
    check(External::Tuple(1, f64::NAN), not_finite("Tuple[1]"));
    check([External::Struct { field: f64::NAN }], not_finite("[0].Struct.field"));
    check(Internal::Newtype(price(f64::NAN)), not_finite("price"));
    check(Adjacent::Tuple(1, f64::NAN), not_finite("content[1]"));
    check(Untagged::Struct { field: f64::NAN }, not_finite("field"));
    check(BTreeMap::from([("a.b", BTreeMap::from([(7, f64::NAN)]))]), not_finite(r#"["a.b"].7"#));
    check([i128::from(u64::MAX) + 1], JsonError::Integer { path: path("[0]") });
    check([i128::from(i64::MIN) - 1], JsonError::Integer { path: path("[0]") });
    check(price(u128::MAX), JsonError::Integer { path: path("price") });
    check(price(BTreeMap::from([(Some(1), 1)])), JsonError::Key { path: path("price"), found: "an option".into() });
}

#[test]
fn an_error_that_a_value_raises_itself_has_its_place_too() {
    struct Raises;
    impl Serialize for Raises {
        fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(S::Error::custom("out of ink"))
        }
    }
    let expected = JsonError::Custom { path: "price[1]".into(), message: "out of ink".into() };
    assert_eq!(expected.to_string(), "the value at price[1] cannot be written: out of ink");
    assert_eq!(to_value(&price(((), Raises))), Err(expected));
}

#[test]
fn the_private_structs_of_serde_json_do_not_become_objects() {
    #[derive(Serialize)]
    #[serde(rename = "$serde_json::private::RawValue")]
    struct Raw {
        text: &'static str,
    }
    let message = "it is JSON text of serde_json's raw_value or arbitrary_precision".into();
    assert_eq!(to_value(&[Raw { text: "1" }]), Err(JsonError::Custom { path: "[0]".into(), message }));
}

#[test]
fn a_map_that_breaks_the_order_of_calls_is_an_error() {
    struct Keyless;
    impl Serialize for Keyless {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut map = Serializer::serialize_map(serializer, Some(usize::MAX))?;
            SerializeMap::serialize_value(&mut map, &1)?;
            SerializeMap::end(map)
        }
    }
    assert_eq!(to_value(&Keyless), Err(custom("", "a map's value was given before its key")));
}

/// Nests as deep as the number says, by `Shape`.
struct Nested(usize, Shape);

#[derive(Clone, Copy)]
enum Shape {
    Array,
    Map,
    /// An object with an array: two levels for each.
    Variant,
}

impl Serialize for Nested {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Nested(0, _) => serializer.serialize_unit(),
            Nested(depth, Shape::Array) => serializer.collect_seq([Nested(depth - 1, Shape::Array)]),
            Nested(depth, Shape::Map) => serializer.collect_map([("k", Nested(depth - 1, Shape::Map))]),
            Nested(depth, Shape::Variant) => {
                let mut items = serializer.serialize_tuple_variant("Nested", 0, "V", 1)?;
                SerializeTupleVariant::serialize_field(&mut items, &Nested(depth - 1, Shape::Variant))?;
                SerializeTupleVariant::end(items)
            }
        }
    }
}

#[test]
fn nesting_ends_at_the_limit_however_deep_a_value_would_go() {
    let too_deep = |path: &str| JsonError::TooDeep { path: path.to_string(), limit: MAX_DEPTH };
    let cases = [
        (Shape::Array, MAX_DEPTH, "[0]".repeat(MAX_DEPTH)),
        (Shape::Map, MAX_DEPTH, vec!["k"; MAX_DEPTH].join(".")),
        (Shape::Variant, MAX_DEPTH / 2, vec!["V[0]"; MAX_DEPTH / 2].join(".")),
    ];
    for (shape, deepest, path) in cases {
        let value = to_value(&Nested(deepest, shape)).unwrap();
        assert_eq!(check_json(&value), Ok(()));
        assert!(matches!(check_json(&json!([value])), Err(JsonError::TooDeep { .. })));
        for depth in [deepest + 1, deepest + 2, 100_000] {
            assert_eq!(to_value(&Nested(depth, shape)), Err(too_deep(&path)));
        }
    }
}

#[test]
fn bytes_and_variants_are_levels_of_their_own() {
    struct Under<'a, T>(usize, &'a T);
    impl<T: Serialize> Serialize for Under<'_, T> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            match *self {
                Under(0, value) => value.serialize(serializer),
                Under(depth, value) => serializer.collect_seq([Under(depth - 1, value)]),
            }
        }
    }
    fn check<T: Serialize>(value: T, levels: usize, step: &str) {
        assert!(to_value(&Under(MAX_DEPTH - levels, &value)).is_ok());
        let path = format!("{}{step}", "[0]".repeat(MAX_DEPTH - levels + 1));
        assert_eq!(
            to_value(&Under(MAX_DEPTH - levels + 1, &value)),
            Err(JsonError::TooDeep { path, limit: MAX_DEPTH })
        );
    }
    check(Bytes(b""), 1, "");
    check([(); 0], 1, "");
    check(BTreeMap::<u8, u8>::new(), 1, "");
    check(External::Newtype(1), 1, "");
    check(External::Tuple(1, 2), 2, ".Tuple");
    check(External::Struct { field: 1 }, 2, ".Struct");
}
