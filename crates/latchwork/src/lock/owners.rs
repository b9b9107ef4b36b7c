//! What the lock layer must know of executions. The layer that runs them implements it.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::lane::Part;
use crate::lock::LockName;
use crate::lock::error::{LockError, LockRefused, Result};
use crate::lock::service::Service;
use crate::node::ExecutionId;
use crate::store::Write;

/// The executions that own requests. With `from_store`, executions are read from the store, because what is in memory
/// was out of date.
pub(crate) trait OwningExecutions: Send + Sync {
    /// True if an execution can still be granted a lock.
    fn is_alive<'a>(self: Arc<Self>, id: &'a ExecutionId, from_store: bool) -> Telling<'a, bool>;

    /// The parts of a commit that notify executions. Executions that ride on the commit add their own records. Returns
    /// `None` if an execution that is granted a lock has ended.
    fn told<'a>(
        self: Arc<Self>,
        notices: Notices,
        from_store: bool,
        riders: &'a BTreeSet<ExecutionId>,
    ) -> Telling<'a, Option<Vec<Part>>>;

    /// Returns the write that removes the message about a grant.
    fn untold(&self, id: &ExecutionId, lock: &LockName, ticket: u64) -> Write;
}

pub(crate) type Telling<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// The notices to executions about their requests for a lock.
#[derive(Debug, Clone)]
pub(crate) struct Notices {
    pub(crate) lock: LockName,
    pub(crate) to: Vec<(ExecutionId, Notice)>,
}

/// One notice to an execution.
#[derive(Debug, Clone)]
pub(crate) enum Notice {
    Granted(u64),
    /// A waiting request was refused.
    Refused(u64, LockRefused),
    /// An operator has released a lock that the execution held.
    TakenAway,
}

impl Service {
    /// The executions, if there is an engine.
    pub(crate) fn executions(&self) -> Option<Arc<dyn OwningExecutions>> {
        self.executions.get().and_then(|executions| executions.upgrade())
    }

    /// The parts of a commit that notify executions.
    pub(crate) async fn tell_executions(
        &self,
        notices: Notices,
        from_store: bool,
        riders: &BTreeSet<ExecutionId>,
    ) -> Result<Option<Vec<Part>>> {
        if notices.to.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let needs = || LockError::NeedsEngine { lock: notices.lock.to_string() };
        let executions = self.executions().ok_or_else(needs)?;
        executions.told(notices, from_store, riders).await
    }
}
