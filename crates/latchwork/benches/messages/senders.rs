//! Many senders to one execution, against the store's rate with 256 callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::workflow::{Ctx, Engine, Handle, workflow};
use tokio::runtime::Runtime;

use crate::load::{self, callers};
use crate::report::{Figure, Report, median};
use crate::store;

/// The number of senders.
const SENDERS: usize = 64;

pub(crate) fn hot(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.signals.hot") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let received = Arc::new(AtomicU64::new(0));
    let receives = workflow("receives").run({
        let received = received.clone();
        move |ctx: Ctx, until: u64| {
            let received = received.clone();
            async move {
                // The code starts from the beginning when the execution is loaded again.
                let mut count = 0;
                while count < until {
                    ctx.receive::<u64>("number").await?;
                    count += 1;
                    received.fetch_max(count, Ordering::Relaxed);
                }
                Ok(count)
            }
        }
    });
    let engine = runtime.block_on(Engine::open(directory.path().join("engine")).register(&receives).start());
    let engine = engine.expect("an engine");
    let (store, space) = runtime.block_on(store(&directory.path().join("store")));
    let mut callers = callers(&space, 256);
    let (rounds, seconds) = if report.quick { (1, 1) } else { (5, 3) };
    let duration = Duration::from_secs(seconds);
    load::run(runtime, &store, &mut callers, duration / 2, &Arc::default());
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        std::thread::sleep(Duration::from_millis(1500));
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        std::thread::sleep(Duration::from_millis(1500));
        received.store(0, Ordering::Relaxed);
        let handle = runtime.block_on(engine.start(&receives, u64::MAX).into_future()).expect("a start");
        ours.push(run(runtime, &handle, &received, duration));
        runtime.block_on(engine.terminate(handle.id(), "enough")).expect("an end");
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "messages.signals.hot", value, unit: "signals/s", floor, target: "≥ 0.3" });
}

/// Sends for `duration`. Returns the signals received per second, until all are received.
fn run(runtime: &Runtime, handle: &Handle<u64>, received: &Arc<AtomicU64>, duration: Duration) -> f64 {
    let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begin = Instant::now();
    runtime.block_on(async {
        let senders = (0..SENDERS).map(|_| async {
            while !stop.load(Ordering::Relaxed) {
                handle.signal("number", &7).await.expect("a signal");
                sent.fetch_add(1, Ordering::Relaxed);
            }
        });
        let timer = async {
            tokio::time::sleep(duration).await;
            stop.store(true, Ordering::Relaxed);
        };
        futures_util::future::join(futures_util::future::join_all(senders), timer).await;
        while received.load(Ordering::Relaxed) < sent.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    sent.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64()
}

use std::future::IntoFuture;
