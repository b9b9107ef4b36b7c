//! Taking executions into memory: all that were running when the engine starts, and each that waits when it is due.
//! Those that take the process with them each time are counted, and parked.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use crate::damage::{Scanned, scan_around};
use crate::lane::Part;
use crate::node::alarm::{Alarms, Due, Keeper, due_key, read_alarm_key};
use crate::node::{SHARD, shard_key};
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Item, Key, Outcome, Range, Rev, Space, StoreError, Timestamp, View};
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::run::{Next, Probation, RECORD, Run, Stop};
use crate::workflow::stored::listed::{read_by_status, read_end};
use crate::workflow::stored::record::{Execution, Status, Supersede, read_count};
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
    let Some(shards) = engine.upgrade().map(|inner| inner.node.owned()) else { return };
    let mut suspects = Vec::new();
    for overdue in [false, true] {
        let mut fresh = Vec::new();
        for shard in &shards {
            let Some(mut rest) = engine.upgrade().map(|inner| inner.left(*shard, overdue).1) else { return };
            while let Some(left) = next_left(&engine, &before, *shard, overdue, &mut rest).await {
                let (new, others): (Vec<Left>, Vec<Left>) = left.into_iter().partition(|left| left.count() == 0);
                suspects.extend(others);
                fresh.extend(new);
                if fresh.len() >= BATCH {
                    let Some(inner) = engine.upgrade() else { return };
                    inner.take_up(fresh.drain(..BATCH).collect(), None).await;
                }
            }
        }
        let Some(inner) = engine.upgrade() else { return };
        inner.take_up(fresh, None).await;
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

/// The next of what an earlier engine has left in a shard, however long the store does not serve. `None` if there is no
/// more, or the shard is not this engine's any more.
async fn next_left(
    engine: &Weak<Inner>,
    before: &View,
    shard: u16,
    overdue: bool,
    rest: &mut Range,
) -> Option<Vec<Left>> {
    loop {
        let inner = engine.upgrade().filter(|inner| !inner.is_stopped() && inner.node.owned().contains(&shard))?;
        match inner.left_page(before, shard, overdue, rest).await {
            Ok(page) => return page,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                let pause = inner.store.env().sleep(PAUSE);
                drop(inner);
                pause.await;
            }
            // What was found so far goes on; the rest is told by every call that meets it.
            Err(error) => {
                tracing::error!(%error, shard, "not everything that was running could be found");
                return None;
            }
        }
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
    type Engine = Inner;

    fn alarms(engine: &Inner) -> &Arc<Alarms> {
        &engine.timers
    }

    async fn ring(engine: &Arc<Inner>, due: Vec<Due>, damaged: Vec<Key>) -> bool {
        engine.pass_over_alarms(&damaged);
        for due in due {
            let taken = engine.pick_up(&due.id).await.or_else(|error| engine.unless_passing(&due.id, error));
            if taken.is_err() {
                return false;
            }
        }
        true
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

    /// The same for alarms.
    pub(crate) fn pass_over_alarms(&self, damaged: &[Key]) {
        damaged.iter().for_each(|key| self.pass_over(key, read_alarm_key(key.bytes()).map(|(_, id)| id)));
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
        self.timers.look_again();
        self.removals.look_again();
        self.scheduling.alarms.look_again();
        self.tell_all();
        self.locks.listen_again().await?;
        self.admissions.look_at_all().await?;
        for shard in self.node.owned() {
            self.sweep_shard(shard).await?;
        }
        Ok(())
    }

    async fn sweep_shard(self: &Arc<Inner>, shard: u16) -> Result<()> {
        let (_, mut rest) = self.left(shard, false);
        while let Some(left) = self.left_page(&self.store.view().await?, shard, false, &mut rest).await? {
            let is_aside = |id: &ExecutionId| self.set_aside.lock().contains_key(id);
            for left in left.into_iter().filter(|left| !self.is_resident(&left.id) && !is_aside(&left.id)) {
                self.pick_up(&left.id).await.or_else(|error| self.unless_passing(&left.id, error))?;
            }
        }
        Ok(())
    }

    /// The next executions of a shard that an earlier engine has left. What is damaged is passed over.
    async fn left_page(
        &self,
        view: &View,
        shard: u16,
        overdue: bool,
        rest: &mut Range,
    ) -> Result<Option<Vec<Left>>, StoreError> {
        let (space, _) = self.left(shard, overdue);
        let Scanned { found, damaged } = scan_around(view, &space, rest, BATCH).await?;
        damaged.iter().for_each(|key| self.pass_over(key, Left::id(key, overdue)));
        let Some((last, _)) = found.last() else { return Ok(None) };
        *rest = rest.after(last);
        Ok(Some(found.into_iter().filter_map(|(key, item)| Left::new(key, item, overdue)).collect()))
    }

    /// Where executions of a shard are found that an earlier engine has left.
    fn left(&self, shard: u16, overdue: bool) -> (Space, Range) {
        let (timers, running) = (&self.spaces.timers, &self.spaces.lists.running);
        match overdue {
            true => (timers.clone(), timers.range(shard_key(shard).to_vec()..due_key(shard, self.since))),
            false => (running.clone(), running.prefix(shard_key(shard))),
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
        let left_out = self.count(ready.iter().map(|(left, _)| *left)).await?;
        for (left, found) in ready.into_iter().filter(|(left, _)| !left_out.contains(&left.id)) {
            self.take_in(&left.id, found, left.count().saturating_add(1), probation.clone()).await;
        }
        Ok(())
    }

    /// Counts that these are taken up once more, before they are. Gives those that are not to be: what cannot be
    /// counted is set aside, and what is in another engine's shard is left to that.
    async fn count<'a>(&self, left: impl Iterator<Item = &'a Left> + Clone) -> Result<BTreeSet<ExecutionId>> {
        let counted = |left: &Left| {
            let part = self.node.for_owner(&left.id).at_rev(RECORD, &left.key, left.item.rev);
            part.put(&left.key, left.count().saturating_add(1).to_be_bytes().to_vec())
        };
        let mut left_out = BTreeSet::new();
        let all = left.clone().fold(Part::default(), |part, left| part.and(counted(left)));
        match self.store.commit(all.place(Commit::new()).0).await {
            Ok(Outcome::Applied(_)) => return Ok(left_out),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error.into()),
            // Some of them were taken up meanwhile by a caller that asked for it, or this is a second try; or a record
            // of one of them is damaged, or its shard lost.
            _ => {}
        }
        for left in left {
            let (commit, placed) = counted(left).place(Commit::new());
            match self.store.commit(commit).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    self.pass_over(&left.key, Some(left.id.clone()));
                    left_out.insert(left.id.clone());
                }
                Ok(Outcome::Refused(refusal)) if placed.has_failed(&refusal, SHARD) => {
                    self.node.lose(left.id.as_bytes());
                    left_out.insert(left.id.clone());
                }
                counted => drop(counted?),
            }
        }
        Ok(left_out)
    }

    /// Takes an execution up whose last commit may still be on its way. A record of a later rev has that refused.
    pub(crate) async fn pick_up_fenced(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        if let (false, Some((execution, rev))) = (self.is_resident(id), self.read(id).await?)
            && !execution.status.is_terminal()
        {
            let key = self.record_of(id);
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
        if self.is_stopped() || self.idle || !self.node.owns(id) || self.is_missed(id) {
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
    async fn ready(self: &Arc<Inner>, id: &ExecutionId) -> Result<Option<Ready>> {
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
        let Some((mut execution, rev)) = found else { return Ok(None) };
        if execution.status.is_terminal() || matches!(execution.status, Status::Parked(_)) {
            self.unbegun.forget(id);
            return Ok(None);
        }
        if execution.superseded == Some(Supersede::Terminate) {
            self.end_superseded(id);
            return Ok(None);
        }
        let now = self.store.env().now().0;
        if execution.is_queued() {
            if execution.timer_us.is_some_and(|timer| timer <= now) {
                self.time_out_in_line(id, execution, rev);
            }
            return Ok(None);
        }
        // It is looked at for another reason than its time, or was put off meanwhile.
        let is_put_off = execution.status == Status::Waiting && execution.cancel.is_none();
        if let Some(begins) = execution.begins_us.filter(|begins| is_put_off && *begins > now) {
            self.timers.set(id, Timestamp(begins));
            return Ok(None);
        }
        if execution.is_batch() {
            execution.input = self.gathered(id).await?;
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
        let run = Run::new(self.clone(), definition, id.clone(), execution, Some(rev)).taken_up(count, probation);
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
