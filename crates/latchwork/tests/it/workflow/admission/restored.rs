//! Snapshots of limits in use: a store that is restored from one has exact limits, and its queues continue.

use latchwork::store::Confirm;
use latchwork::workflow::{Engine, Queue, Workflow, WorkflowError};

use super::{Lives, counted, held, import, judge, settle, used};

/// Two in total, one for each key. The key is the first letter of the id.
fn limited() -> Workflow<String, String> {
    let limited = import().concurrency(2).concurrency_by(1, |id: &String| id[..1].to_string());
    held(limited.when_full(Queue::new()))
}

async fn judge_all(engine: &Engine) {
    judge(engine, None, 2).await;
    for key in ["a", "b", "c", "d"] {
        judge(engine, Some(key), 1).await;
    }
}

/// The actions, in order. A snapshot is taken after each of them.
const SCRIPT: [&str; 14] = [
    "start a1",
    "start a2",
    "start b1",
    "start c1",
    "start d1",
    "start a3",
    "end a1",
    "cancel c1",
    "end b1",
    "start b2",
    "terminate a2",
    "start c2",
    "end d1",
    "end a3",
];

async fn play(engine: &Engine, limited: &Workflow<String, String>, line: &str) {
    let (what, id) = line.split_once(' ').unwrap();
    match what {
        "start" => drop(engine.start(limited, id.into()).id(id).await.unwrap()),
        "cancel" => engine.cancel(id, "not needed").await.unwrap(),
        "terminate" => engine.terminate(id, "enough").await.unwrap(),
        _ => engine.signal(id, "end", &()).await.unwrap(),
    }
    settle().await;
}

/// Ends all executions one after the other, and returns the order in which they were admitted.
async fn drain(engine: &Engine) -> Vec<String> {
    let mut admitted: Vec<String> = Vec::new();
    loop {
        judge_all(engine).await;
        let (held, waiting) = counted(engine, None).await;
        let new: Vec<String> = held.iter().filter(|id| !admitted.contains(*id)).cloned().collect();
        admitted.extend(new);
        let Some(first) = admitted.iter().find(|id| held.contains(id)) else {
            assert_eq!(waiting, [""; 0], "there is room");
            return admitted;
        };
        engine.signal(&**first, "end", &()).await.unwrap();
        settle().await;
    }
}

/// After each line of the script a snapshot is taken, and the store continues. Later each snapshot is restored: revs
/// and generations have changed by then, and later writes are gone.
#[tokio::test]
async fn limits_are_exact_after_a_restore_and_the_queue_continues() {
    let (lives, limited, directory) = (Lives::new().await, limited(), tempfile::tempdir().unwrap());
    let engine = lives.begin(&limited).await;
    let mut expected = Vec::new();
    for (number, line) in SCRIPT.iter().enumerate() {
        play(&engine, &limited, line).await;
        judge_all(&engine).await;
        let view = lives.store.view().await.unwrap();
        view.persist(directory.path().join(number.to_string())).await.unwrap();
        expected.push((counted(&engine, None).await, lives.records().await));
    }
    engine.stop();
    drop(engine);
    for (number, (counts, records)) in expected.iter().enumerate() {
        let snapshot = directory.path().join(number.to_string());
        lives.store.restore(snapshot, Confirm::ReplaceEverything).await.unwrap();
        assert_eq!(lives.records().await, *records);
        let engine = lives.begin(&limited).await;
        judge_all(&engine).await;
        assert_eq!(counted(&engine, None).await, *counts, "after {:?}", SCRIPT[number]);
        let admitted = drain(&engine).await;
        let waited: Vec<_> = admitted.iter().filter(|id| counts.1.contains(id)).collect();
        assert_eq!(waited, counts.1.iter().collect::<Vec<_>>(), "after {:?}: in queue order", SCRIPT[number]);
        lives.pass(60).await;
        assert_eq!(lives.records().await, 0, "after {:?}: nothing is left", SCRIPT[number]);
        engine.stop();
    }
}

/// The gate has not counted an end yet, so the note of the end is still beside the gate.
#[tokio::test]
async fn a_permit_that_was_given_back_before_the_snapshot_is_free_after_the_restore() {
    let (lives, directory) = (Lives::new().await, tempfile::tempdir().unwrap());
    let limited = held(import().concurrency(2));
    let engine = lives.begin(&limited).await;
    for id in ["a", "b"] {
        engine.start(&limited, id.into()).id(id).await.unwrap();
    }
    engine.signal("a", "end", &()).await.unwrap();
    settle().await;
    let view = lives.store.view().await.unwrap();
    view.persist(directory.path().join("s")).await.unwrap();
    drop(view);
    engine.start(&limited, "c".into()).id("c").await.unwrap();
    engine.stop();
    drop(engine);
    // A store can be restored several times, with the same result each time.
    for _ in 0..3 {
        lives.store.restore(directory.path().join("s"), Confirm::ReplaceEverything).await.unwrap();
        let engine = lives.begin(&limited).await;
        assert_eq!(used(&engine, None).await, (1, 0));
        engine.start(&limited, "d".into()).id("d").await.unwrap();
        let rejected = engine.start(&limited, "e".into()).id("e").await;
        assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
        for id in ["b", "d"] {
            engine.signal(id, "end", &()).await.unwrap();
        }
        settle().await;
        assert_eq!(used(&engine, None).await, (0, 0));
        engine.stop();
    }
}
