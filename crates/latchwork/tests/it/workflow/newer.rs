//! Records of a newer version: a program that was rolled back leaves them alone, reports the version that it found and
//! those that it knows, and continues with everything else.

use std::time::Duration;

use latchwork::entity::{Add, EntityError};
use latchwork::json;
use latchwork::lock::LockError;
use latchwork::store::{Bytes, Commit, ErrorKind, Key, Order, Store};
use latchwork::workflow::{Ctx, Engine, ExecutionState, Workflow, WorkflowError, workflow};

/// Changes the version of records whose keys contain a text. Returns the changed records.
async fn set_version(store: &Store, space: &str, text: &str, version: u8) -> Vec<(Key, Bytes)> {
    let space = store.spaces().await.unwrap().into_iter().find(|found| found.name() == space).unwrap();
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    let mut set = Vec::new();
    for (key, item) in found {
        let holds = String::from_utf8_lossy(key.bytes()).contains(text);
        if holds && !item.value.is_empty() {
            let value = [&[version][..], &item.value[1..]].concat();
            store.commit(Commit::new().put(&key, value.clone())).await.unwrap().applied().unwrap();
            set.push((key, value.into()));
        }
    }
    assert!(!set.is_empty(), "there is something of {text} in {}", space.name());
    set
}

/// Uses a lock and a slot after a signal.
fn uses() -> Workflow<String, u64> {
    workflow("uses").run(async |ctx: Ctx, name: String| {
        ctx.run("first", async || Ok(())).await?;
        let by: u64 = ctx.receive("go").await?;
        let guard = ctx.mutex(format!("m-{name}")).acquire().await?;
        let sum = ctx.state().global::<u64>(&format!("s-{name}")).increment(by).await?.value;
        guard.release().await?;
        Ok(sum)
    })
}

/// A store in which `old` and `newer` have been sent what they wait for, and have not run since.
async fn prepared() -> Store {
    let (uses, store) = (uses(), Store::memory().await.unwrap());
    let engine = Engine::on(&store).register(&uses).start().await.unwrap();
    for name in ["old", "newer"] {
        engine.states().global().slot::<u64>(&format!("s-{name}")).set(1).await.unwrap();
        engine.mutex(format!("m-{name}")).acquire().await.unwrap().release().await.unwrap();
        engine.start(&uses, name.to_string()).id(name).await.unwrap();
    }
    while engine.residents() > 0 {
        tokio::task::yield_now().await;
    }
    engine.stop();
    let idle = Engine::on(&store).register(&uses).idle().start().await.unwrap();
    for name in ["old", "newer"] {
        idle.signal(name, "go", &5_u64).await.unwrap();
    }
    idle.stop();
    store
}

/// Stands for a deployment that is rolled back after the newer program has written one record, of any kind.
#[tokio::test]
async fn an_execution_that_needs_a_newer_record_is_set_aside_and_nothing_is_overwritten() {
    for (space, text, known) in [
        ("workflow.executions", "newer", 4),
        ("workflow.journal", "newer", 3),
        ("workflow.kept", "newer", 1),
        ("lock.heads", "m-newer", 1),
        ("state", "s-newer", 1),
    ] {
        let (uses, store) = (uses(), prepared().await);
        let newer = set_version(&store, space, text, known + 1).await;
        let engine = Engine::on(&store).register(&uses).start().await.unwrap();
        assert_eq!(engine.handle(&uses, "old").result().await.unwrap(), 6, "{space}");
        let reason = loop {
            let mut parked = engine.parked().await.unwrap();
            assert!(parked.len() <= 1, "{parked:?}");
            match parked.pop() {
                Some((id, reason)) => break (id, reason),
                None => tokio::task::yield_now().await,
            }
        };
        assert_eq!(&*reason.0, "newer", "{space}");
        let told = format!("has version {}; this program reads versions 1 to {known}: use a newer program", known + 1);
        assert!(reason.1.contains(&told), "{reason:?}");
        engine.stop();
        for (key, value) in newer {
            let found = store.view().await.unwrap().get(&key).await.unwrap();
            assert_eq!(found.unwrap().value, value, "{space}");
        }
        // The newer program is back.
        set_version(&store, space, text, known).await;
        let engine = Engine::on(&store).register(&uses).start().await.unwrap();
        assert_eq!(engine.handle(&uses, "newer").result().await.unwrap(), 6, "{space}");
        assert!(matches!(engine.history("newer").await.unwrap().state, ExecutionState::Completed(_)));
        assert_eq!(engine.parked().await.unwrap(), [], "{space}");
    }
}

/// A newer program may define the ownership of a shard differently: an older program takes no shard from it.
#[tokio::test]
async fn an_engine_does_not_start_on_shards_of_a_newer_one() {
    let store = prepared().await;
    set_version(&store, "node.shards", "", 2).await;
    let refused = Engine::on(&store).start().await.unwrap_err();
    assert!(matches!(refused, WorkflowError::UnknownVersion { found: 2, supported: 1, .. }), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Invalid, "an unknown version is not damage");
}

/// Calls from outside return the versions, too, and write nothing.
#[tokio::test]
async fn newer_records_are_refused_from_outside() {
    let store = prepared().await;
    let engine = Engine::on(&store).idle().start().await.unwrap();
    engine.entities().add(Add::new("t").id("e").data(json!({"n": 1}))).await.unwrap();
    set_version(&store, "entities", "e", 3).await;
    set_version(&store, "lock.heads", "m-newer", 2).await;
    let refused = engine.entities().get("e").await.unwrap_err();
    assert!(matches!(refused, EntityError::UnknownVersion { found: 3, supported: 2, .. }), "{refused}");
    let updated = engine.entities().update(latchwork::entity::Update::new("e").data(json!({"n": 2}))).await;
    assert!(matches!(updated, Err(EntityError::UnknownVersion { .. })), "{updated:?}");
    let lock = engine.mutex("m-newer");
    let acquired = lock.acquire_within(Duration::from_secs(1)).await;
    assert!(matches!(acquired, Err(LockError::UnknownVersion { found: 2, supported: 1, .. })), "{acquired:?}");
}
