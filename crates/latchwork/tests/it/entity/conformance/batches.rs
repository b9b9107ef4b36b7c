//! Adds that may find their entity there already, and batches of adds and updates.

use latchwork::entity::{Add, Effect, Entities, EntityError, Receipt, Update};
use latchwork::store::Rev;
use serde_json::{Value, json};

use super::{failed, fill, generation, get, told};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    if_absent_returns_the_existing_id_and_writes_nothing,
    a_malformed_if_absent_is_refused_also_if_the_entity_exists,
    the_items_own_flag_beats_the_batchs_both_ways,
    a_batch_of_adds_is_all_or_nothing,
    duplicates_within_a_batch_are_reported,
    a_batch_takes_one_generation_or_none,
    update_many_changes_all_or_none,
    an_empty_batch_does_nothing,
);

/// The figures that must not change if nothing is written.
async fn figures(entities: &Entities) -> (u64, u64, u64, u64) {
    let stats = entities.store().stats().await.unwrap();
    (stats.generation.0, stats.applied, stats.refused, stats.past_versions)
}

fn effects(receipt: &Receipt) -> Vec<(&str, u64, Effect)> {
    receipt.ops.iter().map(|op| (op.id.as_str(), op.rev.0, op.effect)).collect()
}

async fn if_absent_returns_the_existing_id_and_writes_nothing(bench: Bench) {
    let entities = bench.entities().await;
    let seed = || Add::new("t").id("config").data(json!({"quota": 1000})).if_absent(true);
    let first = entities.add(seed()).await.unwrap();
    assert_eq!((first.rev, first.effect), (Rev(1), Effect::Added));
    entities.update(Update::new("config").data(json!({"quota": 5}))).await.unwrap();
    let (entity, before) = (get(&entities, "config").await, figures(&entities).await);
    for add in [seed(), seed().data(json!("other")), Add::new("another type").id("config").if_absent(true)] {
        let again = entities.add(add).await.unwrap();
        assert_eq!((again.id.as_str(), again.rev, again.effect), ("config", Rev(2), Effect::Existing));
        assert!(!again.was_added());
    }
    let many = entities.add_many_if_absent([seed(), seed()]).await.unwrap();
    assert_eq!(effects(&many), [("config", 2, Effect::Existing), ("config", 2, Effect::Existing)]);
    assert_eq!(many.generation.0, before.0);
    assert_eq!((get(&entities, "config").await, figures(&entities).await), (entity, before));
    // A removed entity is absent.
    entities.remove("config").await.unwrap();
    let back = entities.add(seed()).await.unwrap();
    assert_eq!((back.rev, back.effect), (Rev(4), Effect::Added));
}

async fn a_malformed_if_absent_is_refused_also_if_the_entity_exists(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    for id in ["a", "b"] {
        let bad = entities.add(Add::new("t").id(id).metadata(json!(1)).if_absent(true)).await;
        assert!(matches!(bad, Err(EntityError::Metadata { .. })), "{bad:?}");
        let bad = entities.add(Add::new("").id(id).if_absent(true)).await;
        assert!(matches!(bad, Err(EntityError::TypeName { .. })), "{bad:?}");
    }
}

async fn the_items_own_flag_beats_the_batchs_both_ways(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("old", json!("kept"))]).await;
    // (the batch's flag, the item's own flag, whether an existing id is accepted)
    let cases = [
        (false, None, false),
        (false, Some(true), true),
        (false, Some(false), false),
        (true, None, true),
        (true, Some(true), true),
        (true, Some(false), false),
    ];
    for (at, (batch, own, passes)) in cases.into_iter().enumerate() {
        let fresh = format!("fresh-{at}");
        let item = |id: &str| {
            let add = Add::new("t").id(id).data(json!("new"));
            own.into_iter().fold(add, Add::if_absent)
        };
        let items = [item("old"), item(&fresh)];
        let before = figures(&entities).await;
        let result = if batch { entities.add_many_if_absent(items).await } else { entities.add_many(items).await };
        assert_eq!(get(&entities, "old").await.data, json!("kept"));
        if passes {
            let receipt = result.unwrap();
            assert_eq!(effects(&receipt), [("old", 1, Effect::Existing), (&fresh, 1, Effect::Added)]);
            assert_eq!(generation(&entities).await, before.0 + 1);
        } else {
            let failed = failed(result);
            assert_eq!(failed.len(), 1);
            assert!(matches!(&failed[0].error, EntityError::AlreadyExists { id, rev: Rev(1) } if id == "old"));
            assert_eq!(failed[0].op, Some(0));
            assert!(entities.get(&fresh).await.unwrap().is_none());
            assert_eq!(generation(&entities).await, before.0);
        }
    }
}

async fn a_batch_of_adds_is_all_or_nothing(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("b", json!(0)), ("d", json!(0))]).await;
    let at = generation(&entities).await;
    let items = ["a", "b", "c", "d", "e"].map(|id| Add::new("t").id(id));
    let failed = failed(entities.add_many(items).await);
    let exists = |id: &str| format!("entity {id:?} exists already, at rev 1; update it, or add with if_absent");
    assert_eq!(told(&failed), [(Some(1), exists("b")), (Some(3), exists("d"))]);
    assert_eq!(generation(&entities).await, at);
    for id in ["a", "c", "e"] {
        assert!(entities.get(id).await.unwrap().is_none());
    }
    super::assert_sound(&entities).await;
}

async fn duplicates_within_a_batch_are_reported(bench: Bench) {
    let entities = bench.entities().await;
    let add = |id: &str, data: Value| Add::new("t").id(id).data(data);
    let at = generation(&entities).await;
    let plain = entities.add_many([add("x", json!(0)), add("a", json!(1)), add("a", json!(2))]).await.unwrap_err();
    assert!(matches!(&plain, EntityError::WrittenTwice { id, first: 1, second: 2 } if id == "a"), "{plain}");
    let later_plain = [add("a", json!(1)).if_absent(true), add("a", json!(2)).if_absent(false)];
    let later_plain = entities.add_many_if_absent(later_plain).await.unwrap_err();
    assert!(matches!(later_plain, EntityError::WrittenTwice { first: 0, second: 1, .. }), "{later_plain}");
    assert_eq!(generation(&entities).await, at);

    let items = [add("a", json!(1)), add("b", json!(1)), add("a", json!(2)), add("a", json!(3))];
    let receipt = entities.add_many_if_absent(items).await.unwrap();
    let expected =
        [("a", 1, Effect::Added), ("b", 1, Effect::Added), ("a", 1, Effect::Existing), ("a", 1, Effect::Existing)];
    assert_eq!(effects(&receipt), expected);
    assert_eq!((get(&entities, "a").await.data, generation(&entities).await), (json!(1), at + 1));

    let first_plain = [add("c", json!(1)).if_absent(false), add("c", json!(2)).if_absent(true)];
    let receipt = entities.add_many(first_plain).await.unwrap();
    assert_eq!(effects(&receipt), [("c", 1, Effect::Added), ("c", 1, Effect::Existing)]);
    assert_eq!(get(&entities, "c").await.data, json!(1));
    super::assert_sound(&entities).await;
}

async fn a_batch_takes_one_generation_or_none(bench: Bench) {
    let entities = bench.entities().await;
    let at = generation(&entities).await;
    let receipt = entities.add_many((0..300).map(|n| Add::new("t").id(format!("{n:03}")).data(n))).await.unwrap();
    assert_eq!((receipt.generation.0, generation(&entities).await), (at + 1, at + 1));
    for (n, op) in receipt.ops.iter().enumerate() {
        assert_eq!((op.id.as_str(), op.rev, op.effect), (format!("{n:03}").as_str(), Rev(1), Effect::Added));
        let entity = get(&entities, &op.id).await;
        assert_eq!((entity.changed.generation, entity.changed.time), (receipt.generation, receipt.time));
    }
    let all = (0..300).map(|n| Add::new("t").id(format!("{n:03}")).data(n));
    let again = entities.add_many_if_absent(all).await.unwrap();
    assert!(again.ops.iter().all(|op| op.effect == Effect::Existing && op.rev == Rev(1)));
    assert_eq!((again.generation.0, generation(&entities).await), (at + 1, at + 1));
}

async fn update_many_changes_all_or_none(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(0)), ("b", json!(0)), ("c", json!(0))]).await;
    let at = generation(&entities).await;
    let update = |id: &str| Update::new(id).data(json!(1)).metadata(json!({"by": id}));
    let receipt = entities.update_many([update("b"), update("a").if_rev(Rev(1))]).await.unwrap();
    assert_eq!(effects(&receipt), [("b", 2, Effect::Updated), ("a", 2, Effect::Updated)]);
    assert_eq!((receipt.generation.0, generation(&entities).await), (at + 1, at + 1));

    let items = [update("c"), update("no"), update("a").if_rev(Rev(1)), update("nor"), update("b").if_rev(Rev(9))];
    let failed = failed(entities.update_many(items).await);
    let expected = [
        (Some(1), "there is no entity \"no\"".to_string()),
        (Some(2), "entity \"a\" is at rev 2, not at 1; read it again and retry".into()),
        (Some(3), "there is no entity \"nor\"".into()),
        (Some(4), "entity \"b\" is at rev 2, not at 9; read it again and retry".into()),
    ];
    assert_eq!(told(&failed), expected);
    assert_eq!((get(&entities, "c").await.rev, generation(&entities).await), (Rev(1), at + 1));
    let twice = entities.update_many([update("a"), update("a")]).await.unwrap_err();
    assert!(matches!(twice, EntityError::WrittenTwice { first: 0, second: 1, .. }), "{twice}");
}

async fn an_empty_batch_does_nothing(bench: Bench) {
    let entities = bench.entities().await;
    let before = figures(&entities).await;
    for receipt in [
        entities.add_many([]).await.unwrap(),
        entities.add_many_if_absent([]).await.unwrap(),
        entities.update_many([]).await.unwrap(),
    ] {
        assert_eq!((receipt.generation.0, receipt.ops.len()), (before.0, 0));
    }
    assert_eq!(figures(&entities).await, before);
}
