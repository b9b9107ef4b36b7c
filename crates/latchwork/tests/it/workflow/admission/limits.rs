//! Limits that reject: the start takes a permit, and the end returns it, whatever the end is.

use std::time::Duration;

use latchwork::store::{Key, Order, Store};
use latchwork::testing::{Side, TestEngine};
use latchwork::workflow::{Ctx, Engine, ExecutionState, Failure, WorkflowError, workflow};

use super::{engine_of, held, import, settle, used};
use crate::lock::turnstile::Stage;

/// The basic case: starts beyond the limit are rejected.
#[tokio::test]
async fn a_start_beyond_the_limit_is_rejected_with_the_limit() {
    let import = held(import().concurrency_by(2, |customer: &String| customer.clone()));
    let test = engine_of(&import).await;
    let engine = test.engine();
    let start = |customer: &str| engine.start(&import, customer.to_string());
    let (a, _b, _other) = (start("c1").id("a").await.unwrap(), start("c1").await.unwrap(), start("c2").await.unwrap());
    match start("c1").await {
        Err(WorkflowError::LimitReached { workflow, key, limit }) => {
            assert_eq!((&*workflow, &*key, limit), ("import", "c1", 2));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((used(engine, Some("c1")).await, used(engine, Some("c2")).await), ((2, 0), (1, 0)));
    engine.signal("a", "end", &()).await.unwrap();
    test.run(a.result()).await.unwrap();
    start("c1").await.unwrap();
    assert!(start("c1").await.is_err());
}

#[tokio::test]
async fn without_a_key_the_limit_is_the_workflows() {
    let import = held(import().concurrency(1));
    let test = engine_of(&import).await;
    test.engine().start(&import, "x".into()).await.unwrap();
    match test.engine().start(&import, "y".into()).await {
        Err(error @ WorkflowError::LimitReached { .. }) => {
            assert!(error.to_string().contains("\"import\" runs 1 of 1 times for \"import\""), "{error}");
        }
        other => panic!("{other:?}"),
    }
    // A repeated start, or a start that joins, needs no permit.
    let again = test.engine().start(&import, "z".into()).id("z").or_join().await;
    assert!(again.is_err());
}

#[tokio::test]
async fn a_start_under_a_known_idempotency_key_needs_no_permit() {
    let import = held(import().concurrency(1));
    let test = engine_of(&import).await;
    let first = test.engine().start(&import, "x".into()).idempotency_key("k").await.unwrap();
    let second = test.engine().start(&import, "x".into()).idempotency_key("k").await.unwrap();
    assert_eq!(first.id(), second.id());
    assert_eq!(used(test.engine(), None).await, (1, 0));
}

/// Both limits count, and a start that one of them rejects takes no permit of the other.
#[tokio::test]
async fn a_limit_for_each_key_and_one_in_total() {
    let import = held(import().concurrency(3).concurrency_by(2, |customer: &String| customer.clone()));
    let test = engine_of(&import).await;
    let engine = test.engine();
    for customer in ["a", "a", "b"] {
        engine.start(&import, customer.into()).await.unwrap();
    }
    let rejected = |result| match result {
        Err(WorkflowError::LimitReached { key, limit, .. }) => (key, limit),
        other => panic!("{other:?}"),
    };
    assert_eq!(rejected(engine.start(&import, "a".into()).await), ("a".into(), 2));
    assert_eq!(rejected(engine.start(&import, "b".into()).await), ("import".into(), 3));
    assert_eq!((used(engine, None).await, used(engine, Some("b")).await), ((3, 0), (1, 0)));
}

/// Every end returns the permit in its own commit; nothing else does.
#[tokio::test]
async fn a_permit_is_held_until_the_end_whatever_the_end() {
    let ends =
        workflow("import").concurrency(1).timeout(Duration::from_secs(100)).run(async |ctx: Ctx, how: String| {
            match &*how {
                "completes" => Ok(0),
                "fails" => Err(Failure::new("no")),
                "panics" => panic!("it panics"),
                "continues" => ctx.continue_as_new(&"waits".to_string()).await,
                _ => {
                    ctx.receive::<u32>("end").await?;
                    Ok(1)
                }
            }
        });
    let test = TestEngine::new(&ends, 1).await.unwrap();
    let engine = test.engine();
    for how in ["completes", "fails"] {
        let handle = engine.start(&ends, how.into()).await.unwrap();
        let _ = test.run(handle.result()).await;
        assert_eq!(used(engine, None).await, (0, 0), "{how}");
    }
    // Parked, and terminated.
    let handle = engine.start(&ends, "panics".into()).id("p").await.unwrap();
    settle().await;
    assert_eq!(engine.parked().await.unwrap().len(), 1);
    assert_eq!(used(engine, None).await, (1, 0));
    assert!(engine.start(&ends, "completes".into()).await.is_err());
    engine.terminate("p", "enough").await.unwrap();
    assert!(handle.result().await.is_err());
    assert_eq!(used(engine, None).await, (0, 0));
    // Continued as new, and cancelled.
    let handle = engine.start(&ends, "continues".into()).id("c").await.unwrap();
    settle().await;
    assert_eq!(used(engine, None).await, (1, 0));
    handle.cancel("stop").await.unwrap();
    assert!(matches!(test.run(handle.result()).await, Err(WorkflowError::Cancelled { .. })));
    assert_eq!(used(engine, None).await, (0, 0));
    // Timed out.
    let handle = engine.start(&ends, "waits".into()).await.unwrap();
    assert!(matches!(test.run(handle.result()).await, Err(WorkflowError::TimedOut { .. })));
    assert_eq!(used(engine, None).await, (0, 0));
}

/// After a crash, the next process finds the permit still held, and does not compute the key again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_survives_its_process() {
    let directory = tempfile::tempdir().unwrap();
    let first = held(import().concurrency_by(1, |_: &String| "k"));
    let engine = Engine::open(directory.path()).register(&first).start().await.unwrap();
    engine.start(&first, "x".into()).id("x").await.unwrap();
    engine.shutdown().await.unwrap();
    drop(engine);
    let second = held(import().concurrency_by(1, |input: &String| if input == "x" { panic!("again") } else { "k" }));
    let engine = Engine::open(directory.path()).register(&second).start().await.unwrap();
    assert!(matches!(engine.start(&second, "y".into()).await, Err(WorkflowError::LimitReached { .. })));
    engine.signal("x", "end", &()).await.unwrap();
    engine.handle(&second, "x").result().await.unwrap();
    engine.start(&second, "y".into()).await.unwrap();
    engine.shutdown().await.unwrap();
}

/// A lowered maximum takes no permit away. It admits no execution until the running ones fit.
#[tokio::test]
async fn a_lowered_limit_waits_until_the_running_executions_fit() {
    let store = Store::memory().await.unwrap();
    let many = held(import().concurrency(3));
    let engine = Engine::on(&store).register(&many).start().await.unwrap();
    for id in ["a", "b", "c"] {
        engine.start(&many, id.into()).id(id).await.unwrap();
    }
    drop(engine);
    let few = held(import().concurrency(1));
    let engine = Engine::on(&store).register(&few).start().await.unwrap();
    for (id, left) in [("a", 2), ("b", 1), ("c", 0)] {
        assert!(engine.start(&few, "d".into()).await.is_err());
        engine.signal(id, "end", &()).await.unwrap();
        engine.handle(&few, id).result().await.unwrap();
        assert_eq!(used(&engine, None).await.0, left);
    }
    engine.start(&few, "d".into()).await.unwrap();
    assert!(engine.start(&few, "e".into()).await.is_err());
}

/// The limit is checked by the commit that starts a child, and by the commit of a fork.
#[tokio::test]
async fn children_and_forks_need_permits_too() {
    let import = held(import().concurrency(1));
    let child = import.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, (): ()| {
        let import = child.clone();
        async move {
            let first = ctx.child(&import, "first".to_string()).id("first").start().await?;
            let second = ctx.child(&import, "second".to_string()).start().await;
            let code = second.err().map(|failure| (failure.code().to_string(), failure.message().to_string()));
            ctx.signal(first.id(), "end", &()).await?;
            first.result().await?;
            let third = ctx.child(&import, "third".to_string()).id("third").start().await?;
            ctx.signal(third.id(), "end", &()).await?;
            Ok((code, third.result().await?))
        }
    });
    let test = TestEngine::build(1).register(&import).register(&parent).start().await.unwrap();
    let handle = test.engine().start(&parent, ()).await.unwrap();
    let (code, third) = test.run(handle.result()).await.unwrap();
    let (code, message) = code.unwrap();
    assert_eq!((&*code, &*third), ("latchwork.limit_reached", "third"));
    assert!(message.contains("the limit is reached"), "{message}");
    assert_eq!(used(test.engine(), None).await, (0, 0));
    let fork = test.engine().fork("first").id("f1").await.unwrap();
    let rejected = test.engine().fork("first").await;
    assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
    assert_eq!(used(test.engine(), None).await, (1, 0));
    test.engine().terminate(&fork, "enough").await.unwrap();
    assert_eq!(used(test.engine(), None).await, (0, 0));
}

/// A key that is not in use leaves no record behind.
#[tokio::test]
async fn keys_that_are_not_in_use_are_cleared_away() {
    let import = workflow("import").concurrency_by(1, |n: &u32| n.to_string()).run(async |_: Ctx, n: u32| Ok(n));
    let test = TestEngine::new(&import, 1).await.unwrap();
    let store = test.engine().store().clone();
    let stored = async || {
        let view = store.view().await.unwrap();
        let mut found = 0;
        for space in store.spaces().await.unwrap() {
            if ["workflow.gates", "workflow.admission"].contains(&space.name()) {
                found += view.scan(&space.all(), Order::Ascending, 10_000).await.unwrap().len();
            }
        }
        found
    };
    for n in 0..200 {
        let handle = test.engine().start(&import, n).await.unwrap();
        test.run(handle.result()).await.unwrap();
    }
    assert!(stored().await >= 200, "they stay for a while");
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    assert_eq!(stored().await, 0);
    assert_eq!(test.complete(&import, 7).await.unwrap(), 7);
}

/// Only unused limits are deleted: a held permit stays, though others of the same limit were returned.
#[tokio::test]
async fn a_limit_that_is_in_use_is_not_cleared_away() {
    let import = held(import().concurrency(2));
    let test = engine_of(&import).await;
    let engine = test.engine();
    for round in 0..3 {
        engine.start(&import, "x".into()).id(format!("{round}")).await.unwrap();
        let other = engine.start(&import, "y".into()).await;
        if round > 0 {
            assert!(matches!(other, Err(WorkflowError::LimitReached { .. })), "{other:?}");
            engine.signal(format!("{}", round - 1), "end", &()).await.unwrap();
            test.run(engine.handle(&import, format!("{}", round - 1)).result()).await.unwrap();
        } else {
            other.unwrap().terminate("enough").await.unwrap();
        }
        test.run(test.env().sleep(Duration::from_secs(60))).await;
        assert_eq!(used(engine, None).await, (1, 0), "in round {round}");
    }
}

/// The records of an execution, by its id, in the spaces of journals and of executions.
async fn records_of(store: &Store, id: &str) -> usize {
    let view = store.view().await.unwrap();
    let mut found = 0;
    for space in store.spaces().await.unwrap() {
        if ["workflow.journal", "workflow.executions", "workflow.running"].contains(&space.name()) {
            let all = view.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
            let is_its = |key: &Key| key.bytes().windows(id.len()).any(|bytes| bytes == id.as_bytes());
            found += all.iter().filter(|(key, _)| is_its(key)).count();
        }
    }
    found
}

/// A fork that takes several commits is rejected before the first of them, or removed again: no record of it is left.
#[tokio::test]
async fn a_large_fork_that_is_rejected_leaves_nothing() {
    let import = import().concurrency(1).run(async |ctx: Ctx, input: String| {
        for n in 0..2500_u32 {
            ctx.publish("n", &n).await?;
        }
        ctx.run("last", async || Ok(())).await?;
        if input != "ends" { ctx.receive::<()>("end").await } else { Ok(()) }
    });
    let stage = Stage::new(|builder| builder.register(&import)).await;
    let engine = stage.engine.clone();
    engine.start(&import, "ends".into()).id("source").await.unwrap().result().await.unwrap();
    let fork = |id: &str| engine.fork("source").at_step("last").id(id);
    // The other start comes before the fork, or while a part of the fork is stored.
    let other = engine.start(&import, "waits".into()).id("before").await.unwrap();
    let rejected = fork("rejected").await;
    assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
    assert_eq!(records_of(engine.store(), "rejected").await, 0);
    other.terminate("enough").await.unwrap();
    stage.turns().await;
    stage.hold_to("workflow.journal", Side::Before).await;
    let forks = stage.begins(fork("discarded").into_future()).await;
    assert!(matches!(engine.describe("discarded").await.unwrap().state, ExecutionState::Parked(_)));
    let other = engine.start(&import, "waits".into()).id("meanwhile").await.unwrap();
    stage.open();
    for _ in 0..20 {
        stage.turns().await;
    }
    let rejected = stage.done(forks).await;
    assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
    assert_eq!(records_of(engine.store(), "discarded").await, 0);
    assert_eq!((engine.parked().await.unwrap(), used(&engine, None).await), (vec![], (1, 0)));
    other.terminate("enough").await.unwrap();
    let accepted = fork("accepted").await.unwrap();
    engine.handle(&import, accepted).result().await.unwrap();
    assert_eq!(used(&engine, None).await, (0, 0));
}
