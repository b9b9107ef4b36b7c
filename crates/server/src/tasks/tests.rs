//! Tasks on a store in memory, on virtual time: leases, tokens, guards, removal, and calls that are cut off.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use latchwork::json;
use latchwork::store::{Check, Commit, Env, Limits, Right, SpaceSpec, Store, VirtualClock};
use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::sync::mpsc::UnboundedSender;

use super::keeper::KEPT;
use super::*;
use crate::calls::{Call, Calls, StoredAnswer};

const LEASE: Duration = Duration::from_secs(30);

async fn tasks() -> (Tasks, Store, Arc<VirtualClock>) {
    let (env, clock) = Env::seeded(7);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    (Tasks::on(&store), store, clock)
}

fn new(id: &str) -> NewTask {
    NewTask::new(id, "k", json!({"n": 1}))
}

fn take(most: usize) -> Take {
    Take { kinds: vec!["k".into()], most, lease: Lease { worker: "w".into(), length: LEASE } }
}

async fn taken(tasks: &Tasks, most: usize) -> Vec<Task> {
    tasks.take(&take(most), &TaskCall::default()).await.unwrap()
}

#[tokio::test]
async fn a_task_is_put_once() {
    let (tasks, ..) = tasks().await;
    assert!(matches!(tasks.put(new("a"), &TaskCall::default()).await.unwrap(), Put::New(_)));
    assert!(matches!(tasks.put(new("a"), &TaskCall::default()).await.unwrap(), Put::Known(_)));
    let other = NewTask::new("a", "k", json!(2));
    assert!(matches!(tasks.put(other, &TaskCall::default()).await.unwrap_err(), TaskError::Exists { .. }));
    let task = taken(&tasks, 9).await.remove(0);
    tasks.complete("a", task.token, &json!(7), &TaskCall::default()).await.unwrap();
    // A put of what is done does not do it again.
    assert!(matches!(tasks.put(new("a"), &TaskCall::default()).await.unwrap().task().state, TaskState::Done { .. }));
    assert_eq!(taken(&tasks, 9).await, []);
}

#[tokio::test]
async fn a_silent_worker_loses_its_lease_to_a_larger_token() {
    let (tasks, _, clock) = tasks().await;
    tasks.put(new("a"), &TaskCall::default()).await.unwrap();
    let first = taken(&tasks, 1).await.remove(0);
    clock.advance(LEASE / 2);
    tasks.renew("a", first.token, None, &TaskCall::default()).await.unwrap();
    clock.advance(LEASE * 3 / 4);
    assert_eq!(taken(&tasks, 1).await, [], "a heartbeat keeps the lease");
    clock.advance(LEASE / 2);
    let second = taken(&tasks, 1).await.remove(0);
    assert!(second.token > first.token && second.attempt == 2, "{second:?}");
    for _ in 0..2 {
        let late = tasks.complete("a", first.token, &json!("late"), &TaskCall::default()).await.unwrap_err();
        assert!(matches!(late, TaskError::LeaseLost { state: "leased", .. }));
    }
    tasks.complete("a", second.token, &json!("done"), &TaskCall::default()).await.unwrap();
    assert!(tasks.complete("a", first.token, &json!("late"), &TaskCall::default()).await.is_err());
    let TaskState::Done { output, .. } = tasks.get("a").await.unwrap().state else { panic!("not done") };
    assert_eq!(output, json!("done"));
}

#[tokio::test]
async fn tokens_rise_over_the_removal_of_a_task() {
    let (tasks, store, clock) = tasks().await;
    let engine = Engine::on(&store).start().await.unwrap();
    tasks.put(new("a"), &TaskCall::default()).await.unwrap();
    let first = taken(&tasks, 1).await.remove(0);
    tasks.complete("a", first.token, &json!(1), &TaskCall::default()).await.unwrap();
    clock.advance(KEPT / 2);
    tasks.look(&engine).await.unwrap();
    assert!(tasks.get("a").await.is_ok());
    clock.advance(KEPT);
    tasks.look(&engine).await.unwrap();
    assert!(matches!(tasks.get("a").await.unwrap_err(), TaskError::NotFound { .. }));
    let keys = tasks.keys().await.unwrap();
    let left = store.view().await.unwrap().scan(&keys.orders(), Order::Ascending, 9).await.unwrap();
    assert!(left.is_empty(), "{left:?}");
    tasks.put(new("a"), &TaskCall::default()).await.unwrap();
    assert!(taken(&tasks, 1).await[0].token > first.token);
}

#[tokio::test]
async fn many_workers_take_each_task_once() {
    let (tasks, store, _) = tasks().await;
    for number in 0..40 {
        tasks.put(new(&format!("t{number:02}")), &TaskCall::default()).await.unwrap();
    }
    // Half of them are workers of another process.
    let other = Tasks::on(&store);
    let workers = (0..20).map(|number| {
        let tasks = if number % 2 == 0 { tasks.clone() } else { other.clone() };
        tokio::spawn(async move { taken(&tasks, 3).await })
    });
    let mut ids = Vec::new();
    for worker in workers.collect::<Vec<_>>() {
        ids.extend(worker.await.unwrap().into_iter().map(|task| task.id));
    }
    let all: BTreeSet<&String> = ids.iter().collect();
    assert_eq!((ids.len(), all.len()), (40, 40));
}

#[tokio::test]
async fn older_tasks_come_first_and_large_ones_are_split() {
    let (tasks, _, clock) = tasks().await;
    for id in ["c", "a", "b"] {
        tasks.put(NewTask::new(id, "k", json!("x".repeat(600 << 10))), &TaskCall::default()).await.unwrap();
        clock.advance(Duration::from_micros(1));
    }
    let ids = async || taken(&tasks, 9).await.into_iter().map(|task| task.id).collect::<Vec<_>>();
    assert_eq!(ids().await, ["c"]);
    assert_eq!(ids().await, ["a"]);
    assert_eq!(ids().await, ["b"]);
}

/// Names the tasks and their states.
fn told(tasks: &[Task]) -> StoredAnswer {
    let tasks: Vec<_> = tasks.iter().map(|task| (&*task.id, task.word(), task.token)).collect();
    StoredAnswer::json(StatusCode::OK, &tasks)
}

#[tokio::test]
async fn a_change_that_has_landed_has_stored_its_answer() {
    let (tasks, store, clock) = tasks().await;
    let calls = Calls::on(&store);
    for id in ["a", "b"] {
        let (call, attempt) = Call::begin(&calls, id.as_bytes()[0]).await;
        tasks.put(new(id), &TaskCall::of(&call, told)).await.unwrap();
        drop((call, attempt));
        let stored = Call::stored_answer(&calls, id.as_bytes()[0]).await.unwrap();
        assert_eq!(stored.body, format!("[[\"{id}\",\"open\",0]]"));
    }
    let (call, attempt) = Call::begin(&calls, 1).await;
    let first = tasks.take(&take(1), &TaskCall::of(&call, told)).await.unwrap();
    drop((call, attempt));
    assert_eq!(Call::stored_answer(&calls, 1).await, Some(told(&first)));
    let task = &first[0];
    let failure = TaskFailure { message: "no".into(), code: None, details: json!(null) };
    let (call, attempt) = Call::begin(&calls, 2).await;
    let failed = tasks.fail(&task.id, task.token, &failure, Some(None), &TaskCall::of(&call, told)).await.unwrap();
    drop((call, attempt));
    // Another worker has the task by now.
    clock.advance(Duration::from_secs(60));
    assert_eq!(taken(&tasks, 9).await.len(), 2);
    assert_eq!(Call::stored_answer(&calls, 2).await, Some(told(std::slice::from_ref(&failed))));
    let (call, attempt) = Call::begin(&calls, 3).await;
    let cancelled = tasks.cancel("a", "why", &TaskCall::of(&call, told)).await.unwrap();
    drop((call, attempt));
    assert_eq!(Call::stored_answer(&calls, 3).await, Some(told(&[cancelled])));
}

#[tokio::test]
async fn an_attempt_that_was_taken_over_changes_no_task() {
    let (tasks, store, _) = tasks().await;
    let calls = Calls::on(&store);
    tasks.put(new("a"), &TaskCall::default()).await.unwrap();
    let (old, attempt) = Call::begin(&calls, 1).await;
    drop(attempt);
    let (next, _attempt) = Call::begin(&calls, 1).await;
    assert!(matches!(tasks.take(&take(1), &TaskCall::of(&old, told)).await, Err(TaskError::Contended)));
    assert_eq!(tasks.take(&take(1), &TaskCall::of(&next, told)).await.unwrap().len(), 1);
}

struct Held(latchwork::store::Key);

impl Right for Held {
    fn check(&self) -> Check {
        Check::AtRev(self.0.clone(), latchwork::store::Rev(1))
    }
}

#[tokio::test]
async fn a_task_whose_right_is_lost_is_neither_taken_nor_done() {
    let (tasks, store, _) = tasks().await;
    let space = store.space(SpaceSpec::new("rights")).await.unwrap();
    let right = Held(space.key("a"));
    assert!(store.commit(Commit::new().put(&right.0, "held")).await.unwrap().is_applied());
    for id in ["a", "b"] {
        tasks.put(new(id).guard(Some(&right)), &TaskCall::default()).await.unwrap();
    }
    let task = taken(&tasks, 1).await.remove(0);
    assert!(store.commit(Commit::new().put(&right.0, "lost")).await.unwrap().is_applied());
    let late = tasks.complete("a", task.token, &json!(1), &TaskCall::default()).await.unwrap_err();
    assert!(matches!(late, TaskError::LeaseLost { state: "cancelled", .. }), "{late:?}");
    assert_eq!(taken(&tasks, 9).await, []);
    assert!(matches!(tasks.get("b").await.unwrap().state, TaskState::Cancelled { .. }));
}

#[tokio::test]
async fn an_execution_is_told_of_the_end_once_the_keeper_looks() {
    let (tasks, store, _) = tasks().await;
    let (send, mut tokens) = tokio::sync::mpsc::unbounded_channel();
    let waits = workflow("waits").with(send).run(async |ctx: Ctx, send: UnboundedSender<String>, _: ()| {
        let end = ctx.completion::<u32>("end").await;
        let token = end.token();
        ctx.run("tell", async || Ok(send.send(token.clone())?)).await?;
        end.wait().await
    });
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    let handle = engine.start(&waits, ()).id("x").await.unwrap();
    let completion = tokens.recv().await;
    tasks.put(NewTask { completion, ..new("a") }, &TaskCall::default()).await.unwrap();
    let task = taken(&tasks, 1).await.remove(0);
    tasks.complete("a", task.token, &json!(7), &TaskCall::default()).await.unwrap();
    // The process may die here: the order of untold ends is durable.
    let next = Tasks::on(&store);
    next.look(&engine).await.unwrap();
    assert_eq!(handle.result().await.unwrap(), 7);
    assert!(next.get("a").await.unwrap().told);
    next.look(&engine).await.unwrap();
}
