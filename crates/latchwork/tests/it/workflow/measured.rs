//! What is counted and measured about executions, by a recorder of the test's own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, Failure, workflow};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, SharedString, Unit};
use parking_lot::Mutex;

const HOUR: Duration = Duration::from_secs(3600);

/// Every value that a metric was given, by its name and labels.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<BTreeMap<String, Vec<f64>>>>);

struct Metric {
    recorder: Recorder,
    key: String,
}

impl Recorder {
    fn metric(&self, key: &Key) -> Arc<Metric> {
        let labels: Vec<String> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let key = [key.name().to_string(), labels.join(",")].join(" ").trim().to_string();
        Arc::new(Metric { recorder: self.clone(), key })
    }

    fn all(&self, key: &str) -> Vec<f64> {
        self.0.lock().get(key).cloned().unwrap_or_default()
    }

    /// The value of a counter.
    fn count(&self, key: &str) -> f64 {
        self.all(key).iter().sum()
    }
}

impl Metric {
    fn note(&self, value: f64) {
        self.recorder.0.lock().entry(self.key.clone()).or_default().push(value);
    }
}

impl CounterFn for Metric {
    fn increment(&self, by: u64) {
        self.note(by as f64);
    }

    fn absolute(&self, _: u64) {
        panic!("counters are counted up");
    }
}

impl GaugeFn for Metric {
    fn increment(&self, _: f64) {
        panic!("gauges are set");
    }

    fn decrement(&self, _: f64) {
        panic!("gauges are set");
    }

    fn set(&self, value: f64) {
        self.note(value);
    }
}

impl HistogramFn for Metric {
    fn record(&self, value: f64) {
        self.note(value);
    }
}

impl metrics::Recorder for Recorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.metric(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.metric(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.metric(key))
    }
}

#[tokio::test]
async fn starts_ends_steps_attempts_commits_waits_and_residents_are_measured() {
    let recorder = Recorder::default();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let works = workflow("works").run(async |ctx: Ctx, fails: bool| {
        let step = ctx.run_with("step", async |attempt| match attempt.number {
            1 => Err(Failure::new("not yet")),
            number => Ok(number),
        });
        step.await?;
        ctx.sleep(HOUR).await?;
        ctx.receive::<()>("go").await?;
        if fails { Err(Failure::new("as it was to")) } else { Ok(()) }
    });
    let late = workflow("late").timeout(HOUR).run(async |ctx: Ctx, ()| ctx.receive::<()>("never").await);
    let prompt = workflow("prompt").run(async |ctx: Ctx, ()| ctx.receive::<()>("go").await);
    let panics = workflow("panics").run(async |_: Ctx, _: ()| -> Result<(), Failure> { panic!("as it was to") });
    let test = TestEngine::build(1).register(&works).register(&late).register(&panics).register(&prompt);
    let test = test.start().await.unwrap();
    let engine = test.engine();
    for (id, fails) in [("completes", false), ("fails", true), ("cancelled", false), ("terminated", false)] {
        engine.start(&works, fails).id(id).await.unwrap();
    }
    engine.start(&works, false).id("completes").or_join().await.unwrap();
    let late = engine.start(&late, ()).id("late").await.unwrap();
    engine.start(&panics, ()).id("panics").await.unwrap();
    let prompt = engine.start(&prompt, ()).id("prompt").await.unwrap();
    test.run(test.env().sleep(Duration::from_millis(500))).await;
    prompt.signal("go", &()).await.unwrap();
    test.run(test.env().sleep(2 * HOUR)).await;
    assert!(test.run(late.result()).await.is_err());
    engine.cancel("cancelled", "enough").await.unwrap();
    engine.terminate("terminated", "enough").await.unwrap();
    for id in ["completes", "fails"] {
        engine.signal(id, "go", &()).await.unwrap();
    }
    for id in ["completes", "fails", "cancelled"] {
        let _ = test.run(engine.handle(&works, id).result()).await;
    }
    test.run(test.env().sleep(HOUR)).await;
    let counts = [
        ("latchwork_starts_total workflow=works", 4),
        ("latchwork_starts_total workflow=late", 1),
        ("latchwork_starts_total workflow=panics", 1),
        ("latchwork_ends_total workflow=works,state=completed", 1),
        ("latchwork_ends_total workflow=works,state=failed", 2),
        ("latchwork_ends_total workflow=works,state=cancelled", 1),
        ("latchwork_ends_total workflow=works,state=timed_out", 0),
        ("latchwork_ends_total workflow=late,state=timed_out", 1),
        ("latchwork_ends_total workflow=panics,state=failed", 0),
        ("latchwork_parked_total workflow=panics", 1),
        ("latchwork_parked_total workflow=works", 0),
        ("latchwork_steps_total", 4),
        ("latchwork_attempts_total", 8),
    ];
    for (key, count) in counts {
        assert_eq!(recorder.count(key), f64::from(count), "{key}: {:?}", recorder.0.lock());
    }
    let timers = recorder.all("latchwork_wait_seconds for=timer");
    assert!(timers.len() == 4 && timers.iter().all(|took| (3600.0..3700.0).contains(took)), "{timers:?}");
    let retries = recorder.all("latchwork_wait_seconds for=retry");
    assert!(retries.len() == 4 && retries.iter().all(|took| (0.1..10.0).contains(took)), "{retries:?}");
    let signals = recorder.all("latchwork_wait_seconds for=signal");
    // For executions that were out of memory, the begin of their wait is unknown.
    assert!(signals.len() == 3 && (0.4..0.6).contains(&signals[0]), "{signals:?}");
    let residents = recorder.all("latchwork_resident_executions");
    assert!(residents.iter().any(|count| *count >= 4.0) && residents.last() == Some(&0.0), "{residents:?}");
    // At least one commit to begin each, one to wait, and one to end.
    let commits = recorder.all("latchwork_commit_seconds");
    assert!(commits.len() >= 18 && commits.iter().all(|took| *took >= 0.0), "{commits:?}");
}

/// The commit of an end is measured like any other commit of the execution.
#[tokio::test]
async fn the_only_commit_of_an_execution_is_measured() {
    let recorder = Recorder::default();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let short = workflow("short").run(async |_: Ctx, number: u32| Ok(number));
    let test = TestEngine::new(&short, 1).await.unwrap();
    assert_eq!(test.complete(&short, 7).await.unwrap(), 7);
    assert_eq!(recorder.all("latchwork_commit_seconds").len(), 1);
}

#[tokio::test]
async fn an_execution_parked_after_too_many_crashes_is_counted() {
    let recorder = Recorder::default();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let stuck = workflow("stuck")
        .run(async |ctx: Ctx, ()| ctx.run("never", async || std::future::pending::<Result<(), Failure>>().await).await);
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&stuck).most_crashes(2).start().await.unwrap();
    engine.start(&stuck, ()).id("s").await.unwrap();
    engine.stop();
    for _ in 0..5 {
        let engine = Engine::on(&store).register(&stuck).most_crashes(2).start().await.unwrap();
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        engine.stop();
    }
    let engine = Engine::on(&store).register(&stuck).start().await.unwrap();
    assert_eq!(engine.parked().await.unwrap().len(), 1);
    assert_eq!(recorder.count("latchwork_parked_total workflow=stuck"), 1.0);
}
