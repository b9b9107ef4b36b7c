//! Metrics of the engine, through the `metrics` facade: a program that installs a recorder gets them.

use std::collections::HashMap;
use std::time::Duration;

use metrics::{counter, gauge, histogram};

use crate::workflow::stored::record::{StoredStatus, WaitsFor};

/// The metrics of an engine.
pub(crate) struct Metrics {
    commits: metrics::Histogram,
    residents: metrics::Gauge,
    steps: metrics::Counter,
    attempts: metrics::Counter,
    workflows: HashMap<String, Counters>,
}

/// The metrics of one workflow.
struct Counters {
    starts: metrics::Counter,
    parked: metrics::Counter,
    completed: metrics::Counter,
    failed: metrics::Counter,
    timed_out: metrics::Counter,
    cancelled: metrics::Counter,
}

impl Metrics {
    /// Registers the metrics of these workflows with the recorder that is installed now.
    pub(crate) fn new<'a>(workflows: impl Iterator<Item = &'a String>) -> Metrics {
        Metrics {
            commits: histogram!("latchwork_commit_seconds"),
            residents: gauge!("latchwork_resident_executions"),
            steps: counter!("latchwork_steps_total"),
            attempts: counter!("latchwork_attempts_total"),
            workflows: workflows.map(|name| (name.clone(), Counters::new(name))).collect(),
        }
    }

    pub(crate) fn started(&self, workflow: &str) {
        if let Some(counters) = self.workflows.get(workflow) {
            counters.starts.increment(1);
        }
    }

    pub(crate) fn ended(&self, workflow: &str, status: &StoredStatus) {
        let Some(counters) = self.workflows.get(workflow) else { return };
        let counter = match status {
            StoredStatus::Completed(_) => &counters.completed,
            StoredStatus::Failed(_) => &counters.failed,
            StoredStatus::TimedOut => &counters.timed_out,
            StoredStatus::Cancelled(_) => &counters.cancelled,
            StoredStatus::Parked(_) => &counters.parked,
            StoredStatus::Running | StoredStatus::Waiting => return,
        };
        counter.increment(1);
    }

    /// A step has ended with a result or a failure.
    pub(crate) fn stepped(&self) {
        self.steps.increment(1);
    }

    /// An attempt begins.
    pub(crate) fn attempted(&self) {
        self.attempts.increment(1);
    }

    pub(crate) fn committed(&self, took: Duration) {
        self.commits.record(took.as_secs_f64());
    }

    pub(crate) fn waited(&self, what: &WaitsFor, took: Duration) {
        let kind = match what {
            WaitsFor::Timer => "timer",
            WaitsFor::Retry(_) => "retry",
            WaitsFor::Signal(_) => "signal",
            WaitsFor::Update(_) => "update",
            WaitsFor::Child(_) => "child",
            WaitsFor::Completion(_) => "completion",
            WaitsFor::Review(_) => "review",
            WaitsFor::Published(_) => "published",
            WaitsFor::Lock(_) => "lock",
            WaitsFor::Admission(_) => "admission",
            WaitsFor::Step(_) | WaitsFor::Store => return,
        };
        histogram!("latchwork_wait_seconds", "for" => kind).record(took.as_secs_f64());
    }

    pub(crate) fn residents(&self, count: usize) {
        self.residents.set(count as f64);
    }
}

impl Counters {
    fn new(workflow: &str) -> Counters {
        let ends = |state: &'static str| {
            let workflow = workflow.to_string();
            counter!("latchwork_ends_total", "workflow" => workflow, "state" => state)
        };
        Counters {
            starts: counter!("latchwork_starts_total", "workflow" => workflow.to_string()),
            parked: counter!("latchwork_parked_total", "workflow" => workflow.to_string()),
            completed: ends("completed"),
            failed: ends("failed"),
            timed_out: ends("timed_out"),
            cancelled: ends("cancelled"),
        }
    }
}
