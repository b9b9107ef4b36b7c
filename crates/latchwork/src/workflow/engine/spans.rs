//! What `tracing` is told of executions: the span of a stay in memory, and the event of an end. A subscriber can build
//! traces from them. It knows no trace, and stores nothing.

use tracing::Span;

use crate::workflow::ExecutionId;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::engine::EngineInner;
use crate::workflow::run::Run;
use crate::workflow::stored::record::{Execution, StoredStatus};

/// What the end of an execution tells of its start.
pub(crate) struct Birth {
    workflow: String,
    started_us: u64,
    parent: Option<ExecutionId>,
}

impl Birth {
    pub(crate) fn of(record: &Execution) -> Birth {
        let (workflow, started_us) = (record.workflow.clone(), record.started_us);
        Birth { workflow, started_us, parent: record.parent.as_ref().map(|parent| parent.id.clone()) }
    }
}

impl EngineInner {
    /// The span of a stay in memory. It has no parent: an execution is loaded by a call of any kind, or by the end of
    /// another execution, and outlives it.
    pub(crate) fn span_of(&self, run: &Run) -> Span {
        let namespace = self.name.as_deref();
        tracing::info_span!(parent: None, "execution", namespace, workflow = run.definition.name, id = %run.id)
    }

    /// Counts an end whose commit has landed, and tells of it.
    pub(crate) fn tell_end(&self, id: &ExecutionId, birth: &Birth, status: &StoredStatus) {
        let Birth { workflow, started_us, parent } = birth;
        self.metrics.ended(workflow, status);
        let (word, error) = match status {
            StoredStatus::Completed(_) => ("completed", None),
            StoredStatus::Cancelled(_) => ("cancelled", None),
            StoredStatus::TimedOut => ("timed_out", Some("it has timed out".to_string())),
            StoredStatus::Failed(failure) => ("failed", Some(read_failure(failure).message().to_string())),
            StoredStatus::Running | StoredStatus::Waiting | StoredStatus::Parked(_) => return,
        };
        // A replay on a copy of the records is not the end of the execution.
        if self.rehearsal.is_replay() {
            return;
        }
        tracing::debug!(
            name: "execution.ended",
            parent: None,
            namespace = self.name.as_deref(),
            workflow,
            %id,
            parent_id = parent.as_ref().map(tracing::field::display),
            started_us,
            status = word,
            error,
            "an execution has ended"
        );
    }
}
