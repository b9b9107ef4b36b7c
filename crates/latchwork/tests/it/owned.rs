//! Futures of handles and builders own what they need: they are kept in variables, joined and spawned after the handle
//! that made them was dropped.

use std::time::Duration;

use futures_util::future::join_all;
use latchwork::entity::{Add, Query, Update};
use latchwork::json;
use latchwork::lock::{DurableMutex, LockRecord};
use latchwork::state::States;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};

const SOON: Duration = Duration::from_millis(10);

async fn engine() -> (Workflow<(), ()>, Engine) {
    let nothing = workflow("nothing").run(async |_: Ctx, ()| Ok(()));
    let store = latchwork::store::Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&nothing).start().await.unwrap();
    (nothing, engine)
}

#[tokio::test]
async fn mutations_of_state_are_kept_joined_and_spawned() {
    let (_, engine) = engine().await;
    let states: States = engine.states().clone();
    let kept = states.session("s").once("k").inc_state("n", 1);
    assert_eq!(kept.await.unwrap().value, json!(1));
    let spawned = tokio::spawn(states.session("s").once("k").inc_state("n", 1));
    assert!(spawned.await.unwrap().unwrap().repeated);
    let joined = join_all((0..10).map(|n| states.session(&format!("s{n}")).push_state("list", json!({ "n": n }))));
    assert!(joined.await.iter().all(Result::is_ok));
    let slot = tokio::spawn(states.global().slot::<u64>("count").initial(7).increment(1)).await.unwrap();
    assert_eq!(slot.unwrap().value, 8);
    let all = join_all((0..10).map(|_| states.global().slot::<u64>("count").update(|count| count.unwrap_or(0) + 1)));
    assert_eq!(all.await.into_iter().map(|changed| changed.unwrap().value).max(), Some(18));
    let read = states.global().slot::<u64>("count").get();
    assert_eq!(read.await.unwrap(), Some(18));
    let list = tokio::spawn(states.workflow("w").slot::<Vec<u64>>("list").append(3));
    assert_eq!(list.await.unwrap().unwrap().value, 1);
}

#[tokio::test]
async fn requests_for_locks_are_kept_joined_and_spawned() {
    let (_, engine) = engine().await;
    let kept = engine.mutex("m").acquire();
    let held = kept.await.unwrap();
    let late = engine.mutex("m").acquire_within(SOON);
    assert!(late.await.unwrap().is_none());
    let waiting = tokio::spawn(engine.mutex("m").acquire());
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    let permits = join_all((0..3).map(|_| engine.semaphore("s", 2).acquire_within(SOON))).await;
    let granted = permits.into_iter().filter_map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(granted.len(), 2);
    let readers = join_all((0..3).map(|_| engine.rw_lock("rw").read())).await;
    let writer = tokio::spawn(engine.rw_lock("rw").write_within(SOON));
    assert!(writer.await.unwrap().unwrap().is_none());
    drop(readers);
    let session = engine.locks().session().await.unwrap();
    let mine = tokio::spawn(engine.mutex("mine").by(&session).request("r").try_acquire()).await.unwrap();
    let shown = engine.locks().inspect("mine");
    assert_eq!(shown.await.unwrap().used, 1);
    mine.unwrap().unwrap().release().await.unwrap();
    let limited = join_all((0..3).map(|_| engine.rate_limit("vendor", 2, Duration::from_secs(60)).try_acquire())).await;
    assert_eq!(limited.into_iter().filter(|taken| *taken.as_ref().unwrap()).count(), 2);
    let slot = engine.states().global().slot::<LockRecord>("slot");
    let now = engine.store().env().now();
    let attempts = join_all(["a", "b"].map(|holder| DurableMutex::default().try_acquire(&slot, holder, now, None)));
    assert_eq!(attempts.await.into_iter().filter(|attempt| attempt.as_ref().unwrap().acquired).count(), 1);
}

#[tokio::test]
async fn operations_on_entities_are_kept_joined_and_spawned() {
    let (_, engine) = engine().await;
    let entities = || engine.entities().clone();
    let added = join_all((0..5).map(|n| entities().add(Add::new("t").id(format!("e{n}")).data(json!(n))))).await;
    assert!(added.iter().all(Result::is_ok));
    let spawned = tokio::spawn(entities().update(Update::new("e0").data(json!(7))));
    assert_eq!(spawned.await.unwrap().unwrap(), latchwork::store::Rev(2));
    let changed = tokio::spawn(entities().update_with("e0", 3, |draft| draft.data = json!(8)));
    changed.await.unwrap().unwrap();
    let found = tokio::spawn(entities().find(Query::of("t").limit(3)));
    assert_eq!(found.await.unwrap().unwrap().items.len(), 3);
    let read = entities().get("e0");
    assert_eq!(read.await.unwrap().unwrap().data, json!(8));
}

// Within a workflow the operations of one branch are awaited one after the other; a branch each may run at once.
#[tokio::test]
async fn a_workflow_keeps_futures_of_locks_and_joins_them_in_branches() {
    let both = workflow("both").run(async |ctx: Ctx, ()| {
        let first = ctx.mutex("a").acquire();
        let guard = first.await?;
        let limit = ctx.rate_limit("vendor", 1, Duration::from_secs(1)).acquire();
        limit.await?;
        let late = ctx.mutex("a").reentrant().try_acquire();
        let again = late.await?.is_some();
        guard.release().await?;
        let readers = [0, 1].map(|_| {
            let lock = ctx.rw_lock("rw");
            async move |ctx: Ctx| {
                let reader = lock.read().await?;
                ctx.sleep(Duration::from_secs(1)).await?;
                reader.release().await
            }
        });
        let [one, two] = readers;
        let (one, two) = ctx.join((one, two)).await;
        Ok((again, one?, two?))
    });
    let test = TestEngine::new(&both, 1).await.unwrap();
    assert_eq!(test.complete(&both, ()).await.unwrap(), (true, true, true));
}
