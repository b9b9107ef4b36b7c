//! Executions whose first attempt is counted by the commit that makes them running, and whose code this engine has not
//! run yet. Usually the task that sent the commit begins them. If another task loads an execution first, or its id is
//! still in memory, that task runs the attempt that was counted.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::workflow::ExecutionId;
use crate::workflow::engine::EngineInner;
use crate::workflow::run::Run;
use crate::workflow::stored::record::{Execution, Intent};

/// Each execution with the time at which its first attempt was counted as begun.
#[derive(Default)]
pub(crate) struct Unbegun(Mutex<HashMap<ExecutionId, u64>>);

impl Unbegun {
    /// Returns whether no code of the execution has run, by its record, and removes it: its code is about to run.
    pub(crate) fn take(&self, id: &ExecutionId, execution: &Execution) -> bool {
        let since = execution.intent.as_ref().and_then(Intent::since_of_first);
        since.is_some_and(|since| self.remove(id, since))
    }

    /// Removes an execution whose code will not run.
    pub(crate) fn forget(&self, id: &ExecutionId) {
        self.0.lock().remove(id);
    }

    fn remove(&self, id: &ExecutionId, since: u64) -> bool {
        let mut unbegun = self.0.lock();
        let is_its = unbegun.get(id) == Some(&since);
        if is_its {
            unbegun.remove(id);
        }
        is_its
    }
}

/// An execution that a commit makes running, until the outcome of that commit is known.
pub(crate) struct SetRunning {
    engine: Arc<EngineInner>,
    id: ExecutionId,
    since: u64,
    has_landed: bool,
}

impl EngineInner {
    /// Counts the first attempt of an execution in the commit that makes it running.
    pub(crate) fn set_running(self: &Arc<EngineInner>, id: &ExecutionId, execution: &mut Execution) -> SetRunning {
        let now = self.store.env().now();
        execution.intent = Some(Intent::of_first(now));
        self.unbegun.0.lock().insert(id.clone(), now.0);
        SetRunning { engine: self.clone(), id: id.clone(), since: now.0, has_landed: false }
    }
}

impl SetRunning {
    /// The commit has landed. If the id is in memory, the execution begins when that id has left memory.
    pub(crate) fn begin(mut self, run: Run) {
        self.has_landed = true;
        self.engine.spawn_stored(Arc::new(run));
    }
}

impl Drop for SetRunning {
    fn drop(&mut self) {
        if !self.has_landed {
            self.engine.unbegun.remove(&self.id, self.since);
        }
    }
}
