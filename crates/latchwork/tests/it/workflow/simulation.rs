//! Whole engines under faults from a seed, judged by an oracle that knows nothing of how they work. `LATCHWORK_SEEDS`
//! sets how many seeds, `LATCHWORK_SEED` replays one and prints its trace; `cargo xtask sim` does both.

mod jobs;
mod oracle;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use latchwork::store::Env;
use latchwork::testing::{Caller, Faults, Report, Simulation, TraceKind};
use latchwork::workflow::{Ctx, Failure, Retry, workflow};
use parking_lot::Mutex;

use jobs::Workload;

pub(crate) fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Runs a seed, and returns what was wrong.
pub(crate) type Simulate = fn(u64, Faults) -> (Report, Vec<String>);

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let workload = Workload::drawn(seed);
    let report = workload.simulation(seed).faults(faults).run();
    let complaints = workload.judge(&report);
    (report, complaints)
}

/// Runs seeds on as many threads as there are cores. Returns the first seed that failed, and how many ran.
fn campaign(seeds: std::ops::Range<u64>, simulate: Simulate) -> (u64, Option<(u64, String)>) {
    let (next, failed) = (AtomicU64::new(seeds.start), Mutex::new(None::<(u64, String)>));
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(2, |threads| threads.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let seed = next.fetch_add(1, Ordering::SeqCst);
                    if seed >= seeds.end {
                        return;
                    }
                    let (report, complaints) = simulate(seed, Faults::default());
                    done.fetch_add(1, Ordering::SeqCst);
                    if seed % 50 == 0 {
                        assert_same(&report, &simulate(seed, Faults::default()).0);
                    }
                    if complaints.is_empty() {
                        continue;
                    }
                    stop.store(true, Ordering::SeqCst);
                    let mut failed = failed.lock();
                    if failed.as_ref().is_none_or(|(first, _)| seed < *first) {
                        *failed = Some((seed, format!("{report}{}", complaints.join("\n"))));
                    }
                }
            });
        }
    });
    (done.into_inner(), failed.into_inner())
}

pub(super) fn assert_same(first: &Report, second: &Report) {
    let (first, second) = (first.to_string(), second.to_string());
    let differs = first.lines().zip(second.lines()).find(|(first, second)| first != second);
    assert_eq!(differs, None, "the same seed is the same run");
    assert_eq!(first.len(), second.len());
}

/// Runs the seed from the environment, or as many seeds as it says, or this many.
pub(crate) fn campaign_of(simulate: Simulate, seeds: u64) {
    if let Some(seed) = number("LATCHWORK_SEED") {
        let (report, complaints) = simulate(seed, Faults::default());
        println!("{report}");
        let (again, _) = simulate(seed, Faults::default());
        assert_same(&report, &again);
        assert!(complaints.is_empty(), "seed {seed}:\n{}", complaints.join("\n"));
        return;
    }
    let (done, failed) = campaign(1..1 + number("LATCHWORK_SEEDS").unwrap_or(seeds), simulate);
    if let Some((seed, told)) = failed {
        panic!("{told}\nseed {seed}, one of {done}; cargo xtask sim --seed {seed} runs it again");
    }
    println!("{done} seeds");
}

#[test]
fn engines_keep_their_promises_under_any_faults() {
    campaign_of(simulate, 1000);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let mut traces = std::collections::BTreeSet::new();
    for seed in 1..=50 {
        let (first, second) = (simulate(seed, Faults::default()).0, simulate(seed, Faults::default()).0);
        assert_same(&first, &second);
        traces.insert(first.to_string());
    }
    assert_eq!(traces.len(), 50, "another seed has another trace");
}

/// The connection to the store breaks again and again, under one engine that keeps running.
#[test]
fn an_execution_whose_commit_had_no_answer_continues_in_the_same_engine() {
    let mut faults = Faults::none();
    (faults.lives, faults.lost_answers) = (1, true);
    let mut lost = 0;
    for seed in 1..=100 {
        let (report, complaints) = simulate(seed, faults.clone());
        assert!(complaints.is_empty(), "{report}{}", complaints.join("\n"));
        lost += report.events.iter().filter(|event| matches!(event.what, TraceKind::Lost { .. })).count();
    }
    assert!(lost > 50, "{lost}");
}

/// The answer to a commit comes after the deadline: the task that waited for it is gone, and the commit has landed.
#[test]
fn an_execution_that_timed_out_during_a_commit_is_not_forgotten() {
    let mut faults = Faults::none();
    (faults.lives, faults.slow, faults.clock_jumps) = (1, true, true);
    for seed in 1..=100 {
        let (report, complaints) = simulate(seed, faults.clone());
        assert!(complaints.is_empty(), "{report}{}", complaints.join("\n"));
    }
}

/// The race: many callers start the same execution on a slow store. While one of them is about to be refused, the timer
/// of the execution fires.
#[test]
fn a_timer_that_fires_during_a_start_that_comes_too_late_is_not_lost() {
    let nap = workflow("nap").run(async |ctx: Ctx, ()| {
        for _ in 0..5 {
            ctx.sleep(Duration::from_millis(1500)).await?;
        }
        Ok(())
    });
    let mut faults = Faults::none();
    (faults.lives, faults.slow) = (1, true);
    for seed in 1..=500 {
        let simulation = Simulation::new(seed).faults(faults.clone()).register(&nap);
        let simulation = (0..4).fold(simulation, |simulation, _| simulation.start(&nap, "nap", ()));
        simulation.run().assert_settled();
    }
}

/// A signal has landed and its answer is lost. The sender sends it again and finds it stored, but its receiver was
/// never notified. The receiver is busy and in memory: it must find the signal soon, and not only when it has nothing
/// else to do.
#[test]
fn a_signal_whose_answer_was_lost_is_received_by_a_busy_execution() {
    const LONG: Duration = Duration::from_secs(6 * 3600);
    let mut faults = Faults::none();
    (faults.lives, faults.lost_answers) = (1, true);
    for seed in 1..=300 {
        // The clock, and the times when the signal was first sent and first seen.
        let (env, times) = (Arc::new(OnceLock::<Env>::new()), Arc::new(Mutex::new((None, None))));
        let (in_step, in_client, seen, asked) = (env.clone(), env, times.clone(), times.clone());
        let busy = workflow("busy").run(move |ctx: Ctx, ()| {
            let (env, seen) = (in_step.clone(), seen.clone());
            async move {
                let env = env.get().expect("the client sets the clock before it starts the execution");
                let works = async |ctx: Ctx| {
                    let step = ctx.run("long", async || {
                        env.sleep(LONG).await;
                        Ok(())
                    });
                    step.retry(Retry::exponential().max_attempts(10_000)).await
                };
                let receives = async |ctx: Ctx| {
                    ctx.receive::<()>("go").await?;
                    seen.lock().1.get_or_insert(env.monotonic());
                    Ok(())
                };
                let (worked, received) = ctx.join((works, receives)).await;
                worked.and(received)
            }
        });
        let simulation = Simulation::new(seed).faults(faults.clone()).register(&busy);
        let simulation = simulation.client(move |caller: Caller| {
            let (env, busy, asked) = (in_client.clone(), busy.clone(), asked.clone());
            async move {
                let env = env.get_or_init(|| caller.env().clone());
                while caller.engine().start(&busy, ()).id("b").or_join().await.is_err() {
                    env.sleep(Duration::from_millis(100)).await;
                }
                caller.started(&"b".into());
                env.sleep(Duration::from_secs(100)).await;
                asked.lock().0.get_or_insert(env.monotonic());
                while caller.engine().signal("b", "go", &()).id("s").await.is_err() {
                    env.sleep(Duration::from_millis(100)).await;
                }
                Ok(())
            }
        });
        let report = simulation.run();
        report.assert_settled();
        let (sent, seen): (Option<Duration>, Option<Duration>) = *times.lock();
        let took = seen.zip(sent).map(|(seen, sent)| seen.saturating_sub(sent));
        assert!(took.is_some_and(|took| took < Duration::from_secs(60)), "{report}seed {seed}: {took:?}");
    }
}

/// Checks that every fault happens, since a simulation without events proves nothing.
#[test]
fn every_fault_strikes() {
    let mut struck = std::collections::BTreeMap::<&str, u32>::new();
    for seed in 1..=200 {
        for event in simulate(seed, Faults::default()).0.events {
            let fault = match event.what {
                TraceKind::Crash(_) => "crash",
                TraceKind::Pause(..) => "pause",
                TraceKind::Stopped => "restart",
                TraceKind::Superseded => "second engine",
                TraceKind::Refused(_) => "refused",
                TraceKind::Lost { decided: true } => "answer lost",
                TraceKind::Lost { decided: false } => "commit lost",
                TraceKind::Slow(_) => "slow",
                TraceKind::Jump(by) if by < 0 => "jump back",
                TraceKind::Jump(_) => "jump ahead",
                TraceKind::NoEngine(_) => "no engine",
                TraceKind::Body { run, .. } if run > 1 => "body again",
                _ => continue,
            };
            *struck.entry(fault).or_default() += 1;
        }
    }
    println!("{struck:?}");
    assert!(struck.len() == 12 && struck.values().all(|times| *times >= 5), "{struck:?}");
}

#[test]
fn without_faults_every_body_runs_as_often_as_it_has_to() {
    for seed in 1..=50 {
        let workload = Workload::drawn(seed);
        let (report, complaints) = simulate(seed, Faults::none());
        assert!(complaints.is_empty(), "{report}{}", complaints.join("\n"));
        let ran = report.events.iter().filter(|event| matches!(event.what, TraceKind::Body { .. })).count();
        assert_eq!(report.lives, 1);
        assert!(ran <= workload.most_bodies(), "{report}\n{ran} bodies");
    }
}

#[test]
fn an_execution_that_would_wait_forever_is_reported() {
    let stuck = workflow("stuck")
        .run(async |ctx: Ctx, ()| ctx.run("never", async || std::future::pending::<Result<(), Failure>>().await).await);
    let report = Simulation::new(1).faults(Faults::none()).register(&stuck).start(&stuck, "s", ()).run();
    assert_eq!(report.unfinished, ["s".into()]);
    assert!(report.stuck.as_ref().is_some_and(|why| why.contains("1 callers wait")), "{:?}", report.stuck);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| report.assert_settled())).is_err());
}
