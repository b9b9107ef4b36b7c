//! The memory of locks that were used once, in a process that opens their store.

use std::time::Duration;

use latchwork::workflow::Engine;

use crate::report::{Figure, Report, resident_mb};
use crate::{child, given, measured};

/// The memory per lock name: the memory of a process with many names, less that of a process without any.
pub(crate) fn idle(report: &Report) {
    if !report.wants("locks.idle") {
        return;
    }
    let count = if report.quick { 50_000 } else { 1_000_000 };
    let (empty, full) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let [_] = measured(child("child-use", empty.path(), 1));
    let [_] = measured(child("child-use", full.path(), count));
    let mut differences: Vec<f64> = Vec::new();
    for _ in 0..3 {
        let [without] = measured(child("child-idle", empty.path(), 1));
        let [with] = measured(child("child-idle", full.path(), count));
        differences.push((with - without) * 1e6 / count as f64);
    }
    let value = crate::report::median(differences).max(0.0);
    report.add(Figure { name: "locks.idle", value, unit: "bytes/name", floor: 1.0, target: "≤ 1" });
}

/// Acquires and releases each lock once.
pub(crate) fn child_use<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(words);
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).start().await.expect("an engine");
        let tasks: Vec<_> = (0..256)
            .map(|task| {
                let engine = engine.clone();
                tokio::spawn(async move {
                    for number in (task..count).step_by(256) {
                        let guard = engine.mutex(format!("lock-{number}")).acquire().await.expect("a lock");
                        guard.release().await.expect("a release");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        println!("{}", resident_mb());
        engine.stop();
        engine.store().close().await.expect("a close");
    });
}

/// Opens the store and uses one lock.
pub(crate) fn child_idle<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, _) = given(words);
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).start().await.expect("an engine");
        let guard = engine.mutex("lock-0").acquire().await.expect("a lock");
        guard.release().await.expect("a release");
        tokio::time::sleep(Duration::from_secs(2)).await;
        println!("{}", resident_mb());
    });
}
