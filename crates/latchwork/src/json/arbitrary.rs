//! JSON values for tests: few letters and few keys, so that values often share a prefix, and numbers near the limits
//! where integers and floats differ.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Number, Value};

pub(super) fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        1 => Just(Value::Null),
        1 => any::<bool>().prop_map(Value::Bool),
        4 => number().prop_map(Value::Number),
        4 => string().prop_map(Value::String),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::Array),
            btree_map(string(), inner, 0..4).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Two values that are unrelated, similar, or different only deep inside.
pub(super) fn pair() -> impl Strategy<Value = (Value, Value)> {
    let numbers = numbers().prop_map(|(a, b)| (Value::Number(a), Value::Number(b)));
    let strings = (string(), string()).prop_map(|(a, b)| (Value::String(a), Value::String(b)));
    let apart = || (value(), value());
    let inside = (vec(value(), 0..3), apart(), vec(value(), 0..2)).prop_map(|(before, (a, b), after)| {
        let array = |value| Value::Array(before.iter().chain([&value]).chain(&after).cloned().collect());
        (array(a), array(b))
    });
    prop_oneof![apart(), numbers, strings, inside, value().prop_map(|a| (a.clone(), a))]
}

pub(super) fn string() -> impl Strategy<Value = String> {
    vec(select(vec!['\0', '\u{1}', 'a', 'b', '\u{7f}', 'é', '\u{ffff}', '𐍈']), 0..4).prop_map(String::from_iter)
}

/// Two numbers, often near the same edge.
pub(super) fn numbers() -> impl Strategy<Value = (Number, Number)> {
    let beside = edge().prop_flat_map(|edge| (near(edge), near(edge)));
    prop_oneof![beside, (number(), number())]
}

/// Numbers where the distance of floats changes, and where the 64-bit integers end.
fn edge() -> impl Strategy<Value = i128> {
    let edges = vec![0, 1 << 52, 1 << 53, 1 << 54, 1 << 62, 1 << 63, 1 << 64, 1 << 65];
    (select(edges), any::<bool>()).prop_map(|(edge, negative)| if negative { -edge } else { edge })
}

/// An integer, if there is one, or a float.
fn near(edge: i128) -> impl Strategy<Value = Number> {
    (prop_oneof![-3..4i128, -3000..3000i128], any::<bool>()).prop_filter_map("not finite", move |(offset, whole)| {
        let integer = Number::from_i128(edge + offset).filter(|_| whole);
        integer.or_else(|| Number::from_f64((edge + offset) as f64))
    })
}

fn number() -> impl Strategy<Value = Number> {
    let near = edge().prop_flat_map(near).prop_map(Some);
    let small = (-3..4i64, any::<bool>(), -2..3i32).prop_map(|(integer, whole, quarters)| {
        let float = integer as f64 + f64::from(quarters) / 4.0;
        if whole { Some(Number::from(integer)) } else { Number::from_f64(float) }
    });
    // The smallest and the largest subnormals, and the largest floats.
    let extreme = select(vec![0, 1, 2, (1 << 52) - 1, 1 << 52, f64::MAX.to_bits() - 1, f64::MAX.to_bits()]);
    let extreme = (extreme, any::<bool>()).prop_map(|(bits, negative)| {
        let float = f64::from_bits(bits);
        Number::from_f64(if negative { -float } else { float })
    });
    let any = prop_oneof![
        any::<i64>().prop_map(|integer| Some(Number::from(integer))),
        any::<u64>().prop_map(|integer| Some(Number::from(integer))),
        any::<u64>().prop_map(|bits| Number::from_f64(f64::from_bits(bits))),
    ];
    prop_oneof![3 => near, 2 => small, 1 => extreme, 1 => any].prop_filter_map("not finite", |number| number)
}
