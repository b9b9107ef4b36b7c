//! Removes what is no longer kept: executions some time after their end, with all their records, and the journals of
//! runs that were continued as new. An interrupted removal is completed the next time, because its alarm is deleted
//! last.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::lane::Part;
use crate::node::alarm::{Alarms, Due, Keeper, alarm_key, read_alarm_key};
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Key, Order, Range, Rev, Timestamp};
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::run::{RECORD, journal_range};
use crate::workflow::stored::keys::keyed_key;
use crate::workflow::stored::record::{Execution, Keyed, Removal, next_page};
use crate::workflow::{ExecutionId, Result};

/// Approximately how many writes a commit of removals has.
const WRITES: usize = 1000;

/// Removes what is due.
pub(crate) struct RemoveDue;

impl Keeper for RemoveDue {
    type Engine = EngineInner;

    fn alarms(engine: &EngineInner) -> &Arc<Alarms> {
        &engine.removals
    }

    async fn ring(engine: &Arc<EngineInner>, due: Vec<Due>, damaged: Vec<Key>) -> bool {
        engine.pass_over_alarms(&damaged);
        engine.remove(&due).await.is_ok()
    }
}

impl Engine {
    /// How long executions of a workflow are kept after their end, if the workflow is registered with this engine.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// println!("{:?}", engine.keeps("order"));
    /// # Ok(()) }
    /// ```
    pub fn keeps(&self, workflow: &str) -> Option<Duration> {
        self.inner.definition(workflow).map(|definition| definition.keep)
    }
}

impl EngineInner {
    async fn remove(self: &Arc<EngineInner>, due: &[Due]) -> Result<()> {
        match Broom::new(self).remove_all(due).await {
            Ok(true) => return Ok(()),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
            // One of the records has changed meanwhile or is damaged; the others are removed one by one.
            _ => {}
        }
        for due in due {
            match Broom::new(self).until_done(&due.id, Some(due)).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    self.put_aside(&due.id, format!("it cannot be removed: {error}"));
                }
                done => done?,
            }
        }
        Ok(())
    }

    /// Removes an execution that has ended, with all its records, before its due time.
    pub(crate) async fn purge(self: &Arc<EngineInner>, id: &ExecutionId) -> Result<()> {
        Broom::new(self).until_done(id, None).await
    }
}

/// Collects removals into commits of a suitable size.
struct Broom<'a> {
    engine: &'a Arc<EngineInner>,
    part: Part,
    /// The keys that the commit deletes. Several alarms may delete the same record, and a commit writes a key once.
    gone: HashSet<Key>,
    /// The record of the execution that is being removed. The commit checks that it is still the same execution.
    record: Option<(Key, Rev)>,
    is_checked: bool,
    /// True if a commit was refused.
    is_refused: bool,
}

impl<'a> Broom<'a> {
    fn new(engine: &'a Arc<EngineInner>) -> Broom<'a> {
        let (part, gone) = (Part::default(), HashSet::new());
        Broom { engine, part, gone, record: None, is_checked: false, is_refused: false }
    }

    /// Removes everything in as few commits as possible. Returns whether no commit was refused.
    async fn remove_all(&mut self, due: &[Due]) -> Result<bool> {
        for due in due {
            self.remove(due).await?;
        }
        self.sweep().await?;
        Ok(!self.is_refused)
    }

    /// Removes what is due of an execution, or all of it; retries as long as other writers are faster.
    async fn until_done(&mut self, id: &ExecutionId, due: Option<&Due>) -> Result<()> {
        loop {
            self.is_refused = false;
            match due {
                Some(due) => self.remove(due).await?,
                None => self.execution(id, None).await?,
            }
            self.sweep().await?;
            if !self.is_refused || self.engine.is_stopped() {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
    }

    async fn remove(&mut self, due: &Due) -> Result<()> {
        match Removal::decode(&due.item.value) {
            Ok(Removal::Before(run)) => self.runs_before(&due.id, run).await?,
            Ok(Removal::Execution) => {
                let at = read_alarm_key(due.key.bytes()).map(|(at, _)| at);
                self.execution(&due.id, at).await?;
            }
            // A newer program knows this removal.
            Err(why) if why.is_version() => return Ok(()),
            // The alarm cannot be read; `verify` finds what stays behind.
            Err(_) => tracing::error!(id = %due.id, key = %due.key, "the alarm of a removal is damaged"),
        }
        self.record = None;
        self.add(&due.key).await
    }

    /// Removes the journals of earlier runs, unless another execution has the id by now.
    async fn runs_before(&mut self, id: &ExecutionId, run: u32) -> Result<()> {
        match self.engine.read(id).await? {
            Some((execution, rev)) if execution.run >= run => {
                self.of(id, rev);
                self.empty(&journal_range(self.engine, id, Some(run))).await
            }
            _ => Ok(()),
        }
    }

    /// Everything removed from here on belongs to this execution.
    fn of(&mut self, id: &ExecutionId, rev: Rev) {
        self.record = Some((self.engine.record_of(id), rev));
        self.is_checked = false;
    }

    /// Removes an execution that has ended, if its record names that time for its removal.
    async fn execution(&mut self, id: &ExecutionId, at: Option<Timestamp>) -> Result<()> {
        let Some((execution, rev)) = self.engine.read(id).await? else { return Ok(()) };
        let is_its = at.is_none_or(|at| execution.removal_us == Some(at.0));
        if !execution.status.is_terminal() || !is_its {
            return Ok(());
        }
        self.of(id, rev);
        self.empty(&journal_range(self.engine, id, None)).await?;
        self.empty(&self.engine.states.execution(id).all()).await?;
        self.slots_of_tree(id, &execution).await?;
        self.start_keys(id, &execution).await?;
        self.empty(&self.engine.kept(id).all()).await?;
        // The rest is one commit: as long as there is a record, there is an alarm for it.
        let listed = self.engine.spaces.lists.list(Part::default(), id, Some(&execution), None, None);
        let mut last: Vec<Key> = listed.writes().iter().map(|write| write.key().clone()).collect();
        last.extend(execution.removal_us.map(|due| self.engine.spaces.removals.key(alarm_key(Timestamp(due), id))));
        if let Some(key) = &execution.key {
            last.extend(keyed(self.engine, id, &execution, key).await?);
        }
        last.push(self.engine.record_of(id));
        if self.part.writes().len() + last.len() > WRITES {
            self.sweep().await?;
        }
        last.iter().for_each(|key| self.note(key));
        Ok(())
    }

    /// Removes the idempotency keys of starts that were gathered.
    async fn start_keys(&mut self, id: &ExecutionId, execution: &Execution) -> Result<()> {
        let kept = self.engine.kept(id);
        let mut rest = kept.start_keys();
        while let Some(found) = next_page(&self.engine.store.view().await?, &mut rest, WRITES).await? {
            for key in found.iter().filter_map(|(key, _)| kept.read_start_key(key)) {
                if let Some(keyed) = keyed(self.engine, id, execution, key).await? {
                    self.add(&keyed).await?;
                }
            }
        }
        Ok(())
    }

    /// Removes the slots of the tree together with its root. A descendant that outlives the root may write slots later:
    /// those are removed with the descendant.
    async fn slots_of_tree(&mut self, id: &ExecutionId, execution: &Execution) -> Result<()> {
        let root = execution.parent.as_ref().map_or(id, |parent| &parent.root);
        if root != id && self.engine.get(&self.engine.record_of(root)).await?.is_some() {
            return Ok(());
        }
        self.empty(&self.engine.states.tree(root).all()).await
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

    /// Adds the deletion of a record, and sends the commit when it is large.
    async fn add(&mut self, key: &Key) -> Result<()> {
        self.note(key);
        if self.part.writes().len() >= WRITES { self.sweep().await } else { Ok(()) }
    }

    fn note(&mut self, key: &Key) {
        if !self.gone.insert(key.clone()) {
            return;
        }
        let mut part = std::mem::take(&mut self.part).delete(key);
        if let Some((record, rev)) = self.record.as_ref().filter(|_| !std::mem::replace(&mut self.is_checked, true)) {
            part = part.at_rev(RECORD, record, *rev);
        }
        self.part = part;
    }

    async fn sweep(&mut self) -> Result<()> {
        let part = std::mem::take(&mut self.part);
        self.gone.clear();
        self.is_checked = false;
        if part.writes().is_empty() {
            return Ok(());
        }
        self.is_refused |= !self.engine.store.commit(part.place(Commit::new()).0).await?.is_applied();
        Ok(())
    }
}

/// The key of an idempotency key, if it belongs to this execution.
async fn keyed(engine: &EngineInner, id: &ExecutionId, execution: &Execution, key: &str) -> Result<Option<Key>> {
    let key = engine.spaces.keys.key(keyed_key(&execution.workflow, key));
    let found = engine.store.get(&key).await?;
    let is_its = |value: &[u8]| Keyed::decode(value).is_ok_and(|keyed| keyed.id == **id);
    Ok(found.filter(|item| is_its(&item.value)).map(|_| key))
}
