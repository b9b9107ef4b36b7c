//! Former bugs, each as a small case.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};

use latchwork::entity::{Add, Entities, EntityError, Query, Transaction, TypeSpec, Update, field};
use latchwork::store::backend::MemoryBackend;
use latchwork::store::disk::sim::{Attempt, SimDisk};
use latchwork::store::{Env, FileOptions, Limits, Rev, Store, VirtualClock};
use serde_json::json;

/// Entities in memory, on virtual time, whose snapshots go to a simulated disk.
async fn entities(limits: Limits) -> (Entities, Arc<VirtualClock>) {
    let (env, clock) = Env::seeded(1);
    let (backend, disk) = (Arc::new(MemoryBackend::new(env.clone())), Arc::new(SimDisk::new()));
    let store = Store::with_backend(backend, env, limits, disk).await.expect("a store in memory");
    (Entities::on(&store).await.expect("entities in memory"), clock)
}

fn person(id: &str, email: &str) -> Add {
    Add::new("person").id(id).data(json!({ "email": email }))
}

#[tokio::test]
async fn a_declaration_that_two_entities_of_one_batch_break_names_them_and_leaves_no_trace() {
    let (entities, _) = entities(Limits::default()).await;
    entities.add_many([person("a", "x"), person("b", "x")]).await.unwrap();
    let declared = entities.declare(TypeSpec::new("person").unique(["data.email"])).await;
    assert!(
        matches!(&declared, Err(EntityError::UniqueViolation { id, owner, .. }) if id == "b" && owner == "a"),
        "{declared:?}"
    );
    let query = Query::of("person").filter(field("data.email").equals("x"));
    assert!(entities.explain(&query).await.unwrap().scans());
    // Since there is no trace, a third entity may have the value as well.
    entities.add(person("c", "x")).await.unwrap();
}

#[tokio::test]
async fn a_find_by_an_index_counts_as_changed_when_the_index_is_undeclared_and_a_match_is_added() {
    let (entities, _) = entities(Limits::default()).await;
    entities.declare(TypeSpec::new("person").index(["data.email"])).await.unwrap();
    let view = entities.now().await.unwrap();
    let query = Query::of("person").filter(field("data.email").equals("x"));
    assert_eq!(view.find(&query).await.unwrap().items.len(), 0);
    entities.undeclare(TypeSpec::new("person").index(["data.email"])).await.unwrap();
    entities.add(person("a", "x")).await.unwrap();
    // As `add_if_missing` does it: now there would be two.
    let added = entities.transact(Transaction::new().add(person("b", "x")).if_unchanged(&view)).await;
    assert!(matches!(added, Err(EntityError::Rejected { .. })), "{added:?}");
}

#[tokio::test]
async fn a_violation_names_the_owner_of_the_value_also_for_the_second_operation() {
    let (entities, _) = entities(Limits::default()).await;
    entities.declare(TypeSpec::new("person").unique(["data.email"])).await.unwrap();
    entities.add(person("owner", "x")).await.unwrap();
    let failed = match entities.add_many([person("a", "x"), person("b", "x")]).await {
        Err(EntityError::Rejected { failed }) => failed,
        other => panic!("{other:?}"),
    };
    let owners = failed.iter().map(|failed| match &failed.error {
        EntityError::UniqueViolation { owner, .. } => owner.to_string(),
        other => panic!("{other}"),
    });
    assert_eq!(owners.collect::<Vec<_>>(), ["owner", "owner"]);
}

#[tokio::test]
async fn an_index_is_built_by_commits_that_the_store_accepts() {
    let mut limits = Limits::default();
    limits.operations = 100;
    let (entities, _) = entities(limits).await;
    for number in 0..60 {
        entities.add(person(&format!("{number}"), &format!("{number}"))).await.unwrap();
    }
    let spec = TypeSpec::new("person").index(["data.email"]);
    entities.declare(spec.clone()).await.unwrap();
    entities.undeclare(spec).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_refuses_has_seen_all_that_was_acknowledged_before_it_began() {
    let disk = SimDisk::new();
    let store = FileOptions::new().disk(disk.clone()).open("/store").await.unwrap();
    let entities = Entities::on(&store).await.unwrap();
    entities.add(Add::new("account").id("a").data(json!(0))).await.unwrap();
    // Another commit is in its sync for as long as the test wants.
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let (begun, mut syncing) = tokio::sync::mpsc::unbounded_channel();
    disk.set_faults(move |attempt, _| {
        if attempt == Attempt::Sync {
            let _ = begun.send(());
            let _ = gate.recv();
        }
        None
    });
    let other = entities.clone();
    let other = tokio::spawn(async move { other.add(Add::new("account").id("other")).await });
    syncing.recv().await.unwrap();
    // Another caller holds the lane: its change is decided, and its answer is not fetched.
    let slow = entities.clone();
    let mut slow = Box::pin(async move { slow.update_with("a", 5, |draft| draft.data = json!(1)).await });
    assert!(slow.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(open);
    other.await.unwrap().unwrap();
    entities.update(Update::new("a").data(json!(100)).if_rev(Rev(2))).await.unwrap();
    let paid = entities.try_update_with("a", 5, |draft| match draft.data.as_i64() {
        Some(balance) if balance >= 50 => {
            draft.data = json!(balance - 50);
            Ok(())
        }
        balance => Err(balance),
    });
    let paid = paid.await;
    assert!(paid.is_ok(), "100 were there, and {paid:?}");
    slow.await.unwrap();
}

#[tokio::test]
async fn a_declaration_by_another_handle_is_no_lost_race_for_an_entity() {
    let (one, _) = entities(Limits::default()).await;
    let other = Entities::on(one.store()).await.unwrap();
    one.add(person("a", "x")).await.unwrap();
    other.declare(TypeSpec::new("person").index(["data.email"])).await.unwrap();
    // The entity has not changed, and the update has no retries.
    one.update_with("a", 0, |draft| draft.data["email"] = json!("y")).await.unwrap();
}
