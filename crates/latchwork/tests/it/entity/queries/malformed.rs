//! Malformed filters, orders and cursors: each is refused with its place.

use latchwork::entity::{Direction, EntityError, Filter, FilterProblem, Query, TypeSpec, field};
use latchwork::{Cursor, CursorError};
use serde_json::{Value, json};

use super::fill;
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_malformed_filter_says_where_it_is_wrong,
    a_malformed_filter_in_code_says_the_same,
    filters_nest_128_deep_and_no_deeper,
    a_malformed_order_says_which,
    a_cursor_of_another_query_is_refused,
    a_garbled_cursor_never_does_harm,
);

async fn refused(entities: &latchwork::entity::Entities, query: Query) -> (String, FilterProblem) {
    match entities.find(&query).await {
        Err(EntityError::Filter(error)) => {
            assert!(error.to_string().starts_with(&format!("the query is malformed at {}: ", error.at)));
            (error.at, error.problem)
        }
        other => panic!("{query:?}: {other:?}"),
    }
}

async fn a_malformed_filter_says_where_it_is_wrong(bench: Bench) {
    let entities = bench.entities().await;
    let operand = |operator: &'static str, wanted: &'static str| {
        let (operator, wanted) = (operator.into(), wanted.into());
        FilterProblem::Operand { operator, wanted }
    };
    let ordered = "a number, a string or a boolean";
    let unknown = |name: &str| FilterProblem::UnknownOperator { name: name.into() };
    let root = |path: &str| FilterProblem::Root { path: path.into() };
    let cases: Vec<(Value, &str, FilterProblem)> = vec![
        (json!(null), "the filter", operand("a filter", "an object")),
        (json!("data.a"), "the filter", operand("a filter", "an object")),
        (json!([{"data.a": 1}]), "the filter", operand("a filter", "an object")),
        (json!({"data.a": {"equal": 1}}), "data.a.equal", unknown("equal")),
        (json!({"data.a": {"$gt": 1}}), "data.a.$gt", unknown("$gt")),
        (json!({"data.a": {"and": []}}), "data.a.and", unknown("and")),
        (json!({"data.a": {"k": 1}}), "data.a.k", unknown("k")),
        (json!({"data.a": {"equals": 1, "": 1}}), "data.a.", unknown("")),
        (json!({"or": [{"data.a": 1}, {"and": [{"data.b": {"gt": 1}}]}]}), "or[1].and[0].data.b.gt", unknown("gt")),
        (json!({"not": {"data.b": {"gt": 1}}}), "not.data.b.gt", unknown("gt")),
        (json!({"a": 1}), "a", root("a")),
        (json!({"id": "x"}), "id", root("id")),
        (json!({"metadata": {}}), "metadata", root("metadata")),
        (json!({"Data.x": 1}), "Data.x", root("Data.x")),
        (json!({"and": [{"where": {}}]}), "and[0].where", root("where")),
        (json!({"$or": []}), "$or", root("$or")),
        (json!({"and": {}}), "and", operand("and", "a list of filters")),
        (json!({"or": 1}), "or", operand("or", "a list of filters")),
        (json!({"or": [1]}), "or[0]", operand("a filter", "an object")),
        (json!({"not": []}), "not", operand("a filter", "an object")),
        (json!({"data.a": {"greater": null}}), "data.a.greater", operand("greater", ordered)),
        (json!({"data.a": {"at_least": []}}), "data.a.at_least", operand("at_least", ordered)),
        (json!({"data.a": {"less": {}}}), "data.a.less", operand("less", ordered)),
        (json!({"data.a": {"at_most": [1]}}), "data.a.at_most", operand("at_most", ordered)),
        (json!({"data.a": {"between": 1}}), "data.a.between", operand("between", "[low, high]")),
        (json!({"data.a": {"between": [1]}}), "data.a.between", operand("between", "[low, high]")),
        (json!({"data.a": {"between": [1, 2, 3]}}), "data.a.between", operand("between", "[low, high]")),
        (json!({"data.a": {"between": [1, "2"]}}), "data.a.between", operand("between", "two values of the same kind")),
        (json!({"data.a": {"between": [null, null]}}), "data.a.between", operand("between", ordered)),
        (json!({"data.a": {"one_of": 1}}), "data.a.one_of", operand("one_of", "a list of values")),
        (json!({"data.a": {"starts_with": 1}}), "data.a.starts_with", operand("starts_with", "a string")),
        (json!({"data.a": {"exists": 1}}), "data.a.exists", operand("exists", "true or false")),
        (
            json!({"data.a": {}}),
            "data.a",
            operand("a path", "a value, or an object of operators; to find an empty object use equals"),
        ),
    ];
    for (json, at, problem) in cases {
        let (found_at, found) = refused(&entities, Query::of("t").filter(json.clone())).await;
        assert_eq!((found_at.as_str(), found), (at, problem), "{json}");
    }
    for path in ["", "data.", "data..a", ".data", "data.a\\", "data.a\\b"] {
        let (at, problem) = refused(&entities, Query::of("t").filter(json!({"and": [{path: 1}]}))).await;
        assert_eq!(at, format!("and[0].{path}"));
        assert!(matches!(problem, FilterProblem::Path(_)), "{path}: {problem}");
    }
    let said = entities.find(&Query::of("t").filter(json!({"data.a": {"like": 1}}))).await.unwrap_err().to_string();
    assert!(said.contains("there is no operator \"like\"; there are equals, not, greater"), "{said}");
}

async fn a_malformed_filter_in_code_says_the_same(bench: Bench) {
    let entities = bench.entities().await;
    let cases = [
        (field("x").equals(1), "\"x\""),
        (field("data.").exists(), "\"data.\""),
        (field("data.a").greater(()), "data.a"),
        (field("data.a").at_least(json!([])), "data.a"),
        (field("data.a").less(f64::NAN), "data.a"),
        (field("data.a").equals(f64::INFINITY), "data.a"),
        (field("data.a").between(1, "2"), "data.a"),
        (field("data.a").between(false, ()), "data.a"),
        (field("data.a").one_of([1.0, f64::NAN]), "data.a"),
        (field("data.a").contains(std::collections::BTreeMap::from([((1, 2), 3)])), "data.a"),
    ];
    for (filter, at) in cases {
        let well = || field("data.b").equals(1);
        // However the filter is combined.
        let wrapped = [
            filter.clone(),
            filter.clone().negate(),
            filter.clone().or(well()),
            well().and(filter.clone()),
            well().or(filter),
        ];
        for filter in wrapped {
            assert_eq!(refused(&entities, Query::of("t").filter(filter)).await.0, at);
        }
    }
}

async fn filters_nest_128_deep_and_no_deeper(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"a": 1}))]).await;
    let in_json = |depth: usize| (1..depth).fold(json!({"data.a": 1}), |inner, _| json!({"not": inner}));
    let in_code = |depth: usize| (1..depth).fold(field("data.a").equals(1), |inner, _| inner.negate());
    for filter in [in_json(120).into(), in_code(120)] {
        // Negated an odd number of times.
        assert_eq!(entities.find(&Query::of("t").filter(filter)).await.unwrap().items.len(), 0);
    }
    for depth in [129, 500] {
        for filter in [Filter::from(in_json(depth)), in_code(depth)] {
            let error = entities.find(&Query::of("t").filter(filter)).await.unwrap_err();
            assert!(matches!(error, EntityError::Filter(_)), "{error}");
        }
    }
}

async fn a_malformed_order_says_which(bench: Bench) {
    let entities = bench.entities().await;
    for path in ["", "x", "metadata", "data.", "id", "_rev"] {
        let query = Query::of("t").order_by("data.ok", Direction::Ascending).order_by(path, Direction::Descending);
        assert_eq!(refused(&entities, query).await.0, format!("{path:?}"));
    }
}

async fn a_cursor_of_another_query_is_refused(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    for name in ["t", "u"] {
        for n in 0..5 {
            fill(&entities, name, [(format!("{name}{n}").as_str(), json!({"n": n}))]).await;
        }
    }
    let (n, m) = (|| field("data.n"), || field("data.m"));
    use Direction::{Ascending, Descending};
    let queries = [
        Query::of("t"),
        Query::of("u"),
        Query::all(),
        Query::of("t").filter(n().at_least(0)),
        Query::of("t").filter(n().at_least(-1)),
        Query::of("t").filter(n().greater(-1)),
        Query::of("t").filter(n().at_most(9)),
        Query::of("t").filter(n().less(9)),
        Query::of("t").filter(n().between(-1, 9)),
        Query::of("t").filter(n().one_of([0, 1, 2])),
        Query::of("t").filter(n().one_of([0, 1, 2, 3])),
        Query::of("t").filter(n().exists()),
        Query::of("t").filter(n().not(9)),
        Query::of("t").filter(n().not("9")),
        Query::of("t").filter(m().not(9)),
        Query::of("t").filter(m().not(9).and(n().not(9))),
        Query::of("t").filter(m().not(9).or(n().not(9))),
        Query::of("t").order_by("data.n", Ascending),
        Query::of("t").order_by("data.n", Descending),
        Query::of("t").order_by("data.m", Descending),
        Query::of("t").order_by("data.n", Ascending).order_by("data.m", Ascending),
        Query::of("t").order_by("data.m", Ascending).order_by("data.n", Ascending),
    ];
    let mut cursors = Vec::new();
    for query in &queries {
        cursors.push(entities.find(&query.clone().limit(2)).await.unwrap().next.unwrap());
    }
    for (at, query) in queries.iter().enumerate() {
        for (of, cursor) in cursors.iter().enumerate() {
            let result = entities.find(&query.clone().after(cursor.clone())).await;
            match result {
                Ok(_) => assert_eq!(at, of, "{query:?} takes the cursor of {:?}", queries[of]),
                Err(EntityError::Cursor(CursorError::OtherQuery { .. })) => assert_ne!(at, of, "{query:?}"),
                Err(error) => panic!("{error}"),
            }
        }
        // The limit may differ from page to page, and the cursor is valid on any view.
        let past = entities.now().await.unwrap();
        assert!(past.find(&query.clone().limit(1).after(cursors[at].clone())).await.is_ok());
    }
}

async fn a_garbled_cursor_never_does_harm(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n", "data.s"])).await.unwrap();
    for n in 0..6 {
        fill(&entities, "t", [(format!("{n}").as_str(), json!({"n": n, "s": "é\0x", "l": [n, {"k": null}]}))]).await;
    }
    let queries = [
        Query::of("t"),
        Query::of("t").order_by("data.n", Direction::Ascending).order_by("data.s", Direction::Ascending),
        Query::of("t").order_by("data.n", Direction::Descending).order_by("data.s", Direction::Descending),
        Query::of("t").order_by("data.l", Direction::Descending).order_by("data.none", Direction::Ascending),
    ];
    for garbage in ["", "0", "00", "zz", "01", "é", "0100000000000000", "010000000000000000", "01000000000000000061"] {
        assert_eq!(garbage.parse::<Cursor>(), Err(CursorError::Unknown { text: garbage.into() }));
    }
    let mut random = fastrand::Rng::with_seed(5);
    for query in queries {
        let good = entities.find(&query.clone().limit(2)).await.unwrap().next.unwrap().to_string();
        assert!(entities.find(&query.clone().after(good.to_uppercase().parse::<Cursor>().unwrap())).await.is_ok());
        for round in 0..600 {
            let mut bytes = good.clone().into_bytes();
            match round % 3 {
                0 => bytes.truncate(random.usize(..bytes.len())),
                1 => bytes.extend((0..random.usize(1..20)).map(|_| random.choice(b"0123456789abcdef".iter()).unwrap())),
                _ => {}
            }
            for _ in 0..random.usize(..3) {
                if !bytes.is_empty() {
                    let at = random.usize(..bytes.len());
                    bytes[at] = *random.choice(b"0123456789abcdefg".iter()).unwrap();
                }
            }
            let Ok(cursor) = String::from_utf8(bytes).unwrap().parse::<Cursor>() else { continue };
            match entities.find(&query.clone().after(cursor.clone())).await {
                Ok(page) => assert!(page.items.len() <= 6),
                Err(EntityError::Cursor(_)) => {}
                Err(error) => panic!("{cursor}: {error}"),
            }
        }
    }
}
