//! Declaring indexes and unique values over existing entities, beside writers, and undeclaring them.

use latchwork::entity::{Add, Entities, EntityError, Query, Transaction, TypeSpec, Update, field};
use latchwork::store::Rev;
use serde_json::json;

use super::{assert_sound, fill, found, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_declaration_covers_entities_that_are_there,
    a_declaration_over_duplicates_fails_and_leaves_no_trace,
    a_declaration_over_duplicates_close_to_each_other_fails_and_leaves_no_trace,
    a_declaration_that_fails_leaves_the_earlier_ones_alone,
    declaring_twice_changes_nothing,
    two_handles_can_declare_at_once,
    an_undeclared_index_no_longer_holds,
    undeclaring_an_unknown_index_changes_nothing,
    a_handle_that_knows_an_old_declaration_obeys_the_new_one,
    update_with_by_a_handle_that_knows_an_old_declaration_needs_no_retry,
    writers_continue_while_an_index_is_built,
    duplicates_written_while_a_unique_index_is_built_are_found,
    a_declaration_survives_a_reopen,
    values_too_long_for_an_index_keep_it_from_being_declared,
);

fn by(path: &str, value: impl serde::Serialize) -> Query {
    Query::of("t").filter(field(path).equals(value))
}

async fn is_indexed(entities: &Entities, path: &str) -> bool {
    !entities.explain(&by(path, 1)).await.unwrap().scans()
}

fn many(count: usize) -> impl Iterator<Item = Add> {
    (0..count).map(|n| Add::new("t").id(format!("{n:04}")).data(json!({"n": n, "mod": n % 7})))
}

async fn a_declaration_covers_entities_that_are_there(bench: Bench) {
    let entities = bench.entities().await;
    for chunk in many(1000).collect::<Vec<_>>().chunks(250) {
        entities.add_many(chunk.to_vec()).await.unwrap();
    }
    let before = found(&entities, &by("data.mod", 3)).await;
    let revs = get(&entities, "0500").await.rev;
    entities.declare(TypeSpec::new("t").unique(["data.n"]).index(["data.mod", "data.n"])).await.unwrap();
    assert!(is_indexed(&entities, "data.n").await && is_indexed(&entities, "data.mod").await);
    assert_eq!(found(&entities, &by("data.mod", 3)).await, before);
    assert_eq!((before.len(), get(&entities, "0500").await.rev), (143, revs));
    let taken = entities.add(Add::new("t").id("x").data(json!({"n": 777}))).await;
    assert!(matches!(taken, Err(EntityError::UniqueViolation { owner, .. }) if owner == "0777"));
    assert_sound(&entities).await;
}

async fn a_declaration_over_duplicates_fails_and_leaves_no_trace(bench: Bench) {
    check_duplicates(bench, 5).await;
}

async fn a_declaration_over_duplicates_close_to_each_other_fails_and_leaves_no_trace(bench: Bench) {
    check_duplicates(bench, 440).await;
}

/// Of 450 numbered entities, one has a twin after the last.
async fn check_duplicates(bench: Bench, twice: usize) {
    let entities = bench.entities().await;
    entities.add_many(many(450)).await.unwrap();
    fill(&entities, "t", [("twin", json!({"n": twice}))]).await;
    let before = entities.find(&Query::of("t")).await.unwrap().items;
    let spec = || TypeSpec::new("t").unique(["data.n"]);
    for _ in 0..2 {
        let error = entities.declare(spec()).await.unwrap_err();
        let EntityError::UniqueViolation { id, entity_type, fields, owner } = error else { panic!("{error}") };
        let mut two = [id.as_str(), owner.as_str()];
        two.sort();
        let name = format!("{twice:04}");
        assert_eq!((two, entity_type.as_str(), fields.as_str()), ([name.as_str(), "twin"], "t", "data.n"));
    }
    assert!(!is_indexed(&entities, "data.n").await);
    assert_eq!(entities.find(&Query::of("t")).await.unwrap().items, before);
    fill(&entities, "t", [("triplet", json!({"n": twice}))]).await;
    assert_sound(&entities).await;
    // Without the duplicates it can be declared.
    entities.transact(Transaction::new().remove("twin").remove("triplet")).await.unwrap();
    entities.declare(spec()).await.unwrap();
    assert!(entities.add(Add::new("t").data(json!({"n": twice}))).await.is_err());
    assert_sound(&entities).await;
}

async fn a_declaration_that_fails_leaves_the_earlier_ones_alone(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.mod"]).unique(["data.n"])).await.unwrap();
    entities.add_many(many(20)).await.unwrap();
    assert!(entities.declare(TypeSpec::new("t").unique(["data.mod"])).await.is_err());
    assert!(is_indexed(&entities, "data.mod").await && is_indexed(&entities, "data.n").await);
    assert_eq!(found(&entities, &by("data.mod", 6)).await, ["0006", "0013"]);
    assert!(entities.add(Add::new("t").data(json!({"n": 7}))).await.is_err());
    assert!(entities.add(Add::new("t").data(json!({"mod": 6}))).await.is_ok());
    assert_sound(&entities).await;
}

async fn declaring_twice_changes_nothing(bench: Bench) {
    let entities = bench.entities().await;
    entities.add_many(many(20)).await.unwrap();
    let spec = || TypeSpec::new("t").index(["data.mod"]).unique(["data.n"]).index(["data.mod"]);
    entities.declare(spec()).await.unwrap();
    let at = generation(&entities).await;
    entities.declare(spec()).await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    entities.declare(TypeSpec::new("t")).await.unwrap();
    Entities::on(entities.store()).await.unwrap().declare(spec()).await.unwrap();
    assert_eq!(generation(&entities).await, at);
}

async fn two_handles_can_declare_at_once(bench: Bench) {
    let one = bench.entities().await;
    one.add_many(many(500)).await.unwrap();
    let two = Entities::on(one.store()).await.unwrap();
    let same = || TypeSpec::new("t").unique(["data.n"]);
    let (a, b, c, d) = tokio::join!(
        one.declare(same()),
        two.declare(same()),
        one.declare(TypeSpec::new("t").index(["data.mod"])),
        two.declare(TypeSpec::new("t").index(["data.mod", "data.n"])),
    );
    assert!([a, b, c, d].iter().all(Result::is_ok));
    for entities in [&one, &two] {
        assert!(is_indexed(entities, "data.n").await && is_indexed(entities, "data.mod").await);
        assert!(entities.add(Add::new("t").data(json!({"n": 7}))).await.is_err());
        assert_eq!(found(entities, &by("data.mod", 3)).await.len(), 71);
    }
    assert_sound(&one).await;
}

async fn an_undeclared_index_no_longer_holds(bench: Bench) {
    let entities = bench.entities().await;
    let other = Entities::on(entities.store()).await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.n"]).index(["data.mod"])).await.unwrap();
    entities.add_many(many(450)).await.unwrap();
    other.add(Add::new("t").id("other")).await.unwrap();
    entities.undeclare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    assert!(!is_indexed(&entities, "data.n").await && is_indexed(&entities, "data.mod").await);
    for (handle, id) in [(&entities, "x"), (&other, "y")] {
        handle.add(Add::new("t").id(id).data(json!({"n": 7, "mod": 0}))).await.unwrap();
        assert_eq!(found(handle, &by("data.n", 7)).await.len(), if id == "x" { 2 } else { 3 });
    }
    assert_sound(&entities).await;
    assert!(entities.declare(TypeSpec::new("t").unique(["data.n"])).await.is_err());
    entities.transact(Transaction::new().remove("x").remove("y")).await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    assert!(other.add(Add::new("t").data(json!({"n": 7}))).await.is_err());
    assert_sound(&entities).await;
}

async fn undeclaring_an_unknown_index_changes_nothing(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    let at = generation(&entities).await;
    // The same fields, but with another uniqueness.
    entities.undeclare(TypeSpec::new("t").index(["data.n"]).unique(["data.m"])).await.unwrap();
    entities.undeclare(TypeSpec::new("unknown").index(["data.n"])).await.unwrap();
    assert_eq!(generation(&entities).await, at);
    assert!(is_indexed(&entities, "data.n").await);
}

async fn a_handle_that_knows_an_old_declaration_obeys_the_new_one(bench: Bench) {
    let new = bench.entities().await;
    let old = Entities::on(new.store()).await.unwrap();
    // Each handle has used the type, first as undeclared.
    fill(&new, "t", [("a", json!({"n": 1, "m": 1}))]).await;
    fill(&old, "t", [("b", json!({"n": 2, "m": 2}))]).await;
    new.declare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    let second = old.add(Add::new("t").id("c").data(json!({"n": 1}))).await;
    assert!(matches!(second, Err(EntityError::UniqueViolation { owner, .. }) if owner == "a"));
    new.declare(TypeSpec::new("t").unique(["data.m"])).await.unwrap();
    let second = old.update(Update::new("b").data(json!({"n": 2, "m": 1}))).await;
    assert!(matches!(second, Err(EntityError::UniqueViolation { owner, .. }) if owner == "a"));
    new.declare(TypeSpec::new("t").index(["data.k"])).await.unwrap();
    old.update_with("b", 1, |draft| draft.data["k"] = json!(5)).await.unwrap();
    new.undeclare(TypeSpec::new("t").index(["data.k"])).await.unwrap();
    new.declare(TypeSpec::new("t").index(["data.k"])).await.unwrap();
    old.remove("b").await.unwrap();
    fill(&old, "t", [("b", json!({"k": 6}))]).await;
    assert_eq!(found(&new, &by("data.k", 6)).await, ["b"]);
    assert_eq!(found(&new, &by("data.k", 5)).await, Vec::<String>::new());
    assert_sound(&old).await;
}

/// The declaration has not changed the entity: there is no race to lose.
async fn update_with_by_a_handle_that_knows_an_old_declaration_needs_no_retry(bench: Bench) {
    let new = bench.entities().await;
    let old = Entities::on(new.store()).await.unwrap();
    fill(&old, "t", [("a", json!({"n": 1}))]).await;
    new.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    let result = old.update_with("a", 0, |draft| draft.data["n"] = json!(2)).await;
    assert!(matches!(result, Ok(Rev(2))), "{}", result.unwrap_err());
}

async fn writers_continue_while_an_index_is_built(bench: Bench) {
    let entities = bench.entities().await;
    entities.add_many(many(600)).await.unwrap();
    let writer = Entities::on(entities.store()).await.unwrap();
    let declaring = {
        let entities = entities.clone();
        tokio::spawn(async move { entities.declare(TypeSpec::new("t").index(["data.mod"]).unique(["data.n"])).await })
    };
    for n in 0..300usize {
        let id = format!("{n:04}");
        match n % 3 {
            0 => drop(writer.update(Update::new(&id).data(json!({"n": n + 10_000, "mod": 100}))).await.unwrap()),
            1 => drop(writer.remove(&id).await.unwrap()),
            _ => drop(writer.add(Add::new("t").id(format!("new-{n}")).data(json!({"mod": 100}))).await.unwrap()),
        }
        // However far the index is, no result is missing.
        let expected = n / 3 + 1 + (n + 1) / 3;
        assert_eq!(found(&writer, &by("data.mod", 100)).await.len(), expected, "after {n}");
        tokio::task::yield_now().await;
    }
    declaring.await.unwrap().unwrap();
    assert!(is_indexed(&writer, "data.mod").await);
    assert_eq!(found(&writer, &by("data.mod", 100)).await.len(), 200);
    assert_sound(&entities).await;
}

async fn duplicates_written_while_a_unique_index_is_built_are_found(bench: Bench) {
    let entities = bench.entities().await;
    for round in 0..6 {
        let name = format!("t{round}");
        let items = (0..300).map(|n| Add::new(name.as_str()).id(format!("{round}-{n}")).data(json!({"n": n})));
        entities.add_many(items).await.unwrap();
        let writer = Entities::on(entities.store()).await.unwrap();
        let declaring = {
            let (entities, spec) = (entities.clone(), TypeSpec::new(name.as_str()).unique(["data.n"]));
            tokio::spawn(async move { entities.declare(spec).await })
        };
        for _ in 0..round * 3 {
            tokio::task::yield_now().await;
        }
        let (low, high) = (format!("{round}-5"), format!("{round}-290"));
        // Two entities from both ends of the list swap their values in two commits; either commit may be refused.
        let first = writer.update(Update::new(&low).data(json!({"n": 290}))).await;
        let second = writer.update(Update::new(&high).data(json!({"n": 5}))).await;
        let declared = declaring.await.unwrap();
        let all = writer.find(&Query::of(name.as_str())).await.unwrap().items;
        let mut values: Vec<u64> = all.iter().map(|entity| entity.data["n"].as_u64().unwrap()).collect();
        values.sort();
        values.dedup();
        let clash = values.len() < 300;
        assert_eq!(declared.is_err(), clash, "{first:?}, {second:?}, {declared:?}");
        let more = writer.add(Add::new(name.as_str()).data(json!({"n": 7}))).await;
        assert_eq!(more.is_err(), declared.is_ok(), "{more:?}");
        assert_sound(&entities).await;
    }
}

async fn a_declaration_survives_a_reopen(bench: Bench) {
    if !bench.is_durable() {
        return;
    }
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.n"])).await.unwrap();
    entities.add_many(many(10)).await.unwrap();
    entities.store().close().await.unwrap();
    drop(entities);
    let entities = bench.entities().await;
    assert!(is_indexed(&entities, "data.n").await);
    let twin = entities.add(Add::new("t").id("x").data(json!({"n": 7}))).await;
    assert!(matches!(twin, Err(EntityError::UniqueViolation { owner, .. }) if owner == "0007"));
    assert_sound(&entities).await;
}

async fn values_too_long_for_an_index_keep_it_from_being_declared(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"n": "short"})), ("b", json!({"n": "x".repeat(2050)}))]).await;
    for spec in [TypeSpec::new("t").index(["data.n"]), TypeSpec::new("t").unique(["data.n"])] {
        let error = entities.declare(spec).await.unwrap_err();
        assert!(matches!(&error, EntityError::IndexedTooLong { id, .. } if id == "b"), "{error}");
        assert!(!is_indexed(&entities, "data.n").await);
    }
    fill(&entities, "t", [("c", json!({"n": "x".repeat(2050)}))]).await;
    assert_eq!(found(&entities, &by("data.n", "x".repeat(2050))).await, ["b", "c"]);
    assert_sound(&entities).await;
}
