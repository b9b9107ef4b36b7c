//! The memory of limits' keys that were used once, in a process that opens their store.

use std::time::Duration;

use latchwork::store::Order;
use latchwork::workflow::{Engine, Workflow, workflow};

use crate::report::{Figure, Report, median, resident_mb};
use crate::{child, given, measured, steps_in};

/// Bytes of memory per key: the memory of a process that has opened a store in which each key was used by one
/// execution, less that of a process with as many executions without limits.
pub(crate) fn idle(report: &Report) {
    if !report.wants("admission.idle") {
        return;
    }
    let count = if report.quick { 20_000 } else { 1_000_000 };
    let (free, limited) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let [_] = measured(child("child-free", free.path(), count));
    let [_] = measured(child("child-limited", limited.path(), count));
    let mut differences: Vec<f64> = Vec::new();
    for _ in 0..5 {
        let [without] = measured(child("child-idle", free.path(), count));
        let [with] = measured(child("child-idle", limited.path(), count));
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("admission.idle: {with:.2} MB with keys, {without:.2} without");
        }
        differences.push((with - without) * 1e6 / count as f64);
    }
    let value = median(differences).max(0.0);
    report.add(Figure { name: "admission.idle", value, unit: "bytes/key", floor: 1.0, target: "≤ 1" });
}

/// A one-step workflow, with a limit for each input if `is_limited`.
fn once(is_limited: bool) -> Workflow<u64, u64> {
    let once = workflow("once");
    steps_in(if is_limited { once.concurrency_by(1, |number: &u64| format!("key-{number}")) } else { once }, 1)
}

/// Uses keys once, and waits until their records are removed.
pub(crate) fn child_use<'a>(words: impl Iterator<Item = &'a str>, is_limited: bool) {
    let (directory, count) = given(words);
    crate::runtime().block_on(async {
        let once = once(is_limited);
        let engine = Engine::open(directory).register(&once).start().await.expect("an engine");
        let tasks: Vec<_> = (0..1024)
            .map(|task| {
                let (engine, once) = (engine.clone(), once.clone());
                tokio::spawn(async move {
                    for number in (task..count).step_by(1024) {
                        let handle = engine.start(&once, number as u64).await.expect("a start");
                        handle.result().await.expect("a result");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        while is_stored(&engine).await {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        while engine.store().maintain().await.expect("maintenance") {}
        println!("{}", resident_mb());
        engine.stop();
        engine.store().close().await.expect("a close");
    });
}

/// True if the store holds records of limits.
async fn is_stored(engine: &Engine) -> bool {
    let store = engine.store();
    let view = store.view().await.expect("a view");
    for space in store.spaces().await.expect("spaces") {
        let is_of_limits = ["workflow.gates", "workflow.admission"].contains(&space.name());
        if is_of_limits && !view.scan(&space.all(), Order::Ascending, 1).await.expect("a scan").is_empty() {
            return true;
        }
    }
    false
}

/// Opens the store with the limited workflow, and uses one key.
pub(crate) fn child_idle<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, _) = given(words);
    crate::runtime().block_on(async {
        let once = once(true);
        let engine = Engine::open(directory).register(&once).start().await.expect("an engine");
        engine.start(&once, 0).await.expect("a start").result().await.expect("a result");
        tokio::time::sleep(Duration::from_secs(2)).await;
        println!("{}", resident_mb());
    });
}
