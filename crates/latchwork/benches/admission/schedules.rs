//! Schedules: the cost of many schedules for a process while none is due, and the delay of the last one if many are due
//! at the same moment.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use latchwork::store::Timestamp;
use latchwork::workflow::{Ctx, Engine, Schedule, Workflow, workflow};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::queue::start_all;
use crate::report::{Figure, Report, median, resident_mb};
use crate::{child, commits, given, measured, processor_seconds, rates, steps_of, tell_commits};

/// How many tasks put schedules at the same time.
const CALLERS: usize = 1024;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Processor time and memory of a process that has opened a store with many schedules that are not due, less those of a
/// process that has opened a store without schedules.
pub(crate) fn at_rest(report: &Report) {
    let is_wanted = ["cpu", "memory"].map(|part| report.wants(&format!("admission.schedules.{part}")));
    if is_wanted == [false; 2] {
        return;
    }
    let (rounds, count, seconds) = if report.quick { (1, 5_000, 3) } else { (3, 100_000, 20) };
    let [without, with] = [0, count].map(|count| {
        let directory = tempfile::tempdir().expect("a directory");
        let [_, _] = measured(child("child-schedule", directory.path(), count));
        directory
    });
    let (mut shares, mut memory) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let [less, more] = [&without, &with].map(|it| measured::<2>(child("child-scheduled", it.path(), seconds)));
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("admission.schedules: {more:.4?} (MB, s in {seconds} s) with schedules, {less:.4?} without");
        }
        memory.push(more[0] - less[0]);
        shares.push((more[1] - less[1]) / seconds as f64 * 100.0);
    }
    let figure = |name, value, unit, floor, target| report.add(Figure { name, value, unit, floor, target });
    if is_wanted[0] {
        figure("admission.schedules.cpu", median(shares), "% of a core", 100.0, "0 (none measurable)");
    }
    if is_wanted[1] {
        figure("admission.schedules.memory", median(memory), "MB resident", 50.0, "≤ 1");
    }
}

/// Puts `count` schedules that all fire from tomorrow on.
pub(crate) fn child_schedule<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(words);
    crate::runtime().block_on(async {
        let once = steps_of("once", 1);
        let (engine, tomorrow) =
            (Engine::open(directory).register(&once).start().await.expect("an engine"), after(DAY));
        put_all(&engine, count, move |number| {
            let (minute, hour) = (number % 60, number / 60 % 24);
            let daily = Schedule::cron(format!("daily-{number}"), format!("{minute} {hour} * * *"));
            daily.zone("Europe/Berlin").start(tomorrow).workflow(&once, number as u64)
        })
        .await;
        println!("{} {}", resident_mb(), processor_seconds());
        engine.stop();
        engine.store().close().await.expect("a close");
    });
}

/// Opens the store, waits until the index has taken in everything, and is idle for some seconds.
pub(crate) fn child_scheduled<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, seconds) = given(words);
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).register(&steps_of("once", 1)).start().await.expect("an engine");
        while engine.store().maintain().await.expect("maintenance") {}
        tokio::time::sleep(Duration::from_secs(3)).await;
        let before = processor_seconds();
        tokio::time::sleep(Duration::from_secs(seconds as u64)).await;
        println!("{} {}", resident_mb(), processor_seconds() - before);
    });
}

/// Measures from the due time of many schedules until the body of the last execution begins, in turn with the same
/// measurement for as many executions that callers start.
pub(crate) fn late(runtime: &Runtime, report: &Report) {
    if !report.wants("admission.schedules.late") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let begun = Arc::new(Semaphore::new(0));
    let once = counted(&begun);
    let engine = runtime.block_on(Engine::open(directory.path()).register(&once).start()).expect("an engine");
    let (rounds, count, lead) = if report.quick { (1, 1_000, 4) } else { (5, 10_000, 8) };
    let started = |callers| {
        rates::settle(&engine);
        runtime.block_on(start(&engine, &once, &begun, (count, callers)))
    };
    let tried = rates::IN_FLIGHT.map(|callers| (started(callers), callers));
    let (_, best) = tried.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("at least one was tried");
    if std::env::var_os("LATCHWORK_STATS").is_some() {
        eprintln!("admission.schedules.late: ms of {count} starts by callers: {tried:.0?}");
    }
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        floors.push(started(best));
        rates::settle(&engine);
        ours.push(runtime.block_on(fire(&engine, &once, &begun, (count, Duration::from_secs(lead)))));
    }
    if std::env::var_os("LATCHWORK_STATS").is_some() {
        eprintln!("admission.schedules.late: ms of schedules {ours:.0?}, of starts {floors:.0?}");
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.schedules.late", value, unit: "ms", floor, target: "≤ 1.5" });
}

/// A one-step workflow. Each execution that begins adds a permit.
fn counted(begun: &Arc<Semaphore>) -> Workflow<u64, u64> {
    let begun = begun.clone();
    workflow("once").run(move |ctx: Ctx, input: u64| {
        begun.add_permits(1);
        async move { ctx.run("add", async || Ok(input + 1)).await }
    })
}

/// Makes callers start executions. Returns the milliseconds until the last one has begun.
async fn start(engine: &Engine, once: &Workflow<u64, u64>, begun: &Semaphore, (count, callers): (usize, usize)) -> f64 {
    let (before, begin) = (commits(engine).await, Instant::now());
    start_all(engine, once, 0..count as u64, callers).await;
    begun.acquire_many(count as u32).await.expect("the semaphore is open").forget();
    let took = begin.elapsed().as_secs_f64() * 1e3;
    tell_commits("admission.schedules.late", "start", commits(engine).await - before, count as f64);
    until_quiet(engine).await;
    took
}

/// Puts schedules that are all due `lead` from now. Returns the milliseconds from that moment until the last execution
/// has begun.
async fn fire(engine: &Engine, once: &Workflow<u64, u64>, begun: &Semaphore, (count, lead): (usize, Duration)) -> f64 {
    let (due, once) = (after(lead), once.clone());
    put_all(engine, count, move |number| {
        let yearly = Schedule::every(format!("yearly-{number}"), DAY * 365).start(due);
        yearly.workflow(&once, number as u64)
    })
    .await;
    // The index takes in the commits while nothing is measured.
    let left = due.0.saturating_sub(after(Duration::ZERO).0);
    assert!(left > 1_500_000, "the schedules were put in time: {left} µs are left");
    let before = commits(engine).await;
    begun.acquire_many(count as u32).await.expect("the semaphore is open").forget();
    let took = (after(Duration::ZERO).0 - due.0) as f64 / 1e3;
    tell_commits("admission.schedules.late", "schedule", commits(engine).await - before, count as f64);
    until_quiet(engine).await;
    assert_eq!(begun.available_permits(), 0, "each occurrence starts one execution");
    took
}

/// Waits until no execution is in memory.
async fn until_quiet(engine: &Engine) {
    while engine.residents() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Puts `count` schedules, with many callers at the same time.
async fn put_all(engine: &Engine, count: usize, schedule: impl Fn(usize) -> Schedule + Send + Sync + 'static) {
    let schedule = Arc::new(schedule);
    let tasks: Vec<_> = (0..CALLERS)
        .map(|task| {
            let (schedules, schedule) = (engine.schedules(), schedule.clone());
            tokio::spawn(async move {
                for number in (task..count).step_by(CALLERS) {
                    schedules.put(schedule(number)).await.expect("a schedule");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
}

/// The time of day after `duration`.
fn after(duration: Duration) -> Timestamp {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
    Timestamp(u64::try_from((now + duration).as_micros()).expect("a time that fits"))
}
