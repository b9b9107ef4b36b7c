//! Each operator on each kind of value, on data and metadata, with an index and without, in code and as JSON.

use latchwork::entity::{Add, FieldRef, Filter, Query, TypeSpec, field};
use serde_json::{Value, json};

use super::{fill, found};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    every_operator_matches_exactly_what_it_says,
    filters_are_combined,
    paths_lead_through_objects_and_arrays,
    a_filter_in_json_is_the_filter_in_code,
    typed_values_can_be_compared_with,
    a_type_sees_only_its_own,
);

/// Values by their names, which are the ids of the entities that have them; one entity has none.
fn values() -> Vec<(&'static str, Option<Value>)> {
    vec![
        ("missing", None),
        ("null", Some(json!(null))),
        ("false", Some(json!(false))),
        ("true", Some(json!(true))),
        ("minus", Some(json!(-1))),
        ("zero", Some(json!(0))),
        ("half", Some(json!(0.5))),
        ("one", Some(json!(1))),
        ("one_float", Some(json!(1.0))),
        ("large", Some(json!(u64::MAX))),
        ("text_one", Some(json!("1"))),
        ("empty", Some(json!(""))),
        ("a", Some(json!("a"))),
        ("ab", Some(json!("ab"))),
        ("b", Some(json!("b"))),
        ("accent", Some(json!("é"))),
        ("list", Some(json!([1, "a", null]))),
        ("lists", Some(json!([[1], true]))),
        ("empty_list", Some(json!([]))),
        ("object", Some(json!({"k": 1}))),
        ("empty_object", Some(json!({}))),
    ]
}

type Case = (fn(FieldRef) -> Filter, Value, &'static [&'static str]);

/// (in code, as JSON under the path, the ids of the matches)
fn comparisons() -> Vec<Case> {
    vec![
        (|f| f.equals(1), json!(1), &["one", "one_float"]),
        (|f| f.equals(1.0), json!({"equals": 1.0}), &["one", "one_float"]),
        (|f| f.equals("1"), json!("1"), &["text_one"]),
        (|f| f.equals(()), json!(null), &["null"]),
        (|f| f.equals(true), json!(true), &["true"]),
        (|f| f.equals(0), json!(0), &["zero"]),
        (|f| f.equals(-0.0), json!({"equals": -0.0}), &["zero"]),
        (|f| f.equals(""), json!(""), &["empty"]),
        (|f| f.equals(json!([])), json!([]), &["empty_list"]),
        (|f| f.equals(json!([1.0, "a", null])), json!([1, "a", null]), &["list"]),
        (|f| f.equals(json!({"k": 1.0})), json!({"equals": {"k": 1}}), &["object"]),
        (|f| f.equals(json!({})), json!({"equals": {}}), &["empty_object"]),
        (|f| f.equals(u64::MAX), json!(u64::MAX), &["large"]),
        (|f| f.equals(u64::MAX - 1), json!(u64::MAX - 1), &[]),
        (|f| f.equals(2), json!(2), &[]),
        (|f| f.greater(0), json!({"greater": 0}), &["half", "one", "one_float", "large"]),
        (|f| f.greater(1), json!({"greater": 1.0}), &["large"]),
        (|f| f.at_least(1), json!({"at_least": 1}), &["one", "one_float", "large"]),
        (|f| f.less(0.5), json!({"less": 0.5}), &["minus", "zero"]),
        (|f| f.at_most(0.5), json!({"at_most": 0.5}), &["minus", "zero", "half"]),
        (
            |f| f.at_most(u64::MAX),
            json!({"at_most": u64::MAX}),
            &["minus", "zero", "half", "one", "one_float", "large"],
        ),
        (|f| f.greater(u64::MAX - 1), json!({"greater": u64::MAX - 1}), &["large"]),
        (|f| f.at_least(u64::MAX), json!({"at_least": u64::MAX}), &["large"]),
        (|f| f.between(u64::MAX - 5, u64::MAX - 1), json!({"between": [u64::MAX - 5, u64::MAX - 1]}), &[]),
        (|f| f.greater(u64::MAX), json!({"greater": u64::MAX}), &[]),
        (|f| f.greater("a"), json!({"greater": "a"}), &["ab", "b", "accent"]),
        (|f| f.at_least("ab"), json!({"at_least": "ab"}), &["ab", "b", "accent"]),
        (|f| f.less("a"), json!({"less": "a"}), &["text_one", "empty"]),
        (|f| f.at_most("a"), json!({"at_most": "a"}), &["text_one", "empty", "a"]),
        (|f| f.greater(""), json!({"greater": ""}), &["text_one", "a", "ab", "b", "accent"]),
        (|f| f.less(""), json!({"less": ""}), &[]),
        (|f| f.greater(false), json!({"greater": false}), &["true"]),
        (|f| f.at_least(false), json!({"at_least": false}), &["false", "true"]),
        (|f| f.less(true), json!({"less": true}), &["false"]),
        (|f| f.at_most(false), json!({"at_most": false}), &["false"]),
        (|f| f.between(0, 1), json!({"between": [0, 1]}), &["zero", "half", "one", "one_float"]),
        (|f| f.between(0.6, 0.9), json!({"between": [0.6, 0.9]}), &[]),
        (|f| f.between(1, 0), json!({"between": [1, 0]}), &[]),
        (|f| f.between("a", "b"), json!({"between": ["a", "b"]}), &["a", "ab", "b"]),
        (|f| f.between(false, false), json!({"between": [false, false]}), &["false"]),
        (|f| f.one_of([1, 7]), json!({"one_of": [1, 7]}), &["one", "one_float"]),
        (
            |f| f.one_of([json!("1"), json!(null), json!(0), json!([]), json!(1), json!(1.0)]),
            json!({"one_of": ["1", null, 0, [], 1, 1.0]}),
            &["null", "zero", "one", "one_float", "text_one", "empty_list"],
        ),
        (|f| f.one_of([0; 0]), json!({"one_of": []}), &[]),
        (|f| f.contains(1), json!({"contains": 1}), &["list"]),
        (|f| f.contains("a"), json!({"contains": "a"}), &["a", "ab", "list"]),
        (|f| f.contains(""), json!({"contains": ""}), &["text_one", "empty", "a", "ab", "b", "accent"]),
        (|f| f.contains(()), json!({"contains": null}), &["list"]),
        (|f| f.contains([1]), json!({"contains": [1]}), &["lists"]),
        (|f| f.contains("1"), json!({"contains": "1"}), &["text_one"]),
        (|f| f.contains("k"), json!({"contains": "k"}), &[]),
        (|f| f.starts_with("a"), json!({"starts_with": "a"}), &["a", "ab"]),
        (|f| f.starts_with(""), json!({"starts_with": ""}), &["text_one", "empty", "a", "ab", "b", "accent"]),
        (|f| f.starts_with("1"), json!({"starts_with": "1"}), &["text_one"]),
        (|f| f.starts_with("é"), json!({"starts_with": "é"}), &["accent"]),
        (|f| f.starts_with("abc"), json!({"starts_with": "abc"}), &[]),
        (|f| f.exists().and(field("data.none").exists()), json!({"exists": true, "equals": "no such"}), &[]),
    ]
}

fn sorted(ids: impl IntoIterator<Item = impl Into<String>>) -> Vec<String> {
    let mut ids: Vec<String> = ids.into_iter().map(Into::into).collect();
    ids.sort();
    ids
}

async fn every_operator_matches_exactly_what_it_says(bench: Bench) {
    let entities = bench.entities().await;
    let paths = ["data.v", "metadata.v", "data.deep.1.v", "metadata.x.y\\.z"];
    for (at, path) in paths.into_iter().enumerate() {
        entities.declare(TypeSpec::new(format!("indexed-{at}")).index([path])).await.unwrap();
        entities.declare(TypeSpec::new(format!("backed-{at}")).index(["data.none", path])).await.unwrap();
        for kind in ["plain", "indexed", "backed"] {
            let name = format!("{kind}-{at}");
            let adds = values().into_iter().map(|(id, value)| {
                let holder = |key: &str| value.clone().map_or(json!({}), |value| json!({key: value}));
                let add = Add::new(name.as_str()).id(format!("{name} {id}"));
                match at {
                    0 => add.data(holder("v")),
                    1 => add.metadata(holder("v")),
                    2 => add.data(json!({"deep": [{}, holder("v")]})),
                    _ => add.metadata(json!({"x": holder("y.z")})),
                }
            });
            entities.add_many(adds).await.unwrap();
            let whom = |ids: &[&str]| sorted(ids.iter().map(|id| format!("{name} {id}")));
            let all: Vec<&str> = values().iter().map(|(id, _)| *id).collect();
            for (code, json, expected) in comparisons() {
                let (code, as_json) = (code(field(path)), Filter::from(json!({path: json})));
                let query = |filter: Filter| Query::of(name.as_str()).filter(filter);
                assert_eq!(
                    sorted(found(&entities, &query(code.clone())).await),
                    whom(expected),
                    "{path} {json}, {kind}"
                );
                let by_json = found(&entities, &query(as_json)).await;
                assert_eq!(sorted(by_json), whom(expected), "{path} {json} as JSON, {kind}");
                // A negation also matches entities without the field.
                let others: Vec<&str> = all.iter().copied().filter(|id| !expected.contains(id)).collect();
                let negated = found(&entities, &query(code.negate())).await;
                assert_eq!(sorted(negated), whom(&others), "not {path} {json}, {kind}");
            }
            let check = async |filter: Filter, json: Value, expected: &[&str]| {
                for filter in [filter, json!({path: json}).into()] {
                    let query = Query::of(name.as_str()).filter(filter);
                    assert_eq!(sorted(found(&entities, &query).await), whom(expected), "{path} {json}, {kind}");
                }
            };
            check(field(path).exists(), json!({"exists": true}), &all[1..]).await;
            check(field(path).exists().negate(), json!({"exists": false}), &all[..1]).await;
            let not_one: Vec<&str> = all.iter().copied().filter(|id| !id.starts_with("one")).collect();
            check(field(path).not(1), json!({"not": 1}), &not_one).await;
            let not_null: Vec<&str> = all.iter().copied().filter(|id| *id != "null").collect();
            check(field(path).not(()), json!({"not": null}), &not_null).await;
        }
    }
}

async fn filters_are_combined(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("indexed").index(["data.a"]).index(["data.b", "data.a"])).await.unwrap();
    for name in ["plain", "indexed"] {
        let item = |a: i64, b: i64| Add::new(name).id(format!("{name}{a}{b}")).data(json!({"a": a, "b": b}));
        entities.add_many((0..9).map(|n| item(n / 3, n % 3))).await.unwrap();
        let (a, b) = (|| field("data.a"), || field("data.b"));
        let cases = [
            (Filter::all(), json!({}), "00 01 02 10 11 12 20 21 22"),
            (Filter::all().negate(), json!({"not": {}}), ""),
            (a().equals(1).and(b().equals(2)), json!({"data.a": 1, "data.b": 2}), "12"),
            (a().equals(1).or(b().equals(2)), json!({"or": [{"data.a": 1}, {"data.b": 2}]}), "02 10 11 12 22"),
            (a().equals(1).and(a().equals(2)), json!({"and": [{"data.a": 1}, {"data.a": 2}]}), ""),
            (a().at_least(1).and(a().less(2)), json!({"data.a": {"at_least": 1, "less": 2}}), "10 11 12"),
            (a().greater(1).and(a().less(1)), json!({"data.a": {"greater": 1, "less": 1}}), ""),
            (
                a().equals(1).or(b().equals(1)).negate(),
                json!({"not": {"or": [{"data.a": 1}, {"data.b": 1}]}}),
                "00 02 20 22",
            ),
            (
                a().one_of([0, 2]).and(b().equals(0).or(b().equals(2))).and(a().not(0)),
                json!({"data.a": {"one_of": [0, 2], "not": 0}, "or": [{"data.b": 0}, {"data.b": 2}]}),
                "20 22",
            ),
            (
                a().equals(0).and(b().equals(0)).or(a().equals(2).and(b().equals(2))).or(a().equals(7)),
                json!({"or": [{"data.a": 0, "data.b": 0}, {"and": [{"data.a": 2}, {"data.b": 2}]}, {"data.a": 7}]}),
                "00 22",
            ),
            (a().equals(1).negate().negate(), json!({"not": {"not": {"data.a": 1}}}), "10 11 12"),
            (Filter::from(json!({"and": []})), json!({"and": []}), "00 01 02 10 11 12 20 21 22"),
            (Filter::from(json!({"or": []})), json!({"or": []}), ""),
            (Filter::from(json!({"or": []})).or(a().equals(0)), json!({"or": [{"or": []}, {"data.a": 0}]}), "00 01 02"),
        ];
        for (code, json, expected) in cases {
            let expected: Vec<String> = expected.split_whitespace().map(|id| format!("{name}{id}")).collect();
            assert_eq!(found(&entities, &Query::of(name).filter(code.clone())).await, expected, "{json}");
            assert_eq!(found(&entities, &Query::of(name).filter(json.clone())).await, expected, "{json}");
            // A second filter is added to the first.
            let both = Query::of(name).filter(b().at_most(1)).filter(code);
            let fewer: Vec<String> = expected.into_iter().filter(|id| !id.ends_with('2')).collect();
            assert_eq!(found(&entities, &both).await, fewer, "{json}");
        }
    }
}

async fn paths_lead_through_objects_and_arrays(bench: Bench) {
    let entities = bench.entities().await;
    let paths = [
        ("data", json!({"a": 1}), json!({"a": 1})),
        ("data.a", json!({"a": 1}), json!(1)),
        ("data.a.b.c", json!({"a": {"b": {"c": 2}}}), json!(2)),
        ("data.0", json!([3, 4]), json!(3)),
        ("data.1.x", json!([3, {"x": 5}]), json!(5)),
        ("data.list.10", json!({"list": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, "ten"]}), json!("ten")),
        ("data.0.key", json!({"0": {"key": 6}}), json!(6)),
        ("data.a\\.b", json!({"a.b": 7}), json!(7)),
        ("data.a\\\\b", json!({"a\\b": 8}), json!(8)),
        ("data.ü", json!({"ü": 9}), json!(9)),
        ("data.data", json!({"data": 10}), json!(10)),
        ("data.metadata.x", json!({"metadata": {"x": 11}}), json!(11)),
    ];
    for (at, (path, data, value)) in paths.iter().enumerate() {
        let name = format!("t{at}");
        entities.declare(TypeSpec::new(format!("{name}-indexed")).index([*path])).await.unwrap();
        for name in [name.clone(), format!("{name}-indexed")] {
            fill(&entities, &name, [(name.as_str(), data.clone())]).await;
            fill(&entities, &name, [(format!("{name}-other").as_str(), json!({"other": [[]]}))]).await;
            let query = Query::of(name.as_str()).filter(field(path).equals(value));
            assert_eq!(found(&entities, &query).await, [name.as_str()], "{path}");
        }
    }
    // If there is no value, or no container, nothing is found and nothing fails.
    fill(&entities, "odd", [("odd", json!({"a": 1, "list": [1]}))]).await;
    for path in
        ["data.a.b", "data.list.1", "data.list.x", "data.list.-1", "data.list.00", "data.list.99999999999999999999"]
    {
        assert_eq!(
            found(&entities, &Query::of("odd").filter(field(path).exists())).await,
            Vec::<String>::new(),
            "{path}"
        );
        assert_eq!(found(&entities, &Query::of("odd").filter(field(path).not(5))).await, ["odd"], "{path}");
    }
}

async fn a_filter_in_json_is_the_filter_in_code(_: Bench) {
    for (code, json, _) in comparisons() {
        // In code, the last case consists of two filters.
        if json != json!({"exists": true, "equals": "no such"}) {
            let code = code(field("data.v"));
            let as_json = Filter::from(json!({"data.v": json}));
            // Numbers may be written in two ways.
            assert_eq!(format!("{code:?}").replace("1.0", "1"), format!("{as_json:?}").replace("1.0", "1"));
        }
    }
}

#[derive(serde::Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Open,
    #[allow(dead_code)]
    Closed {
        by: String,
    },
}

async fn typed_values_can_be_compared_with(bench: Bench) {
    let entities = bench.entities().await;
    fill(
        &entities,
        "t",
        [("a", json!({"s": "open"})), ("b", json!({"s": {"closed": {"by": "x"}}})), ("c", json!({"s": null}))],
    )
    .await;
    let with = |filter: Filter| Query::of("t").filter(filter);
    assert_eq!(found(&entities, &with(field("data.s").equals(Status::Open))).await, ["a"]);
    let closed = Status::Closed { by: "x".into() };
    assert_eq!(found(&entities, &with(field("data.s").equals(closed))).await, ["b"]);
    assert_eq!(found(&entities, &with(field("data.s").equals(None::<u8>))).await, ["c"]);
}

async fn a_type_sees_only_its_own(bench: Bench) {
    let entities = bench.entities().await;
    for name in ["a", "ab", "b", "a\u{1}"] {
        fill(&entities, name, [(format!("{name}-1").as_str(), json!(1)), (format!("{name}-2").as_str(), json!(2))])
            .await;
    }
    for name in ["a", "ab", "b", "a\u{1}"] {
        assert_eq!(found(&entities, &Query::of(name)).await, [format!("{name}-1"), format!("{name}-2")]);
    }
    assert_eq!(found(&entities, &Query::of("none")).await, Vec::<String>::new());
    let all = Query::all().filter(field("data").equals(2));
    assert_eq!(found(&entities, &all).await, ["a\u{1}-2", "a-2", "ab-2", "b-2"]);
}
