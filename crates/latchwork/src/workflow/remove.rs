//! Removing what is no longer kept: executions some time after their end with everything they have left, and journals
//! of runs that were continued as new. What is left of a removal that was interrupted is removed the next time, since
//! the alarm goes last.

use std::collections::HashSet;
use std::sync::Arc;

use crate::store::{Commit, Key, Order, Outcome, Range, Space, Timestamp};
use crate::workflow::alarm::{Alarms, Due, Keeper};
use crate::workflow::engine::Inner;
use crate::workflow::listed::list;
use crate::workflow::record::{Keyed, Removal, alarm_key, keyed_key};
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
        let mut broom = Broom { engine, commit: engine.owned(), gone: HashSet::new() };
        for due in due {
            broom.remove(due).await?;
        }
        broom.sweep().await
    }
}

impl Inner {
    /// Removes an execution that has ended, with everything it has left, before its time.
    pub(crate) async fn purge(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        let mut broom = Broom { engine: self, commit: self.owned(), gone: HashSet::new() };
        broom.execution(id).await?;
        broom.sweep().await
    }
}

/// Collects what is to be removed into commits of a good size.
struct Broom<'a> {
    engine: &'a Arc<Inner>,
    commit: Commit,
    /// What the commit removes. Several alarms may come to the same records, and a commit writes a key once.
    gone: HashSet<Key>,
}

impl Broom<'_> {
    async fn remove(&mut self, due: Due) -> Result<()> {
        match Removal::decode(&due.item.value) {
            Some(Removal::Before(run)) => self.runs_before(&due.id, run).await?,
            Some(Removal::Execution) => self.execution(&due.id).await?,
            // It tells nothing; the rest is for `verify` to find.
            None => {}
        }
        self.add(&due.key).await
    }

    /// Removes the journals of runs that were continued, unless the id is another execution's by now.
    async fn runs_before(&mut self, id: &ExecutionId, run: u32) -> Result<()> {
        match self.engine.read(id).await? {
            Some((execution, _)) if execution.run >= run => {
                self.empty(&journal_range(self.engine, id, Some(run))).await
            }
            _ => Ok(()),
        }
    }

    async fn execution(&mut self, id: &ExecutionId) -> Result<()> {
        let Some((execution, rev)) = self.engine.read(id).await? else { return Ok(()) };
        if !execution.status.is_terminal() {
            return Ok(());
        }
        self.empty(&journal_range(self.engine, id, None)).await?;
        self.empty(&self.engine.states.slots_of(id)).await?;
        self.empty(&self.engine.kept(id).all()).await?;
        if let Some(due) = execution.removal_us {
            self.add(&self.engine.spaces.removals.key(alarm_key(Timestamp(due), id))).await?;
        }
        let listed = list(Commit::new(), &self.engine.spaces.listed, id, Some(&execution), None, None);
        for write in listed.writes() {
            self.add(write.key()).await?;
        }
        if let Some(key) = &execution.key {
            let key = self.engine.spaces.keys.key(keyed_key(&execution.workflow, key));
            let found = self.engine.store.view().await?.get(&key).await?;
            let is_its = |value: &[u8]| Keyed::decode(value).is_some_and(|keyed| keyed.id == **id);
            if found.is_some_and(|item| is_its(&item.value)) {
                self.add(&key).await?;
            }
        }
        let key = self.engine.spaces.executions.key(id.as_bytes());
        if !self.gone.contains(&key) {
            self.commit = std::mem::take(&mut self.commit).at_rev(&key, rev);
        }
        self.add(&key).await
    }

    /// Removes everything in a range.
    async fn empty(&mut self, range: &Range) -> Result<()> {
        let mut rest = range.clone();
        loop {
            let found = self.engine.store.view().await?.scan(&rest, Order::Ascending, WRITES).await?;
            for (key, _) in &found {
                rest = rest.after(key);
                self.add(key).await?;
            }
            if found.len() < WRITES {
                return Ok(());
            }
        }
    }

    /// Adds the removal of a record.
    async fn add(&mut self, key: &Key) -> Result<()> {
        if self.gone.insert(key.clone()) {
            self.commit = std::mem::take(&mut self.commit).delete(key);
        }
        if self.commit.writes().len() >= WRITES { self.sweep().await } else { Ok(()) }
    }

    async fn sweep(&mut self) -> Result<()> {
        let commit = std::mem::replace(&mut self.commit, self.engine.owned());
        self.gone.clear();
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
