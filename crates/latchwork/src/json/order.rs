//! The order of JSON values, and bytes with the same order, for indexes. Values are checked before they come here, so
//! recursion is bounded.
//!
//! Missing < null < false < true < numbers < strings < arrays < objects. Numbers are ordered by value, whether written
//! as integer or float; strings by their UTF-8; arrays item by item; objects as arrays of their keys and values, sorted
//! by key. Equal values have equal bytes, and the bytes of one value are never a prefix of another's.
//!
//! ```text
//! missing, null, false, true   tag
//! number                       tag, largest f64 that is not above it (8 bytes, sortable), rest (2 bytes)
//! string                       tag, UTF-8 with 00 written as 00 ff, 00 00
//! array                        tag, items, 00
//! object                       tag, (key as string, value) by key, 00
//! ```

use std::cmp::Ordering;

use serde_json::{Map, Number, Value};

/// Ends arrays and objects. It is below every tag, so that the shorter of two comes first.
const END: u8 = 0x00;
const MISSING: u8 = 0x01;
const NULL: u8 = 0x02;
const FALSE: u8 = 0x03;
const TRUE: u8 = 0x04;
const NUMBER: u8 = 0x05;
const STRING: u8 = 0x06;
const ARRAY: u8 = 0x07;
const OBJECT: u8 = 0x08;

const NUMBER_BYTES: usize = 10;

/// Appends the bytes of `value`.
pub(crate) fn encode(out: &mut Vec<u8>, value: Option<&Value>) {
    match value {
        None | Some(Value::Null | Value::Bool(_)) => out.push(tag(value)),
        Some(Value::Number(number)) => {
            let (floor, rest) = worth(number);
            out.push(NUMBER);
            out.extend_from_slice(&floor.to_be_bytes());
            out.extend_from_slice(&rest.to_be_bytes());
        }
        Some(Value::String(string)) => encode_string(out, string),
        Some(Value::Array(items)) => {
            out.push(ARRAY);
            items.iter().for_each(|item| encode(out, Some(item)));
            out.push(END);
        }
        Some(Value::Object(fields)) => {
            out.push(OBJECT);
            for (key, field) in sorted(fields) {
                encode_string(out, key);
                encode(out, Some(field));
            }
            out.push(END);
        }
    }
}

fn encode_string(out: &mut Vec<u8>, string: &str) {
    encode_string_prefix(out, string);
    out.extend_from_slice(&[0, 0]);
}

/// Appends the common start of the bytes of all strings with this prefix. No other value's bytes start with it.
pub(crate) fn encode_string_prefix(out: &mut Vec<u8>, prefix: &str) {
    out.push(STRING);
    for (index, part) in prefix.as_bytes().split(|byte| *byte == 0).enumerate() {
        if index > 0 {
            out.extend_from_slice(&[0, 0xff]);
        }
        out.extend_from_slice(part);
    }
}

/// The length of the value at the start of `bytes`; `None` if there is no value.
pub(crate) fn skip(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    // The number of open arrays and objects.
    let mut open = 0usize;
    loop {
        let tag = *bytes.get(at)?;
        at += 1;
        match tag {
            END => open = open.checked_sub(1)?,
            MISSING | NULL | FALSE | TRUE => {}
            NUMBER => at += NUMBER_BYTES,
            STRING => at += string_length(&bytes[at..])?,
            ARRAY | OBJECT => open += 1,
            _ => return None,
        }
        if open == 0 {
            return (at <= bytes.len()).then_some(at);
        }
    }
}

/// True if these are the bytes of a missing value or of null.
pub(crate) fn is_missing_or_null(bytes: &[u8]) -> bool {
    matches!(bytes, [MISSING | NULL])
}

/// The length of an encoded string after its tag.
fn string_length(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        at += bytes[at..].iter().position(|byte| *byte == 0)? + 2;
        match bytes.get(at - 1)? {
            0 => return Some(at),
            0xff => {}
            _ => return None,
        }
    }
}

/// The order of two values: that of their bytes.
pub(crate) fn compare(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    match (a, b) {
        (Some(Value::Number(a)), Some(Value::Number(b))) => worth(a).cmp(&worth(b)),
        (Some(Value::String(a)), Some(Value::String(b))) => a.cmp(b),
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            let differing = a.iter().zip(b).map(|(a, b)| compare(Some(a), Some(b))).find(|order| order.is_ne());
            differing.unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let pairs = sorted(a).into_iter().zip(sorted(b));
            let mut orders =
                pairs.map(|((a_key, a), (b_key, b))| a_key.cmp(b_key).then_with(|| compare(Some(a), Some(b))));
            orders.find(|order| order.is_ne()).unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        _ => tag(a).cmp(&tag(b)),
    }
}

/// True if two values are equal, however their numbers are written and their keys are ordered.
pub(crate) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| equal(a, b)))
        }
        _ => compare(Some(a), Some(b)).is_eq(),
    }
}

/// True if two values are of the same kind: both null, both bools, both numbers and so on.
pub(crate) fn same_kind(a: &Value, b: &Value) -> bool {
    std::mem::discriminant(a) == std::mem::discriminant(b)
}

fn tag(value: Option<&Value>) -> u8 {
    match value {
        None => MISSING,
        Some(Value::Null) => NULL,
        Some(Value::Bool(false)) => FALSE,
        Some(Value::Bool(true)) => TRUE,
        Some(Value::Number(_)) => NUMBER,
        Some(Value::String(_)) => STRING,
        Some(Value::Array(_)) => ARRAY,
        Some(Value::Object(_)) => OBJECT,
    }
}

/// The largest float that is not above `number`, in sortable form, and the difference to the number. For a float the
/// difference is zero; for a 64-bit integer it is less than 2048, the distance of floats below 2^64.
fn worth(number: &Number) -> (u64, u16) {
    let integer = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
    let Some(integer) = integer else {
        // A number that is not a float either cannot have passed the check of values.
        return (sortable(number.as_f64().unwrap_or(f64::INFINITY)), 0);
    };
    let nearest = integer as f64;
    let floor = if nearest as i128 > integer { nearest.next_down() } else { nearest };
    (sortable(floor), (integer - floor as i128) as u16)
}

/// Bits with the order of floats: the sign bit is flipped, and below zero all other bits, too.
fn sortable(float: f64) -> u64 {
    // Makes -0.0 equal to 0.0.
    let bits = (float + 0.0).to_bits();
    if bits >> 63 == 0 { bits | 1 << 63 } else { !bits }
}

/// Fields by key. They have this order already, unless serde_json's preserve_order is turned on.
fn sorted(fields: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut fields: Vec<_> = fields.iter().collect();
    fields.sort_unstable_by_key(|(key, _)| *key);
    fields
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::json::arbitrary::{numbers, pair, string, value};

    fn bytes(value: Option<&Value>) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut out, value);
        out
    }

    /// Written independently of `worth`: whole part and fraction are exact in floats, and where the whole part exceeds
    /// 128 bits, no integer is near.
    fn exact(number: &Number) -> (i128, f64, f64) {
        match number.as_i128() {
            Some(integer) => (integer, 0.0, 0.0),
            None => {
                let float = number.as_f64().unwrap();
                let far = if float.abs() > 1e30 { float } else { 0.0 };
                (float.trunc() as i128, float.fract(), far)
            }
        }
    }

    #[test]
    fn values_are_ordered_by_kind_and_then_by_value() {
        let float = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let ascending: Vec<Vec<Option<Value>>> = vec![
            vec![None],
            vec![Some(json!(null))],
            vec![Some(json!(false))],
            vec![Some(json!(true))],
            vec![Some(json!(f64::MIN))],
            vec![Some(json!(-9223372036854777856.0))],
            vec![Some(json!(i64::MIN)), Some(json!(-9223372036854775808.0))],
            vec![Some(json!(i64::MIN + 1))],
            vec![Some(json!(-9007199254740993i64))],
            vec![Some(json!(-9007199254740992i64)), Some(json!(-9007199254740992.0))],
            vec![Some(json!(-1)), Some(json!(-1.0))],
            vec![Some(json!(-5e-324))],
            vec![Some(json!(0)), Some(json!(0.0)), Some(json!(-0.0)), Some(float("-0"))],
            vec![Some(json!(5e-324))],
            vec![Some(json!(0.5))],
            vec![Some(json!(1)), Some(json!(1.0)), Some(json!(1u64)), Some(float("10e-1"))],
            vec![Some(json!(9007199254740991i64)), Some(json!(9007199254740991.0))],
            vec![Some(json!(9007199254740992i64)), Some(json!(9007199254740992.0))],
            vec![Some(json!(9007199254740993i64))],
            vec![Some(json!(9007199254740994i64)), Some(json!(9007199254740994.0))],
            vec![Some(json!(i64::MAX))],
            vec![Some(json!(1u64 << 63)), Some(json!(9223372036854775808.0))],
            vec![Some(json!(u64::MAX - 2047)), Some(json!(18446744073709549568.0))],
            vec![Some(json!(u64::MAX - 1))],
            vec![Some(json!(u64::MAX))],
            vec![Some(json!(18446744073709551616.0)), Some(float("18446744073709551616"))],
            vec![Some(json!(f64::MAX))],
            vec![Some(json!(""))],
            vec![Some(json!("\0"))],
            vec![Some(json!("\0\0"))],
            vec![Some(json!("\0\u{1}"))],
            vec![Some(json!("\u{1}"))],
            vec![Some(json!("a"))],
            vec![Some(json!("a\0"))],
            vec![Some(json!("a\0b"))],
            vec![Some(json!("ab"))],
            vec![Some(json!("\u{ffff}"))],
            vec![Some(json!("\u{10000}"))],
            vec![Some(json!([]))],
            vec![Some(json!([null]))],
            vec![Some(json!([null, null]))],
            vec![Some(json!([1, 2])), Some(json!([1.0, 2.0]))],
            vec![Some(json!(["a"]))],
            vec![Some(json!(["a", []]))],
            vec![Some(json!(["a\0"]))],
            vec![Some(json!([[]]))],
            vec![Some(json!({}))],
            vec![Some(json!({"": null}))],
            vec![Some(json!({"a": 1})), Some(json!({"a": 1.0}))],
            vec![Some(json!({"a": 1, "b": 1})), Some(json!({"b": 1, "a": 1}))],
            vec![Some(json!({"a": 2}))],
            vec![Some(json!({"a\0": 0}))],
            vec![Some(json!({"b": 0}))],
        ];
        for (i, left) in ascending.iter().enumerate() {
            for (j, right) in ascending.iter().enumerate() {
                for (a, b) in left.iter().flat_map(|a| right.iter().map(move |b| (a.as_ref(), b.as_ref()))) {
                    assert_eq!(compare(a, b), i.cmp(&j), "{a:?} and {b:?}");
                    assert_eq!(bytes(a).cmp(&bytes(b)), i.cmp(&j), "bytes of {a:?} and {b:?}");
                    if let (Some(a), Some(b)) = (a, b) {
                        assert_eq!(equal(a, b), i == j, "{a} and {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn bytes_are_the_stored_ones() {
        let cases: Vec<(Value, &[u8])> = vec![
            (json!(null), &[2]),
            (json!(1), &[5, 0xbf, 0xf0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (json!(-1.0), &[5, 0x40, 0x0f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0]),
            (json!(u64::MAX), &[5, 0xc3, 0xef, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 7, 0xff]),
            (json!("a\0b"), &[6, b'a', 0, 0xff, b'b', 0, 0]),
            (json!([true, []]), &[7, 4, 7, 0, 0]),
            (json!({"b": false, "": null}), &[8, 6, 0, 0, 2, 6, b'b', 0, 0, 3, 0]),
        ];
        for (value, expected) in cases {
            assert_eq!(bytes(Some(&value)), expected, "{value}");
        }
        assert_eq!(bytes(None), [1]);
    }

    #[test]
    fn kinds_are_the_same_whatever_the_value() {
        let kinds = [
            vec![json!(null)],
            vec![json!(true), json!(false)],
            vec![json!(1), json!(-1), json!(1.5)],
            vec![json!(""), json!("a")],
            vec![json!([]), json!([1])],
            vec![json!({}), json!({"a": 1})],
        ];
        for (i, left) in kinds.iter().enumerate() {
            for (j, right) in kinds.iter().enumerate() {
                for (a, b) in left.iter().flat_map(|a| right.iter().map(move |b| (a, b))) {
                    assert_eq!(same_kind(a, b), i == j, "{a} and {b}");
                }
            }
        }
    }

    #[test]
    fn bytes_that_start_with_no_value_are_not_skipped() {
        let cases: &[&[u8]] =
            &[&[], &[0], &[9], &[0xff], &[5, 1], &[6], &[6, b'a'], &[6, 0], &[6, 0, 1, 0, 0], &[7], &[8, 2]];
        for bytes in cases {
            assert_eq!(skip(bytes), None, "{bytes:?}");
        }
        assert_eq!(skip(&vec![ARRAY; 1_000_000]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 10_000, ..ProptestConfig::default() })]

        #[test]
        fn bytes_are_ordered_as_values_are((a, b) in pair()) {
            let order = compare(Some(&a), Some(&b));
            prop_assert_eq!(bytes(Some(&a)).cmp(&bytes(Some(&b))), order);
            prop_assert_eq!(compare(Some(&b), Some(&a)), order.reverse());
            prop_assert_eq!(equal(&a, &b), order.is_eq());
            prop_assert_eq!(bytes(None).cmp(&bytes(Some(&a))), Ordering::Less);
            prop_assert_eq!(compare(None, Some(&a)), Ordering::Less);
        }

        #[test]
        fn numbers_are_ordered_by_their_values((a, b) in numbers()) {
            let expected = exact(&a).partial_cmp(&exact(&b)).unwrap();
            prop_assert_eq!(compare(Some(&a.into()), Some(&b.into())), expected);
        }

        #[test]
        fn no_bytes_begin_with_those_of_another_value((a, b) in pair()) {
            let (a, b) = (bytes(Some(&a)), bytes(Some(&b)));
            prop_assert!(a == b || !b.starts_with(&a));
            prop_assert!(!a.starts_with(&bytes(None)));
        }

        #[test]
        fn skip_finds_where_a_value_ends(value in value(), behind in vec(any::<u8>(), 0..20)) {
            let bytes = bytes(Some(&value));
            prop_assert_eq!(skip(&[&bytes[..], &behind].concat()), Some(bytes.len()));
            for length in 0..bytes.len() {
                prop_assert_eq!(skip(&bytes[..length]), None);
            }
        }

        #[test]
        fn whatever_bytes_are_skipped_nothing_panics(bytes in vec(prop_oneof![0..9u8, any::<u8>()], 0..40)) {
            prop_assert!(skip(&bytes).is_none_or(|length| 0 < length && length <= bytes.len()));
        }

        #[test]
        fn a_prefix_is_found_in_the_strings_that_start_with_it(prefix in string(), rest in string(), other in value()) {
            let mut start = Vec::new();
            encode_string_prefix(&mut start, &prefix);
            let longer = Value::String(format!("{prefix}{rest}"));
            prop_assert!(bytes(Some(&longer)).starts_with(&start));
            let has_it = other.as_str().is_some_and(|other| other.starts_with(&prefix));
            prop_assert_eq!(bytes(Some(&other)).starts_with(&start), has_it);
            let shorter: String = prefix.chars().take(1).collect();
            let has_it = shorter.starts_with(&prefix);
            prop_assert_eq!(bytes(Some(&shorter.into())).starts_with(&start), has_it);
        }
    }
}
