//! Occurrences at their times: overlap policies, catch-up, jitter, jumps of the clock, and times without an engine.

use std::time::Duration;

use latchwork::store::{Env, Limits, Store, Timestamp};
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Ctx, Engine, ExecutionState, Failure, Overlap, RunOutcome, Schedule, WorkflowError, workflow,
};

use super::kit::{Kit, SECOND, at, report, word};

#[tokio::test]
async fn an_occurrence_starts_an_execution_that_is_named_after_it() {
    let kit = Kit::new().await;
    kit.put(Schedule::cron("s", "30 1 * * *").zone("Asia/Kolkata").workflow(&kit.report, 7)).await;
    kit.until(2 * 86_400).await;
    let ids: Vec<String> = kit.executions().await.iter().map(|(id, _)| id.to_string()).collect();
    assert_eq!(ids, ["s@2026-01-01T20:00:00Z", "s@2026-01-02T20:00:00Z"]);
    let handle = kit.test.engine().handle(&kit.report, "s@2026-01-01T20:00:00Z");
    assert_eq!(handle.result().await.unwrap(), 7);
    let described = kit.description().await;
    assert_eq!((described.counts.started, described.next), (2, Some(at(2 * 86_400 + 72_000))));
}

#[tokio::test]
async fn skip_starts_nothing_while_an_execution_runs() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(150).overlap(Overlap::Skip)).await;
    kit.until(300).await;
    let expected = [(60, "started"), (120, "skipped"), (180, "skipped"), (240, "started"), (300, "skipped")];
    assert_eq!(kit.runs().await, expected);
}

#[tokio::test]
async fn queue_one_lets_one_occurrence_wait_for_the_end() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(150).overlap(Overlap::QueueOne)).await;
    kit.until(230).await;
    let expected = [(60, "started"), (120, "queued"), (180, "skipped"), (120, "started")];
    assert_eq!(kit.runs().await, expected);
    let described = kit.description().await;
    assert_eq!((described.waiting, described.running.len()), (0, 1));
    let runs = kit.test.engine().schedules().runs("s").limit(1).await.unwrap().items;
    let late = runs[0].at.0 - at(210).0;
    assert!(late < 1_000_000, "it was started when the other had ended: {late} us after that");
}

#[tokio::test]
async fn queue_all_runs_every_occurrence_one_after_the_other() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(90).overlap(Overlap::QueueAll).end(at(240))).await;
    kit.until(240).await;
    assert_eq!(kit.description().await.waiting, 1, "two have ended by now, the third runs");
    kit.until(600).await;
    let runs = kit.runs().await;
    let started: Vec<u64> = runs.iter().filter(|(_, word)| *word == "started").map(|(time, _)| *time).collect();
    assert_eq!(started, [60, 120, 180, 240]);
    let mut ends = Vec::new();
    for (id, state) in kit.executions().await {
        assert!(matches!(state, ExecutionState::Completed(_)), "{id}: {state:?}");
        let described = kit.test.engine().describe(&id).await.unwrap();
        ends.push((described.started, described.changed));
    }
    ends.sort_unstable();
    assert!(ends.windows(2).all(|two| two[0].1 <= two[1].0), "no two of them overlap: {ends:?}");
}

#[tokio::test]
async fn cancel_running_cancels_and_starts_in_one_step() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(150).overlap(Overlap::CancelRunning)).await;
    kit.until(180).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "cancelled previous"), (180, "cancelled previous")]);
    let states: Vec<ExecutionState> = kit.executions().await.into_iter().map(|(_, state)| state).collect();
    let cancelled = |state: &ExecutionState| matches!(state, ExecutionState::Cancelled(_));
    assert!(cancelled(&states[0]) && cancelled(&states[1]) && !cancelled(&states[2]), "{states:?}");
    assert_eq!(kit.description().await.running.len(), 1);
}

#[tokio::test]
async fn allow_starts_executions_beside_each_other() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(150).overlap(Overlap::Allow)).await;
    kit.until(180).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "started"), (180, "started")]);
    assert_eq!(kit.description().await.running.len(), 3);
}

/// A parked execution has not ended; a terminated or failed execution has.
#[tokio::test]
async fn the_end_counts_however_an_execution_ends() {
    let fails = workflow("report").run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Err::<u64, _>(Failure::new("no paper"))
    });
    let test = TestEngine::new(&fails, 1).await.unwrap();
    let kit = Kit { test, report: fails };
    kit.put(kit.minutely(90).overlap(Overlap::QueueAll)).await;
    kit.until(160).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "queued"), (120, "started")]);
    let running = kit.description().await.running[0].clone();
    kit.test.engine().terminate(&running, "enough").await.unwrap();
    kit.settle().await;
    assert!(kit.description().await.running.is_empty());
    kit.until(180).await;
    assert_eq!(kit.runs().await.last(), Some(&(180, "started")), "nothing was in its way");
}

/// A schedule whose program was away for an hour.
#[tokio::test]
async fn occurrences_without_an_engine_are_caught_up_within_the_window_and_missed_beyond() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
    let report = report();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    let schedule = Schedule::every("s", 600 * SECOND).workflow(&report, 0).overlap(Overlap::Allow);
    engine.schedules().put(schedule.catch_up(1500 * SECOND)).await.unwrap();
    engine.stop();
    drop(engine);
    clock.advance(3600 * SECOND);
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
    let runs = engine.schedules().runs("s").limit(100).await.unwrap().items;
    let told: Vec<_> = runs.iter().rev().map(|run| (run.time.since(at(0)).as_secs(), word(run))).collect();
    assert_eq!(told, [(600, "missed"), (2400, "started"), (3000, "started"), (3600, "started")]);
    let missed = RunOutcome::Missed { count: 3, before: at(2100) };
    assert_eq!((&runs[3].outcome, engine.schedules().get("s").await.unwrap().unwrap().counts.missed), (&missed, 3));
}

/// Jitter is computed from the name and the time, so it is the same after a crash.
#[tokio::test]
async fn jitter_puts_occurrences_off_and_keeps_their_names() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(0).jitter(30 * SECOND).overlap(Overlap::Allow)).await;
    kit.until(60 * 20).await;
    let runs = kit.test.engine().schedules().runs("s").limit(100).await.unwrap().items;
    let late: Vec<u64> = runs.iter().map(|run| run.at.since(run.time).as_secs()).collect();
    assert!(late.iter().all(|late| *late <= 30) && late.iter().any(|late| *late > 5), "{late:?}");
    assert!(runs.iter().all(|run| run.time.0 % 60_000_000 == 0));
}

/// The keeper sleeps by a clock that is never set. It notices within a second that the time of day was set forward, by
/// any amount.
#[tokio::test]
async fn when_the_clock_is_set_forward_an_occurrence_is_at_most_a_second_late() {
    for jump in [86_400 * 20 + 1, 3600, 59] {
        let kit = Kit::new().await;
        let schedule = Schedule::every("s", Duration::from_secs(jump)).workflow(&kit.report, 0);
        kit.put(schedule.start(at(jump)).catch_up(Duration::from_secs(10))).await;
        kit.settle().await;
        kit.test.set_time(at(jump));
        kit.test.run(kit.test.env().sleep(SECOND)).await;
        kit.settle().await;
        let runs = kit.test.engine().schedules().runs("s").limit(10).await.unwrap().items;
        assert_eq!(runs.len(), 1, "{jump}");
        assert!(runs[0].at.0 - at(jump).0 <= 1_000_000, "{runs:?}");
    }
}

/// The clock is set back over an occurrence that has been started: it is not started again.
#[tokio::test]
async fn when_the_clock_is_set_back_no_occurrence_comes_twice() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(0)).await;
    kit.until(120).await;
    kit.test.set_time(at(30));
    kit.until(170).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "started")]);
    kit.until(180).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "started"), (180, "started")]);
    // A change of the times, and a pause, do not bring any of them back either.
    kit.test.set_time(at(30));
    kit.put(Schedule::every("s", 30 * SECOND).workflow(&kit.report, 0)).await;
    kit.test.engine().schedules().pause("s", "?").await.unwrap();
    kit.test.engine().schedules().resume("s").await.unwrap();
    assert_eq!(kit.description().await.next, Some(at(210)));
}

/// Without schedules the engine does not look at the clock; with one, it does not ask the store.
#[tokio::test]
async fn an_engine_without_schedules_does_not_look_at_the_clock() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
    let report = report();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
    assert!(clock.next_deadline().is_none_or(|next| next > 2 * SECOND), "{:?}", clock.next_deadline());
    engine.schedules().put(Schedule::every("s", 3600 * SECOND).workflow(&report, 0)).await.unwrap();
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(clock.next_deadline(), Some(SECOND));
}

/// A program that does not know the workflow: the occurrence stays and is reported, and the next program starts it.
#[tokio::test]
async fn an_occurrence_whose_workflow_is_not_registered_waits_for_a_program_that_has_it() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
    let report = report();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    engine.schedules().put(Schedule::every("s", 60 * SECOND).workflow(&report, 0)).await.unwrap();
    engine.stop();
    let engine = Engine::on(&store).start().await.unwrap();
    let turns = async || {
        for _ in 0..2000 {
            tokio::task::yield_now().await;
        }
    };
    turns().await;
    clock.advance(60 * SECOND);
    turns().await;
    let described = engine.schedules().get("s").await.unwrap().unwrap();
    assert!(described.stalled.unwrap().contains("not registered"));
    assert_eq!((described.next, described.counts.started), (Some(at(60)), 0));
    engine.stop();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    turns().await;
    let described = engine.schedules().get("s").await.unwrap().unwrap();
    assert_eq!((described.stalled, described.counts.started), (None, 1));
}

/// An input that fitted when the schedule was put does not fit the program that fires it: the schedule continues.
#[tokio::test]
async fn a_refused_start_is_reported_as_rejected_and_the_schedule_continues() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
    let report = report();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    engine.schedules().put(Schedule::every("s", 60 * SECOND).workflow(&report, 7)).await.unwrap();
    engine.stop();
    let other = workflow("report").run(async |_: Ctx, text: String| Ok(text));
    let engine = Engine::on(&store).register(&other).start().await.unwrap();
    for _ in 0..2 {
        for _ in 0..2000 {
            tokio::task::yield_now().await;
        }
        clock.advance(60 * SECOND);
    }
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
    let runs = engine.schedules().runs("s").limit(100).await.unwrap().items;
    let told: Vec<_> = runs.iter().map(|run| (run.time.since(at(0)).as_secs(), word(run))).collect();
    assert_eq!(told, [(120, "rejected"), (60, "rejected")]);
    assert!(matches!(engine.describe(&runs[0].id).await, Err(WorkflowError::NotFound { .. })));
}

/// A caller has started an execution under the id of an occurrence.
#[tokio::test]
async fn an_occurrence_whose_id_is_taken_is_skipped() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(0)).await;
    kit.test.engine().start(&kit.report, 1).id("s@2026-01-01T00:01:00Z").await.unwrap();
    kit.until(120).await;
    assert_eq!(kit.runs().await, [(60, "skipped"), (120, "started")]);
}

/// Many schedules that are due at once all fire, each once.
#[tokio::test]
async fn a_thousand_schedules_are_due_at_once() {
    let kit = Kit::new().await;
    for number in 0..1000 {
        kit.put(Schedule::every(format!("s{number}"), 3600 * SECOND).workflow(&kit.report, 0)).await;
    }
    kit.until(3600).await;
    for _ in 0..20 {
        kit.settle().await;
    }
    let ids: Vec<String> = kit.executions().await.iter().map(|(id, _)| id.to_string()).collect();
    assert_eq!(ids.len(), 1000);
    assert!(ids.iter().all(|id| id.ends_with("@2026-01-01T01:00:00Z")));
    let late = kit.test.engine().schedules().runs("s7").limit(1).await.unwrap().items;
    assert!(late[0].at < Timestamp(at(3600).0 + 1_000_000), "{late:?}");
}
