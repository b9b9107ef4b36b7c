//! What operators do to schedules: put, pause, resume, trigger, backfill, delete; and what idle engines leave to the
//! next engine.

use latchwork::store::{Env, Limits, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Ctx, Engine, Overlap, RunCause, Schedule, ScheduleDescription, ScheduleError, StoredSchedules, WorkflowError,
    workflow,
};

use super::kit::{Kit, SECOND, at, report, word};

fn is_missing<T: std::fmt::Debug>(result: Result<T, WorkflowError>) -> bool {
    matches!(result, Err(WorkflowError::Schedule(ScheduleError::NotFound { .. })))
}

#[tokio::test]
async fn a_paused_schedule_starts_nothing_and_continues_when_it_is_resumed() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(0)).await;
    let schedules = kit.test.engine().schedules();
    kit.until(60).await;
    schedules.pause("s", "the books are closed").await.unwrap();
    let described = kit.description().await;
    assert_eq!((described.paused.as_deref(), described.next), (Some("the books are closed"), None));
    assert!(schedules.next("s", 3).await.unwrap().is_empty());
    kit.until(200).await;
    schedules.pause("s", "and stay so").await.unwrap();
    assert_eq!(kit.description().await.paused_since, described.paused_since, "since the first time");
    kit.put(kit.minutely(0)).await;
    assert_eq!(kit.description().await.paused.as_deref(), Some("and stay so"), "a change does not resume it");
    schedules.resume("s").await.unwrap();
    schedules.resume("s").await.unwrap();
    kit.until(300).await;
    assert_eq!(kit.runs().await, [(60, "started"), (240, "started"), (300, "started")]);
    assert_eq!(kit.description().await.counts.missed, 0, "what is passed over in a pause is not missed");
}

#[tokio::test]
async fn an_occurrence_that_waits_in_a_pause_is_started_after_it() {
    let kit = Kit::new().await;
    kit.put(kit.minutely(90).overlap(Overlap::QueueAll)).await;
    let schedules = kit.test.engine().schedules();
    kit.until(120).await;
    schedules.pause("s", "?").await.unwrap();
    kit.until(400).await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "queued")]);
    assert_eq!(kit.description().await.waiting, 1);
    schedules.resume("s").await.unwrap();
    kit.settle().await;
    assert_eq!(kit.runs().await, [(60, "started"), (120, "queued"), (120, "started")]);
}

#[tokio::test]
async fn a_trigger_fires_now_and_obeys_the_overlap_policy() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.put(kit.minutely(30).overlap(Overlap::Skip)).await;
    let [first, second] = [schedules.trigger("s").await.unwrap(), schedules.trigger("s").await.unwrap()];
    assert_eq!([&*first, &*second], ["s@2026-01-01T00:00:00Z~1", "s@2026-01-01T00:00:00Z~2"]);
    kit.settle().await;
    assert_eq!(kit.runs().await, [(0, "started"), (0, "skipped")]);
    assert_eq!(schedules.runs("s").limit(1).await.unwrap().items[0].cause, RunCause::Trigger);
    assert_eq!(kit.executions().await.len(), 1);
    // The other policies.
    kit.put(kit.minutely(30).overlap(Overlap::QueueOne)).await;
    schedules.trigger("s").await.unwrap();
    schedules.trigger("s").await.unwrap();
    kit.settle().await;
    assert_eq!(kit.runs().await[2..], [(0, "queued"), (0, "skipped")]);
    kit.put(kit.minutely(30).overlap(Overlap::CancelRunning)).await;
    schedules.trigger("s").await.unwrap();
    kit.settle().await;
    assert!(kit.runs().await.contains(&(0, "cancelled previous")));
    kit.put(kit.minutely(30).overlap(Overlap::Allow)).await;
    let last = schedules.trigger("s").await.unwrap();
    kit.settle().await;
    assert!(kit.description().await.running.contains(&last));
    assert!(is_missing(schedules.trigger("t").await));
}

/// Two operators and the keeper change a schedule at the same time: no change overwrites another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn simultaneous_requests_to_a_schedule_are_all_done() {
    let report = report();
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    let often = Schedule::every("s", SECOND).workflow(&report, 0).overlap(Overlap::Allow);
    engine.schedules().put(often).await.unwrap();
    let trigger = |number: usize| {
        let schedules = engine.schedules();
        tokio::spawn(async move {
            if number.is_multiple_of(8) {
                schedules.pause("s", "?").await.unwrap();
                schedules.resume("s").await.unwrap();
            }
            schedules.trigger("s").await.unwrap()
        })
    };
    let triggers: Vec<_> = (0..200).map(trigger).collect();
    let mut ids = std::collections::BTreeSet::new();
    for triggered in triggers {
        assert!(ids.insert(triggered.await.unwrap()), "each has a number of its own");
    }
    for id in &ids {
        for _ in 0..1000 {
            if engine.describe(id).await.is_ok() {
                break;
            }
            store.env().sleep(SECOND / 200).await;
        }
        assert_eq!(engine.handle(&report, id).result().await.unwrap(), 0, "{id}");
    }
}

#[tokio::test]
async fn a_paused_schedule_can_still_be_triggered_and_backfilled() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.put(kit.minutely(0)).await;
    schedules.pause("s", "?").await.unwrap();
    kit.until(200).await;
    schedules.trigger("s").await.unwrap();
    assert_eq!(schedules.backfill("s", at(60), at(180)).await.unwrap(), 2);
    kit.until(260).await;
    assert_eq!(kit.runs().await, [(200, "started"), (60, "started"), (120, "started")]);
}

#[tokio::test]
async fn a_backfill_starts_each_occurrence_of_a_range_that_was_not_started() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.until(3600).await;
    kit.put(Schedule::cron("s", "*/10 * * * *").workflow(&kit.report, 5)).await;
    kit.until(4200).await;
    assert_eq!(
        schedules.backfill("s", at(2400), at(4201)).await.unwrap_err().kind(),
        latchwork::store::ErrorKind::Invalid
    );
    assert_eq!(schedules.backfill("s", at(2400), at(4200).plus(SECOND / 4)).await.unwrap(), 4);
    assert_eq!(schedules.backfill("s", at(4199), at(4200)).await.unwrap(), 0);
    kit.until(4260).await;
    let expected = [(4200, "started"), (2400, "started"), (3000, "started"), (3600, "started"), (4200, "skipped")];
    assert_eq!(kit.runs().await, expected, "one after the other, under every policy");
    assert_eq!(kit.description().await.backfills, 0);
    // If overlaps are allowed, all start at once.
    kit.put(Schedule::cron("s", "*/10 * * * *").workflow(&kit.report, 500).overlap(Overlap::Allow)).await;
    assert_eq!(schedules.backfill("s", at(600), at(2400)).await.unwrap(), 3);
    kit.settle().await;
    assert_eq!(kit.description().await.running.len(), 3);
}

#[tokio::test]
async fn a_backfill_of_thousands_of_occurrences_is_worked_off() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.test.set_time(at(10_000));
    kit.put(Schedule::every("s", SECOND).workflow(&kit.report, 0).overlap(Overlap::Allow).end(at(3000))).await;
    assert_eq!(schedules.backfill("s", at(1), at(10_000)).await.unwrap(), 3000);
    for _ in 0..1000 {
        kit.settle().await;
        if kit.description().await.counts.started == 3000 {
            break;
        }
    }
    let described = kit.description().await;
    assert_eq!((described.counts.started, described.backfills, described.next), (3000, 0, None));
    assert_eq!(schedules.runs("s").limit(usize::MAX).await.unwrap().items.len(), 100, "the last hundred are kept");
}

#[tokio::test]
async fn a_schedule_that_is_put_again_is_changed() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.put(kit.minutely(0)).await;
    kit.until(60).await;
    let same = schedules.put(kit.minutely(3)).await.unwrap();
    assert_eq!((same.next, same.counts.started, same.input), (Some(at(120)), 1, 3.into()));
    let other = Schedule::cron("s", "@hourly").workflow(&kit.report, 4).start(at(7000)).end(at(10_800));
    let other = schedules.put(other).await.unwrap();
    assert_eq!((other.next, other.created), (Some(at(7200)), same.created));
    assert_eq!(schedules.next("s", 10).await.unwrap(), [at(7200), at(10_800)]);
    kit.until(20_000).await;
    assert_eq!(kit.runs().await, [(60, "started"), (7200, "started"), (10_800, "started")]);
    assert_eq!(kit.description().await.next, None, "it has come to its end");
}

#[tokio::test]
async fn a_deleted_schedule_starts_nothing_more_and_leaves_its_executions() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.put(kit.minutely(90).overlap(Overlap::QueueAll)).await;
    kit.until(120).await;
    schedules.delete("s").await.unwrap();
    assert!(schedules.get("s").await.unwrap().is_none() && is_missing(schedules.delete("s").await));
    assert!(is_missing(schedules.runs("s").await) && is_missing(schedules.next("s", 1).await));
    assert!(is_missing(schedules.pause("s", "?").await) && is_missing(schedules.resume("s").await));
    assert!(is_missing(schedules.backfill("s", at(0), at(1)).await));
    kit.until(400).await;
    assert_eq!(kit.executions().await.len(), 1, "what waited is gone");
    // A new schedule of the same name starts again from zero.
    kit.put(kit.minutely(0)).await;
    assert!(kit.runs().await.is_empty());
    kit.until(420).await;
    assert_eq!(kit.runs().await, [(420, "started")]);
}

#[tokio::test]
async fn schedules_are_listed_by_their_names_with_and_without_an_engine() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    for name in ["b", "a", "c"] {
        kit.put(Schedule::every(name, 60 * SECOND).workflow(&kit.report, 1)).await;
    }
    let names =
        |page: Vec<ScheduleDescription>| page.into_iter().map(|schedule| schedule.name).collect::<Vec<String>>();
    let first = schedules.list().limit(2).await.unwrap();
    assert_eq!(names(first.items), ["a", "b"]);
    let stored = StoredSchedules::on(kit.test.engine().store()).await.unwrap();
    let rest = stored.list().after(first.next).await.unwrap();
    assert_eq!((names(rest.items), rest.next), (vec!["c".to_string()], None));
    schedules.pause("b", "the books are closed").await.unwrap();
    assert_eq!(names(stored.list().paused().limit(1).await.unwrap().items), ["b"]);
    assert_eq!(stored.get("a").await.unwrap(), schedules.get("a").await.unwrap());
    let none = StoredSchedules::on(&Store::memory().await.unwrap()).await.unwrap();
    assert!(none.list().await.unwrap().items.is_empty() && none.get("a").await.unwrap().is_none());
    assert!(is_missing(none.runs("a").await));
}

/// The command line works in this way: an idle engine records the request.
#[tokio::test]
async fn an_idle_engine_leaves_the_firing_to_the_next() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
    let idle = Engine::on(&store).idle().start().await.unwrap();
    idle.schedules().put(Schedule::every("s", 60 * SECOND).workflow_by_name("report", 3)).await.unwrap();
    let triggered = idle.schedules().trigger("s").await.unwrap();
    let turns = async || {
        for _ in 0..2000 {
            tokio::task::yield_now().await;
        }
    };
    turns().await;
    assert!(idle.describe(&triggered).await.is_err());
    idle.stop();
    let report = report();
    let engine = Engine::on(&store).register(&report).start().await.unwrap();
    turns().await;
    clock.advance(3 * SECOND);
    assert_eq!(engine.handle(&report, &triggered).result().await.unwrap(), 3);
    clock.advance(57 * SECOND);
    turns().await;
    let runs = engine.schedules().runs("s").limit(10).await.unwrap().items;
    assert_eq!(runs.iter().map(word).collect::<Vec<_>>(), ["started", "started"]);
    assert_eq!(runs[0].time, at(60));
}

#[tokio::test]
async fn an_execution_that_continues_as_new_still_runs() {
    let again = workflow("report").run(async |ctx: Ctx, times: u64| {
        ctx.sleep(70 * SECOND).await?;
        if times > 0 {
            return ctx.continue_as_new(&(times - 1)).await;
        }
        Ok(times)
    });
    let kit = Kit { test: TestEngine::new(&again, 1).await.unwrap(), report: again };
    kit.put(kit.minutely(2)).await;
    kit.until(300).await;
    let expected = [(60, "started"), (120, "skipped"), (180, "skipped"), (240, "skipped"), (300, "started")];
    assert_eq!(kit.runs().await, expected);
}
