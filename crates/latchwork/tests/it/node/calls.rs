//! Everything can be called on every node, for every execution.

use super::*;
use latchwork::workflow::{Schedule, WorkflowError};

async fn two(waits: &Workflow<u64, u64>) -> (Store, Engine, Engine) {
    let store = Store::memory().await.unwrap();
    let a = named(&store, "a").register(waits).start().await.unwrap();
    let b = named(&store, "b").register(waits).start().await.unwrap();
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    (store, a, b)
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_and_results_cross_nodes() {
    let waits = waits();
    let (_store, a, b) = two(&waits).await;
    for number in 0..40_u64 {
        let id = format!("e{number}");
        let handle = a.start(&waits, number).id(id.clone()).await.unwrap();
        let elsewhere = tokio::spawn(b.handle(&waits, id.clone()).result());
        b.signal(id.clone(), "go", &1_u64).await.unwrap();
        assert_eq!(in_time(handle.result()).await.unwrap(), number + 1);
        assert_eq!(in_time(elsewhere).await.unwrap().unwrap(), number + 1);
        assert!(matches!(a.start(&waits, number).id(id).await, Err(WorkflowError::AlreadyStarted { .. })));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn updates_cancellations_and_children_cross_nodes() {
    let add = workflow("waits").run(async |ctx: Ctx, base: u64| {
        let asked = ctx.receive_update::<u64, u64>("add").await?;
        let sum = base + asked.value;
        asked.answer(&sum).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(base)
    });
    let (_store, a, b) = two(&add).await;
    for number in 0..20_u64 {
        let id = format!("e{number}");
        let here = a.start(&add, number).id(id.clone()).await.unwrap();
        let there = b.handle(&add, id.clone());
        assert_eq!(in_time(there.update::<u64>("add", &5_u64).into_future()).await.unwrap(), number + 5);
        in_time(async {
            there.cancel("enough").await.unwrap();
        })
        .await;
        assert!(matches!(in_time(here.result()).await, Err(WorkflowError::Cancelled { .. })));
        assert!(matches!(in_time(there.result()).await, Err(WorkflowError::Cancelled { .. })));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_are_handed_over_between_nodes_and_never_held_twice() {
    let waits = waits();
    let (_store, a, b) = two(&waits).await;
    let inside = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let enter = |engine: &Engine| {
        let (lock, inside) = (engine.mutex("printer"), inside.clone());
        tokio::spawn(async move {
            for _ in 0..30 {
                let guard = lock.clone().acquire().await.unwrap();
                assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                guard.release().await.unwrap();
            }
        })
    };
    let tasks: Vec<_> = [&a, &b, &a, &b].into_iter().map(enter).collect();
    for task in tasks {
        in_time(task).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn timers_limits_and_schedules_fire_wherever_their_shard_is() {
    let naps = workflow("waits").concurrency(2).when_full(latchwork::workflow::Queue::new()).run(
        async |ctx: Ctx, base: u64| {
            ctx.sleep(Duration::from_millis(20)).await?;
            Ok(base)
        },
    );
    let (store, a, b) = two(&naps).await;
    let mut handles = Vec::new();
    for number in 0..20_u64 {
        let starter = if number % 2 == 0 { &a } else { &b };
        handles.push(starter.start(&naps, number).id(format!("n{number}")).await.unwrap());
    }
    for (number, handle) in handles.iter().enumerate() {
        assert_eq!(in_time(handle.result()).await.unwrap(), number as u64);
    }
    // Each schedule is made on one node, and most likely kept by the other one.
    for number in 0..6_u64 {
        let starter = if number % 2 == 0 { &a } else { &b };
        let every = Schedule::every(format!("s{number}"), Duration::from_secs(3600)).workflow(&naps, number);
        starter.schedules().put(every).await.unwrap();
        starter.schedules().trigger(&format!("s{number}")).await.unwrap();
    }
    in_time(async {
        loop {
            let mut started = 0;
            for number in 0..6 {
                let past = a.schedules().runs(format!("s{number}")).await.unwrap();
                started += past.items.len();
            }
            if started == 6 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    drop(store);
}

/// A node without the workflow starts and updates what another node runs; rules that it does not know are not broken.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_starts_by_name_what_only_another_node_runs() {
    let store = Store::memory().await.unwrap();
    let add = workflow("add").version(3).timeout(Duration::from_secs(600)).run(async |ctx: Ctx, base: u64| {
        let asked = ctx.receive_update::<u64, u64>("add").await?;
        let sum = base + asked.value;
        asked.answer(&sum).await?;
        Ok(sum)
    });
    let limited = workflow("limited").concurrency(1).run(async |_: Ctx, base: u64| Ok(base));
    let caller = named(&store, "caller").start().await.unwrap();
    let error = caller.start_by_name("add", 1_u64).await.unwrap_err();
    assert!(matches!(error, WorkflowError::NotRegistered { .. }), "{error}");
    let _runner = named(&store, "runner").register(&add).register(&limited).start().await.unwrap();
    let started = in_time(async {
        loop {
            match caller.start_by_name("add", 1_u64).id("a").or_join().await {
                Ok(started) => break started,
                Err(WorkflowError::NotRegistered { .. }) => tokio::time::sleep(Duration::from_millis(10)).await,
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await;
    let handle = caller.handle(&add, started.id().clone());
    assert_eq!(in_time(handle.update::<u64>("add", &5_u64).into_future()).await.unwrap(), 6);
    assert_eq!(in_time(handle.result()).await.unwrap(), 6);
    let described = caller.describe("a").await.unwrap();
    assert!(described.deadline.is_some(), "the time limit of the definition holds: {described:?}");
    let error = caller.start_by_name("limited", 1_u64).await.unwrap_err();
    assert!(matches!(error, WorkflowError::RulesElsewhere { .. }), "{error}");
}
