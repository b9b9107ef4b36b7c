//! A crash right before and right after every commit while schedules fire: each occurrence still starts one execution,
//! and an occurrence that waits for an end is started after it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::Crashes;
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Overlap, Retry, Schedule, workflow};
use parking_lot::Mutex;

use super::kit::{SECOND, at, report};

/// A schedule with this policy and three occurrences. Each execution takes longer than the time to the next occurrence.
fn schedule(overlap: Overlap) -> Schedule {
    let times = Schedule::every("s", 10 * SECOND).start(at(10)).end(at(30)).catch_up(Duration::from_secs(86_400));
    times.overlap(overlap).workflow(&report(), 15)
}

/// What is stored in the end: for each execution whether it was cancelled, and the counts. `None` if the process has
/// ended.
async fn look(engine: &Engine, overlap: Overlap) -> Option<String> {
    let (schedules, env) = (engine.schedules(), engine.store().env().clone());
    if schedules.get("s").await.ok()?.is_none() {
        schedules.put(schedule(overlap)).await.ok()?;
    }
    let mut looks = 0;
    loop {
        let described = schedules.get("s").await.ok()??;
        if described.next.is_none() && described.running.is_empty() && described.waiting == 0 {
            break;
        }
        looks += 1;
        if looks > 1000 {
            return Some(format!("something is left to do: {described:?}"));
        }
        env.sleep(SECOND).await;
    }
    let mut found = Vec::new();
    for execution in engine.list(ExecutionFilter::new().workflow("report")).ascending().await.ok()?.items {
        let described = engine.describe(&execution.id).await.ok()?;
        found.push((described.started, described.changed, execution.id));
    }
    found.sort();
    let ids: BTreeSet<_> = found.iter().map(|(.., id)| id.clone()).collect();
    let overlaps = found.windows(2).any(|two| two[0].1 > two[1].0);
    let counts = schedules.get("s").await.ok()??.counts;
    let (started, others) = (counts.started, counts.skipped + counts.rejected + counts.missed);
    Some(format!("{} executions, {started} started, {others} not, overlaps {overlaps}", ids.len()))
}

async fn crash(overlap: Overlap, expected: &'static [&'static str]) {
    let looked: Arc<Mutex<Vec<String>>> = Arc::default();
    // The crash test drives a workflow; the schedule runs beside it.
    let waits = workflow("waits").run(async |ctx: Ctx, (): ()| {
        ctx.receive::<()>("done").await?;
        let often = Retry::exponential().max_attempts(100);
        ctx.run("end", async || Ok(())).retry(often).await
    });
    let told = looked.clone();
    let crashes = Crashes::of(|| waits.clone(), ()).register(report).outside(move |engine| {
        let looked = told.clone();
        async move {
            let Some(found) = look(&engine, overlap).await else { return };
            looked.lock().push(found);
            let _ = engine.signal("execution", "done", &()).id("done").await;
        }
    });
    let mut checked = 0;
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}: {:?}", outcome.crash, outcome.result);
        let looked = std::mem::take(&mut *looked.lock());
        let last = looked.last().expect("the last life looks");
        assert!(expected.contains(&last.as_str()), "{:?}: {last}", outcome.crash);
        checked += 1;
    });
    assert_eq!(crashes.await, checked);
    assert!(checked > 20, "{checked}");
}

#[tokio::test]
async fn a_crash_anywhere_starts_each_occurrence_once() {
    crash(Overlap::Allow, &["3 executions, 3 started, 0 not, overlaps true"]).await;
}

#[tokio::test]
async fn a_crash_anywhere_leaves_the_queue_of_occurrences_as_it_was() {
    crash(Overlap::QueueAll, &["3 executions, 3 started, 0 not, overlaps false"]).await;
}

/// Whether an occurrence finds the previous execution running depends on how long the crash takes.
#[tokio::test]
async fn a_crash_anywhere_skips_or_starts_each_occurrence() {
    let (two, one) =
        ("2 executions, 2 started, 1 not, overlaps false", "1 executions, 1 started, 2 not, overlaps false");
    crash(Overlap::Skip, Box::leak(Box::new([two, one]))).await;
}

#[tokio::test]
async fn a_crash_anywhere_cancels_and_starts_in_one_step() {
    crash(
        Overlap::CancelRunning,
        &["3 executions, 3 started, 0 not, overlaps false", "3 executions, 3 started, 0 not, overlaps true"],
    )
    .await;
}
