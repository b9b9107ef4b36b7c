//! An engine on virtual time with a workflow of a given duration, and what its schedules have started.

use std::time::Duration;

use latchwork::store::Timestamp;
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Ctx, ExecutionFilter, ExecutionId, ExecutionState, RunOutcome, Schedule, ScheduleRun, Workflow, workflow,
};

/// The first second of 2026, at which virtual time begins.
pub(super) const BEGIN: u64 = 1_767_225_600;

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// This many seconds after the beginning.
pub(super) fn at(seconds: u64) -> Timestamp {
    Timestamp((BEGIN + seconds) * 1_000_000)
}

/// Takes as many seconds as its input says.
pub(super) fn report() -> Workflow<u64, u64> {
    workflow("report").keep(Duration::from_secs(10 * 365 * 86_400)).run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Ok(seconds)
    })
}

pub(super) struct Kit {
    pub(super) test: TestEngine,
    pub(super) report: Workflow<u64, u64>,
}

impl Kit {
    pub(super) async fn new() -> Kit {
        let report = report();
        Kit { test: TestEngine::new(&report, 1).await.unwrap(), report }
    }

    /// A schedule of every minute, whose executions take `takes` seconds.
    pub(super) fn minutely(&self, takes: u64) -> Schedule {
        Schedule::every("s", 60 * SECOND).workflow(&self.report, takes)
    }

    pub(super) async fn put(&self, schedule: Schedule) {
        self.test.engine().schedules().put(schedule).await.unwrap();
    }

    /// Lets time pass until this many seconds after the beginning, and a moment more.
    pub(super) async fn until(&self, seconds: u64) {
        let now = self.test.env().now();
        let left = Duration::from_micros(at(seconds).0 - now.0) + Duration::from_millis(500);
        let sleep = self.test.env().sleep(left);
        self.test.run(sleep).await;
        self.settle().await;
    }

    /// Runs everything that needs no time.
    pub(super) async fn settle(&self) {
        for _ in 0..2000 {
            tokio::task::yield_now().await;
        }
    }

    /// The outcomes of occurrences, the oldest first: the second of each after the beginning, and a word.
    pub(super) async fn runs(&self) -> Vec<(u64, &'static str)> {
        let runs = self.test.engine().schedules().runs("s").limit(1000).await.unwrap().items;
        runs.iter().rev().map(|run| (run.time.0 / 1_000_000 - BEGIN, word(run))).collect()
    }

    /// All executions, each with its state.
    pub(super) async fn executions(&self) -> Vec<(ExecutionId, ExecutionState)> {
        let page = self.test.engine().list(ExecutionFilter::new()).ascending().limit(1000).await.unwrap();
        page.items.into_iter().map(|found| (found.id, found.state)).collect()
    }

    pub(super) async fn description(&self) -> latchwork::workflow::ScheduleDescription {
        self.test.engine().schedules().get("s").await.unwrap().unwrap()
    }
}

pub(super) fn word(run: &ScheduleRun) -> &'static str {
    match run.outcome {
        RunOutcome::Started => "started",
        RunOutcome::Skipped(_) => "skipped",
        RunOutcome::Queued => "queued",
        RunOutcome::Missed { .. } => "missed",
        RunOutcome::Rejected(_) => "rejected",
        RunOutcome::CancelledPrevious(_) => "cancelled previous",
        _ => "something else",
    }
}
