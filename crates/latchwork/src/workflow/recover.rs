//! Taking executions into memory: all that were running when the engine starts, and each that waits when it is due.
//! Those that take the process with them each time are counted, and parked.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use crate::damage::{Scanned, scan_around};
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Item, Key, Outcome, Range, Rev, Space, Timestamp, View};
use crate::workflow::alarm::{Alarms, Due, Keeper};
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::listed::{Shelf, by_status, read_by_status, read_end};
use crate::workflow::record::{Execution, Status, read_alarm_key, read_count};
use crate::workflow::run::{Next, Probation, RECORD, Run, Stop};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions are found at once when the engine starts.
const BATCH: usize = 256;

/// How long to wait for those on probation to come to something, and after the store did not serve.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);

/// When to look for what a commit without an answer may have set running.
const DOUBTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// An execution that was running, or due, when the engine started.
struct Left {
    id: ExecutionId,
    /// Where it is counted how often it was taken up.
    key: Key,
    item: Item,
}

/// An execution that is to run, with what runs it.
struct Ready {
    execution: Execution,
    rev: Rev,
    definition: Arc<Definition>,
}

/// Goes on with everything that was running or due as the view shows it. Those that an earlier engine took up without
/// their coming to anything are suspects: one of them may have taken the process with it. They are taken up a few at a
/// time, fewer each time, and in the end alone, so that the others are not counted with the one it was.
pub(crate) async fn recover(engine: Weak<Inner>, before: View) {
    let mut suspects = Vec::new();
    for overdue in [false, true] {
        let Some(inner) = engine.upgrade() else { return };
        let (space, mut rest) = inner.left(overdue);
        drop(inner);
        loop {
            let Scanned { found, damaged } = match scan_around(&before, &space, &rest, BATCH).await {
                Ok(scanned) => scanned,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    let Some(inner) = engine.upgrade().filter(|inner| !inner.is_stopped()) else { return };
                    let pause = inner.store.env().sleep(PAUSE);
                    drop(inner);
                    pause.await;
                    continue;
                }
                // What was found so far goes on; the rest is told by every call that meets it.
                Err(error) => {
                    tracing::error!(%error, "not everything that was running could be found");
                    break;
                }
            };
            let Some(inner) = engine.upgrade() else { return };
            damaged.iter().for_each(|key| inner.pass_over(key, Left::id(key, overdue)));
            let Some((last, _)) = found.last() else { break };
            rest = rest.after(last);
            let left = found.into_iter().filter_map(|(key, item)| Left::new(key, item, overdue));
            let (fresh, others): (Vec<Left>, Vec<Left>) = left.partition(|left| left.count() == 0);
            suspects.extend(others);
            inner.take_up(fresh, None).await;
        }
    }
    drop(before);
    if let Some(inner) = engine.upgrade() {
        inner.found.send_replace(true);
    }
    suspects.sort_by_key(Left::count);
    while !suspects.is_empty() {
        let Some(inner) = engine.upgrade() else { return };
        let count = suspects[0].count();
        let together = suspects.iter().take_while(|left| left.count() == count).count();
        let group = suspects.drain(..together.min(inner.group(count))).collect();
        let (probation, mut passed) = tokio::sync::mpsc::channel::<()>(1);
        inner.take_up(group, Some(probation)).await;
        let mut patience = inner.store.env().sleep(PATIENCE);
        drop(inner);
        std::future::poll_fn(|context| match passed.poll_recv(context) {
            Poll::Pending => patience.as_mut().poll(context),
            Poll::Ready(_) => Poll::Ready(()),
        })
        .await;
    }
}

/// Whenever a commit had no answer, looks for what that has set running and nobody has taken up: soon, and again when
/// whatever was on its way has landed or is lost.
pub(crate) async fn doubt(engine: Weak<Inner>) {
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let doubted = inner.node.doubted();
        drop(inner);
        doubted.notified().await;
        for pause in DOUBTS {
            let Some(inner) = engine.upgrade() else { return };
            let pause = inner.store.env().sleep(pause);
            drop(inner);
            pause.await;
            let Some(inner) = engine.upgrade() else { return };
            if let Err(error) = inner.sweep().await {
                tracing::debug!(%error, "what runs could not be looked through");
                inner.node.doubt();
            }
        }
    }
}

impl Left {
    fn new(key: Key, item: Item, overdue: bool) -> Option<Left> {
        let id = Left::id(&key, overdue);
        if id.is_none() {
            tracing::error!(%key, "the key is damaged and is passed over");
        }
        Some(Left { id: id?, key, item })
    }

    /// Which execution a key tells of.
    fn id(key: &Key, overdue: bool) -> Option<ExecutionId> {
        match overdue {
            true => read_alarm_key(key.bytes()).map(|(_, id)| id),
            false => read_end(read_by_status(key.bytes())?.1).map(|(_, id)| id),
        }
    }

    fn count(&self) -> u32 {
        read_count(&self.item.value)
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
        for due in due {
            engine.pick_up(&due.id).await.or_else(|error| engine.unless_passing(&due.id, error))?;
        }
        Ok(())
    }
}

impl Inner {
    /// Sets an execution aside: it cannot run here as things are. Others need not wait for that.
    pub(crate) fn put_aside(&self, id: &ExecutionId, reason: String) {
        let mut set_aside = self.set_aside.lock();
        if set_aside.get(id) != Some(&reason) {
            tracing::error!(%id, reason, "an execution is set aside");
            set_aside.insert(id.clone(), reason);
        }
    }

    /// Sets the execution aside that a damaged record is of, as far as its key tells.
    pub(crate) fn pass_over(&self, key: &Key, id: Option<ExecutionId>) {
        match id {
            Some(id) => self.put_aside(&id, format!("its record {key} is damaged: it cannot be read")),
            None => tracing::error!(%key, "the record is damaged and is passed over"),
        }
    }

    /// What an error means that came up with one execution: if it stays, the execution is set aside and others go on.
    pub(crate) fn unless_passing(&self, id: &ExecutionId, error: WorkflowError) -> Result<()> {
        if error.kind() == ErrorKind::Unavailable {
            return Err(error);
        }
        self.put_aside(id, format!("it cannot be taken up: {error}"));
        Ok(())
    }

    /// Takes up what runs and is not in memory, and has those look who were not told.
    async fn sweep(self: &Arc<Inner>) -> Result<()> {
        let mut residents: Vec<_> = self.residents.lock().values().map(|resident| resident.run.clone()).collect();
        residents.sort_by(|a, b| a.id.cmp(&b.id));
        residents.iter().for_each(|run| run.doubt());
        // Time may have jumped since; those that were rung before and are still there are few.
        let env = self.store.env();
        self.timers.set(Timestamp(0), env);
        self.removals.set(Timestamp(0), env);
        self.tell_all();
        self.locks.listen_again().await?;
        let (space, mut rest) = self.left(false);
        loop {
            let Scanned { found, damaged } = scan_around(&self.store.view().await?, &space, &rest, BATCH).await?;
            damaged.iter().for_each(|key| self.pass_over(key, Left::id(key, false)));
            let Some((last, _)) = found.last() else { return Ok(()) };
            rest = rest.after(last);
            let left = found.into_iter().filter_map(|(key, item)| Left::new(key, item, false));
            let is_aside = |id: &ExecutionId| self.set_aside.lock().contains_key(id);
            for left in left.filter(|left| !self.is_resident(&left.id) && !is_aside(&left.id)) {
                self.pick_up(&left.id).await.or_else(|error| self.unless_passing(&left.id, error))?;
            }
        }
    }

    /// Where executions are found that an earlier engine has left.
    fn left(&self, overdue: bool) -> (Space, Range) {
        let (timers, listed) = (&self.spaces.timers, &self.spaces.listed);
        match overdue {
            true => (timers.clone(), timers.range(&[0][..]..&self.since.0.to_be_bytes()[..])),
            false => (listed.clone(), listed.prefix(by_status(Shelf::Running, None))),
        }
    }

    /// How many executions may be taken up together that were so often before.
    fn group(&self, count: u32) -> usize {
        if count + 1 >= self.most_crashes { 1 } else { (BATCH >> (3 * (count - 1)).min(31)).max(1) }
    }

    /// Takes executions up that an earlier engine has left, after that was counted.
    async fn take_up(self: &Arc<Inner>, left: Vec<Left>, probation: Option<Probation>) {
        if left.is_empty() {
            return;
        }
        loop {
            match self.take_up_once(&left, &probation).await {
                Err(error) if error.kind() == ErrorKind::Unavailable && !self.is_stopped() => {
                    self.store.env().sleep(PAUSE).await;
                }
                taken => {
                    // What comes up with one of them does not come here.
                    let error = taken.err().filter(|_| !self.is_stopped());
                    error.iter().for_each(|error| tracing::error!(%error, "executions could not be taken up"));
                    return;
                }
            }
        }
    }

    async fn take_up_once(self: &Arc<Inner>, left: &[Left], probation: &Option<Probation>) -> Result<()> {
        // What cannot run here is not taken up, and not counted.
        let mut ready = Vec::with_capacity(left.len());
        for left in left {
            if let Some(found) = self.ready(&left.id).await? {
                ready.push((left, found));
            }
        }
        if ready.is_empty() {
            return Ok(());
        }
        let damaged = self.count(ready.iter().map(|(left, _)| *left)).await?;
        for (left, found) in ready.into_iter().filter(|(left, _)| !damaged.contains(&left.id)) {
            self.take_in(&left.id, found, left.count().saturating_add(1), probation.clone()).await;
        }
        Ok(())
    }

    /// Counts that these are taken up once more, before they are. Gives those that cannot be counted: they are set
    /// aside.
    async fn count<'a>(&self, left: impl Iterator<Item = &'a Left> + Clone) -> Result<BTreeSet<ExecutionId>> {
        let counted = |left: &Left| {
            let part = self.node.for_owner(&left.id).at_rev(RECORD, &left.key, left.item.rev);
            part.put(&left.key, left.count().saturating_add(1).to_be_bytes().to_vec())
        };
        let mut damaged = BTreeSet::new();
        let all = left.clone().fold(Part::default(), |part, left| part.and(counted(left)));
        match self.store.commit(all.place(Commit::new()).0).await {
            Ok(Outcome::Applied(_)) => return Ok(damaged),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error.into()),
            // Some of them were taken up meanwhile by a caller that asked for it, or this is a second try; or a record
            // of one of them is damaged.
            _ => {}
        }
        for left in left {
            match self.store.commit(counted(left).place(Commit::new()).0).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    self.pass_over(&left.key, Some(left.id.clone()));
                    damaged.insert(left.id.clone());
                }
                counted => drop(counted?),
            }
        }
        Ok(damaged)
    }

    /// Takes an execution up whose last commit may still be on its way. A record of a later rev has that refused.
    pub(crate) async fn pick_up_fenced(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        let resident = self.residents.lock().contains_key(id);
        if let (false, Some((execution, rev))) = (resident, self.read(id).await?)
            && !execution.status.is_terminal()
        {
            let key = self.spaces.executions.key(id.as_bytes());
            let part = self.node.for_owner(id).at_rev(RECORD, &key, rev).put(&key, execution.encode());
            // If it is refused, something has landed since, or this engine is no longer the owner.
            let _ = self.store.commit(part.place(Commit::new()).0).await?;
        }
        self.pick_up(id).await
    }

    /// Takes an execution into memory, in a task of its own, however long the store does not serve.
    pub(crate) fn wake_up(self: &Arc<Inner>, id: &ExecutionId) {
        let (inner, id) = (self.clone(), id.clone());
        self.node.runtime.spawn(async move {
            while let Err(error) = inner.pick_up(&id).await {
                if inner.is_stopped() || inner.unless_passing(&id, error).is_ok() {
                    return;
                }
                inner.store.env().sleep(PAUSE).await;
            }
        });
    }

    /// Takes an execution into memory, if it is not there and is to run.
    pub(crate) async fn pick_up(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        if self.is_stopped() || self.idle || self.is_missed(id) {
            return Ok(());
        }
        if let Some(found) = self.ready(id).await? {
            self.take_in(id, found, 0, None).await;
        }
        Ok(())
    }

    /// Whether an execution is in memory. If it is, it is looked at again when it leaves.
    fn is_missed(&self, id: &ExecutionId) -> bool {
        let mut residents = self.residents.lock();
        residents.get_mut(id).map(|resident| resident.missed = true).is_some()
    }

    /// An execution that is to run and can. One that cannot run here is set aside.
    async fn ready(&self, id: &ExecutionId) -> Result<Option<Ready>> {
        let found = match self.read(id).await {
            Err(error @ (WorkflowError::Corrupt { .. } | WorkflowError::UnknownVersion { .. })) => {
                self.put_aside(id, error.to_string());
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.put_aside(id, format!("execution {id:?} is damaged: {error}"));
                return Ok(None);
            }
            found => found?,
        };
        let Some((execution, rev)) = found else { return Ok(None) };
        if execution.status.is_terminal() || matches!(execution.status, Status::Parked(_)) {
            return Ok(None);
        }
        let Some(definition) = self.definition(&execution.workflow).cloned() else {
            let reason = format!("workflow {:?} is not registered", execution.workflow);
            self.set_aside.lock().insert(id.clone(), reason);
            return Ok(None);
        };
        Ok(Some(Ready { execution, rev, definition }))
    }

    /// Runs an execution, or parks it if it was taken up too often by now without coming to anything.
    async fn take_in(
        self: &Arc<Inner>,
        id: &ExecutionId,
        Ready { execution, rev, definition }: Ready,
        count: u32,
        probation: Option<Probation>,
    ) {
        let run = Run::stored(self.clone(), definition, id.clone(), execution, rev).taken_up(count, probation);
        let run = Arc::new(run);
        if count > self.most_crashes {
            let times = count - 1;
            let reason =
                format!("it was taken up {times} times, and each time the process ended before it came to anything");
            loop {
                match run.close(Next::Rests(Status::Parked(reason.clone()))).await {
                    Err(Stop::Failed(error)) if error.kind() == ErrorKind::Unavailable && !self.is_stopped() => {
                        self.store.env().sleep(PAUSE).await;
                    }
                    // That it is parked cannot be stored.
                    Err(Stop::Parked(why)) => return self.put_aside(id, why),
                    _ => return,
                }
            }
        } else {
            self.set_aside.lock().remove(id);
            self.spawn_stored(run);
        }
    }
}
