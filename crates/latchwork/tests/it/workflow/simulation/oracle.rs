//! Judges a simulation from outside: by what callers were told, what bodies and workflows saw, and the trace.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use latchwork::Value;
use latchwork::store::{Env, Timestamp};
use latchwork::testing::{Report, TraceKind};
use latchwork::workflow::{ExecutionId, Result, WorkflowError};
use parking_lot::Mutex;

use super::jobs::{Manner, Output, Start};

/// How long a start may take in a running process: longer than any commit.
const PATIENCE: Duration = Duration::from_secs(120);

/// How much later than its deadline an execution may end: some commits are slow.
const SLACK: Duration = Duration::from_secs(60);

/// How an execution ended.
#[derive(Debug, Clone, PartialEq)]
pub enum End {
    Completed(Output),
    Failed(String),
    TimedOut,
}

/// A sleep: its execution, its place, and the time of day that the code read just before it.
type Sleep = (ExecutionId, usize, Timestamp);

#[derive(Default)]
pub struct Oracle {
    env: OnceLock<Env>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    complaints: Vec<String>,
    /// How often each body ran.
    bodies: BTreeMap<(ExecutionId, usize), u32>,
    /// The value of an earlier place that a body has seen: once used, a value never changes.
    values: BTreeMap<(ExecutionId, usize), Value>,
    /// When an execution came to a sleep: the first time, and each time its code ran again.
    asleep: BTreeMap<Sleep, Vec<Duration>>,
    /// When each sleep ended, and how long it should have taken.
    awake: Vec<(Sleep, Duration, Duration)>,
    /// Starts without an answer so far, and since when.
    asked: BTreeMap<(u32, usize), Duration>,
    /// When each caller asked first.
    first_asked: BTreeMap<usize, Duration>,
    /// Executions whose start was acknowledged.
    acknowledged: BTreeSet<ExecutionId>,
    /// The callers that were told that their start created the execution.
    won: BTreeMap<ExecutionId, Vec<usize>>,
    ends: BTreeMap<ExecutionId, End>,
}

impl Oracle {
    pub fn meet(&self, env: &Env) {
        let _ = self.env.set(env.clone());
    }

    pub fn env(&self) -> &Env {
        self.env.get().expect("nothing runs before the simulation has started")
    }

    /// A body begins. Returns how often it has begun.
    pub fn body(&self, id: &ExecutionId, place: usize, got: &[Value]) -> u32 {
        let mut seen = self.seen.lock();
        for (earlier, value) in got.iter().enumerate() {
            seen.uses(id, earlier, value);
        }
        let runs = seen.bodies.entry((id.clone(), place)).or_default();
        *runs += 1;
        *runs
    }

    pub fn asleep(&self, id: &ExecutionId, place: usize, began: Timestamp) {
        let now = self.env().monotonic();
        self.seen.lock().asleep.entry((id.clone(), place, began)).or_default().push(now);
    }

    pub fn awake(&self, id: &ExecutionId, place: usize, began: Timestamp, length: Duration) {
        let now = self.env().monotonic();
        let (mut seen, sleep) = (self.seen.lock(), (id.clone(), place, began));
        // By the process's own clock it may have slept long enough, though the time of day was set back.
        if seen.asleep.get(&sleep).is_none_or(|came| now < came[0] + length) {
            seen.awake.push((sleep, now, length));
        }
    }

    pub fn asks(&self, life: u32, start: &Start) {
        let now = self.env().monotonic();
        let mut seen = self.seen.lock();
        seen.asked.insert((life, start.caller), now);
        seen.first_asked.entry(start.caller).or_insert(now);
    }

    pub fn answered(&self, life: u32, start: &Start, answer: Result<ExecutionId, &WorkflowError>) {
        let mut seen = self.seen.lock();
        seen.asked.remove(&(life, start.caller));
        match answer {
            Ok(id) => {
                if matches!(start.manner, Manner::Refuse) {
                    seen.won.entry(id.clone()).or_default().push(start.caller);
                }
                seen.acknowledged.insert(id);
            }
            // The start of another caller is stored.
            Err(WorkflowError::AlreadyStarted { id }) => drop(seen.acknowledged.insert(id.clone())),
            Err(_) => {}
        }
    }

    pub fn sees(&self, id: &ExecutionId, end: End) {
        let mut seen = self.seen.lock();
        let first = seen.ends.entry(id.clone()).or_insert_with(|| end.clone()).clone();
        if first != end {
            seen.complaints.push(format!("{id} ended as {first:?} and as {end:?}"));
        }
    }

    /// Returns everything that is wrong.
    pub fn judge(&self, report: &Report, jobs: &BTreeMap<u64, &Start>, limit: Duration) -> Vec<String> {
        let mut seen = std::mem::take(&mut *self.seen.lock());
        seen.settled(report);
        seen.results(report, jobs);
        seen.bodies(report);
        seen.times(report, jobs, limit);
        seen.deadlines(report, jobs, limit);
        seen.complaints
    }
}

impl Seen {
    fn uses(&mut self, id: &ExecutionId, place: usize, value: &Value) {
        let first = self.values.entry((id.clone(), place)).or_insert_with(|| value.clone()).clone();
        if first != *value {
            self.complaints.push(format!("{id} at {place} gave {first} and {value}"));
        }
    }

    /// No caller waits, nothing is left over, nothing is parked.
    fn settled(&mut self, report: &Report) {
        let mut complain = |wrong: bool, what: String| self.complaints.extend(wrong.then_some(what));
        complain(report.stuck.is_some(), format!("stuck: {:?}", report.stuck));
        complain(!report.unfinished.is_empty(), format!("unfinished: {:?}", report.unfinished));
        complain(!report.parked.is_empty(), format!("parked: {:?}", report.parked));
        complain(!report.errors.is_empty(), format!("callers were told: {:?}", report.errors));
        complain(!report.misfiled.is_empty(), format!("misfiled: {:?}", report.misfiled));
        for id in &self.acknowledged {
            complain(!report.results.contains_key(id), format!("{id} was acknowledged and did not end"));
        }
        let over = report.events.last().map_or(Duration::ZERO, |event| event.at);
        for ((life, caller), since) in &self.asked {
            // No answer is expected from a process that is gone; a paused process has time from the end of its pause.
            let of_life = report.events.iter().filter(|event| event.life == *life);
            let gone =
                |what: &TraceKind| matches!(what, TraceKind::Crash(_) | TraceKind::Stopped | TraceKind::NoEngine(_));
            let woke = of_life.clone().filter(|event| event.what == TraceKind::Woke).map(|event| event.at).max();
            let waited = over.saturating_sub(woke.unwrap_or(*since).max(*since));
            let is_forgotten = !of_life.clone().any(|event| gone(&event.what)) && waited > PATIENCE;
            complain(is_forgotten, format!("caller {caller} has no answer to its start in life {life} for {waited:?}"));
        }
    }

    /// Every execution ended as its input says.
    fn results(&mut self, report: &Report, jobs: &BTreeMap<u64, &Start>) {
        for (id, result) in &report.results {
            let (end, output): (End, Option<Output>) = match result {
                Ok(value) => match serde_json_output(value) {
                    Some(output) => (End::Completed(output.clone()), Some(output)),
                    None => {
                        self.complaints.push(format!("{id} gave {value}"));
                        continue;
                    }
                },
                Err(WorkflowError::Failed { failure, .. }) => {
                    let value: Value = failure.message().parse().unwrap_or_default();
                    (End::Failed(failure.message().into()), serde_json_output(&value))
                }
                Err(WorkflowError::TimedOut { .. }) => (End::TimedOut, None),
                Err(error) => {
                    self.complaints.push(format!("the result of {id}: {error}"));
                    continue;
                }
            };
            if let Some(told) = self.ends.get(id)
                && *told != end
            {
                self.complaints.push(format!("{id} ended as {end:?}, and callers were told {told:?}"));
            }
            let winners = self.won.get(id).cloned().unwrap_or_default();
            if winners.len() > 1 {
                self.complaints.push(format!("{id} was started by {winners:?}, and each was told that it won"));
            }
            match (output, &end) {
                (Some((n, values)), _) => self.output(id, n, &values, jobs, &winners, matches!(end, End::Failed(_))),
                (None, End::TimedOut) => {}
                (None, end) => self.complaints.push(format!("{id} ended as {end:?}")),
            }
        }
    }

    fn output(
        &mut self,
        id: &ExecutionId,
        n: u64,
        values: &[Value],
        jobs: &BTreeMap<u64, &Start>,
        winners: &[usize],
        failed: bool,
    ) {
        let Some(start) = jobs.get(&n) else { return self.complaints.push(format!("{id} belongs to no job {n}")) };
        let (expected, fails) = start.job.expected();
        let fits = expected.len() == values.len()
            && expected.iter().zip(values).all(|(expected, value)| match (expected, value) {
                (Value::Null, _) => true,
                // The step's value, and the run that returned it.
                (expected, Value::Array(pair)) => pair.first() == Some(expected),
                (expected, value) => expected == value,
            });
        if !fits || fails != failed {
            self.complaints.push(format!("{id} came to {values:?}, expected {expected:?}, failed {failed}"));
        }
        // Only the output has used the last value.
        for (place, value) in values.iter().enumerate() {
            self.uses(id, place, value);
        }
        let is_named = !matches!(start.manner, Manner::Unnamed);
        if is_named && start.id != **id || winners.iter().any(|winner| *winner as u64 != n) {
            self.complaints.push(format!("{id} ran with the input of caller {n}, started by {winners:?}"));
        }
    }

    /// The order of bodies. A place is the number in a step's name.
    fn bodies(&mut self, report: &Report) {
        let mut owner = 0;
        let mut furthest = BTreeMap::<ExecutionId, usize>::new();
        let mut ended = BTreeSet::new();
        let mut late = BTreeMap::<(ExecutionId, u32), u32>::new();
        for event in &report.events {
            match &event.what {
                TraceKind::Owner => owner = event.life,
                TraceKind::Ended(id) if !ended.insert(id.clone()) => {
                    self.complaints.push(format!("{event}: for the second time"));
                }
                TraceKind::Body { id, step, .. } if event.life != owner => {
                    // The engine learned that its commit landed before it was paused or replaced, so it can run that
                    // one body. It cannot commit, so it cannot run a second one.
                    let bodies = late.entry((id.clone(), event.life)).or_default();
                    *bodies += 1;
                    if *bodies > 1 {
                        self.complaints.push(format!("{event}: {step} in an engine that is no longer the owner"));
                    }
                }
                TraceKind::Body { id, step, .. } => {
                    let place: usize = step[1..].parse().unwrap_or_default();
                    let before = furthest.entry(id.clone()).or_default();
                    if place < *before {
                        self.complaints.push(format!("{event}: s{before} has used its result"));
                    }
                    *before = place.max(*before);
                    if ended.contains(id) {
                        self.complaints.push(format!("{event}: it has ended"));
                    }
                }
                _ => {}
            }
        }
    }

    /// No sleep ended early and nothing timed out early, by the clock that was the furthest ahead.
    fn times(&mut self, report: &Report, jobs: &BTreeMap<u64, &Start>, limit: Duration) {
        let Some(first) = report.events.first() else { return };
        let start = first.time.minus(first.at);
        let jumps: Vec<(Duration, i64)> = report
            .events
            .iter()
            .filter(|event| matches!(event.what, TraceKind::Jump(_)))
            .map(|event| (event.at, event.time.minus(event.at).0 as i64 - start.0 as i64))
            .collect();
        // How far the time of day was ahead at most, and at least, up to a moment.
        let offsets = |until: Duration| {
            let offsets = jumps.iter().filter(|(at, _)| *at <= until).map(|(_, by)| *by);
            (offsets.clone().min().unwrap_or(0).min(0), offsets.max().unwrap_or(0).max(0))
        };
        let latest = |at: Duration| start.plus(at).0.saturating_add_signed(offsets(at).1);
        // The least time of day at an instant. A sleep counts from its begin. Other tasks run between that and the
        // moment when the code read the time, so the clock may be set back in between. The two clocks need not tick
        // together, so one microsecond is allowed.
        let least = |at: Duration| {
            let before = jumps.iter().rfind(|(jump, _)| *jump < at).map_or(0, |(_, by)| *by);
            let within = jumps.iter().filter(|(jump, _)| *jump == at).map(|(_, by)| *by);
            start.plus(at).0.saturating_add_signed(within.fold(before, i64::min) - 1)
        };
        for (sleep, at, length) in std::mem::take(&mut self.awake) {
            let began = self.asleep.get(&sleep).into_iter().flatten().map(|came| least(*came)).min();
            let until = began.map_or(sleep.2, Timestamp).plus(length).0;
            if latest(at) < until {
                self.complaints.push(format!("{} woke at {at:?}, {} µs early", sleep.0, until - latest(at)));
            }
        }
        for (id, result) in &report.results {
            let Err(WorkflowError::TimedOut { .. }) = result else { continue };
            let ended = report.events.iter().find(|event| event.what == TraceKind::Ended(id.clone()));
            let callers = jobs.values().filter(|job| job.id == **id).map(|job| job.caller);
            let asked = callers.filter_map(|caller| self.first_asked.get(&caller)).min();
            let (Some(ended), Some(asked)) = (ended, asked) else { continue };
            let began = start.plus(*asked).0.saturating_add_signed(offsets(ended.at).0);
            if latest(ended.at) < Timestamp(began).plus(limit).0 {
                self.complaints.push(format!("{id} timed out early, at {:?}", ended.at));
            }
        }
    }

    /// An execution with a time limit ends in time, or as soon as an engine runs again to end it.
    fn deadlines(&mut self, report: &Report, jobs: &BTreeMap<u64, &Start>, limit: Duration) {
        let at = |wanted: &dyn Fn(&TraceKind) -> bool| {
            report.events.iter().filter(|event| wanted(&event.what)).map(|event| event.at).collect::<Vec<_>>()
        };
        let back = report.events.iter().map(|event| match event.what {
            TraceKind::Jump(by) if by < 0 => Duration::from_micros(by.unsigned_abs()),
            _ => Duration::ZERO,
        });
        let back: Duration = back.sum();
        let last_engine =
            at(&|what| matches!(what, TraceKind::Engine | TraceKind::Woke)).into_iter().max().unwrap_or_default();
        for start in jobs.values().filter(|start| start.is_limited && !matches!(start.manner, Manner::Unnamed)) {
            let id = ExecutionId::from(start.id.as_str());
            let started = at(&|what| *what == TraceKind::Started(id.clone())).into_iter().min();
            let ended = at(&|what| *what == TraceKind::Ended(id.clone())).into_iter().min();
            let (Some(started), Some(ended)) = (started, ended) else { continue };
            let latest = (started + limit + back).max(last_engine) + SLACK;
            if ended > latest {
                self.complaints.push(format!("{id} ended at {ended:?}; the latest time was {latest:?}"));
            }
        }
    }
}

fn serde_json_output(value: &Value) -> Option<Output> {
    let pair = value.as_array().filter(|pair| pair.len() == 2)?;
    Some((pair[0].as_u64()?, pair[1].as_array()?.clone()))
}
