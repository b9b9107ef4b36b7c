//! A year of awkward expressions. Engines are stopped at any moment, the clock is set far ahead and back, and schedules
//! are paused. The times are those of `times.rs`. Of the expressions that fire more than 400 times a year, one is fired
//! here in each of three zones.
//!
//! What must hold: every occurrence outside of a pause starts one execution; no occurrence in a pause starts one.

use std::collections::BTreeSet;
use std::time::Duration;

use latchwork::store::{Env, Limits, Store, Timestamp, VirtualClock};
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Overlap, Schedule, Workflow, workflow};

use super::kit::{BEGIN, SECOND};
use super::times::lines;

const DAY: u64 = 86_400;

fn job() -> Workflow<(), ()> {
    let forever = Duration::from_secs(100 * 365 * DAY);
    workflow("job").keep(forever).run(async |_: Ctx, (): ()| Ok(()))
}

/// An expression that fires more often than the file lists times, and the zones in which it is fired here.
const OFTEN: (&str, [&str; 3]) = ("*/15 2 * * *", ["Europe/Berlin", "America/New_York", "Asia/Kolkata"]);

/// Its times, made of those that the file lists for two o'clock and half past two: where these are the same moment, the
/// hour does not exist, and so are those of the other quarters. The file has the hash of the result.
fn often(zone: &str) -> Vec<u64> {
    let line = |expression: &str| {
        let mut found = lines().filter(|(its, other, ..)| *its == zone && *other == expression);
        found.next().expect("the file has the line")
    };
    let (two, half_past) = (line("0 2 * * *").4, line("30 2 * * *").4);
    let mut times = Vec::new();
    for (two, half_past) in two.into_iter().zip(half_past) {
        let quarters = if two == half_past { 1 } else { 4 };
        times.extend((0..quarters).map(|quarter| two + quarter * 900));
    }
    let hash = times.iter().fold(0_u64, |hash, time| hash.wrapping_mul(31).wrapping_add(*time));
    assert_eq!((times.len(), hash), (line(OFTEN.0).2, line(OFTEN.0).3), "{zone}");
    times
}

/// The expressions that are fired here, with their zones and times.
fn fired() -> impl Iterator<Item = (&'static str, &'static str, Vec<u64>)> {
    let listed = lines().map(|(zone, expression, .., times)| (zone, expression, times));
    let listed = listed.filter(|(.., times)| !times.is_empty());
    listed.chain(OFTEN.1.into_iter().map(|zone| (zone, OFTEN.0, often(zone))))
}

/// A year, and the engine that runs at present.
struct Year {
    env: Env,
    clock: std::sync::Arc<VirtualClock>,
    store: Store,
    engine: Engine,
    names: Vec<String>,
    /// The executions that must have been started in the end.
    expected: BTreeSet<(u64, String)>,
    /// The time of the clock when all due occurrences were last done.
    reached: u64,
    crashes: u32,
}

impl Year {
    async fn new(seed: u64) -> Year {
        let (env, clock) = Env::seeded(seed);
        clock.jump_to(Timestamp((BEGIN - 1) * 1_000_000));
        let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
        let engine = Engine::on(&store).register(&job()).start().await.unwrap();
        let (mut names, mut expected) = (Vec::new(), BTreeSet::new());
        for (zone, expression, times) in fired() {
            let name = format!("{zone} {expression}");
            let schedule = Schedule::cron(&name, expression).zone(zone).workflow(&job(), ());
            let schedule = schedule.overlap(Overlap::Allow).catch_up(Duration::from_secs(3 * 365 * DAY));
            engine.schedules().put(schedule).await.unwrap();
            expected.extend(times.into_iter().map(|time| (time, name.clone())));
            names.push(name);
        }
        Year { env, clock, store, engine, names, expected, reached: 0, crashes: 0 }
    }

    fn now(&self) -> u64 {
        self.env.now().0 / 1_000_000
    }

    /// Sets the clock, and lets a second pass: by then every task has noticed.
    fn set(&self, seconds: u64) {
        self.clock.jump_to(Timestamp(seconds * 1_000_000));
        self.clock.advance(SECOND);
    }

    async fn turns(&self, count: u64) {
        for _ in 0..count {
            tokio::task::yield_now().await;
        }
    }

    /// Stops the engine in the middle of its work, and starts another.
    async fn crash(&mut self) {
        self.crashes += 1;
        self.engine.stop();
        self.engine = Engine::on(&self.store).register(&job()).start().await.unwrap();
    }

    /// Waits until everything that is due is done.
    async fn settle(&mut self) {
        for _ in 0..100_000 {
            self.turns(50).await;
            let all = self.engine.schedules().list().limit(1000).await.unwrap().items;
            let is_due = |next: Option<Timestamp>| next.is_some_and(|next| next <= self.env.now());
            if !all.iter().any(|schedule| is_due(schedule.next) || !schedule.running.is_empty()) {
                self.reached = self.reached.max(self.now());
                return;
            }
        }
        panic!("something stays due");
    }

    async fn started(&self) -> u64 {
        let all = self.engine.schedules().list().limit(1000).await.unwrap().items;
        all.iter().map(|schedule| schedule.counts.started).sum()
    }

    /// Pauses all schedules for some days, with crashes and jumps meanwhile.
    async fn pause(&mut self) {
        self.settle().await;
        for name in &self.names {
            self.engine.schedules().pause(name, "?").await.unwrap();
        }
        let (from, before) = (self.now(), self.started().await);
        for _ in 0..3 {
            self.set(self.now() + self.env.random() % (3 * DAY));
            self.turns(self.env.random() % 200).await;
            self.crash().await;
        }
        self.turns(2000).await;
        assert_eq!(self.started().await, before, "nothing is started in a pause");
        for name in &self.names {
            self.engine.schedules().resume(name).await.unwrap();
        }
        let until = self.now();
        // If the clock was set back before the pause, some of them were started before.
        let passed_over = self.reached.max(from) + 1..=until;
        self.expected.retain(|(time, _)| !passed_over.contains(time));
    }

    async fn live(mut self) {
        let end = BEGIN + 365 * DAY - 1;
        while self.now() < end {
            match self.env.random() % 12 {
                0 => {
                    self.settle().await;
                    self.set(self.now() - self.env.random() % 7200);
                }
                1 => self.pause().await,
                _ => self.set((self.now() + self.env.random() % (6 * DAY)).min(end - 1)),
            }
            self.turns(self.env.random() % 300).await;
            if self.env.random().is_multiple_of(2) {
                self.crash().await;
            }
        }
        self.settle().await;
        let mut found = BTreeSet::new();
        let (mut cursor, mut count) = (None, 0);
        loop {
            let page = self.engine.list(ExecutionFilter::new()).ascending().limit(1000).after(cursor).await.unwrap();
            count += page.items.len();
            found.extend(page.items.into_iter().map(|execution| execution.id.to_string()));
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        let id = |(time, name): &(u64, String)| format!("{name}@{}", rfc3339(*time));
        let expected: BTreeSet<String> = self.expected.iter().map(id).collect();
        let missing: Vec<_> = expected.difference(&found).take(5).collect();
        let foreign: Vec<_> = found.difference(&expected).take(5).collect();
        assert!(missing.is_empty() && foreign.is_empty(), "not started: {missing:?}; no occurrence: {foreign:?}");
        assert_eq!((count as u64, expected.len()), (self.started().await, count));
        assert!(count > 6000 && self.crashes > 30, "{count} {}", self.crashes);
    }
}

/// Seconds since 1970 as text, for times of 2026.
fn rfc3339(time: u64) -> String {
    let (mut day, second) = ((time - BEGIN) / DAY, time % DAY);
    let mut month = 1;
    for length in [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < length {
            break;
        }
        (day, month) = (day - length, month + 1);
    }
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("2026-{month:02}-{:02}T{hour:02}:{minute:02}:{:02}Z", day + 1, second % 60)
}

/// Each seed is another year of crashes, jumps and pauses.
#[tokio::test]
async fn every_occurrence_of_a_year_starts_one_execution_through_crashes_jumps_and_pauses() {
    let seeds = std::env::var("LATCHWORK_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 1..=seeds.unwrap_or(2_u64) {
        println!("seed {seed}");
        Year::new(seed).await.live().await;
    }
}
