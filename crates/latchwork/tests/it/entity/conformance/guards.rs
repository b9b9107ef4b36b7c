//! A fencing token guards writes: they land while the lock is held, and are refused afterwards with an error that names
//! the lock.

use latchwork::entity::{Add, Entities, EntityError, Query, Remove, Transaction, Update};
use latchwork::lock::Locks;
use latchwork::store::{ErrorKind, Rev, Store};
use serde_json::json;

use super::{assert_sound, failed, fill, generation, get, told};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_guarded_transaction_lands_while_the_lock_is_held_and_is_refused_after_its_release,
    every_failed_check_is_named_beside_the_guards,
    single_operations_can_be_guarded,
    a_guard_counts_though_nothing_would_be_written,
);

/// The holder was paused, and the lock has another holder by now: late writes of the first holder must not land.
async fn a_guarded_transaction_lands_while_the_lock_is_held_and_is_refused_after_its_release(bench: Bench) {
    let entities = bench.entities().await;
    let locks = Locks::on(entities.store()).await.unwrap();
    let guard = locks.mutex("m").acquire().await.unwrap();
    let token = guard.token().clone();
    let write = |id: &str| entities.transact(Transaction::new().add(Add::new("t").id(id)).guard(&token));
    write("a").await.unwrap();
    guard.release().await.unwrap();
    let lost = format!("nothing was written: lock \"m\" is not held under token {token}");
    let refused = async |id: &str| {
        let at = generation(&entities).await;
        let error = write(id).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert_eq!(told(&failed(Err::<(), _>(error))), [(None, lost.clone())]);
        assert_eq!(generation(&entities).await, at);
        assert!(entities.get(id).await.unwrap().is_none());
    };
    refused("b").await;
    let next = locks.mutex("m").acquire().await.unwrap();
    refused("c").await;
    entities.transact(Transaction::new().add(Add::new("t").id("d")).guard(next.token())).await.unwrap();
    assert_sound(&entities).await;
}

async fn every_failed_check_is_named_beside_the_guards(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(1)), ("c", json!(1))]).await;
    let locks = Locks::on(entities.store()).await.unwrap();
    let [lost, held] = ["lost", "held"].map(|name| locks.mutex(name));
    let (lost, held) = (lost.acquire().await.unwrap(), held.acquire().await.unwrap());
    let token = lost.token().clone();
    lost.release().await.unwrap();
    let fenced = format!("nothing was written: lock \"lost\" is not held under token {token}");
    let conflict = "entity \"b\" is at rev 1, not at 7; read it again and retry".to_string();
    let exists = "entity \"c\" exists already, at rev 1; update it, or add with if_absent".to_string();
    let transaction = Transaction::new()
        .remove(Remove::new("a").guard(held.token()))
        .update(Update::new("b").if_rev(Rev(7)).guard(&token))
        .add(Add::new("t").id("c"))
        .guard(held.token())
        .guard(&token);
    let expected = [(None, fenced.clone()), (Some(1), fenced.clone()), (Some(1), conflict), (Some(2), exists)];
    assert_eq!(told(&failed(entities.transact(transaction).await)), expected);
    for id in ["a", "b", "c"] {
        assert_eq!(get(&entities, id).await.rev, Rev(1));
    }
    // No other failed check hides it: the update is on the newest rev, and still refused.
    let update = Transaction::new().update(Update::new("b").data(json!(2)).guard(&token));
    assert_eq!(told(&failed(entities.transact(update).await)), [(Some(0), fenced)]);
}

async fn single_operations_can_be_guarded(bench: Bench) {
    let entities = bench.entities().await;
    let locks = Locks::on(entities.store()).await.unwrap();
    let guard = locks.mutex("m").acquire().await.unwrap();
    let token = guard.token().clone();
    entities.add(Add::new("t").id("a").data(json!(1)).guard(&token)).await.unwrap();
    assert_eq!(entities.update(Update::new("a").data(json!(2)).guard(&token)).await.unwrap(), Rev(2));
    assert_eq!(entities.update(Update::new("a").data(json!(3)).if_rev(Rev(2)).guard(&token)).await.unwrap(), Rev(3));
    assert_eq!(entities.remove(Remove::new("a").guard(&token)).await.unwrap(), Rev(4));
    fill(&entities, "t", [("a", json!(1))]).await;
    guard.release().await.unwrap();
    let rev = get(&entities, "a").await.rev;
    let refused = [
        entities.add(Add::new("t").id("b").guard(&token)).await.err(),
        entities.add_if_missing(&Query::of("u"), Add::new("u").guard(&token)).await.err(),
        entities.update(Update::new("a").data(json!(2)).guard(&token)).await.err(),
        entities.update(Update::new("a").data(json!(2)).if_rev(Rev(1)).guard(&token)).await.err(),
        entities.remove(Remove::new("a").guard(&token)).await.err(),
    ];
    for error in refused {
        assert!(
            matches!(&error, Some(EntityError::Fenced { reason }) if reason.contains("\"m\" is not held")),
            "{error:?}"
        );
    }
    assert_eq!((get(&entities, "a").await.rev, entities.get("b").await.unwrap()), (rev, None));
    assert_sound(&entities).await;
}

/// A holder that gets "it is there already" would believe that it still holds the lock.
async fn a_guard_counts_though_nothing_would_be_written(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    let locks = Locks::on(entities.store()).await.unwrap();
    let guard = locks.mutex("m").acquire().await.unwrap();
    let token = guard.token().clone();
    let add = || entities.add(Add::new("t").id("a").if_absent(true).guard(&token));
    let only = || entities.transact(Transaction::new().guard(&token));
    assert!(!add().await.unwrap().was_added());
    only().await.unwrap();
    guard.release().await.unwrap();
    assert!(matches!(add().await, Err(EntityError::Fenced { .. })));
    assert_eq!(failed(only().await).len(), 1);
}

#[tokio::test]
async fn an_error_of_entities_is_the_same_when_it_is_read_again() {
    let entities = Entities::on(&Store::memory().await.unwrap()).await.unwrap();
    entities.add(Add::new("t").id("a")).await.unwrap();
    let twice = Transaction::new().update(Update::new("a").if_rev(Rev(7))).remove("b");
    let errors = [
        entities.add(Add::new("t").id("a")).await.unwrap_err(),
        entities.update(Update::new("a").data(json!(1)).if_rev(Rev(7))).await.unwrap_err(),
        entities.transact(twice).await.unwrap_err(),
        entities.add(Add::new("")).await.unwrap_err(),
        entities.find(Query::of("t").filter(json!({"data.x": {"like": 1}}))).await.unwrap_err(),
        EntityError::Store(latchwork::store::StoreError::Closed),
    ];
    for error in errors {
        let text = serde_json::to_string(&error).unwrap();
        let read: EntityError = serde_json::from_str(&text).unwrap();
        assert_eq!((read.to_string(), read.kind()), (error.to_string(), error.kind()), "{text}");
    }
}
