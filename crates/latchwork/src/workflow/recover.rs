//! Taking executions into memory: all that were running when the engine starts, and each that waits when it is due.
//! Those that take the process with them each time are counted, and parked.

use std::sync::{Arc, Weak};

use crate::store::{Commit, Item, Key, Order, Outcome, Space, View};
use crate::workflow::alarm::{Alarms, Due, Keeper};
use crate::workflow::engine::Inner;
use crate::workflow::record::{Status, read_count};
use crate::workflow::run::{Next, Run};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions are found at once when the engine starts.
const BATCH: usize = 256;

/// Goes on with everything that was running as the view shows it.
pub(crate) async fn recover(engine: Weak<Inner>, running: View) {
    let Some(all) = engine.upgrade().map(|inner| inner.spaces.active.all()) else { return };
    let mut rest = all;
    loop {
        let Ok(found) = running.scan(&rest, Order::Ascending, BATCH).await else { break };
        let Some((last, _)) = found.last() else { break };
        rest = rest.after(last);
        let Some(inner) = engine.upgrade() else { return };
        if inner.take_up(found).await.is_err() {
            break;
        }
    }
    if let Some(inner) = engine.upgrade() {
        inner.found.send_replace(true);
    }
}

/// Wakes executions that wait.
pub(crate) struct Wake;

impl Keeper for Wake {
    fn space(engine: &Inner) -> &Space {
        &engine.spaces.timers
    }

    fn alarms(engine: &Inner) -> &Arc<Alarms> {
        &engine.timers
    }

    async fn ring(engine: &Arc<Inner>, due: Vec<Due>) -> Result<()> {
        // What was due before this engine was there may have been woken by an earlier one.
        let (earlier, now): (Vec<Due>, Vec<Due>) = due.into_iter().partition(|due| due.at < engine.since);
        let keys = earlier.iter().map(|due| (due.key.clone(), due.item.clone())).collect();
        let counts = engine.count(keys).await?;
        for (due, count) in earlier.iter().zip(counts) {
            engine.pick_up(&due.id, count).await?;
        }
        for due in now {
            engine.pick_up(&due.id, 0).await?;
        }
        Ok(())
    }
}

impl Inner {
    async fn take_up(self: &Arc<Inner>, found: Vec<(Key, Item)>) -> Result<()> {
        let ids: Vec<Option<ExecutionId>> =
            found.iter().map(|(key, _)| std::str::from_utf8(key.bytes()).ok().map(Into::into)).collect();
        let counts = self.count(found).await?;
        for (id, count) in ids.into_iter().zip(counts) {
            if let Some(id) = id {
                self.pick_up(&id, count).await?;
            }
        }
        Ok(())
    }

    /// Counts that these are taken up once more, before they are. Gives how often they were by now.
    async fn count(&self, found: Vec<(Key, Item)>) -> Result<Vec<u32>> {
        let counts: Vec<u32> = found.iter().map(|(_, item)| read_count(&item.value).saturating_add(1)).collect();
        if found.is_empty() {
            return Ok(counts);
        }
        let counted = |commit: Commit, (key, item): &(Key, Item), count: u32| {
            commit.at_rev(key, item.rev).put(key, count.to_be_bytes().to_vec())
        };
        let all = found.iter().zip(&counts).fold(self.owned(), |commit, (found, count)| counted(commit, found, *count));
        if let Outcome::Refused(_) = self.store.commit(all).await? {
            // Some of them were taken up meanwhile by somebody who asked for it.
            for (found, count) in found.iter().zip(&counts) {
                let _ = self.store.commit(counted(self.owned(), found, *count)).await?;
            }
        }
        Ok(counts)
    }

    /// Takes an execution into memory, if it is not there and is to run. `count` is how often it was taken up by now
    /// without coming to anything.
    pub(crate) async fn pick_up(self: &Arc<Inner>, id: &ExecutionId, count: u32) -> Result<()> {
        if self.is_stopped() || self.residents.lock().contains_key(id) {
            return Ok(());
        }
        let found = match self.read(id).await {
            Err(error @ WorkflowError::Corrupt { .. }) => {
                self.set_aside.lock().insert(id.clone(), error.to_string());
                return Ok(());
            }
            found => found?,
        };
        let Some((execution, rev)) = found else { return Ok(()) };
        if execution.status.is_terminal() || matches!(execution.status, Status::Parked(_)) {
            return Ok(());
        }
        let Some(definition) = self.definition(&execution.workflow).cloned() else {
            let reason = format!("workflow {:?} is not registered", execution.workflow);
            self.set_aside.lock().insert(id.clone(), reason);
            return Ok(());
        };
        let run = Run::stored(self.clone(), definition, id.clone(), execution, rev, count);
        if count > self.most_crashes {
            let reason = format!("it was taken up {} times and each time took the process with it", count - 1);
            let _ = run.commit(Next::Rests(Status::Parked(reason))).await;
            return Ok(());
        }
        self.spawn(Arc::new(run));
        Ok(())
    }
}
