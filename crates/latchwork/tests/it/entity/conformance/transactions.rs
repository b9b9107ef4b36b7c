//! Several operations as one commit: all or nothing, every failed check named, and the contents of the receipt.

use latchwork::entity::{Add, Effect, EntityError, Remove, Transaction, TypeSpec, Update};
use latchwork::store::{ErrorKind, Generation, Rev};
use serde_json::json;

use super::{assert_sound, failed, fill, generation, get, told};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    every_kind_of_operation_lands_in_one_commit,
    a_rejected_transaction_leaves_no_trace,
    all_failed_checks_are_listed_in_order_with_the_generation_first,
    a_transaction_without_writes_takes_no_generation,
    an_entity_is_written_once_by_a_transaction,
    requirements_are_checked_beside_writes,
    if_at_generation_is_refused_after_any_other_commit,
    author_and_reason_are_kept_in_history,
    generations_are_accounted_for_exactly,
    a_transaction_of_a_single_failed_check_is_rejected_as_a_list_of_one,
);

async fn every_kind_of_operation_lands_in_one_commit(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("u", json!(1)), ("r", json!(1)), ("old", json!(1)), ("seen", json!(1))]).await;
    let at = generation(&entities).await;
    let transaction = Transaction::new()
        .require_exists("seen")
        .add(Add::new("t").id("new").data(json!(2)))
        .require_absent("unknown")
        .update(Update::new("u").data(json!(2)).if_rev(Rev(1)))
        .remove(Remove::new("r").if_rev(Rev(1)))
        .require_rev("seen", Rev(1))
        .add(Add::new("t").id("old").data(json!(2)).if_absent(true))
        .add(Add::new("t").data(json!("made")))
        .if_at_generation(Generation(at));
    let receipt = entities.transact(transaction).await.unwrap();
    let made = receipt.ops[7].id.to_string();
    let expected = [
        ("seen", 1, Effect::Checked),
        ("new", 1, Effect::Added),
        ("unknown", 0, Effect::Checked),
        ("u", 2, Effect::Updated),
        ("r", 2, Effect::Removed),
        ("seen", 1, Effect::Checked),
        ("old", 1, Effect::Existing),
        (made.as_str(), 1, Effect::Added),
    ];
    let ops: Vec<_> = receipt.ops.iter().map(|op| (op.id.as_str(), op.rev.0, op.effect)).collect();
    assert_eq!(ops, expected);
    assert_eq!((receipt.generation.0, generation(&entities).await), (at + 1, at + 1));
    for id in ["new", "u", &made] {
        let entity = get(&entities, id).await;
        assert_eq!((entity.changed.generation, entity.changed.time), (receipt.generation, receipt.time));
    }
    assert!(entities.get("r").await.unwrap().is_none());
    assert_eq!((get(&entities, "old").await.data, get(&entities, "seen").await.rev), (json!(1), Rev(1)));
    assert_sound(&entities).await;
}

async fn a_rejected_transaction_leaves_no_trace(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"]).index(["data.n"])).await.unwrap();
    fill(&entities, "t", [("a", json!({"u": 1, "n": 1})), ("b", json!({"u": 2, "n": 1}))]).await;
    let (a, b, at) = (get(&entities, "a").await, get(&entities, "b").await, generation(&entities).await);
    let good = || {
        Transaction::new()
            .update(Update::new("a").data(json!({"u": 7, "n": 7})))
            .add(Add::new("t").id("c").data(json!({"u": 8})))
            .remove("b")
    };
    let bad = [
        good().require_exists("unknown"),
        good().require_absent("a"),
        good().require_rev("b", Rev(2)),
        good().update(Update::new("unknown")),
        good().remove("unknown"),
        good().add(Add::new("t").id("d").data(json!({"u": 7}))),
        good().if_at_generation(Generation(at - 1)),
    ];
    for transaction in bad {
        let shown = format!("{transaction:?}");
        assert_eq!(failed(entities.transact(transaction).await).len(), 1, "{shown}");
        assert_eq!(generation(&entities).await, at, "{shown}");
        assert_eq!((get(&entities, "a").await, get(&entities, "b").await), (a.clone(), b.clone()), "{shown}");
        assert!(entities.get("c").await.unwrap().is_none(), "{shown}");
    }
    assert_sound(&entities).await;
    entities.transact(good()).await.unwrap();
    assert_eq!(generation(&entities).await, at + 1);
    assert_sound(&entities).await;
}

async fn all_failed_checks_are_listed_in_order_with_the_generation_first(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("u").unique(["data.k"])).await.unwrap();
    fill(&entities, "u", [("owner", json!({"k": 1})), ("other", json!({"k": 2}))]).await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(1)), ("c", json!(1))]).await;
    entities.update(Update::new("a")).await.unwrap();
    let view = entities.now().await.unwrap();
    view.get("b").await.unwrap();
    entities.update(Update::new("b")).await.unwrap();
    let at = generation(&entities).await;
    let transaction = Transaction::new()
        .add(Add::new("u").id("new").data(json!({"k": 1})))
        .update(Update::new("a").if_rev(Rev(1)))
        .update(Update::new("c").if_rev(Rev(1)))
        .remove(Remove::new("b").if_rev(Rev(7)))
        .update(Update::new("ghost"))
        .require_absent("c")
        .require_exists("phantom")
        .add(Add::new("t").id("owner"))
        .update(Update::new("other").data(json!({"k": 1})))
        .require_rev("c", Rev(3))
        .remove(Remove::new("spirit").if_rev(Rev(1)))
        .if_unchanged(&view)
        .if_at_generation(Generation(at - 1));
    let failed = failed(entities.transact(transaction).await);
    let read_at = view.generation();
    let conflict =
        |id, actual, expected| format!("entity {id:?} is at rev {actual}, not at {expected}; read it again and retry");
    let exists = |id| format!("entity {id:?} exists already, at rev 1; update it, or add with if_absent");
    let unknown = |id| format!("there is no entity {id:?}");
    let unique =
        |id, owner| format!("data.k of entity {id:?} must be unique among \"u\", and entity {owner:?} has the same");
    let expected = [
        (None, format!("the store is at generation {at}, not at {}; read again and retry", at - 1)),
        (None, format!("entity \"b\" has changed since it was read at generation {read_at}; read again and retry")),
        (Some(0), unique("new", "owner")),
        (Some(1), conflict("a", 2, 1)),
        (Some(3), conflict("b", 2, 7)),
        (Some(4), unknown("ghost")),
        (Some(5), exists("c")),
        (Some(6), unknown("phantom")),
        (Some(7), exists("owner")),
        (Some(8), unique("other", "new")),
        (Some(9), conflict("c", 1, 3)),
        (Some(10), unknown("spirit")),
    ];
    let mut said = told(&failed);
    // The value is taken twice in this transaction and by another entity already: either owner is a right answer.
    said[9].1 = said[9].1.replace("\"owner\"", "\"new\"");
    assert_eq!(said, expected);
    assert_eq!(generation(&entities).await, at);
}

async fn a_transaction_without_writes_takes_no_generation(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let at = generation(&entities).await;
    let view = entities.now().await.unwrap();
    view.get("a").await.unwrap();
    let checks = [
        Transaction::new(),
        Transaction::new().author("ada").reason("nothing"),
        Transaction::new().require_exists("a").require_rev("a", Rev(1)).require_absent("b"),
        Transaction::new().if_at_generation(Generation(at)).if_unchanged(&view),
        Transaction::new().add(Add::new("t").id("a").if_absent(true)),
    ];
    for transaction in checks {
        let receipt = entities.transact(transaction).await.unwrap();
        assert_eq!((receipt.generation.0, generation(&entities).await), (at, at));
    }
    assert_eq!(entities.store().stats().await.unwrap().generation.0, at);
}

async fn an_entity_is_written_once_by_a_transaction(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(1))]).await;
    let at = generation(&entities).await;
    let (add, update, remove) = (|| Add::new("t").id("a"), || Update::new("a"), || Remove::new("a"));
    let first = || Transaction::new().update(Update::new("b"));
    let twice = [
        first().update(update()).update(update()),
        first().update(update()).remove(remove()),
        first().remove(remove()).update(update()),
        first().remove(remove()).add(add()),
        first().remove(remove()).remove(remove()),
        first().add(add()).update(update()),
        first().add(add()).add(add()),
        first().update(update()).add(add().if_absent(true)),
    ];
    for transaction in twice {
        let shown = format!("{transaction:?}");
        let error = entities.transact(transaction).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let EntityError::WrittenTwice { id, first, second } = error else { panic!("{shown}: {error}") };
        assert_eq!((id.as_str(), first, second), ("a", 1, 2), "{shown}");
    }
    assert_eq!(generation(&entities).await, at);
    // A check beside a write is not a second write.
    let checked = first().require_rev("a", Rev(1)).update(update()).require_exists("a");
    assert_eq!(entities.transact(checked).await.unwrap().ops[2].rev, Rev(2));
}

async fn requirements_are_checked_beside_writes(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let write = || Transaction::new().update(Update::new("a"));
    let cases = [
        (write().require_exists("a"), None),
        (write().require_exists("b"), Some("there is no entity \"b\"")),
        (write().require_absent("b"), None),
        (write().require_rev("b", Rev(1)), Some("there is no entity \"b\"")),
        // Requirements are about the state before the transaction.
        (write().add(Add::new("t").id("x")).require_exists("x"), Some("there is no entity \"x\"")),
        (write().add(Add::new("t").id("x")).require_absent("x"), None),
    ];
    for (transaction, expected) in cases {
        let shown = format!("{transaction:?}");
        let result = entities.transact(transaction).await;
        match expected {
            None => assert!(result.is_ok(), "{shown}: {result:?}"),
            Some(expected) => assert_eq!(told(&failed(result))[0].1, expected, "{shown}"),
        }
    }
}

async fn if_at_generation_is_refused_after_any_other_commit(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let pinned = entities.now().await.unwrap().generation();
    let write = |n: u64| Transaction::new().add(Add::new("t").id(format!("n{n}"))).if_at_generation(Generation(n));
    fill(&entities, "elsewhere", [("unrelated", json!(1))]).await;
    let at = generation(&entities).await;
    for wrong in [0, pinned.0, at + 1, u64::MAX] {
        let failed = failed(entities.transact(write(wrong)).await);
        let EntityError::GenerationConflict { expected, actual } = failed[0].error else { panic!("{failed:?}") };
        assert_eq!((failed.len(), failed[0].op, expected.0, actual.0), (1, None, wrong, at));
    }
    assert_eq!(entities.transact(write(at)).await.unwrap().generation.0, at + 1);
}

async fn author_and_reason_are_kept_in_history(bench: Bench) {
    let entities = bench.entities().await;
    let add = Transaction::new().add(Add::new("t").id("a").data(json!(1)));
    entities.transact(add.author("ada").reason("first")).await.unwrap();
    entities.update(Update::new("a").data(json!(2))).await.unwrap();
    entities.transact(Transaction::new().update(Update::new("a")).author("bob")).await.unwrap();
    entities.transact(Transaction::new().remove("a").reason("done")).await.unwrap();
    entities.transact(Transaction::new().add(Add::new("t").id("a")).author("").reason("ü\"\n")).await.unwrap();
    let history = entities.now().await.unwrap().history("a").limit(10).await.unwrap().items;
    let meta: Vec<_> =
        history.iter().map(|version| (version.meta.author.as_deref(), version.meta.reason.as_deref())).collect();
    let expected = [
        (Some(""), Some("ü\"\n")),
        (None, Some("done")),
        (Some("bob"), None),
        (None, None),
        (Some("ada"), Some("first")),
    ];
    assert_eq!(meta, expected);
}

async fn generations_are_accounted_for_exactly(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"]).index(["data.n"])).await.unwrap();
    let mut expected = generation(&entities).await;
    for round in 0..10u64 {
        let id = |n: u64| format!("{round}-{n}");
        let add = |n: u64| Add::new("t").id(id(n)).data(json!({"u": id(n), "n": n}));
        // (the action, whether it lands, how many generations it takes)
        let steps: [(_, bool, u64); 9] = [
            (entities.add(add(0)).await.is_ok(), true, 1),
            (entities.add(add(0)).await.is_ok(), false, 0),
            (entities.add(add(0).if_absent(true)).await.is_ok(), true, 0),
            (entities.add_many([add(1), add(2), add(3)]).await.is_ok(), true, 1),
            (entities.add_many([add(4), add(3)]).await.is_ok(), false, 0),
            (entities.add_many_if_absent([add(3), add(4), add(4)]).await.is_ok(), true, 1),
            (entities.update(Update::new(id(0)).data(json!({"u": id(1)}))).await.is_ok(), false, 0),
            (entities.update(Update::new(id(0)).data(json!({"u": "own"}))).await.is_ok(), true, 1),
            (entities.update_with(id(0), 0, |draft| draft.data["u"] = json!(null)).await.is_ok(), true, 1),
        ];
        assert!(steps.iter().all(|(did, should, _)| did == should), "{steps:?}");
        expected += steps.iter().map(|(.., taken)| taken).sum::<u64>();
        assert_eq!(generation(&entities).await, expected);
        let stale = entities.remove(Remove::new(id(0)).if_rev(Rev(1))).await;
        assert!(stale.is_err() && entities.remove(id(0)).await.is_ok() && entities.remove(id(0)).await.is_err());
        let mixed = Transaction::new().remove(id(1)).add(add(1 + 10)).update(Update::new(id(2)));
        entities.transact(mixed.clone()).await.unwrap();
        assert!(entities.transact(mixed).await.is_err());
        expected += 2;
        assert_eq!(generation(&entities).await, expected);
    }
    assert_eq!(entities.store().stats().await.unwrap().applied, expected);
    assert_sound(&entities).await;
}

async fn a_transaction_of_a_single_failed_check_is_rejected_as_a_list_of_one(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let conflict = entities.transact(Transaction::new().update(Update::new("a").if_rev(Rev(2)))).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict);
    let conflict = failed::<()>(Err(conflict));
    assert!(matches!(conflict[..], [ref only] if only.op == Some(0)), "{conflict:?}");
    let missing = entities.transact(Transaction::new().remove("b")).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    let said = missing.to_string();
    assert_eq!(said, "the transaction was rejected: operation 0: there is no entity \"b\"");
}
