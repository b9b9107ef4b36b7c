//! A definition whose limits differ from those of an earlier process. The stored records decide: the permits and
//! positions that executions have, and the keys that they were started under.

use std::time::Duration;

use latchwork::store::{Bytes, Commit, Key};
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, ExecutionFilter, ExecutionState, Queue, RateLimit, Supersede, Workflow,
    WorkflowBuilder, WorkflowError, workflow,
};

use super::{Lives, held, import, settle, used};

const SECOND: Duration = Duration::from_secs(1);

/// The result that the caller of a start gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Runs,
    Waits,
    Rejected,
}

use Told::{Rejected, Runs, Waits};

/// Starts an execution and returns its result.
async fn start(engine: &Engine, import: &Workflow<String, String>, id: &str) -> Told {
    match engine.start(import, id.into()).id(id).await {
        Err(WorkflowError::LimitReached { .. }) => return Rejected,
        started => drop(started.unwrap()),
    }
    settle().await;
    if engine.why(id).await.unwrap().queue.is_some() { Waits } else { Runs }
}

/// The executions of the workflow that have begun, in no order.
async fn begun(engine: &Engine) -> Vec<String> {
    let page = engine.list(ExecutionFilter::new().workflow("import")).ascending().limit(100).await.unwrap();
    let mut begun = Vec::new();
    for found in page.items {
        let has_begun = engine.why(&found.id).await.unwrap().queue.is_none();
        if has_begun && matches!(found.state, ExecutionState::Running | ExecutionState::Waiting) {
            begun.push(found.id.to_string());
        }
    }
    begun
}

/// A definition with the results of starts under it, and then another definition.
struct Case {
    what: &'static str,
    first: WorkflowBuilder,
    starts: &'static [(&'static str, Told)],
    second: WorkflowBuilder,
    /// The executions that have begun when the second process has started.
    begun: &'static [&'static str],
    later: &'static [(&'static str, Told)],
    /// How many executions of both definitions may run at once.
    most: usize,
}

/// A limit for each first letter of the input.
fn by_letter(max: u32) -> WorkflowBuilder {
    import().concurrency_by(max, |id: &String| id[..1].to_string())
}

/// Queues that become rejections and the reverse, and limits that are removed.
fn queues_and_removals() -> Vec<Case> {
    let queue = Queue::new;
    vec![
        Case {
            what: "a queue becomes a rejection while starts wait",
            first: import().concurrency(1).when_full(queue()),
            starts: &[("a1", Runs), ("b1", Waits), ("c1", Waits)],
            second: import().concurrency(1),
            begun: &["a1"],
            later: &[("d1", Rejected)],
            most: 1,
        },
        Case {
            what: "a rejection becomes a queue",
            first: import().concurrency(1),
            starts: &[("a1", Runs), ("b1", Rejected)],
            second: import().concurrency(1).when_full(queue()),
            begun: &["a1"],
            later: &[("c1", Waits), ("d1", Waits)],
            most: 1,
        },
        Case {
            what: "a limit is removed",
            first: import().concurrency(1).when_full(queue()),
            starts: &[("a1", Runs), ("b1", Waits), ("c1", Waits)],
            second: import(),
            begun: &["a1", "b1", "c1"],
            later: &[("d1", Runs)],
            most: 4,
        },
        Case {
            what: "a limit for each key is removed beside one in total",
            first: by_letter(1).concurrency(3).when_full(queue()),
            starts: &[("a1", Runs), ("a2", Waits), ("a3", Waits), ("a4", Waits), ("b1", Runs)],
            second: import().concurrency(3).when_full(queue()),
            begun: &["a1", "a2", "b1"],
            later: &[("c1", Waits)],
            most: 3,
        },
        Case {
            what: "a limit in total is removed beside one for each key",
            first: by_letter(1).concurrency(1).when_full(queue()),
            starts: &[("a1", Runs), ("a2", Waits), ("b1", Waits), ("c1", Waits)],
            second: by_letter(1).when_full(queue()),
            begun: &["a1", "b1", "c1"],
            later: &[("d1", Runs), ("d2", Waits)],
            most: 4,
        },
    ]
}

/// Limits that are added, lowered and raised, and keys that are computed in another way.
fn other_limits() -> Vec<Case> {
    let queue = Queue::new;
    vec![
        Case {
            what: "a limit is added: what runs already holds no permit of it",
            first: import(),
            starts: &[("a1", Runs), ("b1", Runs)],
            second: import().concurrency(1).when_full(queue()),
            begun: &["a1", "b1"],
            later: &[("c1", Runs), ("d1", Waits)],
            most: 3,
        },
        Case {
            what: "a limit for each key is added: what waits has a permit of the first to wait for, and no other",
            first: import().concurrency(2).when_full(queue()),
            starts: &[("a1", Runs), ("a2", Runs), ("a3", Waits)],
            second: by_letter(1).concurrency(2).when_full(queue()),
            begun: &["a1", "a2"],
            later: &[("a4", Waits), ("b1", Waits)],
            most: 2,
        },
        Case {
            what: "a maximum is lowered below what runs",
            first: import().concurrency(3).when_full(queue()),
            starts: &[("a1", Runs), ("b1", Runs), ("c1", Runs), ("d1", Waits)],
            second: import().concurrency(1).when_full(queue()),
            begun: &["a1", "b1", "c1"],
            later: &[("e1", Waits)],
            most: 3,
        },
        Case {
            what: "a maximum is raised",
            first: import().concurrency(1).when_full(queue()),
            starts: &[("a1", Runs), ("b1", Waits), ("c1", Waits)],
            second: import().concurrency(2).when_full(queue()),
            begun: &["a1", "b1"],
            later: &[("d1", Waits)],
            most: 2,
        },
        Case {
            what: "the function of the key is another: the stored key counts",
            first: by_letter(1).when_full(queue()),
            starts: &[("a1", Runs), ("a2", Waits), ("b1", Runs)],
            second: import().concurrency_by(1, |id: &String| id[1..].to_string()).when_full(queue()),
            begun: &["a1", "b1"],
            later: &[("a3", Runs), ("b3", Waits)],
            most: 3,
        },
        Case {
            what: "a rate limit is added to a queue",
            first: import().concurrency(1).when_full(queue()),
            starts: &[("a1", Runs), ("b1", Waits)],
            second: import().concurrency(1).when_full(queue()).rate_limit(RateLimit::new(1, SECOND).delay()),
            begun: &["a1"],
            later: &[("c1", Waits)],
            most: 1,
        },
    ]
}

/// Each case by itself: in the end all accepted executions have run, as many at once as the limit allows, and no record
/// of the limit is left.
#[tokio::test]
async fn a_definition_that_was_changed_admits_all_that_wait_and_leaks_nothing() {
    for case in queues_and_removals().into_iter().chain(other_limits()) {
        let (what, lives) = (case.what, Lives::new().await);
        let first = held(case.first);
        let engine = lives.begin(&first).await;
        let mut accepted = Vec::new();
        for (id, told) in case.starts {
            assert_eq!(start(&engine, &first, id).await, *told, "{what}: {id}");
            accepted.extend((*told != Rejected).then_some(*id));
        }
        engine.stop();
        drop(engine);
        let second = held(case.second);
        let engine = lives.begin(&second).await;
        assert_eq!(begun(&engine).await, case.begun, "{what}");
        for (id, told) in case.later {
            assert_eq!(start(&engine, &second, id).await, *told, "{what}: {id}");
            accepted.extend((*told != Rejected).then_some(*id));
        }
        let mut ended = Vec::new();
        while ended.len() < accepted.len() {
            let begun = begun(&engine).await;
            // An execution that has ended does not run again, and no more run than the case allows.
            let is_known = |id: &String| ended.contains(id);
            assert!(begun.len() <= case.most && !begun.iter().any(is_known), "{what}: {begun:?} run");
            let Some(id) = begun.into_iter().next() else {
                // The queue of a definition that now rejects is looked at only some seconds later.
                lives.pass(15).await;
                assert!(!self::begun(&engine).await.is_empty(), "{what}: of {accepted:?} only {ended:?} have run");
                continue;
            };
            engine.signal(&*id, "end", &()).await.unwrap();
            assert_eq!(lives.run(engine.handle(&second, &*id).result()).await.unwrap(), id, "{what}");
            settle().await;
            ended.push(id);
        }
        for key in [None, Some("a"), Some("b"), Some("c"), Some("1"), Some("3")] {
            assert_eq!(used(&engine, key).await, (0, 0), "{what}: {key:?}");
        }
        lives.pass(60).await;
        assert_eq!(lives.records().await, 0, "{what}: nothing is left");
        engine.stop();
    }
}

/// After the maximum is lowered, no execution is admitted until the running ones fit.
#[tokio::test]
async fn a_queue_under_a_lowered_maximum_waits_until_the_running_executions_fit() {
    let lives = Lives::new().await;
    let many = held(import().concurrency(3).when_full(Queue::new()));
    let engine = lives.begin(&many).await;
    for id in ["a", "b", "c", "d", "e"] {
        engine.start(&many, id.into()).id(id).await.unwrap();
    }
    engine.stop();
    let few = held(import().concurrency(1).when_full(Queue::new()));
    let engine = lives.begin(&few).await;
    for (ends, left) in [("a", (2, 2)), ("b", (1, 2)), ("c", (1, 1)), ("d", (1, 0)), ("e", (0, 0))] {
        engine.signal(ends, "end", &()).await.unwrap();
        lives.run(engine.handle(&few, ends).result()).await.unwrap();
        settle().await;
        assert_eq!(used(&engine, None).await, left, "after {ends}");
    }
}

/// Returns its input, of any type.
fn echo(builder: WorkflowBuilder) -> Workflow<serde_json::Value, serde_json::Value> {
    builder.run(async |ctx: Ctx, input: serde_json::Value| ctx.run("echo", async || Ok(input.clone())).await)
}

fn batches() -> Workflow<u64, u64> {
    workflow("echo").batch(Batch::new(10, 60 * SECOND)).run(async |_: Ctx, numbers: Vec<u64>| Ok(numbers))
}

/// Gathered starts begin at their time with the inputs they have, whatever definition comes later.
#[tokio::test]
async fn gathered_starts_begin_in_time_though_the_new_definition_gathers_none() {
    let debounced = || echo(workflow("echo").debounce(Debounce::new(60 * SECOND)));
    for second in [echo(workflow("echo")), debounced(), echo(workflow("echo").concurrency(1))] {
        let lives = Lives::new().await;
        let engine = lives.begin(&debounced()).await;
        for n in [1, 2] {
            engine.start(&debounced(), n.into()).id("d").await.unwrap();
        }
        engine.stop();
        let engine = lives.begin(&second).await;
        let alone = engine.start(&second, 3.into()).await.unwrap();
        let is_gathered = &**alone.id() == "d";
        let began = lives.env.now();
        let result = lives.run(engine.handle(&second, "d").result()).await.unwrap();
        assert_eq!(result, if is_gathered { 3 } else { 2 });
        assert!(lives.env.now().0 - began.0 >= 59_000_000);
        lives.run(alone.result()).await.unwrap();
        assert_eq!(lives.records().await, 0, "nothing gathers");
        engine.stop();
        // With the first definition again, the next start is gathered again.
        let engine = lives.begin(&debounced()).await;
        let next = engine.start(&debounced(), 4.into()).await.unwrap();
        assert_ne!(next.id(), alone.id());
        assert_eq!(lives.run(next.result()).await.unwrap(), 4);
    }
}

/// A start that is no longer gathered supersedes an execution that still gathers.
#[tokio::test]
async fn an_execution_that_gathers_is_superseded_by_a_start_that_is_not_gathered() {
    for how in [Supersede::Cancel, Supersede::Terminate] {
        let lives = Lives::new().await;
        let engine = lives.begin(&batches()).await;
        for n in [1, 2] {
            engine.start(&batches(), n).id("batch").await.unwrap();
        }
        engine.stop();
        let plain = echo(workflow("echo"));
        let engine = lives.begin(&plain).await;
        let waits = [engine.handle(&batches(), "batch").of_item(0), engine.handle(&batches(), "batch").of_item(1)];
        let told = tokio::spawn(async move { tokio::join!(waits[0].result(), waits[1].result()) });
        settle().await;
        let other = engine.start(&plain, 7.into()).id("batch").supersede(how).await.unwrap();
        let (first, second) = lives.run(told).await.unwrap();
        for told in [first, second] {
            let text = told.unwrap_err().to_string();
            assert!(text.contains("another start has taken its place"), "{how:?}: {text}");
        }
        assert_eq!(lives.run(other.result()).await.unwrap(), 7, "{how:?}");
        assert_eq!(lives.records().await, 0, "{how:?}: nothing gathers");
    }
}

/// The batch begins with its inputs; starts that come meanwhile are debounced into an execution of their own.
#[tokio::test]
async fn a_batch_and_a_debounce_that_follows_it_gather_beside_each_other() {
    let lives = Lives::new().await;
    let engine = lives.begin(&batches()).await;
    for n in [1, 2] {
        engine.start(&batches(), n).id("batch").await.unwrap();
    }
    engine.stop();
    let debounced = echo(workflow("echo").debounce(Debounce::new(100 * SECOND)));
    let engine = lives.begin(&debounced).await;
    let first = engine.start(&debounced, 3.into()).id("debounced").await.unwrap();
    assert_eq!(&**first.id(), "debounced");
    let batch = lives.run(engine.handle(&debounced, "batch").result()).await.unwrap();
    assert_eq!(batch, serde_json::json!([1, 2]));
    // The batch has begun; the debounce still gathers.
    let second = engine.start(&debounced, 4.into()).await.unwrap();
    assert_eq!(second.id(), first.id(), "it still gathers");
    assert_eq!(lives.run(second.result()).await.unwrap(), 4);
    assert_eq!(lives.records().await, 0, "nothing gathers");
}

/// Changes the stored records of executions as a newer program would. Returns the records as they were.
async fn store_as_newer(lives: &Lives, ids: &[&str]) -> Vec<(Key, Bytes)> {
    let spaces = lives.store.spaces().await.unwrap();
    let executions = spaces.iter().find(|space| space.name() == "workflow.executions").unwrap();
    let mut known = Vec::new();
    for id in ids {
        let key = executions.key(*id);
        let value = lives.store.view().await.unwrap().get(&key).await.unwrap().unwrap().value;
        let newer = [&[value[0] + 1], &value[1..]].concat();
        lives.store.commit(Commit::new().put(&key, newer)).await.unwrap().applied().unwrap();
        known.push((key, value));
    }
    known
}

async fn store_again(lives: &Lives, known: Vec<(Key, Bytes)>) {
    for (key, value) in known {
        lives.store.commit(Commit::new().put(&key, value)).await.unwrap().applied().unwrap();
    }
}

async fn is_queued(engine: &Engine, id: &str) -> bool {
    engine.why(id).await.unwrap().queue.is_some()
}

/// A newer program has stored the first execution of the queue. While this program cannot read it, it keeps its
/// position, and the executions behind it are admitted. When it can be read again, it is the next.
#[tokio::test]
async fn an_execution_of_a_newer_program_keeps_its_position_while_others_are_admitted() {
    let queued = |limit| held(import().concurrency(limit).when_full(Queue::new()));
    let (lives, one, three) = (Lives::new().await, queued(1), queued(3));
    let engine = lives.begin(&one).await;
    for (id, told) in [("h", Runs), ("a", Waits), ("b", Waits), ("c", Waits), ("d", Waits)] {
        assert_eq!(start(&engine, &one, id).await, told, "{id}");
    }
    engine.stop();
    let known = store_as_newer(&lives, &["a"]).await;
    // Two more may begin beside the running execution.
    let engine = lives.begin(&three).await;
    assert_eq!(used(&engine, None).await, (3, 2));
    assert!(!is_queued(&engine, "b").await && !is_queued(&engine, "c").await && is_queued(&engine, "d").await);
    engine.stop();
    store_again(&lives, known).await;
    let engine = lives.begin(&three).await;
    assert_eq!(used(&engine, None).await, (3, 2));
    engine.signal("h", "end", &()).await.unwrap();
    lives.run(engine.handle(&three, "h").result()).await.unwrap();
    settle().await;
    assert_eq!(used(&engine, None).await, (3, 1));
    assert!(!is_queued(&engine, "a").await && is_queued(&engine, "d").await);
    engine.stop();
}

/// The executions of a newer program at the front of the queue are as many as there are free permits, or more. The
/// executions behind them are admitted in their order, at the start of the engine, by an end and by a new start.
#[tokio::test]
async fn executions_of_a_newer_program_at_the_front_do_not_stop_the_queue() {
    let queued = |limit| held(import().concurrency(limit).when_full(Queue::new()));
    let (lives, one, two) = (Lives::new().await, queued(1), queued(2));
    let engine = lives.begin(&one).await;
    let newer: Vec<String> = (0..40).map(|n| format!("newer-{n:02}")).collect();
    assert_eq!(start(&engine, &one, "h").await, Runs);
    for id in newer.iter().map(String::as_str).chain(["a", "b", "c"]) {
        engine.start(&one, id.to_string()).id(id).await.unwrap();
    }
    engine.stop();
    let ids: Vec<&str> = newer.iter().map(String::as_str).collect();
    let known = store_as_newer(&lives, &ids).await;
    // There is one free permit.
    let engine = lives.begin(&two).await;
    assert_eq!(used(&engine, None).await, (2, 42));
    assert!(!is_queued(&engine, "a").await && is_queued(&engine, "b").await && is_queued(&engine, "c").await);
    // An end makes room for the next.
    engine.signal("h", "end", &()).await.unwrap();
    lives.run(engine.handle(&two, "h").result()).await.unwrap();
    settle().await;
    assert!(!is_queued(&engine, "b").await && is_queued(&engine, "c").await);
    // A new start is behind all of them.
    assert_eq!(start(&engine, &two, "d").await, Waits);
    assert!(is_queued(&engine, "c").await);
    engine.signal("a", "end", &()).await.unwrap();
    lives.run(engine.handle(&two, "a").result()).await.unwrap();
    settle().await;
    assert!(!is_queued(&engine, "c").await && is_queued(&engine, "d").await);
    engine.stop();
    // The newer program is back: its executions are before the rest of the queue.
    store_again(&lives, known).await;
    let engine = lives.begin(&two).await;
    assert_eq!(used(&engine, None).await, (2, 41));
    engine.signal("b", "end", &()).await.unwrap();
    lives.run(engine.handle(&two, "b").result()).await.unwrap();
    settle().await;
    assert!(!is_queued(&engine, "newer-00").await && is_queued(&engine, "newer-01").await);
    assert!(is_queued(&engine, "d").await);
    engine.stop();
}
