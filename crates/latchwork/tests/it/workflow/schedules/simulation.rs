//! Schedules under faults from a seed: crashes, restarts, pauses with a second engine, lost answers, slow commits and
//! jumps of the clock, with operators who pause, resume and trigger.
//!
//! What must hold: every occurrence between the start and the end starts one execution, unless the schedule is paused
//! at its time; no occurrence is started during a pause or before its time; under `Skip`, `QueueOne` and `QueueAll` no
//! two executions overlap; an occurrence of `Skip` and `QueueOne` that is not started is listed as skipped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::{Caller, Faults, Report, Simulation};
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, Overlap, RunCause, RunOutcome, Schedule, ScheduleError, ScheduleRun, Workflow,
    WorkflowError, workflow,
};
use parking_lot::Mutex;

use super::kit::{SECOND, at};
use crate::workflow::simulation::campaign_of;

/// The schedules: each with its policy, and its occurrences until the end.
const SCHEDULES: [(&str, Overlap, u64); 6] = [
    ("beside", Overlap::Allow, 40),
    ("line", Overlap::QueueAll, 55),
    ("instead", Overlap::CancelRunning, 70),
    ("held", Overlap::Allow, 45),
    ("skips", Overlap::Skip, 35),
    ("one", Overlap::QueueOne, 50),
];

/// The schedules whose executions never overlap.
const IN_TURN: [&str; 3] = ["line", "skips", "one"];

/// The schedules whose executions last longer than the time between two occurrences, which are skipped then.
const SKIPPING: [&str; 2] = ["skips", "one"];

const END: u64 = 600;

/// How often the watcher sees the same pause before it resumes the schedule. That is longer than any operator pauses.
/// A client of a simulation ends once, in any process. If the operator of a paused process ends, and the operator of a
/// later process crashes between its pause and its `resume`, no operator comes after it.
const PATIENCE: u32 = 60;

#[derive(Clone, Default)]
struct Play {
    complaints: Arc<Mutex<Vec<String>>>,
    /// How often `held` was paused and resumed.
    paused: Arc<Mutex<u32>>,
    triggered: Arc<Mutex<BTreeSet<String>>>,
    /// How many occurrences were skipped.
    skipped: Arc<Mutex<u64>>,
}

fn job() -> Workflow<u64, u64> {
    workflow("job").keep(Duration::from_secs(365 * 86_400)).run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Ok(seconds)
    })
}

fn schedule(name: &str, overlap: Overlap, every: u64) -> Schedule {
    let lasts = if SKIPPING.contains(&name) { every * 5 / 2 } else { every / 2 };
    let times = Schedule::every(name, Duration::from_secs(every)).start(at(10)).end(at(END));
    times.overlap(overlap).catch_up(Duration::from_secs(300 * 86_400)).workflow_by_name("job", lasts)
}

impl Play {
    /// Puts the schedules and waits until all their occurrences are started or skipped.
    async fn watcher(self, caller: Caller) -> Result<(), WorkflowError> {
        let (schedules, env) = (caller.engine().schedules(), caller.env().clone());
        for (name, overlap, every) in SCHEDULES {
            if schedules.get(name).await?.is_none() {
                schedules.put(schedule(name, overlap, every)).await?;
            }
        }
        let (mut pause, mut seen) = (None, 0);
        loop {
            let mut left = 0;
            for found in schedules.list().limit(10).await?.items {
                if found.name == "held" {
                    seen = if found.paused_since.is_some() && found.paused_since == pause { seen + 1 } else { 0 };
                    pause = found.paused_since;
                }
                left += found.running.len() + usize::from(found.next.is_some()) + found.waiting as usize;
                left += usize::from(found.paused.is_some());
                if IN_TURN.contains(&&*found.name) && found.running.len() > 1 {
                    self.complaints.lock().push(format!("{:?} run at once", found.running));
                }
            }
            if left == 0 {
                return Ok(());
            }
            if seen == PATIENCE {
                schedules.resume("held").await?;
            }
            env.sleep(7 * SECOND).await;
        }
    }

    /// Pauses and resumes one of them, and triggers another.
    async fn operator(self, caller: Caller) -> Result<(), WorkflowError> {
        let (schedules, env) = (caller.engine().schedules(), caller.env().clone());
        for _ in 0..4 {
            env.sleep(Duration::from_secs(env.random() % 120)).await;
            match schedules.pause("held", "?").await {
                Err(WorkflowError::Schedule(ScheduleError::NotFound { .. })) => continue,
                paused => paused?,
            }
            let pause = async || {
                let found = schedules.get("held").await?;
                Ok::<_, WorkflowError>(found.map(|found| (found.paused_since, found.counts.started)))
            };
            let before = pause().await?;
            env.sleep(Duration::from_secs(env.random() % 120)).await;
            let after = pause().await?;
            // The operator of another life may have resumed it meanwhile; then this is another pause, or none.
            let paused = before.and_then(|(paused, _)| paused);
            let is_same = paused.is_some() && after.and_then(|(paused, _)| paused) == paused;
            if is_same && after != before {
                self.complaints.lock().push(format!("started in a pause: {before:?}, {after:?}"));
            }
            schedules.resume("held").await?;
            *self.paused.lock() += 1;
            match schedules.trigger("line").await {
                Err(WorkflowError::Schedule(ScheduleError::NotFound { .. })) => {}
                triggered => drop(self.triggered.lock().insert(triggered?.to_string())),
            }
        }
        // A trigger is durable before its execution is started. The simulation must not end in between: a process that
        // crashes then would have no successor.
        while !self.not_started(caller.engine()).await?.is_empty() {
            env.sleep(7 * SECOND).await;
        }
        Ok(())
    }

    /// The triggered occurrences that have no execution.
    async fn not_started(&self, engine: &Engine) -> Result<Vec<String>, WorkflowError> {
        let page = engine.list(ExecutionFilter::new()).ascending().limit(1000).await?;
        let ids: BTreeSet<String> = page.items.iter().map(|found| found.id.to_string()).collect();
        Ok(self.triggered.lock().iter().filter(|id| !ids.contains(*id)).cloned().collect())
    }

    fn simulation(&self, seed: u64) -> Simulation {
        let (watcher, operator, judge) = (self.clone(), self.clone(), self.clone());
        Simulation::new(seed)
            .register(&job())
            .client(move |caller| watcher.clone().watcher(caller))
            .client(move |caller| operator.clone().operator(caller))
            .afterwards(move |engine| async move { judge.judge(&engine).await })
    }

    async fn judge(&self, engine: &Engine) -> Result<(), WorkflowError> {
        let mut complaints = Vec::new();
        let page = engine.list(ExecutionFilter::new()).ascending().limit(1000).await?;
        let ids: BTreeSet<String> = page.items.iter().map(|found| found.id.to_string()).collect();
        for (name, _, every) in SCHEDULES {
            let Some(described) = engine.schedules().get(name).await? else { continue };
            let mut expected = BTreeSet::new();
            for second in (10..=END).step_by(every as usize) {
                // After a slow commit or a jump of the clock, the schedule may be put after its first occurrence.
                if at(second) <= described.created {
                    continue;
                }
                expected.insert((at(second), format!("{name}@{}", rfc3339(second))));
            }
            let runs = engine.schedules().runs(name).limit(1000).await?.items;
            let is_skipped = |run: &&ScheduleRun| matches!(run.outcome, RunOutcome::Skipped(_));
            let skipped: BTreeSet<String> = runs.iter().filter(is_skipped).map(|run| run.id.to_string()).collect();
            *self.skipped.lock() += skipped.len() as u64;
            for (_, id) in &expected {
                let may_be_skipped = SKIPPING.contains(&name) && skipped.contains(id);
                if !ids.contains(id) && name != "held" && !may_be_skipped {
                    complaints.push(format!("{id} was not started"));
                }
                if ids.contains(id) && skipped.contains(id) {
                    complaints.push(format!("{id} was started and skipped"));
                }
            }
            let known: BTreeSet<&String> = expected.iter().map(|(_, id)| id).collect();
            let own = ids.iter().filter(|id| id.starts_with(&format!("{name}@")));
            let foreign: Vec<_> = own.filter(|id| !known.contains(id) && !id.contains('~')).collect();
            complaints.extend(foreign.iter().map(|id| format!("{id} is no occurrence")));
            if described.counts.missed + described.counts.rejected > 0 {
                complaints.push(format!("{name}: {:?}", described.counts));
            }
            for run in runs {
                // A trigger has no time of its own but that of its call, which a clock that jumps back can undercut.
                if run.outcome.is_start() && run.cause != RunCause::Trigger && run.at < run.time {
                    complaints.push(format!("{run:?} came before its time"));
                }
                if run.outcome.is_start() && !ids.contains(&*run.id) {
                    complaints.push(format!("{run:?} is listed, and did not happen"));
                }
            }
        }
        complaints.extend(self.not_started(engine).await?.iter().map(|id| format!("{id} is lost")));
        self.complaints.lock().extend(complaints);
        Ok(())
    }
}

fn rfc3339(second: u64) -> String {
    format!("2026-01-01T00:{:02}:{:02}Z", second / 60, second % 60)
}

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let play = Play::default();
    let report = play.simulation(seed).faults(faults).timeout(Duration::from_secs(3 * 86_400)).run();
    let mut complaints = play.complaints.lock().clone();
    complaints.extend(report.stuck.clone());
    complaints.extend(report.errors.iter().map(ToString::to_string));
    complaints.extend(report.misfiled.iter().cloned());
    (report, complaints)
}

#[test]
fn schedules_keep_their_promises_under_any_faults() {
    campaign_of(simulate, 100);
}

/// Checks that pauses, triggers, jumps and crashes all happen.
#[test]
fn every_scene_of_schedules_is_played() {
    let (mut pauses, mut triggers, mut lives, mut skipped) = (0, 0, 0, 0);
    for seed in 1..=30 {
        let play = Play::default();
        lives += play.simulation(seed).timeout(Duration::from_secs(3 * 86_400)).run().lives;
        pauses += *play.paused.lock();
        triggers += play.triggered.lock().len();
        skipped += *play.skipped.lock();
    }
    let counts = format!("{pauses} {triggers} {lives} {skipped}");
    assert!(pauses > 30 && triggers > 30 && lives > 40 && skipped > 100, "{counts}");
}
