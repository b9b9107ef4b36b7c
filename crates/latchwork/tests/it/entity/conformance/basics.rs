//! One entity at a time: adding, reading, changing, removing, and what is counted.

use std::time::Duration;

use latchwork::entity::{Add, Effect, Entity, EntityError, Remove, Update};
use latchwork::store::{ErrorKind, Rev};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{fill, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    an_added_entity_reads_as_it_was_given,
    an_id_that_is_not_given_is_a_uuid_v7,
    every_kind_of_id_works,
    revs_count_up_and_are_never_reused,
    created_and_changed_hold_generation_and_time,
    as_of_the_time_of_a_change_sees_just_that_version,
    an_update_keeps_what_it_does_not_name,
    metadata_is_merged_unless_it_is_to_be_replaced,
    if_rev_guards_updates_and_removes,
    an_unknown_id_is_an_error_of_its_own,
    a_plain_add_of_an_existing_id_is_refused,
    typed_values_go_in_and_come_out,
    an_entity_has_a_json_form,
    added_entities_are_there_after_a_reopen,
);

async fn an_added_entity_reads_as_it_was_given(bench: Bench) {
    let entities = bench.entities().await;
    let data = [
        json!(null),
        json!(true),
        json!(-7),
        json!(u64::MAX),
        json!(0.1),
        json!("text\0 ü 🦀"),
        json!([1, [2, {"a": null}]]),
        json!({"": 1, "a.b": {"c\\d": []}, "z": {}}),
    ];
    for (at, data) in data.into_iter().enumerate() {
        let metadata = json!({"at": at, "nested": {"list": [null]}});
        let id = format!("id-{at}");
        let before = generation(&entities).await;
        let added = entities.add(Add::new("t").id(&id).data(&data).metadata(&metadata)).await.unwrap();
        assert_eq!((added.id.as_str(), added.rev, added.effect), (id.as_str(), Rev(1), Effect::Added));
        assert!(added.was_added());
        let entity = get(&entities, &id).await;
        assert_eq!((&*entity.id, &*entity.entity_type, entity.rev), (id.as_str(), "t", Rev(1)));
        assert_eq!((&entity.data, &Value::Object(entity.metadata.clone())), (&data, &metadata));
        assert_eq!((entity.created, entity.changed.generation.0), (entity.changed, before + 1));
    }
    let bare = entities.add(Add::new("t")).await.unwrap();
    let bare = get(&entities, &bare.id).await;
    assert_eq!((bare.data, bare.metadata.len()), (json!(null), 0));
    assert!(entities.get("unknown").await.unwrap().is_none());
}

async fn an_id_that_is_not_given_is_a_uuid_v7(bench: Bench) {
    let entities = bench.entities().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        // Without an id from the caller the flag has no effect.
        let id = entities.add(Add::new("t").if_absent(true)).await.unwrap();
        assert!(id.was_added());
        let uuid: latchwork::store::Uuid = id.id.parse().unwrap();
        assert_eq!(uuid.get_version_num(), 7);
        made.push(id.id);
        bench.clock.advance(Duration::from_millis(1));
    }
    assert!(made.is_sorted(), "{made:?}");
    let batch = entities.add_many((0..3).map(|_| Add::new("t"))).await.unwrap();
    for op in batch.ops {
        assert!(op.was_added() && op.id.len() == 36 && entities.get(&op.id).await.unwrap().is_some());
    }
}

async fn every_kind_of_id_works(bench: Bench) {
    let entities = bench.entities().await;
    let longest = "é".repeat(256);
    let ids = ["a", " ", "\0", "a\0", "a\0b", "a/b", "🦀", "\u{10ffff}", "data.x", longest.as_str()];
    for id in ids {
        entities.add(Add::new("t").id(id).data(json!({"id": id}))).await.unwrap();
    }
    for id in ids {
        assert_eq!(get(&entities, id).await.data, json!({"id": id}), "{id:?}");
        assert_eq!(entities.update(Update::new(id).data(json!(2))).await.unwrap(), Rev(2), "{id:?}");
        assert_eq!(entities.remove(id).await.unwrap(), Rev(3), "{id:?}");
        assert!(entities.get(id).await.unwrap().is_none(), "{id:?}");
    }
    super::assert_sound(&entities).await;
}

async fn revs_count_up_and_are_never_reused(bench: Bench) {
    let entities = bench.entities().await;
    let mut expected = 0;
    for round in 0..4 {
        expected += 1;
        assert_eq!(entities.add(Add::new("t").id("a")).await.unwrap().rev, Rev(expected));
        for change in 0..round {
            expected += 1;
            assert_eq!(entities.update(Update::new("a").data(json!(change))).await.unwrap(), Rev(expected));
            assert_eq!(get(&entities, "a").await.rev, Rev(expected));
        }
        expected += 1;
        assert_eq!(entities.remove("a").await.unwrap(), Rev(expected));
    }
    // An entity of another type under the same id continues the revs as well.
    assert_eq!(entities.add(Add::new("other").id("a")).await.unwrap().rev, Rev(expected + 1));
    assert_eq!(&*get(&entities, "a").await.entity_type, "other");
    super::assert_sound(&entities).await;
}

async fn created_and_changed_hold_generation_and_time(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("t").id("a").data(json!(0))).await.unwrap();
    let added = get(&entities, "a").await;
    assert_eq!((added.created, added.changed.time), (added.changed, bench.env.now()));
    for (count, how) in ["update", "update_with", "if_rev", "update_many"].into_iter().enumerate() {
        bench.clock.advance(Duration::from_secs(1));
        let update = Update::new("a").data(json!(how));
        match how {
            "update" => drop(entities.update(update).await.unwrap()),
            "update_with" => drop(entities.update_with("a", 0, |draft| draft.data = json!(how)).await.unwrap()),
            "if_rev" => drop(entities.update(update.if_rev(Rev(count as u64 + 1))).await.unwrap()),
            _ => drop(entities.update_many([update]).await.unwrap()),
        }
        let now = get(&entities, "a").await;
        assert_eq!((now.created, &now.data), (added.created, &json!(how)));
        assert_eq!((now.changed.generation.0, now.changed.time), (generation(&entities).await, bench.env.now()));
        assert_eq!(now.rev, Rev(count as u64 + 2));
    }
    entities.remove("a").await.unwrap();
    bench.clock.advance(Duration::from_secs(1));
    entities.add(Add::new("t").id("a")).await.unwrap();
    let again = get(&entities, "a").await;
    assert_eq!((again.created, again.changed.time), (again.changed, bench.env.now()));
}

async fn as_of_the_time_of_a_change_sees_just_that_version(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("t").id("a").data(json!(0))).await.unwrap();
    let mut versions = vec![get(&entities, "a").await];
    for count in 1..20 {
        bench.clock.advance(Duration::from_micros(1));
        match count % 5 {
            3 => drop(entities.remove("a").await.unwrap()),
            4 => drop(entities.add(Add::new("t").id("a").data(json!(count))).await.unwrap()),
            _ => drop(entities.update_with("a", 0, |draft| draft.data = json!(count)).await.unwrap()),
        }
        versions.extend(entities.get("a").await.unwrap());
    }
    for version in versions {
        let at_time = entities.as_of(version.changed.time).await.unwrap();
        assert_eq!(at_time.generation(), version.changed.generation);
        assert_eq!(at_time.get("a").await.unwrap(), Some(version.clone()));
        let at_generation = entities.as_of(version.changed.generation).await.unwrap();
        assert_eq!(at_generation.get("a").await.unwrap(), Some(version));
    }
}

async fn an_update_keeps_what_it_does_not_name(bench: Bench) {
    let entities = bench.entities().await;
    entities.add(Add::new("t").id("a").data(json!({"x": 1})).metadata(json!({"m": 1}))).await.unwrap();
    let state = |entity: Entity| (entity.data, Value::Object(entity.metadata), entity.rev);
    entities.update(Update::new("a").metadata(json!({"n": 2}))).await.unwrap();
    assert_eq!(state(get(&entities, "a").await), (json!({"x": 1}), json!({"m": 1, "n": 2}), Rev(2)));
    entities.update(Update::new("a").data(json!({"y": 2}))).await.unwrap();
    assert_eq!(state(get(&entities, "a").await), (json!({"y": 2}), json!({"m": 1, "n": 2}), Rev(3)));
    // An update without changes is a write as well: the rev shows it.
    assert_eq!(entities.update(Update::new("a")).await.unwrap(), Rev(4));
    assert_eq!(state(get(&entities, "a").await), (json!({"y": 2}), json!({"m": 1, "n": 2}), Rev(4)));
}

async fn metadata_is_merged_unless_it_is_to_be_replaced(bench: Bench) {
    let entities = bench.entities().await;
    let before = json!({"keep": 1, "drop": 2, "nested": {"a": 1, "b": 2}, "list": [1, 2]});
    let patch = json!({"drop": null, "nested": {"b": null, "c": 3}, "list": [3], "new": {"x": null, "y": 1}});
    let merged = json!({"keep": 1, "nested": {"a": 1, "c": 3}, "list": [3], "new": {"y": 1}});
    let plain = || Update::new("a").metadata(&patch);
    let replace = || Update::new("a").replace_metadata(&patch);
    // The last call counts.
    let cases = [
        (plain(), &merged),
        (replace(), &patch),
        (plain().replace_metadata(&patch), &patch),
        (replace().metadata(&patch), &merged),
        (Update::new("a").replace_metadata(json!({})), &json!({})),
        (Update::new("a").metadata(json!({})), &before),
    ];
    for (update, expected) in cases {
        for guarded in [false, true] {
            let rev = entities.add(Add::new("t").id("a").metadata(&before)).await.unwrap().rev;
            let update = if guarded { update.clone().if_rev(rev) } else { update.clone() };
            entities.update(update.clone()).await.unwrap();
            let found = Value::Object(get(&entities, "a").await.metadata);
            assert_eq!(&found, expected, "{update:?}");
            entities.remove("a").await.unwrap();
        }
    }
}

async fn if_rev_guards_updates_and_removes(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    entities.update(Update::new("a").data(json!(2))).await.unwrap();
    let (before, at) = (get(&entities, "a").await, generation(&entities).await);
    for wrong in [0, 1, 3, u64::MAX] {
        let update = entities.update(Update::new("a").data(json!(3)).if_rev(Rev(wrong))).await.map(drop);
        let remove = entities.remove(Remove::new("a").if_rev(Rev(wrong))).await.map(drop);
        for refused in [update, remove] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict);
            let EntityError::RevisionConflict { id, expected, actual } = error else { panic!("{error}") };
            assert_eq!((id.as_str(), expected, actual), ("a", Rev(wrong), Rev(2)));
        }
    }
    assert_eq!((get(&entities, "a").await, generation(&entities).await), (before, at));
    assert_eq!(entities.update(Update::new("a").data(json!(3)).if_rev(Rev(2))).await.unwrap(), Rev(3));
    assert_eq!(entities.remove(Remove::new("a").if_rev(Rev(3))).await.unwrap(), Rev(4));
    assert_eq!(generation(&entities).await, at + 2);
    // The rev of the removal is not the rev of any entity that exists.
    let gone = entities.update(Update::new("a").if_rev(Rev(4))).await.unwrap_err();
    assert!(matches!(&gone, EntityError::NotFound { id } if id == "a"), "{gone}");
    entities.add(Add::new("t").id("a")).await.unwrap();
    let stale = entities.remove(Remove::new("a").if_rev(Rev(3))).await.unwrap_err();
    assert!(matches!(stale, EntityError::RevisionConflict { actual: Rev(5), .. }), "{stale}");
}

async fn an_unknown_id_is_an_error_of_its_own(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("removed", json!(1))]).await;
    entities.remove("removed").await.unwrap();
    let at = generation(&entities).await;
    for id in ["never", "removed"] {
        let errors = [
            entities.update(Update::new(id)).await.map(drop),
            entities.update(Update::new(id).if_rev(Rev(1))).await.map(drop),
            entities.update_with(id, 3, |draft| draft.data = json!(1)).await.map(drop),
            entities.remove(id).await.map(drop),
            entities.remove(Remove::new(id).if_rev(Rev(1))).await.map(drop),
        ];
        for error in errors.map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::NotFound);
            assert_eq!(error.to_string(), format!("there is no entity {id:?}"));
            assert!(matches!(error, EntityError::NotFound { id: unknown } if unknown == id));
        }
    }
    assert_eq!(generation(&entities).await, at);
}

async fn a_plain_add_of_an_existing_id_is_refused(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!("first"))]).await;
    entities.update(Update::new("a").metadata(json!({"m": 1}))).await.unwrap();
    let (before, at) = (get(&entities, "a").await, generation(&entities).await);
    for add in [Add::new("t").id("a"), Add::new("other").id("a").data(json!(2)).if_absent(false)] {
        let error = entities.add(add).await.unwrap_err();
        assert!(matches!(&error, EntityError::AlreadyExists { id, rev: Rev(2) } if id == "a"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Conflict);
    }
    assert_eq!((get(&entities, "a").await, generation(&entities).await), (before, at));
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Order {
    lines: Vec<Line>,
    total: f64,
    note: Option<String>,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Line(String, u32);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Open,
    Shipped { to: String },
}

#[derive(Serialize)]
struct Source {
    author: &'static str,
}

async fn typed_values_go_in_and_come_out(bench: Bench) {
    let entities = bench.entities().await;
    let lines = vec![Line("tea".into(), 2), Line("cup".into(), u32::MAX)];
    let mut order = Order { lines, total: 0.1 + 0.2, note: None, state: State::Open };
    let id = entities.add(Add::new("order").data(&order).metadata(Source { author: "ada" })).await.unwrap().id;
    let stored = get(&entities, &id).await;
    assert_eq!(stored.parse::<Order>().unwrap(), order);
    assert_eq!(stored.data["lines"], json!([["tea", 2], ["cup", u32::MAX]]));
    assert_eq!(Value::Object(stored.metadata), json!({"author": "ada"}));

    order.state = State::Shipped { to: "Oslo".into() };
    entities.update(Update::new(&id).data(&order).metadata(Source { author: "bob" })).await.unwrap();
    let stored = get(&entities, &id).await;
    assert_eq!((stored.parse::<Order>().unwrap(), &stored.metadata["author"]), (order, &json!("bob")));

    let error = stored.parse::<Vec<u8>>().unwrap_err();
    assert!(matches!(&error, EntityError::Mismatch { id: of, .. } if *of == id), "{error}");
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

async fn an_entity_has_a_json_form(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"x": 1}))]).await;
    bench.clock.advance(Duration::from_micros(5));
    entities.update(Update::new("a").metadata(json!({"m": true}))).await.unwrap();
    let entity = get(&entities, "a").await;
    let (created, changed) = (entity.created, entity.changed);
    let json = serde_json::to_value(&entity).unwrap();
    let expected = json!({
        "id": "a", "type": "t", "data": {"x": 1}, "metadata": {"m": true}, "_rev": 2,
        "created": {"generation": created.generation.0, "time_us": created.time.0},
        "changed": {"generation": changed.generation.0, "time_us": changed.time.0},
    });
    assert_eq!(json, expected);
    assert_eq!(serde_json::from_value::<Entity>(json).unwrap(), entity);
    let old: Entity = serde_json::from_value(json!({"id": "a", "type": "t", "data": {"x": 1}})).unwrap();
    assert_eq!((old.rev, old.metadata.len()), (Rev(1), 0));
}

async fn added_entities_are_there_after_a_reopen(bench: Bench) {
    if !bench.is_durable() {
        return;
    }
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(2))]).await;
    entities.update(Update::new("a").data(json!(3))).await.unwrap();
    entities.remove("b").await.unwrap();
    let (before, at) = (get(&entities, "a").await, generation(&entities).await);
    entities.store().close().await.unwrap();
    drop(entities);
    let entities = bench.entities().await;
    assert_eq!((get(&entities, "a").await, generation(&entities).await), (before, at));
    assert!(entities.get("b").await.unwrap().is_none());
    assert_eq!(entities.add(Add::new("t").id("b")).await.unwrap().rev, Rev(3));
    super::assert_sound(&entities).await;
}
