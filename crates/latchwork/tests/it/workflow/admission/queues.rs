//! Starts that wait in a queue.

use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Ctx, ExecutionFilter, ExecutionState, Queue, Status, WaitsFor, Workflow, WorkflowBuilder, WorkflowError, workflow,
};

use super::{engine_of, held, import, settle, used};

/// A workflow that takes a second, and returns the time at which it began.
fn timed(builder: WorkflowBuilder) -> Workflow<(i32, String), u64> {
    builder.run(async |ctx: Ctx, _: (i32, String)| {
        let began = ctx.now().await.0;
        ctx.sleep(Duration::from_secs(1)).await?;
        Ok(began)
    })
}

/// The names of starts, in the order in which their executions began.
async fn order(test: &TestEngine, timed: &Workflow<(i32, String), u64>, starts: &[(i32, &str)]) -> Vec<String> {
    let mut handles = Vec::new();
    for (place, (priority, name)) in starts.iter().enumerate() {
        let handle = test.engine().start(timed, (*priority, name.to_string())).id(format!("{place}{name}")).await;
        handles.push((handle.unwrap(), format!("{place}{name}")));
    }
    let mut began = Vec::new();
    for (handle, name) in handles {
        began.push((test.run(handle.result()).await.unwrap(), name));
    }
    began.sort();
    began.into_iter().map(|(_, name)| name).collect()
}

#[tokio::test]
async fn starts_wait_and_go_first_come_first_served() {
    let timed = timed(workflow("timed").concurrency(1).when_full(Queue::new()));
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let names = [(0, "a"), (9, "b"), (3, "c"), (0, "d")];
    assert_eq!(order(&test, &timed, &names).await, ["0a", "1b", "2c", "3d"]);
    let left = test.engine().limit_use("timed", None).await.unwrap();
    assert_eq!((left.used, left.waiting), (0, 0));
}

#[tokio::test]
async fn a_queued_start_is_an_execution_that_waits() {
    let import = held(import().concurrency(1).when_full(Queue::new()));
    let test = engine_of(&import).await;
    let engine = test.engine();
    let first = engine.start(&import, "a".into()).id("a").await.unwrap();
    for id in ["b", "c", "d"] {
        engine.start(&import, id.into()).id(id).tag("t").await.unwrap();
    }
    settle().await;
    assert_eq!(used(engine, None).await, (1, 3));
    let listed = engine.list(ExecutionFilter::new().is(Status::Waiting).tag("t")).await.unwrap();
    assert_eq!(listed.items.len(), 3);
    let waiting = engine.list(ExecutionFilter::new().waits_for(WaitsFor::Admission("import".into()))).await.unwrap();
    assert_eq!(waiting.items.len(), 3);
    let why = engine.why("d").await.unwrap();
    assert_eq!(why.state, ExecutionState::Waiting);
    assert_eq!(why.waits[0].what, WaitsFor::Admission("import".into()));
    assert_eq!(why.queue.as_ref().map(|queue| (queue.ahead, queue.used, queue.limit)), Some((2, 1, 1)));
    // It can be joined, signalled and cancelled.
    let joined = engine.start(&import, "c".into()).id("c").or_join().await.unwrap();
    engine.signal("c", "end", &()).await.unwrap();
    engine.cancel("b", "not needed").await.unwrap();
    assert!(matches!(engine.handle(&import, "b").result().await, Err(WorkflowError::Cancelled { .. })));
    assert_eq!(used(engine, None).await, (1, 2));
    engine.signal("a", "end", &()).await.unwrap();
    test.run(first.result()).await.unwrap();
    assert_eq!(test.run(joined.result()).await.unwrap(), "c");
    settle().await;
    assert_eq!(used(engine, None).await, (1, 0));
    engine.terminate("d", "enough").await.unwrap();
    assert_eq!(used(engine, None).await, (0, 0));
}

/// None of its code runs; the others continue.
#[tokio::test]
async fn a_queued_start_has_a_time_limit_of_its_own() {
    let import = held(import().concurrency(1).when_full(Queue::new().timeout(Duration::from_secs(60))));
    let test = engine_of(&import).await;
    let engine = test.engine();
    engine.start(&import, "a".into()).id("a").await.unwrap();
    let late = engine.start(&import, "b".into()).id("b").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(30))).await;
    let next = engine.start(&import, "c".into()).id("c").await.unwrap();
    assert!(matches!(test.run(late.result()).await, Err(WorkflowError::TimedOut { .. })));
    assert_eq!(used(engine, None).await, (1, 1));
    engine.signal("a", "end", &()).await.unwrap();
    engine.signal("c", "end", &()).await.unwrap();
    assert_eq!(test.run(next.result()).await.unwrap(), "c");
    assert_eq!(used(engine, None).await, (0, 0));
}

/// The time limit of a workflow counts from its admission.
#[tokio::test]
async fn waiting_in_the_queue_is_no_part_of_the_time_limit_of_the_execution() {
    let limited = workflow("timed").timeout(Duration::from_millis(1500)).concurrency(1).when_full(Queue::new());
    let timed = timed(limited);
    let test = TestEngine::new(&timed, 1).await.unwrap();
    assert_eq!(order(&test, &timed, &[(0, "a"), (0, "b"), (0, "c")]).await, ["0a", "1b", "2c"]);
}

#[tokio::test]
async fn a_queue_may_have_a_depth() {
    let import = held(import().concurrency(1).when_full(Queue::new().depth(2)));
    let test = engine_of(&import).await;
    for id in ["a", "b", "c"] {
        test.engine().start(&import, id.into()).id(id).await.unwrap();
    }
    match test.engine().start(&import, "d".into()).await {
        Err(WorkflowError::QueueFull { workflow, key, depth }) => {
            assert_eq!((&*workflow, &*key, depth), ("import", "import", 2))
        }
        other => panic!("{other:?}"),
    }
    test.engine().cancel("b", "no").await.unwrap();
    test.engine().start(&import, "d".into()).await.unwrap();
}

/// A high priority overtakes. But a start of low priority that has waited long enough goes first.
#[tokio::test]
async fn priorities_age() {
    let queue = Queue::new().priority(Duration::from_secs(10), |input: &(i32, String)| input.0);
    let timed = timed(workflow("timed").concurrency(1).when_full(queue));
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let starts = [(0, "a"), (0, "b"), (1, "c"), (5, "d"), (-1, "e")];
    assert_eq!(order(&test, &timed, &starts).await, ["0a", "3d", "2c", "1b", "4e"]);
    // The first of them waits for more than the ten seconds that one step of priority is worth.
    let engine = test.engine();
    let mut handles = Vec::new();
    for n in 0..40 {
        let id = format!("x{n}");
        handles.push(engine.start(&timed, (i32::from(n > 0), id.clone())).id(id).await.unwrap());
        test.run(test.env().sleep(Duration::from_millis(500))).await;
    }
    let mut began = Vec::new();
    for handle in handles {
        began.push(test.run(handle.result()).await.unwrap());
    }
    // x1 runs when x0 could have run: an execution of priority 1 that came more than ten seconds later runs after it.
    let overtaking = began.iter().skip(1).filter(|time| **time < began[0]).count();
    assert!(overtaking <= 20, "{overtaking}");
}

/// One key with many starts does not delay another key with few.
#[tokio::test]
async fn keys_are_served_in_turn() {
    let queue = Queue::new().fair(|input: &(i32, String)| input.1.clone());
    let timed = timed(workflow("timed").concurrency(1).when_full(queue));
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let starts = [(0, "a"), (0, "a"), (0, "a"), (0, "a"), (0, "b"), (0, "b"), (0, "c")];
    assert_eq!(order(&test, &timed, &starts).await, ["0a", "1a", "4b", "6c", "2a", "5b", "3a"]);
}

/// A queue for each key and one for the workflow: no key waits for another key while there is room.
#[tokio::test]
async fn queues_of_keys_and_of_the_workflow() {
    let both = workflow("timed").concurrency(2).concurrency_by(1, |input: &(i32, String)| input.1.clone());
    let timed = timed(both.when_full(Queue::new()));
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let starts = [(0, "a"), (0, "a"), (0, "b"), (0, "c"), (0, "b")];
    let order = order(&test, &timed, &starts).await;
    // The first a and b run, then the second a and c, which came before the second b.
    assert_eq!(
        (&order[..2], &order[4..]),
        (&["0a".into(), "2b".to_string()][..], &["4b".to_string()][..]),
        "{order:?}"
    );
    for key in [None, Some("a"), Some("b"), Some("c")] {
        let left = test.engine().limit_use("timed", key).await.unwrap();
        assert_eq!((left.used, left.waiting), (0, 0), "{key:?}");
    }
}

/// A child waits in the queue like any other start; the end of its parent takes it out of the queue.
#[tokio::test]
async fn children_wait_in_the_queue() {
    let import = held(import().concurrency(1).when_full(Queue::new()));
    let child = import.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, waits: bool| {
        let import = child.clone();
        async move {
            let child = ctx.child(&import, "child".to_string()).id(format!("child-{waits}")).start().await?;
            if !waits {
                return Ok("left".to_string());
            }
            child.result().await
        }
    });
    let test = TestEngine::build(1).register(&import).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let first = engine.start(&import, "a".into()).id("a").await.unwrap();
    let waits = engine.start(&parent, true).await.unwrap();
    let leaves = engine.start(&parent, false).await.unwrap();
    assert_eq!(test.run(leaves.result()).await.unwrap(), "left");
    let cancelled = test.run(engine.handle(&import, "child-false").result()).await;
    assert!(matches!(cancelled, Err(WorkflowError::Cancelled { .. })), "{cancelled:?}");
    assert_eq!(used(engine, None).await, (1, 1));
    engine.signal("child-true", "end", &()).await.unwrap();
    engine.signal("a", "end", &()).await.unwrap();
    test.run(first.result()).await.unwrap();
    assert_eq!(test.run(waits.result()).await.unwrap(), "child");
    assert_eq!(used(engine, None).await, (0, 0));
}

/// A child that is cancelled in the queue notifies its parent.
#[tokio::test]
async fn a_parent_is_notified_of_a_child_that_left_the_queue() {
    let import = held(import().concurrency(1).when_full(Queue::new().timeout(Duration::from_secs(5))));
    let child = import.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, (): ()| {
        let import = child.clone();
        async move {
            let child = ctx.child(&import, "child".to_string()).await;
            Ok(child.unwrap_err().message().to_string())
        }
    });
    let test = TestEngine::build(1).register(&import).register(&parent).start().await.unwrap();
    test.engine().start(&import, "a".into()).id("a").await.unwrap();
    let told = test.complete(&parent, ()).await.unwrap();
    assert!(told.contains("timed out"), "{told}");
}

/// The code begins by starting a child under the same limit: the execution's own first commit must not wait for the
/// child's commit.
#[tokio::test]
async fn an_execution_may_start_a_child_of_its_own_workflow_at_once() {
    let tree = workflow("tree").concurrency(10).when_full(Queue::new());
    let leaf = workflow("tree").concurrency(10).when_full(Queue::new()).run(async |_: Ctx, n: u32| Ok(n));
    let tree = tree.run(move |ctx: Ctx, n: u32| {
        let leaf = leaf.clone();
        async move { if n == 0 { Ok(1) } else { Ok(1 + ctx.child(&leaf, n - 1).await?) } }
    });
    let test = TestEngine::new(&tree, 1).await.unwrap();
    assert_eq!(test.complete(&tree, 4).await.unwrap(), 5);
    let left = test.engine().limit_use("tree", None).await.unwrap();
    assert_eq!((left.used, left.waiting), (0, 0));
}

/// A commit counts an execution that leaves a queue by one write, so the children of one parent leave one after the
/// other.
#[tokio::test]
async fn several_children_leave_one_queue_with_their_parent() {
    let import = held(import().concurrency(1).when_full(Queue::new()));
    let child = import.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, (): ()| {
        let import = child.clone();
        async move {
            for _ in 0..5 {
                ctx.child(&import, "child".to_string()).start().await?;
            }
            Ok(())
        }
    });
    let test = TestEngine::build(1).register(&import).register(&parent).start().await.unwrap();
    let first = test.engine().start(&import, "a".into()).id("a").await.unwrap();
    test.complete(&parent, ()).await.unwrap();
    settle().await;
    assert_eq!(used(test.engine(), None).await, (1, 0));
    test.engine().signal("a", "end", &()).await.unwrap();
    test.run(first.result()).await.unwrap();
    assert_eq!(used(test.engine(), None).await, (0, 0));
}

/// An execution that waits in a queue costs two commits: that of its start, and that of its end, which admits the next.
#[tokio::test]
async fn the_commit_of_an_end_admits_the_next_in_the_queue() {
    let once = workflow("once").concurrency(1).when_full(Queue::new());
    let once = once.run(async |ctx: Ctx, n: u32| ctx.run("once", async || Ok(n)).await);
    let test = TestEngine::new(&once, 1).await.unwrap();
    let engine = test.engine();
    let generation = async || engine.store().generation().await.unwrap().0;
    let mut handles = Vec::new();
    let before = generation().await;
    for n in 0..20 {
        handles.push(engine.start(&once, n).await.unwrap());
    }
    for (n, handle) in (0..).zip(handles) {
        assert_eq!(test.run(handle.result()).await.unwrap(), n);
    }
    assert!(generation().await - before <= 41, "{} commits", generation().await - before);
}

/// A start of higher priority comes after others were already served: it goes before all waiting starts.
#[tokio::test]
async fn a_start_that_ranks_before_all_served_ones_is_the_next() {
    let priority = |input: &String| if input.starts_with("urgent") { 10 } else { 0 };
    let queue = Queue::new().priority(Duration::from_secs(60), priority);
    let import = held(import().concurrency(1).when_full(queue));
    let test = engine_of(&import).await;
    let engine = test.engine();
    let start = async |id: &str| drop(engine.start(&import, id.into()).id(id).await.unwrap());
    for id in ["a", "b", "c", "d"] {
        start(id).await;
    }
    let end = async |id: &str| {
        engine.signal(id, "end", &()).await.unwrap();
        assert_eq!(test.run(engine.handle(&import, id).result()).await.unwrap(), id);
        settle().await;
    };
    end("a").await;
    start("urgent").await;
    let ahead = async |id: &str| engine.why(id).await.unwrap().queue.map(|queue| queue.ahead);
    assert_eq!((ahead("urgent").await, ahead("c").await, ahead("d").await), (Some(0), Some(1), Some(2)));
    end("b").await;
    assert_eq!((ahead("urgent").await, ahead("c").await, ahead("d").await), (None, Some(0), Some(1)));
    for id in ["urgent", "c", "d"] {
        end(id).await;
    }
    assert_eq!(used(engine, None).await, (0, 0));
}
