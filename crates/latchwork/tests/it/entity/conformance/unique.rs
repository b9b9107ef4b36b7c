//! Values that only one entity of a type may have.

use latchwork::entity::{Add, ChangeError, Entities, EntityError, Transaction, TypeSpec, Update};
use latchwork::store::{ErrorKind, Rev};
use serde_json::{Value, json};

use super::{assert_sound, failed, fill, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    the_error_of_the_second_writer_names_the_owner_of_the_value,
    values_are_the_same_as_json_values_are,
    a_combination_is_unique_as_a_whole,
    null_and_missing_are_free,
    another_type_and_another_field_are_not_concerned,
    a_value_is_free_again_when_its_owner_gives_it_up,
    a_value_moves_between_entities_in_one_transaction,
    duplicates_within_a_transaction_are_refused,
    metadata_can_be_unique_too,
    several_unique_declarations_hold_at_once,
    a_violation_leaves_everything_as_it_was,
);

#[track_caller]
fn assert_violation<T: std::fmt::Debug>(result: Result<T, EntityError>, id: &str, fields: &str, owner: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    match &error {
        EntityError::UniqueViolation { id: of, fields: told, owner: by, .. } => {
            assert_eq!((of.as_str(), told.as_str(), by.as_str()), (id, fields, owner));
        }
        other => panic!("{other:?}"),
    }
}

async fn people(bench: &Bench) -> Entities {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("person").unique(["data.email"])).await.unwrap();
    fill(&entities, "person", [("ada", json!({"email": "a@x"})), ("bob", json!({"email": "b@x"}))]).await;
    entities
}

fn email(value: impl Into<Value>) -> Value {
    json!({"email": value.into()})
}

async fn the_error_of_the_second_writer_names_the_owner_of_the_value(bench: Bench) {
    let entities = people(&bench).await;
    let at = generation(&entities).await;
    let add = Add::new("person").id("eve").data(email("a@x"));
    assert_violation(entities.add(add.clone()).await, "eve", "data.email", "ada");
    assert_violation(entities.add(add.clone().if_absent(true)).await, "eve", "data.email", "ada");
    let update = Update::new("bob").data(email("a@x"));
    assert_violation(entities.update(update.clone()).await, "bob", "data.email", "ada");
    assert_violation(entities.update(update.clone().if_rev(Rev(1))).await, "bob", "data.email", "ada");
    let with = entities.update_with("bob", 3, |draft| draft.data = email("a@x")).await;
    assert_violation(with, "bob", "data.email", "ada");
    let tried = entities.try_update_with("bob", 3, |draft| -> Result<(), ()> {
        draft.data = email("a@x");
        Ok(())
    });
    let Err(ChangeError::Entity(error)) = tried.await else { panic!("it is refused") };
    assert_violation::<()>(Err(error), "bob", "data.email", "ada");
    let in_transaction = failed(entities.transact(Transaction::new().require_exists("bob").add(add)).await);
    assert_eq!(in_transaction[0].op, Some(1));
    assert_violation::<()>(Err(in_transaction[0].error.clone()), "eve", "data.email", "ada");
    let said = in_transaction[0].error.to_string();
    assert_eq!(said, "data.email of entity \"eve\" must be unique among \"person\", and entity \"ada\" has the same");
    assert_eq!(generation(&entities).await, at);
    // An entity's own value is no violation.
    entities.update(Update::new("ada").data(json!({"email": "a@x", "more": 1}))).await.unwrap();
    assert_sound(&entities).await;
}

async fn values_are_the_same_as_json_values_are(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    let different = [
        json!(1),
        json!("1"),
        json!(true),
        json!("true"),
        json!(0),
        json!(false),
        json!(""),
        json!([]),
        json!({}),
        json!([1]),
        json!([1, 2]),
        json!({"a": 1}),
        json!(u64::MAX),
        json!(u64::MAX - 1),
        json!(0.1),
        json!("a"),
        json!("a\0"),
        json!("A"),
    ];
    for (at, value) in different.iter().enumerate() {
        let added = entities.add(Add::new("t").id(at.to_string()).data(json!({"u": value}))).await;
        assert!(added.is_ok(), "{value}: {added:?}");
    }
    let same = [(json!(1.0), "0"), (json!(-0.0), "4"), (json!([1.0]), "9"), (json!({"a": 1.0}), "11")];
    for (value, owner) in same {
        let add = Add::new("t").id("x").data(json!({"u": value}));
        assert_violation(entities.add(add).await, "x", "data.u", owner);
    }
    assert_sound(&entities).await;
}

async fn a_combination_is_unique_as_a_whole(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.country", "metadata.number"])).await.unwrap();
    let add = |id: &str, country: &str, number: Value| {
        Add::new("t").id(id).data(json!({"country": country})).metadata(json!({"number": number}))
    };
    entities.add(add("a", "no", json!(1))).await.unwrap();
    entities.add(add("b", "no", json!(2))).await.unwrap();
    entities.add(add("c", "se", json!(1))).await.unwrap();
    // Two values whose joined text is the same are still a different combination.
    entities.add(add("d", "n", json!("o1"))).await.unwrap();
    let fields = "data.country and metadata.number";
    assert_violation(entities.add(add("e", "no", json!(1))).await, "e", fields, "a");
    assert_violation(entities.update(Update::new("b").metadata(json!({"number": 1}))).await, "b", fields, "a");
    assert_violation(entities.update(Update::new("c").data(json!({"country": "no"}))).await, "c", fields, "a");
    entities.update(Update::new("a").metadata(json!({"number": 3}))).await.unwrap();
    entities.update(Update::new("c").data(json!({"country": "no"}))).await.unwrap();
    assert_sound(&entities).await;
}

async fn null_and_missing_are_free(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.a", "data.b"]).unique(["data.c"])).await.unwrap();
    let free = [
        json!({"a": 1}),
        json!({"a": 1}),
        json!({"a": 1, "b": null}),
        json!({"a": 1, "b": null}),
        json!({"b": 2}),
        json!({"a": null, "b": 2, "c": null}),
        json!({"a": null, "b": null, "c": null}),
        json!(null),
        json!(7),
        json!([]),
    ];
    for (at, data) in free.iter().cycle().take(20).enumerate() {
        entities.add(Add::new("t").id(format!("{at:02}")).data(data)).await.unwrap();
    }
    for id in ["00", "01"] {
        let result = entities.update(Update::new(id).data(json!({"a": 1, "b": 2}))).await;
        if id == "01" {
            assert_violation(result, "01", "data.a and data.b", "00");
        }
    }
    entities.update(Update::new("00").data(json!({"a": 1, "b": null}))).await.unwrap();
    entities.update(Update::new("01").data(json!({"a": 1, "b": 2}))).await.unwrap();
    assert_sound(&entities).await;
}

async fn another_type_and_another_field_are_not_concerned(bench: Bench) {
    let entities = people(&bench).await;
    fill(&entities, "perso", [("1", email("a@x"))]).await;
    fill(&entities, "person2", [("2", email("a@x")), ("3", email("a@x"))]).await;
    fill(&entities, "person", [("4", json!({"mail": "a@x", "nested": {"email": "a@x"}}))]).await;
    assert_sound(&entities).await;
}

async fn a_value_is_free_again_when_its_owner_gives_it_up(bench: Bench) {
    let entities = people(&bench).await;
    entities.update(Update::new("ada").data(email("new@x"))).await.unwrap();
    fill(&entities, "person", [("eve", email("a@x"))]).await;
    entities.remove("bob").await.unwrap();
    fill(&entities, "person", [("dan", email("b@x"))]).await;
    assert_violation(entities.add(Add::new("person").id("x").data(email("a@x"))).await, "x", "data.email", "eve");
    assert_violation(entities.add(Add::new("person").id("x").data(email("b@x"))).await, "x", "data.email", "dan");
    assert_violation(entities.add(Add::new("person").id("x").data(email("new@x"))).await, "x", "data.email", "ada");
    entities.update(Update::new("eve").data(email(Value::Null))).await.unwrap();
    fill(&entities, "person", [("x", email("a@x"))]).await;
    // An id that is used again, for another entity.
    entities.remove("x").await.unwrap();
    fill(&entities, "person", [("y", email("a@x"))]).await;
    fill(&entities, "animal", [("x", email("a@x"))]).await;
    assert_sound(&entities).await;
}

async fn a_value_moves_between_entities_in_one_transaction(bench: Bench) {
    let entities = people(&bench).await;
    fill(&entities, "person", [("eve", email("e@x"))]).await;
    let set = |id: &str, to: &str| Update::new(id).data(email(to));
    let at = generation(&entities).await;
    let steps = [
        // Swapped, in either order of the operations.
        Transaction::new().update(set("ada", "b@x")).update(set("bob", "a@x")),
        Transaction::new().update(set("bob", "b@x")).update(set("ada", "a@x")),
        // In a cycle.
        Transaction::new().update(set("ada", "b@x")).update(set("bob", "e@x")).update(set("eve", "a@x")),
        // Passed on: taken before the former owner gives it up.
        Transaction::new().update(set("bob", "b@x")).update(set("ada", "free@x")),
        Transaction::new().update(set("ada", "b@x")).update(set("bob", "e@x")).update(set("eve", "f@x")),
        // From a removed entity to an added one, in both orders.
        Transaction::new().add(Add::new("person").id("dan").data(email("e@x"))).remove("bob"),
        Transaction::new().remove("dan").add(Add::new("person").id("bob").data(email("e@x"))),
    ];
    let count = steps.len() as u64;
    for transaction in steps {
        let shown = format!("{transaction:?}");
        let result = entities.transact(transaction).await;
        assert!(result.is_ok(), "{shown}: {result:?}");
        assert_sound(&entities).await;
    }
    assert_eq!(generation(&entities).await, at + count);
    for (id, holds) in [("ada", "b@x"), ("bob", "e@x"), ("eve", "f@x")] {
        assert_eq!(get(&entities, id).await.data, email(holds));
        assert_violation(entities.add(Add::new("person").id("x").data(email(holds))).await, "x", "data.email", id);
    }
    // A chain whose last entity keeps its value.
    let blocked = Transaction::new().update(set("ada", "e@x")).update(set("bob", "f@x"));
    let blocked = failed(entities.transact(blocked).await);
    assert_eq!((blocked.len(), blocked[0].op), (1, Some(1)));
    assert_violation::<()>(Err(blocked[0].error.clone()), "bob", "data.email", "eve");
}

async fn duplicates_within_a_transaction_are_refused(bench: Bench) {
    let entities = people(&bench).await;
    let add = |id: &str| Add::new("person").id(id).data(email("new@x"));
    let at = generation(&entities).await;
    let two = failed(entities.add_many([add("x"), add("y"), add("z")]).await);
    assert_eq!(two.iter().map(|failed| failed.op).collect::<Vec<_>>(), [Some(1), Some(2)]);
    for (failed, id) in two.into_iter().zip(["y", "z"]) {
        assert_violation::<()>(Err(failed.error), id, "data.email", "x");
    }
    let mixed = Transaction::new().update(Update::new("ada").data(email("new@x"))).add(add("x"));
    let mixed = failed(entities.transact(mixed).await);
    assert_eq!((mixed.len(), mixed[0].op), (1, Some(1)));
    assert_violation::<()>(Err(mixed[0].error.clone()), "x", "data.email", "ada");
    // Given up by one entity and taken by two.
    let two = Transaction::new().remove("ada").add(add("x").data(email("a@x"))).add(add("y").data(email("a@x")));
    let two = failed(entities.transact(two).await);
    assert_eq!((two.len(), two[0].op), (1, Some(2)));
    assert_violation::<()>(Err(two[0].error.clone()), "y", "data.email", "x");
    assert_eq!(generation(&entities).await, at);
    // The same id twice is one entity, not two.
    entities.add_many_if_absent([add("x"), add("x")]).await.unwrap();
    assert_sound(&entities).await;
}

async fn metadata_can_be_unique_too(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["metadata.source.key"])).await.unwrap();
    let add = |id: &str, key: &str| Add::new("t").id(id).metadata(json!({"source": {"key": key}}));
    entities.add(add("a", "k")).await.unwrap();
    assert_violation(entities.add(add("b", "k")).await, "b", "metadata.source.key", "a");
    entities.add(add("b", "l")).await.unwrap();
    let merge = Update::new("b").metadata(json!({"source": {"key": "k"}}));
    assert_violation(entities.update(merge.clone()).await, "b", "metadata.source.key", "a");
    entities.update(Update::new("a").metadata(json!({"source": null}))).await.unwrap();
    entities.update(merge).await.unwrap();
    assert_sound(&entities).await;
}

async fn several_unique_declarations_hold_at_once(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.a"]).unique(["data.b"]).index(["data.a"])).await.unwrap();
    fill(&entities, "t", [("x", json!({"a": 1, "b": 1})), ("y", json!({"a": 2, "b": 2}))]).await;
    let both = Transaction::new().add(Add::new("t").id("z").data(json!({"a": 1, "b": 2})));
    let both = failed(entities.transact(both).await);
    assert!(both.iter().all(|failed| failed.op == Some(0)));
    let mut said: Vec<_> = both
        .iter()
        .map(|failed| match &failed.error {
            EntityError::UniqueViolation { fields, owner, .. } => (fields.as_str(), owner.as_str()),
            other => panic!("{other}"),
        })
        .collect();
    said.sort();
    assert_eq!(said, [("data.a", "x"), ("data.b", "y")]);
    assert_sound(&entities).await;
}

async fn a_violation_leaves_everything_as_it_was(bench: Bench) {
    let entities = people(&bench).await;
    let (before, at) = (get(&entities, "bob").await, generation(&entities).await);
    assert!(entities.update(Update::new("bob").data(email("a@x"))).await.is_err());
    assert!(entities.update_with("bob", 0, |draft| draft.data = email("a@x")).await.is_err());
    assert_eq!((get(&entities, "bob").await, generation(&entities).await), (before, at));
    entities.update_with("bob", 0, |draft| draft.data = email("c@x")).await.unwrap();
    assert_violation(entities.add(Add::new("person").id("x").data(email("c@x"))).await, "x", "data.email", "bob");
    fill(&entities, "person", [("y", email("b@x"))]).await;
    assert_sound(&entities).await;
}
