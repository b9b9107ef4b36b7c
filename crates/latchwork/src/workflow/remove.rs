//! Removing what is no longer kept: executions some time after their end with everything they have left, and journals
//! of runs that were continued as new. What is left of a removal that was interrupted is removed the next time, since
//! the alarm goes last.

use std::sync::Arc;

use crate::store::{Commit, Order, Outcome, Range, Space};
use crate::workflow::alarm::{Alarms, Due, Keeper};
use crate::workflow::engine::Inner;
use crate::workflow::record::{Keyed, Removal, keyed_key};
use crate::workflow::run::journal_range;
use crate::workflow::{ExecutionId, Result};

/// How many writes a commit of removals has, about.
const WRITES: usize = 1000;

/// Removes what is due.
pub(crate) struct Remove;

impl Keeper for Remove {
    fn space(engine: &Inner) -> &Space {
        &engine.spaces.removals
    }

    fn alarms(engine: &Inner) -> &Arc<Alarms> {
        &engine.removals
    }

    async fn ring(engine: &Arc<Inner>, due: Vec<Due>) -> Result<()> {
        let mut broom = Broom { engine, commit: engine.owned() };
        for due in due {
            broom.remove(due).await?;
        }
        broom.sweep().await
    }
}

/// Collects what is to be removed into commits of a good size.
struct Broom<'a> {
    engine: &'a Arc<Inner>,
    commit: Commit,
}

impl Broom<'_> {
    async fn remove(&mut self, due: Due) -> Result<()> {
        match Removal::decode(&due.item.value) {
            Some(Removal::Before(run)) => self.empty(&journal_range(self.engine, &due.id, Some(run))).await?,
            Some(Removal::Execution) => self.execution(&due.id).await?,
            // It tells nothing; the rest is for `verify` to find.
            None => {}
        }
        self.add(|commit| commit.delete(&due.key)).await
    }

    async fn execution(&mut self, id: &ExecutionId) -> Result<()> {
        let Some((execution, rev)) = self.engine.read(id).await? else { return Ok(()) };
        if !execution.status.is_terminal() {
            return Ok(());
        }
        self.empty(&journal_range(self.engine, id, None)).await?;
        self.empty(&self.engine.states.slots_of(id)).await?;
        if let Some(key) = &execution.key {
            let key = self.engine.spaces.keys.key(keyed_key(&execution.workflow, key));
            let found = self.engine.store.view().await?.get(&key).await?;
            let is_its = |value: &[u8]| Keyed::decode(value).is_some_and(|keyed| keyed.id == **id);
            if found.is_some_and(|item| is_its(&item.value)) {
                self.add(|commit| commit.delete(&key)).await?;
            }
        }
        let key = self.engine.spaces.executions.key(id.as_bytes());
        self.add(|commit| commit.at_rev(&key, rev).delete(&key)).await
    }

    /// Removes everything in a range.
    async fn empty(&mut self, range: &Range) -> Result<()> {
        let mut rest = range.clone();
        loop {
            let found = self.engine.store.view().await?.scan(&rest, Order::Ascending, WRITES).await?;
            for (key, _) in &found {
                rest = rest.after(key);
                self.add(|commit| commit.delete(key)).await?;
            }
            if found.len() < WRITES {
                return Ok(());
            }
        }
    }

    async fn add(&mut self, add: impl FnOnce(Commit) -> Commit) -> Result<()> {
        self.commit = add(std::mem::take(&mut self.commit));
        if self.commit.writes().len() >= WRITES { self.sweep().await } else { Ok(()) }
    }

    async fn sweep(&mut self) -> Result<()> {
        let commit = std::mem::replace(&mut self.commit, self.engine.owned());
        if commit.writes().is_empty() {
            return Ok(());
        }
        match self.engine.store.commit(commit).await? {
            Outcome::Applied(_) => Ok(()),
            // This engine is no longer the owner, or somebody else has removed it.
            Outcome::Refused(_) => Ok(()),
        }
    }
}
