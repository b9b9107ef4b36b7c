//! Snapshots of entities: any generation that is kept can be written, and a restored store continues from it.

use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Query, TypeSpec, Update, field};
use latchwork::store::{Confirm, Rev, StoreError};
use serde_json::json;

use super::{assert_sound, fill, found, generation, get, ids};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_snapshot_of_any_generation_opens_as_a_store_of_its_own,
    a_restored_store_continues,
    a_restore_undoes_declarations_made_since,
    a_restore_brings_back_declarations_undeclared_since,
    a_restore_is_refused_while_a_view_is_open,
    a_snapshot_is_not_written_over_something,
    a_restored_entity_was_created_when_it_was,
);

async fn a_snapshot_of_any_generation_opens_as_a_store_of_its_own(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    fill(&entities, "t", [("a", json!({"u": 1})), ("b", json!({"u": 2}))]).await;
    let past = entities.now().await.unwrap();
    entities.update(Update::new("a").data(json!({"u": 3}))).await.unwrap();
    entities.remove("b").await.unwrap();
    past.persist(bench.path("past")).await.unwrap();
    entities.now().await.unwrap().persist(bench.path("present")).await.unwrap();
    for (name, expected) in [("past", &["a", "b"][..]), ("present", &["a"])] {
        let copy = Entities::on(&bench.open_at(&bench.path(name)).await).await.unwrap();
        assert_eq!(found(&copy, &Query::of("t")).await, expected);
        let taken = copy.add(Add::new("t").data(get(&copy, "a").await.data)).await;
        assert!(matches!(taken, Err(EntityError::UniqueViolation { owner, .. }) if owner == "a"));
        assert_sound(&copy).await;
    }
}

async fn a_restored_store_continues(bench: Bench) {
    let entities = bench.entities().await;
    let other = Entities::on(entities.store()).await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.u"]).index(["data.n"])).await.unwrap();
    let items = [("a", json!({"u": 1, "n": 1})), ("b", json!({"u": 2, "n": 1})), ("c", json!({"u": 3, "n": 2}))];
    fill(&entities, "t", items).await;
    other.update(Update::new("c")).await.unwrap();
    let view = entities.now().await.unwrap();
    let picture = view.find(&Query::all()).await.unwrap().items;
    view.persist(bench.path("snapshot")).await.unwrap();
    drop(view);

    let mut highest = std::collections::BTreeMap::new();
    for (id, data) in [("a", json!({"u": 10, "n": 5})), ("b", json!({"u": 1, "n": 5}))] {
        highest.insert(id, entities.update(Update::new(id).data(data)).await.unwrap());
    }
    highest.insert("c", entities.remove("c").await.unwrap());
    highest.insert("d", entities.add(Add::new("t").id("d").data(json!({"u": 2}))).await.unwrap().rev);
    let at = generation(&entities).await;
    let restored = entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await.unwrap();
    assert!(restored.0 > at && generation(&entities).await == restored.0);
    for handle in [&entities, &other] {
        let now = handle.find(&Query::all()).await.unwrap().items;
        assert_eq!(ids(&now), ids(&picture));
        for (now, then) in now.iter().zip(&picture) {
            assert_eq!((&now.data, &now.metadata, &now.entity_type), (&then.data, &then.metadata, &then.entity_type));
            assert!(now.rev > highest[now.id.as_str()], "{now:?}");
        }
        assert_eq!(found(handle, &Query::of("t").filter(field("data.n").equals(1))).await, ["a", "b"]);
        assert!(!handle.explain(&Query::of("t").filter(field("data.n").equals(1))).await.unwrap().scans());
    }
    assert_sound(&entities).await;
    // A rev from before the restore fits nothing.
    let stale = entities.update(Update::new("a").if_rev(highest["a"])).await;
    assert!(matches!(stale, Err(EntityError::RevisionConflict { .. })), "{stale:?}");
    for handle in [&entities, &other] {
        let taken = handle.add(Add::new("t").id("x").data(json!({"u": 1}))).await;
        assert!(matches!(taken, Err(EntityError::UniqueViolation { owner, .. }) if owner == "a"));
    }
    let before = get(&other, "b").await.rev;
    let after = other.update_with("b", 0, |draft| draft.data["u"] = json!(10)).await.unwrap();
    assert_eq!(after, Rev(before.0 + 1));
    let back = entities.add(Add::new("t").id("d").data(json!({"u": 2}))).await.unwrap();
    assert!(back.rev > highest["d"], "{back:?}");
    assert_eq!(generation(&entities).await, restored.0 + 2);
    assert_sound(&entities).await;
}

async fn a_restore_undoes_declarations_made_since(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"u": 1, "v": 1})), ("b", json!({"u": 2, "v": 1}))]).await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    entities.now().await.unwrap().persist(bench.path("snapshot")).await.unwrap();
    entities.update(Update::new("b").data(json!({"u": 2, "v": 2}))).await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.v"])).await.unwrap();
    entities.declare(TypeSpec::new("s").unique(["data.v"])).await.unwrap();
    fill(&entities, "s", [("s", json!({"v": 1}))]).await;
    entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await.unwrap();
    assert_sound(&entities).await;
    assert_eq!(found(&entities, &Query::of("t").filter(field("data.v").equals(1))).await, ["a", "b"]);
    fill(&entities, "t", [("c", json!({"v": 1}))]).await;
    fill(&entities, "s", [("s", json!({"v": 1})), ("r", json!({"v": 1}))]).await;
    assert!(entities.add(Add::new("t").data(json!({"u": 1}))).await.is_err());
    assert_sound(&entities).await;
    entities.declare(TypeSpec::new("t").index(["data.v"])).await.unwrap();
    assert_eq!(found(&entities, &Query::of("t").filter(field("data.v").equals(1))).await, ["a", "b", "c"]);
    assert_sound(&entities).await;
}

async fn a_restore_brings_back_declarations_undeclared_since(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"u": 1})), ("b", json!({"u": 2}))]).await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    entities.now().await.unwrap().persist(bench.path("snapshot")).await.unwrap();
    entities.undeclare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    fill(&entities, "t", [("c", json!({"u": 1}))]).await;
    entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await.unwrap();
    let taken = entities.add(Add::new("t").data(json!({"u": 2}))).await;
    assert!(matches!(taken, Err(EntityError::UniqueViolation { owner, .. }) if owner == "b"));
    fill(&entities, "t", [("c", json!({"u": 3}))]).await;
    assert_sound(&entities).await;
}

async fn a_restore_is_refused_while_a_view_is_open(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let view = entities.now().await.unwrap();
    view.persist(bench.path("snapshot")).await.unwrap();
    let at = generation(&entities).await;
    let refused = entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await;
    assert!(matches!(refused, Err(EntityError::Store(StoreError::ViewsOpen { views: 1 }))), "{refused:?}");
    assert_eq!(generation(&entities).await, at);
    view.release();
    entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await.unwrap();
}

async fn a_snapshot_is_not_written_over_something(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let view = entities.now().await.unwrap();
    view.persist(bench.path("snapshot")).await.unwrap();
    let again = view.persist(bench.path("snapshot")).await;
    assert!(matches!(again, Err(EntityError::Store(StoreError::NotEmpty { .. }))), "{again:?}");
}

async fn a_restored_entity_was_created_when_it_was(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("added", json!(1)), ("updated", json!(1))]).await;
    entities.update(Update::new("updated").data(json!(2))).await.unwrap();
    let created = [get(&entities, "added").await.created, get(&entities, "updated").await.created];
    entities.now().await.unwrap().persist(bench.path("snapshot")).await.unwrap();
    bench.clock.advance(Duration::from_secs(3600));
    // The change comes after the snapshot, so that the restore has something to bring back.
    entities.update(Update::new("added")).await.unwrap();
    entities.update(Update::new("updated")).await.unwrap();
    entities.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await.unwrap();
    assert_eq!([get(&entities, "added").await.created, get(&entities, "updated").await.created], created);
}
