//! Subtypes: a text beside the type, which finds use without a declared index.

use latchwork::entity::{Add, Direction, Entity, EntityError, Query, Transaction, TypeSpec, Update, field};
use serde_json::json;

use super::{assert_sound, found, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_subtype_is_stored_shown_and_changed,
    entities_are_found_by_type_and_subtype_through_an_index,
    pages_of_a_subtype_continue_where_they_ended,
    a_find_of_a_subtype_is_a_read_that_transactions_check,
    an_invalid_subtype_is_refused,
);

async fn a_subtype_is_stored_shown_and_changed(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("document").subtype("draft").id("a").data(json!(1))).await.unwrap();
    entities.add(Add::new("document").id("b")).await.unwrap();
    assert_eq!(get(&entities, "a").await.subtype.as_deref(), Some("draft"));
    assert_eq!(get(&entities, "b").await.subtype, None);
    entities.update(Update::new("a").data(json!(2))).await.unwrap();
    assert_eq!(get(&entities, "a").await.subtype.as_deref(), Some("draft"), "an update keeps what it does not name");
    entities.update(Update::new("a").subtype("invoice")).await.unwrap();
    entities.update_with("b", 3, |draft| draft.subtype = Some("invoice".into())).await.unwrap();
    assert_eq!(found(&entities, &Query::of("document").subtype("invoice")).await, ["a", "b"]);
    assert!(found(&entities, &Query::of("document").subtype("draft")).await.is_empty());
    let entity = get(&entities, "a").await;
    let text = serde_json::to_value(&entity).unwrap();
    assert_eq!(text["subtype"], json!("invoice"));
    assert_eq!(serde_json::from_value::<Entity>(text).unwrap(), entity);
    entities.update(Update::new("a").without_subtype()).await.unwrap();
    entities.remove("b").await.unwrap();
    assert!(found(&entities, &Query::of("document").subtype("invoice")).await.is_empty());
    let view = entities.now().await.unwrap();
    let history = view.history("a").limit(10).await.unwrap().items;
    let subtypes: Vec<_> = history.iter().map(|version| version.entity.as_ref().unwrap().subtype.as_deref()).collect();
    assert_eq!(subtypes, [None, Some("invoice"), Some("draft"), Some("draft")]);
    let past = entities.as_of(history[1].committed.generation).await.unwrap();
    assert_eq!(past.find(&Query::of("document").subtype("invoice")).await.unwrap().items.len(), 1);
    drop((view, past));
    assert_sound(&entities).await;
}

async fn entities_are_found_by_type_and_subtype_through_an_index(bench: Bench) {
    let entities = bench.entities().await;
    for (id, kind, subtype) in [
        ("a", "document", "invoice"),
        ("b", "document", "invoice-x"),
        ("c", "letter", "invoice"),
        ("d", "document", "in"),
    ] {
        let added = entities.add(Add::new(kind).subtype(subtype).id(id).data(json!({"n": id}))).await;
        added.unwrap();
    }
    let query = Query::of("document").subtype("invoice");
    let by_type = entities.find_explained(&query).await.unwrap();
    assert_eq!((by_type.page.items.len(), by_type.examined), (1, 1));
    assert_eq!(by_type.plan.to_string(), "index on subtype: 1 equal");
    assert_eq!(found(&entities, &Query::all().subtype("invoice")).await, ["a", "c"]);
    let filtered = query.clone().filter(field("data.n").equals("z"));
    assert!(found(&entities, &filtered).await.is_empty());
    // A declared index that binds more fields is used instead, and its results are checked.
    entities.declare(TypeSpec::new("document").index(["data.n", "data.m"])).await.unwrap();
    let exact = query.filter(field("data.n").equals("d")).filter(field("data.m").equals(json!(null)));
    let exact = entities.find_explained(exact).await.unwrap();
    assert!(exact.page.items.is_empty() && exact.plan.to_string().contains("data.n"), "{}", exact.plan);
    assert_sound(&entities).await;
}

async fn pages_of_a_subtype_continue_where_they_ended(bench: Bench) {
    let entities = bench.entities().await;
    for n in 0..7 {
        let subtype = if n % 2 == 0 { "even" } else { "odd" };
        let add = Add::new("number").subtype(subtype).id(format!("n{n}")).data(json!({ "n": 10 - n }));
        entities.add(add).await.unwrap();
    }
    for ordered in [false, true] {
        let query = Query::of("number").subtype("even").limit(3);
        let query = if ordered { query.order_by("data.n", Direction::Ascending) } else { query };
        let first = entities.find(&query).await.unwrap();
        let cursor = first.next.unwrap();
        let rest = found(&entities, &query.clone().after(cursor.clone())).await;
        assert_eq!(rest, if ordered { ["n0"] } else { ["n6"] });
        let other = Query::of("number").subtype("odd").after(cursor.clone());
        let refused = entities.find(other).await.unwrap_err();
        assert!(matches!(refused, EntityError::Cursor { .. }), "{refused}");
        assert!(entities.find(Query::of("number").after(cursor)).await.is_err());
    }
}

async fn a_find_of_a_subtype_is_a_read_that_transactions_check(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("document").subtype("invoice").id("a")).await.unwrap();
    let view = entities.now().await.unwrap();
    assert_eq!(view.find(&Query::of("document").subtype("credit")).await.unwrap().items.len(), 0);
    // Another subtype does not disturb; the requested subtype does.
    entities.add(Add::new("document").subtype("invoice").id("b")).await.unwrap();
    let add = |id: &str| Transaction::new().add(Add::new("note").id(id)).if_unchanged(&view);
    entities.transact(add("n1")).await.unwrap();
    entities.update(Update::new("b").subtype("credit")).await.unwrap();
    assert!(matches!(entities.transact(add("n2")).await, Err(EntityError::Rejected { .. })));
    drop(view);
    let missing = Query::of("document").subtype("receipt");
    let add = || entities.add_if_missing(&missing, Add::new("document").subtype("receipt"));
    assert!(add().await.unwrap().was_added());
    assert!(!add().await.unwrap().was_added());
    assert_sound(&entities).await;
}

async fn an_invalid_subtype_is_refused(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("document").id("a")).await.unwrap();
    for subtype in ["", "nul\0", &"x".repeat(129)] {
        let refused = [
            entities.add(Add::new("document").subtype(subtype)).await.map(drop),
            entities.update(Update::new("a").subtype(subtype)).await.map(drop),
            entities.update_with("a", 1, |draft| draft.subtype = Some(subtype.into())).await.map(drop),
            entities.find(Query::of("document").subtype(subtype)).await.map(drop),
        ];
        for refused in refused {
            assert!(matches!(refused, Err(EntityError::Subtype { .. })), "{refused:?}");
        }
    }
    assert_eq!(get(&entities, "a").await.rev, 1);
}
