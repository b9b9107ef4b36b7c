//! Starts that are gathered: debounce and batches.

use std::collections::BTreeSet;
use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::{Side, TestEngine};
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, Failure, Handle, Queue, Workflow, WorkflowBuilder, WorkflowError, workflow,
};

use crate::lock::turnstile::Stage;

fn index(debounce: Debounce) -> Workflow<(String, u32), (u32, u64)> {
    index_in(workflow("index"), debounce)
}

fn index_in(builder: WorkflowBuilder, debounce: Debounce) -> Workflow<(String, u32), (u32, u64)> {
    let gathered = builder.debounce(debounce.by(|input: &(String, u32)| input.0.clone()));
    gathered.run(async |ctx: Ctx, (_, n): (String, u32)| Ok((n, ctx.now().await.0)))
}

/// The last input counts, and every caller gets the handle of the one execution.
#[tokio::test]
async fn a_newer_start_replaces_the_waiting_one() {
    let index = index(Debounce::new(Duration::from_secs(10)));
    let test = TestEngine::new(&index, 1).await.unwrap();
    let mut handles = Vec::new();
    for n in 1..=5 {
        handles.push(test.engine().start(&index, ("a".into(), n)).await.unwrap());
        test.run(test.env().sleep(Duration::from_secs(4))).await;
    }
    let other = test.engine().start(&index, ("b".into(), 9)).await.unwrap();
    let last = test.env().now().0 - 4_000_000;
    for handle in &handles {
        assert_eq!(handle.id(), handles[0].id());
        let (n, began) = test.run(handle.result()).await.unwrap();
        assert_eq!(n, 5);
        assert!((10_000_000..10_500_000).contains(&(began - last)), "{}", began - last);
    }
    assert_ne!(other.id(), handles[0].id());
    assert_eq!(test.run(other.result()).await.unwrap().0, 9);
    let next = test.engine().start(&index, ("a".into(), 6)).await.unwrap();
    assert_ne!(next.id(), handles[0].id());
    assert_eq!(test.run(next.result()).await.unwrap().0, 6);
}

#[tokio::test]
async fn a_debounce_has_a_longest_wait() {
    let index = index(Debounce::new(Duration::from_secs(10)).max_wait(Duration::from_secs(25)));
    let test = TestEngine::new(&index, 1).await.unwrap();
    let mut ids = Vec::new();
    for n in 0..10 {
        ids.push(test.engine().start(&index, ("a".into(), n)).await.unwrap().id().clone());
        test.run(test.env().sleep(Duration::from_secs(6))).await;
    }
    // Starts came at 0, 6, 12, 18 and 24 seconds, and the execution began at 25.
    assert_eq!(ids.iter().filter(|id| **id == ids[0]).count(), 5, "{ids:?}");
    let (n, _) = test.run(test.engine().handle(&index, &ids[0]).result()).await.unwrap();
    assert_eq!(n, 4);
}

/// Many callers on one key, on real time and threads. Every caller has the handle of an execution, and the input of
/// each execution is that of its last start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_debounce_one_key() {
    let index = index(Debounce::new(Duration::from_millis(5)).max_wait(Duration::from_millis(20)));
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&index).start().await.unwrap();
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..16 {
        let (engine, index) = (engine.clone(), index.clone());
        callers.spawn(async move {
            let mut given = Vec::new();
            for n in 0..50 {
                let n = caller * 50 + n;
                let handle = engine.start(&index, ("k".into(), n)).await.unwrap();
                given.push((handle.id().clone(), n));
            }
            given
        });
    }
    let given: Vec<_> = callers.join_all().await.into_iter().flatten().collect();
    let runs: BTreeSet<_> = given.iter().map(|(id, _)| id.clone()).collect();
    for id in runs {
        let (n, _) = engine.handle(&index, &id).result().await.unwrap();
        assert!(given.contains(&(id, n)), "the input of a run is one of its starts");
    }
}

fn double(builder: WorkflowBuilder, batch: Batch) -> Workflow<u64, u64> {
    builder.batch(batch).run(async |ctx: Ctx, numbers: Vec<u64>| {
        if numbers.contains(&13) {
            return Err(Failure::new("unlucky"));
        }
        let length = numbers.len() as u64;
        ctx.run("double", async || Ok(numbers.iter().map(|n| n * 1000 + length).collect())).await
    })
}

/// A batch begins by size or by time; each caller gets its own result.
#[tokio::test]
async fn a_batch_begins_when_it_is_full_or_its_time_has_come() {
    let double = double(workflow("double"), Batch::new(3, Duration::from_secs(60)));
    let test = TestEngine::new(&double, 1).await.unwrap();
    let mut handles = Vec::new();
    for n in 1..=5 {
        handles.push(test.engine().start(&double, n).await.unwrap());
    }
    let began = test.env().now();
    let items: Vec<_> = handles.iter().map(|handle| handle.item().unwrap()).collect();
    assert_eq!(items, [0, 1, 2, 0, 1]);
    let mut results = Vec::new();
    for handle in &handles[..3] {
        results.push(test.run(handle.result()).await.unwrap());
    }
    assert_eq!(results, [1003, 2003, 3003]);
    assert!(test.env().now().0 - began.0 < 10_000_000, "a full batch waits for nothing");
    let results = [test.run(handles[3].result()).await.unwrap(), test.run(handles[4].result()).await.unwrap()];
    assert_eq!(results, [4002, 5002]);
    assert!(test.env().now().0 - began.0 >= 60_000_000);
    // A handle by id alone returns the results of all callers.
    let all = test.engine().handle_by_id(handles[3].id()).result().await.unwrap();
    assert_eq!(all, serde_json::json!([4002, 5002]));
    assert_eq!(test.engine().handle(&double, handles[3].id()).of_item(1).result().await.unwrap(), 5002);
}

#[tokio::test]
async fn all_callers_of_a_batch_get_its_failure() {
    let double = double(workflow("double"), Batch::new(2, Duration::from_secs(1)));
    let test = TestEngine::new(&double, 1).await.unwrap();
    let handles = [test.engine().start(&double, 1).await.unwrap(), test.engine().start(&double, 13).await.unwrap()];
    for handle in handles {
        let failed = test.run(handle.result()).await;
        assert!(matches!(failed, Err(WorkflowError::Failed { .. })), "{failed:?}");
    }
    let uneven = workflow("uneven").batch(Batch::new(1, Duration::from_secs(1)));
    let uneven = uneven.run(async |_: Ctx, _: Vec<u64>| Ok(vec![1, 2, 3]));
    let test = TestEngine::new(&uneven, 1).await.unwrap();
    let handle = test.engine().start(&uneven, 1).await.unwrap();
    let failed = test.run(handle.result()).await.unwrap_err().to_string();
    assert!(failed.contains("a batch of 1 inputs returned 3 outputs"), "{failed}");
}

/// A child is a batch of one, and so is a fork of it.
#[tokio::test]
async fn a_child_is_a_batch_of_its_own() {
    let double = double(workflow("double"), Batch::new(10, Duration::from_secs(1)));
    let child = double.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, n: u64| {
        let double = child.clone();
        async move { ctx.child(&double, n).id("child").await }
    });
    let test = TestEngine::build(1).register(&double).register(&parent).start().await.unwrap();
    assert_eq!(test.complete(&parent, 7).await.unwrap(), 7001);
    let fork = test.engine().fork("child").await.unwrap();
    let forked = test.run(test.engine().handle(&double, &fork).of_item(0).result()).await.unwrap();
    assert_eq!(forked, 7001);
}

/// No input is lost, and none is used twice: every caller gets its own result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_callers_fill_batches() {
    let double = double(workflow("double"), Batch::new(16, Duration::from_millis(20)));
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&double).start().await.unwrap();
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..32 {
        let (engine, double) = (engine.clone(), double.clone());
        callers.spawn(async move {
            let mut places = Vec::new();
            for n in 0..20 {
                let n = 1000 + caller * 100 + n;
                let handle = engine.start(&double, n).await.unwrap();
                assert_eq!(handle.result().await.unwrap() / 1000, n);
                places.push((handle.id().clone(), handle.item().unwrap()));
            }
            places
        });
    }
    let places: Vec<_> = callers.join_all().await.into_iter().flatten().collect();
    assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), 32 * 20, "each start has its own item");
}

/// A batch may wait in the queue of a limit, too.
#[tokio::test]
async fn batches_are_limited_as_other_executions_are() {
    let limited = workflow("double").concurrency(1).when_full(Queue::new());
    let slow = limited.batch(Batch::new(2, Duration::from_secs(5))).run(async |ctx: Ctx, numbers: Vec<u64>| {
        let began = ctx.now().await.0 / 1_000_000;
        ctx.sleep(Duration::from_secs(100)).await?;
        Ok(numbers.iter().map(|n| (*n, began)).collect())
    });
    let test = TestEngine::new(&slow, 1).await.unwrap();
    let mut handles = Vec::new();
    for n in 1..=5u64 {
        handles.push(test.engine().start(&slow, n).await.unwrap());
    }
    let mut results = Vec::new();
    for handle in handles {
        results.push(test.run(handle.result()).await.unwrap());
    }
    let numbers: Vec<u64> = results.iter().map(|(n, _)| *n).collect();
    assert_eq!(numbers, [1, 2, 3, 4, 5]);
    let (first, second, third) = (results[0].1, results[2].1, results[4].1);
    assert!(second >= first + 100 && third >= second + 100, "{results:?}");
}

/// A start that is sent again under its key is used once: while its batch gathers, in the same commit, and after the
/// batch has ended; in this process and in the next. The key is removed together with the execution.
#[tokio::test]
async fn a_gathered_start_that_is_sent_again_under_its_key_is_used_once() {
    let double = double(workflow("double").keep(Duration::from_secs(600)), Batch::new(3, Duration::from_secs(60)));
    let test = TestEngine::new(&double, 1).await.unwrap();
    let engine = test.engine();
    let start = |n: u64| engine.start(&double, n).idempotency_key(format!("k{n}"));
    let (one, again, two) = tokio::join!(start(1), start(1), start(2));
    let place = |handle: &Handle<u64>| (handle.id().clone(), handle.item());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(place(&one), place(&again.unwrap()));
    assert_ne!(place(&one), place(&two));
    assert_eq!(place(&start(2).await.unwrap()), place(&two));
    let other = engine.start(&double, 7).idempotency_key("k1").await;
    assert!(matches!(other, Err(WorkflowError::KeyReused { .. })), "{other:?}");
    let three = start(3).await.unwrap();
    let results = async |handles: [&Handle<u64>; 3]| {
        let mut results = Vec::new();
        for handle in handles {
            results.push(test.run(handle.result()).await.unwrap());
        }
        results
    };
    assert_eq!(results([&one, &two, &three]).await, [1003, 2003, 3003]);
    let known = start(2).await.unwrap();
    assert_eq!((place(&known), test.run(known.result()).await.unwrap()), (place(&two), 2003));
    engine.stop();
    let next = Engine::on(engine.store()).register(&double).start().await.unwrap();
    let known = next.start(&double, 3).idempotency_key("k3").await.unwrap();
    assert_eq!(place(&known), place(&three));
    test.run(test.env().sleep(Duration::from_secs(1200))).await;
    let anew = next.start(&double, 3).idempotency_key("k3").await.unwrap();
    assert_ne!(anew.id(), three.id());
}

#[tokio::test]
async fn a_debounced_start_that_is_sent_again_under_its_key_replaces_nothing() {
    let index = index(Debounce::new(Duration::from_secs(10)));
    let test = TestEngine::new(&index, 1).await.unwrap();
    let start = |n: u32| test.engine().start(&index, ("a".into(), n)).idempotency_key(format!("k{n}"));
    let first = start(1).await.unwrap();
    start(2).await.unwrap();
    assert_eq!(start(1).await.unwrap().id(), first.id());
    assert_eq!(test.run(first.result()).await.unwrap().0, 2);
    assert_eq!(test.run(start(1).await.unwrap().result()).await.unwrap().0, 2);
}

/// Starts beyond a full batch go to the next batch, and a repeated start finds the batch that it was part of.
#[tokio::test]
async fn keyed_starts_of_several_batches_are_found_where_they_were() {
    let double = double(workflow("double"), Batch::new(2, Duration::from_secs(60)));
    let test = TestEngine::new(&double, 1).await.unwrap();
    let start = async |n: u64| {
        let handle = test.engine().start(&double, n).idempotency_key(format!("k{n}")).await.unwrap();
        (handle.id().clone(), handle.item())
    };
    // Each start is sent twice while the commits are on their way, and once more afterwards.
    let all = tokio::join!(start(1), start(2), start(2), start(1), start(3), start(3), start(4), start(5), start(6));
    let (one, two, two_again, one_again, three, three_again, four, five, six) = all;
    assert_eq!((&one, &two, &three), (&one_again, &two_again, &three_again));
    let places = [&one, &two, &three, &four, &five, &six];
    let distinct: BTreeSet<_> = places.iter().map(|place| format!("{place:?}")).collect();
    assert_eq!(distinct.len(), 6, "{places:?}");
    for (n, place) in (1..).zip(places) {
        assert_eq!(&start(n).await, place);
        let handle = test.engine().handle(&double, place.0.clone()).of_item(place.1.unwrap());
        assert_eq!(test.run(handle.result()).await.unwrap() / 1000, n);
    }
}

/// A key is used only by a start that is accepted. It stays with the execution, however that ends.
#[tokio::test]
async fn a_key_stays_with_the_execution_that_its_start_was_gathered_into() {
    let index = index_in(workflow("index").concurrency(1), Debounce::new(Duration::from_secs(10)));
    let test = TestEngine::new(&index, 1).await.unwrap();
    let engine = test.engine();
    let start = |key: &str, n: u32| engine.start(&index, (key.into(), n)).idempotency_key(format!("{key}{n}"));
    let first = start("a", 1).await.unwrap();
    // The limit rejects the start: its key stays free for another input.
    let rejected = start("b", 1).await;
    assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
    engine.cancel(first.id(), "not needed").await.unwrap();
    let again = start("a", 1).await.unwrap();
    assert_eq!(again.id(), first.id());
    let told = test.run(again.result()).await;
    assert!(matches!(told, Err(WorkflowError::Cancelled { .. })), "{told:?}");
    let second = engine.start(&index, ("b".into(), 2)).idempotency_key("b1").await.unwrap();
    assert_ne!(second.id(), first.id());
    let reused = start("b", 1).await;
    assert!(matches!(reused, Err(WorkflowError::KeyReused { .. })), "{reused:?}");
    assert_eq!(test.run(second.result()).await.unwrap().0, 2);
}

/// Two starts under one idempotency key are gathered into different executions: the start that lands first has the key.
#[tokio::test]
async fn starts_under_one_key_that_are_gathered_apart_do_not_both_land() {
    let index = index(Debounce::new(Duration::from_secs(10)));
    let stage = Stage::new(|builder| builder.register(&index)).await;
    let start = |key: &str| {
        let start = stage.engine.start(&index, (key.to_string(), 1)).idempotency_key("k");
        async move { start.await.map(|handle| handle.id().clone()) }
    };
    stage.hold_to("workflow.gates", Side::Before).await;
    let first = stage.begins(start("a")).await;
    let second = start("b").await.unwrap();
    stage.open();
    stage.turns().await;
    match stage.done(first).await {
        Err(WorkflowError::KeyReused { id, .. }) => assert_eq!(id, second),
        other => panic!("{other:?}"),
    }
}
