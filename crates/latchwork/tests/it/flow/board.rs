//! The task board: each task is done once, in order, whatever happens to its workers.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::flow::{Board, BoardError, BoardState, ClaimedTask, Dispatch, NewTask, TaskState};
use latchwork::store::{Env, Limits, Store, VirtualClock};
use parking_lot::Mutex;
use serde_json::json;

const LEASE: Duration = Duration::from_secs(60);

async fn board() -> Board {
    Board::open(&Store::memory().await.unwrap(), "b").await.unwrap()
}

/// Each row: an order, and the tasks in the order in which they are claimed.
#[tokio::test]
async fn tasks_are_claimed_in_the_order_of_the_board_and_after_what_they_depend_on() {
    for (dispatch, expected) in [
        (Dispatch::Arrival, ["a", "b", "c", "d"]),
        (Dispatch::Topology, ["a", "c", "b", "d"]),
        (Dispatch::Priority, ["c", "a", "d", "b"]),
    ] {
        let board = board().await.dispatch(dispatch);
        let tasks = [
            NewTask::new("a", 1).priority(5),
            NewTask::new("b", 2).after("a").priority(1),
            NewTask::new("c", 3).priority(9),
            NewTask::new("d", 4).after("a").after("c").priority(2),
        ];
        board.add(tasks).await.unwrap();
        let mut claimed = Vec::new();
        while let Some(task) = board.claim("w", LEASE).await.unwrap() {
            claimed.push(task.task.id.clone());
            assert_eq!(board.state().await.unwrap(), BoardState::Open);
            board.complete(task, json!("done")).await.unwrap();
        }
        assert_eq!(claimed, expected, "{dispatch:?}");
        assert_eq!(board.state().await.unwrap(), BoardState::AllCompleted);
    }
}

#[tokio::test]
async fn a_task_fails_after_its_attempts_and_blocks_what_depends_on_it() {
    let board = board().await.attempts(2);
    board.add([NewTask::new("a", 1), NewTask::new("b", 2).after("a")]).await.unwrap();
    for _ in 0..2 {
        let task = board.claim("w", LEASE).await.unwrap().unwrap();
        board.fail(task, "broken").await.unwrap();
    }
    assert!(board.claim("w", LEASE).await.unwrap().is_none());
    assert_eq!(board.state().await.unwrap(), BoardState::BlockedByFailures);
    let states: Vec<TaskState> = board.tasks().await.unwrap().into_iter().map(|task| task.state).collect();
    assert_eq!(states, [TaskState::Failed("broken".into()), TaskState::Waiting]);
}

#[tokio::test]
async fn a_claim_whose_lease_is_over_is_taken_away_and_can_do_nothing_any_more() {
    let (env, clock) = Env::seeded(1);
    let board = Board::open(&Store::memory_with(env, Limits::default()).await.unwrap(), "b").await.unwrap();
    board.add([NewTask::new("a", 1)]).await.unwrap();
    let late = board.claim("slow", LEASE).await.unwrap().unwrap();
    assert!(board.claim("fast", LEASE).await.unwrap().is_none());
    clock.advance(LEASE * 2);
    let taken = board.claim("fast", LEASE).await.unwrap().unwrap();
    assert_eq!(taken.task.attempts, 2);
    assert!(matches!(board.complete(late.clone(), 1).await, Err(BoardError::ClaimLost { .. })));
    assert!(matches!(board.fail(late, "late").await, Err(BoardError::ClaimLost { .. })));
    board.complete(taken, json!(7)).await.unwrap();
    assert_eq!(board.tasks().await.unwrap().items[0].state, TaskState::Completed(json!(7)));
}

#[tokio::test]
async fn a_lease_that_is_renewed_lasts_from_then_on() {
    let (env, clock) = Env::seeded(1);
    let board = Board::open(&Store::memory_with(env, Limits::default()).await.unwrap(), "b").await.unwrap();
    board.add([NewTask::new("a", 1)]).await.unwrap();
    let mut task = board.claim("slow", LEASE).await.unwrap().unwrap();
    for _ in 0..3 {
        board.renew(&mut task, LEASE).await.unwrap();
        board.renew(&mut task, LEASE).await.unwrap();
        clock.advance(LEASE / 2);
        assert!(board.claim("fast", LEASE).await.unwrap().is_none());
    }
    clock.advance(LEASE);
    assert_eq!(board.claim("fast", LEASE).await.unwrap().unwrap().task.attempts, 2);
    assert!(matches!(board.renew(&mut task, LEASE).await, Err(BoardError::ClaimLost { .. })));
    assert_eq!(board.reclaim().await.unwrap(), 0, "the old leases are gone");
}

/// A task that a newer program has stored is left as it is.
#[tokio::test]
async fn a_task_of_a_newer_version_is_refused() {
    let store = Store::memory().await.unwrap();
    let board = Board::open(&store, "b").await.unwrap();
    board.add([NewTask::new("a", 1)]).await.unwrap();
    assert_eq!(super::newer(&store, "flow.board", b"{\"id\"").await, 1);
    for refused in [board.tasks().await.map(drop), board.claim("w", LEASE).await.map(drop)] {
        assert!(matches!(refused, Err(BoardError::UnknownVersion { found: 2, supported: 1, .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn wrong_tasks_are_refused() {
    let board = board().await;
    board.add([NewTask::new("a", 1)]).await.unwrap();
    for (tasks, expected) in [
        (vec![NewTask::new("a", 1)], "there is a task \"a\" already"),
        (vec![NewTask::new("b", 1), NewTask::new("b", 1)], "there is a task \"b\" already"),
        (vec![NewTask::new("b", 1).after("x")], "there is no task \"x\""),
        (
            vec![NewTask::new("b", 1).after("c"), NewTask::new("c", 1).after("b")],
            "task \"b\" depends on itself, through others",
        ),
        (vec![NewTask::new("", 1)], "\"\" cannot be the name of a board or task: it is empty or too long"),
    ] {
        assert_eq!(board.add(tasks).await.unwrap_err().to_string(), expected);
    }
    assert_eq!(board.tasks().await.unwrap().items.len(), 1);
}

/// Workers that stop in the middle lose their claims; each task is completed once all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_workers_do_each_of_ten_thousand_tasks_once() {
    let (env, clock) = Env::seeded(1);
    let board =
        Board::open(&Store::memory_with(env, Limits::default()).await.unwrap(), "b").await.unwrap().attempts(100);
    let task = |number: u32| match number % 10 {
        0 => NewTask::new(format!("t{number:05}"), number),
        _ => NewTask::new(format!("t{number:05}"), number).after(format!("t{:05}", number - 1)),
    };
    board.add((0..10_000).map(task)).await.unwrap();
    let done: std::sync::Arc<Mutex<BTreeMap<String, u32>>> = Default::default();
    let workers = (0..32_u64).map(|worker| {
        let (board, done, clock) = (board.clone(), done.clone(), clock.clone());
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(worker);
            loop {
                let Some(task) = board.claim(&worker.to_string(), LEASE).await.unwrap() else {
                    if board.state().await.unwrap() != BoardState::Open {
                        return;
                    }
                    clock.advance(Duration::from_millis(100));
                    tokio::task::yield_now().await;
                    continue;
                };
                // A worker that is killed leaves its claim behind.
                if random.u32(0..100) == 0 {
                    continue;
                }
                let id = task.task.id.clone();
                if board.complete(task, 1).await.is_ok() {
                    *done.lock().entry(id).or_default() += 1;
                }
            }
        })
    });
    for worker in futures_util::future::join_all(workers).await {
        worker.unwrap();
    }
    assert_eq!(board.state().await.unwrap(), BoardState::AllCompleted);
    let done = done.lock();
    assert!(done.len() == 10_000 && done.values().all(|times| *times == 1));
}

/// A board whose next task is `c`: `a` and `b` are claimed, and all three have the lowest priority.
async fn two_claimed(store: &Store) -> (Board, [ClaimedTask; 2]) {
    let board = Board::open(store, "b").await.unwrap().dispatch(Dispatch::Priority);
    let tasks = [NewTask::new("a", 1), NewTask::new("b", 2), NewTask::new("c", 3), NewTask::new("d", 4)];
    board.add(tasks).await.unwrap();
    board.add([NewTask::new("after-a", 5).after("a").priority(9)]).await.unwrap();
    let first = board.claim("w", LEASE * 2).await.unwrap().unwrap();
    let second = board.claim("w", LEASE).await.unwrap().unwrap();
    assert_eq!((&*first.task.id, &*second.task.id), ("a", "b"));
    (board, [first, second])
}

async fn next(board: &Board) -> Option<String> {
    board.claim("w", LEASE).await.unwrap().map(|claimed| claimed.task.id)
}

/// What makes a task ready that comes before those that are left, and which task that is.
const EARLIER: [(&str, &str); 4] =
    [("added", "urgent"), ("completed", "after-a"), ("failed", "a"), ("lease over", "b")];

async fn make_ready(how: &str, board: &Board, clock: &VirtualClock, [a, _]: [ClaimedTask; 2]) {
    match how {
        "added" => board.add([NewTask::new("urgent", 6).priority(9)]).await.unwrap(),
        "completed" => board.complete(a, 1).await.unwrap(),
        "failed" => board.fail(a, "broken").await.unwrap(),
        _ => clock.advance(LEASE),
    }
}

#[tokio::test]
async fn a_task_that_becomes_ready_before_the_others_is_the_next_one() {
    for (how, expected) in EARLIER {
        let (env, clock) = Env::seeded(1);
        let store = Store::memory_with(env, Limits::default()).await.unwrap();
        let (board, claimed) = two_claimed(&store).await;
        make_ready(how, &board, &clock, claimed).await;
        for expected in [expected, "c", "d"] {
            assert_eq!(next(&board).await.as_deref(), Some(expected), "{how}");
        }
        assert_eq!(next(&board).await, None, "{how}");
    }
}

/// Another handle stands for another process: this one learns of its tasks after a while, or when it has no others.
#[tokio::test]
async fn a_task_that_another_handle_makes_ready_is_claimed_within_a_tenth_of_a_second_or_when_none_is_left() {
    for (how, expected) in EARLIER {
        for waits in [false, true] {
            let (env, clock) = Env::seeded(1);
            let store = Store::memory_with(env, Limits::default()).await.unwrap();
            let other = Board::open(&store, "b").await.unwrap().dispatch(Dispatch::Priority);
            let (board, claimed) = two_claimed(&store).await;
            make_ready(how, &other, &clock, claimed).await;
            let order = match waits || how == "lease over" {
                true => [expected, "c", "d"],
                false => ["c", "d", expected],
            };
            clock.advance(Duration::from_millis(if waits { 100 } else { 0 }));
            for expected in order {
                assert_eq!(next(&board).await.as_deref(), Some(expected), "{how}, {waits}");
            }
            assert_eq!(next(&board).await, None, "{how}, {waits}");
        }
    }
}

/// The leases of another handle end, too, before this one says that no task is ready.
#[tokio::test]
async fn a_lease_of_another_handle_is_taken_away_before_no_task_is_found() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    let board = Board::open(&store, "b").await.unwrap();
    board.add([NewTask::new("a", 1), NewTask::new("b", 2)]).await.unwrap();
    assert_eq!(next(&board).await.as_deref(), Some("a"));
    let other = Board::open(&store, "b").await.unwrap();
    other.claim("w", Duration::from_millis(5)).await.unwrap().unwrap();
    assert_eq!(next(&board).await, None);
    clock.advance(Duration::from_millis(10));
    assert_eq!(next(&board).await.as_deref(), Some("b"));
}

/// A hundred tasks fail for good when their leases end, and the one behind them is given back.
#[tokio::test]
async fn more_leases_than_one_commit_takes_away_can_be_over() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    let board = Board::open(&store, "b").await.unwrap().attempts(2);
    let task = |number: usize| NewTask::new(format!("t{number:03}"), number);
    board.add((0..100).map(task)).await.unwrap();
    for _ in 0..100 {
        let claimed = board.claim("w", LEASE).await.unwrap().unwrap();
        board.fail(claimed, "broken").await.unwrap();
        clock.advance(Duration::from_millis(1));
        if board.tasks().await.unwrap().items.iter().all(|task| task.attempts > 0) {
            break;
        }
    }
    assert_eq!(next(&board).await.as_deref(), Some("t050"));
}

/// Claims that wait at the same time share commits, and so do the ends of claims.
#[tokio::test]
async fn many_callers_share_a_commit() {
    let store = Store::memory().await.unwrap();
    let board = Board::open(&store, "b").await.unwrap();
    board.add((0..32).map(|number| NewTask::new(format!("t{number:02}"), number))).await.unwrap();
    let before = store.generation().await.unwrap().0;
    let claims = (0..32).map(|worker| {
        let board = board.clone();
        tokio::spawn(async move { board.claim(&worker.to_string(), LEASE).await.unwrap().unwrap() })
    });
    let claimed: Vec<ClaimedTask> =
        futures_util::future::join_all(claims).await.into_iter().map(|claimed| claimed.unwrap()).collect();
    // In the order in which they asked.
    for (number, claimed) in claimed.iter().enumerate() {
        assert_eq!(claimed.task.id, format!("t{number:02}"));
    }
    let completions = claimed.into_iter().map(|claimed| {
        let board = board.clone();
        tokio::spawn(async move { board.complete(claimed, 1).await.unwrap() })
    });
    futures_util::future::join_all(completions).await;
    assert_eq!(board.state().await.unwrap(), BoardState::AllCompleted);
    assert!(store.generation().await.unwrap().0 - before <= 4);
}

/// A caller completes with what it knows of its claim. If the task was changed meanwhile, it is read again.
#[tokio::test]
async fn a_task_that_was_added_behind_a_claimed_one_is_ready_after_it() {
    let store = Store::memory().await.unwrap();
    let (board, other) = (Board::open(&store, "b").await.unwrap(), Board::open(&store, "b").await.unwrap());
    board.add([NewTask::new("a", 1), NewTask::new("b", 2)]).await.unwrap();
    let (a, b) = (board.claim("w", LEASE).await.unwrap().unwrap(), board.claim("w", LEASE).await.unwrap().unwrap());
    other.add([NewTask::new("c", 3).after("a").after("b")]).await.unwrap();
    let (first, second, again) = tokio::join!(board.complete(a.clone(), 1), board.complete(b, 1), board.complete(a, 2));
    first.unwrap();
    second.unwrap();
    assert!(matches!(again, Err(BoardError::ClaimLost { .. })), "a claim is completed once");
    assert_eq!(next(&board).await.as_deref(), Some("c"));
    let tasks = board.tasks().await.unwrap().items;
    assert_eq!(tasks[0].state, TaskState::Completed(json!(1)));
}

/// Two handles stand for two processes, which meet at the same tasks all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_handles_do_each_task_once() {
    let store = Store::memory().await.unwrap();
    let handles = [Board::open(&store, "b").await.unwrap(), Board::open(&store, "b").await.unwrap()];
    let task = |number: u32| match number % 4 {
        0 => NewTask::new(format!("t{number:05}"), number),
        _ => NewTask::new(format!("t{number:05}"), number).after(format!("t{:05}", number - 1)),
    };
    handles[0].add((0..2_000).map(task)).await.unwrap();
    let workers = (0..16).map(|worker| {
        let board = handles[worker % 2].clone();
        tokio::spawn(async move {
            let mut done = Vec::new();
            while board.state().await.unwrap() == BoardState::Open {
                match board.claim(&worker.to_string(), LEASE).await.unwrap() {
                    Some(claimed) => {
                        done.push(claimed.task.id.clone());
                        board.complete(claimed, 1).await.unwrap();
                    }
                    None => tokio::task::yield_now().await,
                }
            }
            done
        })
    });
    let done = futures_util::future::join_all(workers).await;
    let mut done: Vec<String> = done.into_iter().flat_map(|done| done.unwrap()).collect();
    done.sort();
    assert_eq!(done, (0..2_000).map(|number| format!("t{number:05}")).collect::<Vec<_>>());
    assert_eq!(handles[1].state().await.unwrap(), BoardState::AllCompleted);
}
