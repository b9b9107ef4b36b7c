//! The cost of keeping claims whose actions wait.

use std::time::Duration;

use tokio::runtime::Runtime;

use crate::as_task;
use crate::kit::{HOLD, Kit};
use crate::report::{Figure, Report};

const LEASE: Duration = Duration::from_secs(1);

/// Counts the commits during a lease with many live claims, and with one.
pub(crate) fn heartbeat(runtime: &Runtime, report: &Report) {
    if !report.wants("claims.heartbeat") {
        return;
    }
    let (count, leases) = if report.quick { (1_000, 5) } else { (10_000, 20) };
    let value = as_task(runtime, commits(count, leases));
    let floor = as_task(runtime, commits(1, leases));
    report.add(Figure { name: "claims.heartbeat", value, unit: "commits/lease", floor, target: "≤ 1.1" });
}

async fn commits(count: usize, leases: u32) -> f64 {
    let directory = tempfile::tempdir().expect("a directory");
    let kit = Kit::with(directory.path(), "1s", |builder| builder).await;
    kit.fill(HOLD, count).await;
    let held = kit.hold(0..count).await;
    let generation = async || kit.engine.store().generation().await.expect("a generation").0;
    tokio::time::sleep(LEASE).await;
    let before = generation().await;
    tokio::time::sleep(LEASE * leases).await;
    let commits = generation().await - before;
    assert!(commits > 0, "leases are renewed");
    kit.seen.gate.add_permits(count);
    for held in held {
        assert!(held.await.expect("a caller").is_done(), "the claim has held for all of the time");
    }
    assert_eq!(kit.seen.bodies(), count, "each action has run once");
    commits as f64 / f64::from(leases)
}
