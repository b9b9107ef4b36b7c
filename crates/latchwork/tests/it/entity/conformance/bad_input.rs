//! Values that cannot be stored and queries that make no sense: a typed error that says where, and no write.

use std::collections::BTreeMap;

use latchwork::JsonError;
use latchwork::entity::{Add, Entities, EntityError, Filter, Query, Remove, Transaction, TypeSpec, Update, field};
use latchwork::store::{ErrorKind, Store, StoreError};
use serde_json::{Value, json};

use super::{assert_sound, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    values_that_are_no_json_are_refused_with_their_place,
    documents_nest_128_deep_and_no_deeper,
    ids_have_1_to_512_bytes,
    type_names_have_1_to_128_bytes_without_nul,
    metadata_is_an_object,
    documents_over_the_limit_are_refused,
    transactions_over_the_limits_are_refused,
    values_too_long_for_an_index_are_refused,
    bad_declarations_are_refused,
    bad_queries_are_refused_wherever_they_are_used,
    one_bad_operation_refuses_the_whole_transaction,
);

/// A store with some entities, and its contents.
async fn prepared(bench: &Bench) -> (Entities, Vec<latchwork::entity::Entity>, u64) {
    let entities = bench.entities().await;
    entities.add(Add::new("t").id("a").data(json!({"n": 1})).metadata(json!({"m": 1}))).await.unwrap();
    let picture = entities.find(&Query::all()).await.unwrap().items;
    let at = generation(&entities).await;
    (entities, picture, at)
}

async fn assert_untouched((entities, picture, at): &(Entities, Vec<latchwork::entity::Entity>, u64)) {
    assert_eq!(&entities.find(&Query::all()).await.unwrap().items, picture);
    assert_eq!(generation(entities).await, *at);
    assert_sound(entities).await;
}

async fn values_that_are_no_json_are_refused_with_their_place(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let nested = |number: f64| BTreeMap::from([("prices", vec![1.0, number])]);
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let bad = nested(number);
        let results = [
            (entities.add(Add::new("t").id("b").data(&bad)).await.map(drop), "\"b\"", "data"),
            (entities.add(Add::new("t").data(&bad)).await.map(drop), "(new, operation 0)", "data"),
            (entities.add(Add::new("t").id("b").metadata(&bad)).await.map(drop), "\"b\"", "metadata"),
            (entities.update(Update::new("a").data(&bad)).await.map(drop), "\"a\"", "data"),
            (entities.update(Update::new("a").metadata(&bad)).await.map(drop), "\"a\"", "metadata"),
            (entities.update(Update::new("a").replace_metadata(&bad)).await.map(drop), "\"a\"", "metadata"),
            (entities.update_many([Update::new("a").data(&bad)]).await.map(drop), "\"a\"", "data"),
        ];
        for (result, of, part) in results {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let start = format!("{part} of entity {of}: the number at prices[1] is not finite");
            assert!(error.to_string().starts_with(&start), "{error}");
            assert!(matches!(error, EntityError::Document { cause: JsonError::NotFinite { .. }, .. }));
        }
        let bare = entities.add(Add::new("t").data(number)).await.unwrap_err();
        assert!(bare.to_string().contains("at the top"), "{bare}");
        let single = entities.add(Add::new("t").data(number as f32)).await.unwrap_err();
        assert!(matches!(single, EntityError::Document { .. }), "{single}");
    }
    let key = entities.add(Add::new("t").data(BTreeMap::from([(vec![1], 2)]))).await.unwrap_err();
    assert!(matches!(key, EntityError::Document { cause: JsonError::Key { .. }, .. }), "{key}");
    let wide = entities.add(Add::new("t").data(json!({})).metadata(BTreeMap::from([("n", u128::MAX)]))).await;
    assert!(
        matches!(wide, Err(EntityError::Document { cause: JsonError::Integer { .. }, part, .. }) if part == "metadata")
    );
    assert_untouched(&prepared).await;
}

fn nested(depth: usize) -> Value {
    let around = |inner: Value, at: usize| match at % 2 {
        0 => Value::Array(vec![inner]),
        _ => Value::Object([("k".to_string(), inner)].into_iter().collect()),
    };
    (1..depth).fold(json!([]), around)
}

async fn documents_nest_128_deep_and_no_deeper(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    for depth in [129, 130, 1000] {
        let results = [
            entities.add(Add::new("t").id("b").data(nested(depth))).await.map(drop),
            entities.add(Add::new("t").id("b").metadata(json!({"m": nested(depth - 1)}))).await.map(drop),
            entities.update(Update::new("a").data(nested(depth))).await.map(drop),
            entities.update(Update::new("a").metadata(json!({"m": nested(depth - 1)}))).await.map(drop),
        ];
        for result in results {
            let error = result.unwrap_err();
            let EntityError::Document { cause: JsonError::TooDeep { limit: 128, path }, .. } = error else {
                panic!("{depth}: {error}")
            };
            assert!(!path.is_empty());
        }
    }
    assert_untouched(&prepared).await;
    entities.add(Add::new("t").id("b").data(nested(128)).metadata(json!({"m": nested(127)}))).await.unwrap();
    let read = get(entities, "b").await;
    assert_eq!((read.data, &read.metadata["m"]), (nested(128), &nested(127)));
    entities.update_with("b", 0, |draft| drop(draft.metadata.insert("n".into(), json!(1)))).await.unwrap();
    assert_eq!(get(entities, "b").await.data, nested(128));
}

async fn ids_have_1_to_512_bytes(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let view = entities.now().await.unwrap();
    for (id, length) in [(String::new(), 0), ("x".repeat(513), 513), ("é".repeat(257), 514)] {
        let id = id.as_str();
        let results = [
            entities.add(Add::new("t").id(id)).await.map(drop),
            entities.add(Add::new("t").id(id).if_absent(true)).await.map(drop),
            entities.add_many_if_absent([Add::new("t").id(id)]).await.map(drop),
            entities.get(id).await.map(drop),
            entities.update(Update::new(id)).await.map(drop),
            entities.update_with(id, 1, |_| {}).await.map(drop),
            entities.remove(id).await.map(drop),
            entities.transact(Transaction::new().require_absent(id)).await.map(drop),
            entities.transact(Transaction::new().require_exists(id)).await.map(drop),
            view.get(id).await.map(drop),
            view.history(id).await.map(drop),
        ];
        for (at, result) in results.into_iter().enumerate() {
            let error = result.expect_err("no such id can be");
            assert!(matches!(error, EntityError::Id { length: l, limit: 512 } if l == length), "{at}: {error}");
        }
    }
    drop(view);
    assert_untouched(&prepared).await;
    entities.add(Add::new("t").id("x".repeat(512))).await.unwrap();
}

async fn type_names_have_1_to_128_bytes_without_nul(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    for name in [String::new(), "x".repeat(129), "a\0b".into(), "\0".into()] {
        let name = name.as_str();
        let results = [
            entities.add(Add::new(name).id("b")).await.map(drop),
            entities.find(&Query::of(name)).await.map(drop),
            entities.explain(&Query::of(name)).await.map(drop),
            entities.declare(TypeSpec::new(name)).await,
            entities.undeclare(TypeSpec::new(name)).await,
            entities.add_if_missing(&Query::of(name), Add::new(name)).await.map(drop),
        ];
        for result in results {
            let error = result.unwrap_err();
            assert!(matches!(&error, EntityError::TypeName { name: told, .. } if told == name), "{error}");
        }
    }
    assert_untouched(&prepared).await;
    for name in ["x".repeat(128), "ü ü/🦀".into(), "\u{1}".into()] {
        entities.add(Add::new(name.as_str())).await.unwrap();
        assert_eq!(entities.find(&Query::of(name.as_str())).await.unwrap().items.len(), 1);
    }
}

async fn metadata_is_an_object(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let kinds = [
        (json!(null), "null"),
        (json!(true), "a boolean"),
        (json!(1), "a number"),
        (json!("x"), "a string"),
        (json!([]), "an array"),
    ];
    for (bad, kind) in kinds {
        let results = [
            entities.add(Add::new("t").id("a").metadata(&bad)).await.map(drop),
            entities.update(Update::new("a").metadata(&bad)).await.map(drop),
            entities.update(Update::new("a").replace_metadata(&bad)).await.map(drop),
        ];
        for result in results {
            let error = result.unwrap_err();
            assert_eq!(error.to_string(), format!("metadata of entity \"a\" is {kind}; it must be an object"));
        }
    }
    assert_untouched(&prepared).await;
}

async fn documents_over_the_limit_are_refused(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let limit = bench.limits.value_bytes;
    let large = "x".repeat(limit);
    let results = [
        (entities.add(Add::new("t").id("b").data(&large)).await.map(drop), "b"),
        (entities.add(Add::new("t").id("b").metadata(json!({"m": large}))).await.map(drop), "b"),
        (entities.update(Update::new("a").data(&large)).await.map(drop), "a"),
        // Only both together are too large.
        (
            entities.update(Update::new("a").data(&large[..limit - 30]).metadata(json!({"k": 12345}))).await.map(drop),
            "a",
        ),
        (entities.update_with("a", 2, |draft| draft.data = json!(large)).await.map(drop), "a"),
        (
            entities.add_many([Add::new("t").id("x"), Add::new("t").id("b").data(&large)]).await.map(|_| ()).map(drop),
            "b",
        ),
    ];
    for (result, of) in results {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let EntityError::DocumentTooLarge { id, length, limit: told } = error else { panic!("{error}") };
        assert!(id == of && length > limit && told == limit, "{id} {length} {told}");
    }
    assert_untouched(&prepared).await;
    entities.add(Add::new("t").id("b").data(&large[..limit - 100])).await.unwrap();
}

async fn transactions_over_the_limits_are_refused(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let many = entities.add_many((0..bench.limits.operations).map(|_| Add::new("t"))).await.unwrap_err();
    assert!(matches!(many, EntityError::Store(StoreError::TooManyOperations { .. })), "{many}");
    let data = "x".repeat(bench.limits.value_bytes - 100);
    let count = bench.limits.commit_bytes / data.len() + 2;
    let large = entities.add_many((0..count).map(|_| Add::new("t").data(&data))).await.unwrap_err();
    assert!(matches!(large, EntityError::Store(StoreError::CommitTooLarge { .. })), "{large}");
    let meta = Transaction::new().update(Update::new("a")).reason("x".repeat(bench.limits.value_bytes));
    let meta = entities.transact(meta).await.unwrap_err();
    assert!(matches!(meta, EntityError::Store(StoreError::MetaTooLong { .. })), "{meta}");
    assert_untouched(&prepared).await;
}

async fn values_too_long_for_an_index_are_refused(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.i"]).unique(["data.u", "metadata.v"])).await.unwrap();
    entities.add(Add::new("t").id("a").data(json!({"i": "x".repeat(1000), "u": "y".repeat(1000)}))).await.unwrap();
    let prepared = (entities.clone(), entities.find(&Query::all()).await.unwrap().items, generation(&entities).await);
    let long = "x".repeat(2048);
    let results = [
        (entities.add(Add::new("t").id("b").data(json!({"i": long}))).await.map(drop), "b", "data.i"),
        (entities.add(Add::new("t").id("b").data(json!({"u": [long]}))).await.map(drop), "b", "data.u and metadata.v"),
        (entities.update(Update::new("a").data(json!({"i": long}))).await.map(drop), "a", "data.i"),
        (entities.update_with("a", 3, |draft| draft.data["i"] = json!(long)).await.map(drop), "a", "data.i"),
        (
            entities.update(Update::new("a").metadata(json!({"v": "x".repeat(1100)}))).await.map(drop),
            "a",
            "data.u and metadata.v",
        ),
    ];
    for (result, of, named) in results {
        let error = result.unwrap_err();
        let EntityError::IndexedTooLong { id, fields, length, limit: 2048 } = error else { panic!("{error}") };
        assert!(id == of && fields == named && length > 2048);
    }
    assert_untouched(&prepared).await;
    // A filter may hold a value that is longer than any stored value.
    for filter in [field("data.i").equals(&long), field("data.i").starts_with(&long), field("data.i").greater(&long)] {
        assert_eq!(entities.find(&Query::of("t").filter(filter)).await.unwrap().items, []);
    }
    assert_eq!(entities.find(&Query::of("t").filter(field("data.i").less(&long))).await.unwrap().items.len(), 1);
}

async fn bad_declarations_are_refused(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let spec = || TypeSpec::new("t");
    let none: [&str; 0] = [];
    let nine: Vec<String> = (0..9).map(|n| format!("data.f{n}")).collect();
    let declarations = [
        (spec().index(none), "the type \"t\" cannot be declared so: an index needs a field"),
        (spec().unique(&nine), "the type \"t\" cannot be declared so: an index has at most 8 fields"),
        (
            spec().index(["data.a", "data.b", "data.a"]),
            "the type \"t\" cannot be declared so: an index names a field twice",
        ),
        (
            (0..65).fold(spec(), |spec, n| spec.index([format!("data.f{n}")])),
            "the type \"t\" cannot be declared so: a type has at most 64 indexes",
        ),
    ];
    for (spec, said) in declarations {
        let error = entities.declare(spec).await.unwrap_err();
        assert_eq!((error.to_string().as_str(), error.kind()), (said, ErrorKind::Invalid));
    }
    for path in ["", "x", "metadata", "id", "data.", "data..x", ".data", "Data.x", "data.a\\"] {
        for spec in [spec().index(["data.ok", path]), spec().unique([path])] {
            let error = entities.declare(spec).await.unwrap_err();
            assert!(matches!(&error, EntityError::Filter(error) if error.at == format!("{path:?}")), "{path}: {error}");
        }
    }
    assert_untouched(&prepared).await;
    entities.declare((0..64).fold(spec(), |spec, n| spec.index([format!("data.f{n}")]))).await.unwrap();
    assert!(matches!(entities.declare(spec().index(["data.x"])).await, Err(EntityError::Declaration { .. })));
    assert_sound(entities).await;
}

async fn bad_queries_are_refused_wherever_they_are_used(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let elsewhere = Entities::on(&Store::memory().await.unwrap()).await.unwrap();
    elsewhere.add_many([Add::new("t"), Add::new("t")]).await.unwrap();
    let other = elsewhere.find(Query::all().limit(1)).await.unwrap().next;
    let queries = [
        (Query::of("t").limit(0), "a query's limit must be at least 1"),
        (Query::of("t").after(other), "this cursor continues a list of entities with another filter or order"),
        (
            Query::of("t").filter(Filter::from(json!([]))),
            "the query is malformed at the filter: a filter takes an object",
        ),
        (Query::of("t").order_by("x", Default::default()), "the query is malformed at \"x\": \"x\" names no field; "),
    ];
    let view = entities.now().await.unwrap();
    for (query, said) in queries {
        let mut results = vec![
            entities.find(&query).await.map(drop),
            entities.explain(&query).await.map(drop),
            view.find(&query).await.map(drop),
            view.explain(&query).await.map(drop),
        ];
        if !matches!(results[0], Err(EntityError::Limit)) {
            // `add_if_missing` asks for one entity, whatever the query's limit says.
            results.push(entities.add_if_missing(&query, Add::new("t")).await.map(drop));
        }
        for result in results {
            let error = result.unwrap_err();
            assert!(error.to_string().starts_with(said), "{error}");
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }
    drop(view);
    assert_untouched(&prepared).await;
}

async fn one_bad_operation_refuses_the_whole_transaction(bench: Bench) {
    let prepared = prepared(&bench).await;
    let entities = &prepared.0;
    let good = || Transaction::new().add(Add::new("t").id("b")).update(Update::new("a").data(json!(2)));
    let bad = [
        good().add(Add::new("t").data(f64::NAN)),
        good().add(Add::new("")),
        good().update(Update::new("a2").metadata(json!(1))),
        good().remove(Remove::new("")),
        good().require_exists(""),
    ];
    for transaction in bad {
        let error = entities.transact(transaction).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let new = good().add(Add::new("t").data(json!({}))).add(Add::new("t").data(vec![f64::NAN]));
    let new = entities.transact(new).await.unwrap_err();
    assert!(new.to_string().starts_with("data of entity (new, operation 3): the number at [0]"), "{new}");
    assert_untouched(&prepared).await;
}
