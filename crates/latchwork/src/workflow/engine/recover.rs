//! Loads executions: all running ones when the engine starts, and each waiting one when it is due. An execution that
//! crashes the process again and again is counted, and parked.

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
use crate::workflow::engine::EngineInner;
use crate::workflow::engine::listen::News;
use crate::workflow::run::{NextState, Probation, RECORD, Run, Stop};
use crate::workflow::stored::keys::read_count;
use crate::workflow::stored::listed::{read_by_status, read_end};
use crate::workflow::stored::record::{Execution, StoredStatus, Supersede};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions are read at once when the engine starts.
const BATCH: usize = 256;

/// How long to wait for executions on probation to make progress; and the pause after the store was unavailable.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(100);

/// When to look for executions that a commit without an answer may have made running.
const DOUBTS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// An execution that was running, or due, when the engine started.
struct LeftExecution {
    id: ExecutionId,
    /// The key whose value counts how often it was loaded.
    key: Key,
    item: Item,
}

/// An execution that has to run, with its definition.
struct Ready {
    execution: Execution,
    rev: Rev,
    definition: Arc<Definition>,
}

/// Continues everything that was running or due in these shards, in the view if there is one. Executions that an
/// earlier engine loaded and that made no progress are suspects: one of them may have crashed the process. They are
/// loaded a few at a time, fewer each time, and in the end alone, so that the others are not counted together with the
/// cause of the crash.
pub(crate) async fn recover(engine: Weak<EngineInner>, shards: Vec<u16>, before: Option<View>) {
    let before = match before {
        Some(before) => Some(before),
        None => view_at_last(&engine).await,
    };
    let Some(before) = before else { return };
    let mut suspects = Vec::new();
    for overdue in [false, true] {
        let mut fresh = Vec::new();
        for shard in &shards {
            let Some(mut rest) = engine.upgrade().map(|inner| inner.left(*shard, overdue).1) else { return };
            while let Some(left) = next_left(&engine, &before, *shard, overdue, &mut rest).await {
                let (new, others): (Vec<LeftExecution>, Vec<LeftExecution>) =
                    left.into_iter().partition(|left| left.count() == 0);
                suspects.extend(others);
                fresh.extend(new);
                if fresh.len() >= BATCH {
                    let Some(inner) = engine.upgrade() else { return };
                    inner.load_left(fresh.drain(..BATCH).collect(), None).await;
                }
            }
        }
        let Some(inner) = engine.upgrade() else { return };
        inner.load_left(fresh, None).await;
    }
    drop(before);
    if let Some(inner) = engine.upgrade() {
        inner.found.send_replace(true);
    }
    suspects.sort_by_key(LeftExecution::count);
    while !suspects.is_empty() {
        let Some(inner) = engine.upgrade() else { return };
        let count = suspects[0].count();
        let together = suspects.iter().take_while(|left| left.count() == count).count();
        let group = suspects.drain(..together.min(inner.group(count))).collect();
        let (probation, mut passed) = tokio::sync::mpsc::channel::<()>(1);
        inner.load_left(group, Some(probation)).await;
        let mut patience = inner.store.env().sleep(PATIENCE);
        drop(inner);
        std::future::poll_fn(|context| match passed.poll_recv(context) {
            Poll::Pending => patience.as_mut().poll(context),
            Poll::Ready(_) => Poll::Ready(()),
        })
        .await;
    }
}

/// A view of the store; retries as long as the store is unavailable.
async fn view_at_last(engine: &Weak<EngineInner>) -> Option<View> {
    loop {
        let inner = engine.upgrade().filter(|inner| !inner.is_stopped())?;
        match inner.store.view().await {
            Ok(view) => return Some(view),
            Err(error) if error.is_passing() => {}
            Err(error) => {
                tracing::error!(%error, "the running executions could not be read");
                return None;
            }
        }
        let pause = inner.store.env().sleep(PAUSE);
        drop(inner);
        pause.await;
    }
}

/// The next executions that an earlier engine left in a shard; retries as long as the store is unavailable. `None` if
/// there are no more, or if this engine no longer owns the shard.
async fn next_left(
    engine: &Weak<EngineInner>,
    before: &View,
    shard: u16,
    overdue: bool,
    rest: &mut Range,
) -> Option<Vec<LeftExecution>> {
    loop {
        let inner = engine.upgrade().filter(|inner| !inner.is_stopped() && inner.node.owned().contains(&shard))?;
        match inner.left_page(before, shard, overdue, rest).await {
            Ok(page) => return page,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                let pause = inner.store.env().sleep(PAUSE);
                drop(inner);
                pause.await;
            }
            // Everything found so far runs. Each later call that reads the damaged part reports the error.
            Err(error) => {
                tracing::error!(%error, shard, "not all running executions could be found");
                return None;
            }
        }
    }
}

/// Whenever a commit had no answer, looks for executions that the commit made running and that are not loaded: soon,
/// and again when everything in flight has landed or is lost.
pub(crate) async fn doubt(engine: Weak<EngineInner>) {
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
                tracing::debug!(%error, "the running executions could not be read");
                inner.node.doubt();
            }
        }
    }
}

/// The execution of a key in the list of running executions.
pub(crate) fn read_running(key: &Key) -> Option<ExecutionId> {
    LeftExecution::id(key, false)
}

impl LeftExecution {
    fn new(key: Key, item: Item, overdue: bool) -> Option<LeftExecution> {
        let id = LeftExecution::id(&key, overdue);
        if id.is_none() {
            tracing::error!(%key, "the key is damaged and is skipped");
        }
        Some(LeftExecution { id: id?, key, item })
    }

    /// The execution that a key belongs to.
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

/// Loads waiting executions when they are due.
pub(crate) struct Wake;

impl Keeper for Wake {
    type Engine = EngineInner;

    fn alarms(engine: &EngineInner) -> &Arc<Alarms> {
        &engine.timers
    }

    async fn ring(engine: &Arc<EngineInner>, due: Vec<Due>, damaged: Vec<Key>) -> bool {
        engine.pass_over_alarms(&damaged);
        for due in due {
            let loaded = engine.load(&due.id).await.or_else(|error| engine.unless_passing(&due.id, error));
            if loaded.is_err() {
                return false;
            }
        }
        true
    }
}

impl EngineInner {
    /// Sets an execution aside: this program cannot run it. The other executions go on, and callers that wait for the
    /// result are told.
    pub(crate) fn put_aside(&self, id: &ExecutionId, reason: String) {
        let before = self.set_aside.lock().insert(id.clone(), reason.clone());
        if before.as_ref() != Some(&reason) {
            tracing::error!(%id, reason, "execution set aside");
            self.tell(id, News::End, false);
        }
    }

    /// Sets the execution of a damaged record aside, if the key names the execution.
    pub(crate) fn pass_over(&self, key: &Key, id: Option<ExecutionId>) {
        match id {
            Some(id) => self.put_aside(&id, format!("its record {key} is damaged: it cannot be read")),
            None => tracing::error!(%key, "the record is damaged and is skipped"),
        }
    }

    /// Does this for damaged alarms.
    pub(crate) fn pass_over_alarms(&self, damaged: &[Key]) {
        damaged.iter().for_each(|key| self.pass_over(key, read_alarm_key(key.bytes()).map(|(_, id)| id)));
    }

    /// Returns an error that passes. For any other error of one execution, sets the execution aside, so that others
    /// run.
    pub(crate) fn unless_passing(&self, id: &ExecutionId, error: WorkflowError) -> Result<()> {
        if error.kind() == ErrorKind::Unavailable {
            return Err(error);
        }
        self.put_aside(id, format!("it cannot be loaded: {error}"));
        Ok(())
    }

    /// Loads running executions that are not in memory, and makes residents check what they may have missed.
    async fn sweep(self: &Arc<EngineInner>) -> Result<()> {
        let mut residents: Vec<_> = self.residents.lock().values().map(|resident| resident.run.clone()).collect();
        residents.sort_by(|a, b| a.id.cmp(&b.id));
        residents.iter().for_each(|run| run.doubt());
        // The clock may have jumped, so all alarms are looked at again. Few of them have rung before and are still
        // stored.
        self.timers.look_again();
        self.removals.look_again();
        self.scheduling.alarms.look_again();
        self.tell_all();
        self.tell_again().await?;
        self.locks.listen_again().await?;
        self.admissions.look_at_all().await?;
        for shard in self.node.owned() {
            self.sweep_shard(shard).await?;
        }
        Ok(())
    }

    async fn sweep_shard(self: &Arc<EngineInner>, shard: u16) -> Result<()> {
        let (_, mut rest) = self.left(shard, false);
        while let Some(left) = self.left_page(&self.store.view().await?, shard, false, &mut rest).await? {
            let is_aside = |id: &ExecutionId| self.set_aside.lock().contains_key(id);
            for left in left.into_iter().filter(|left| !self.is_resident(&left.id) && !is_aside(&left.id)) {
                self.load(&left.id).await.or_else(|error| self.unless_passing(&left.id, error))?;
            }
        }
        Ok(())
    }

    /// The next executions of a shard that an earlier engine left. Damaged keys are skipped.
    async fn left_page(
        &self,
        view: &View,
        shard: u16,
        overdue: bool,
        rest: &mut Range,
    ) -> Result<Option<Vec<LeftExecution>>, StoreError> {
        let (space, _) = self.left(shard, overdue);
        let Scanned { found, damaged } = scan_around(view, &space, rest, BATCH).await?;
        damaged.iter().for_each(|key| self.pass_over(key, LeftExecution::id(key, overdue)));
        let Some((last, _)) = found.last() else { return Ok(None) };
        *rest = rest.after(last);
        Ok(Some(found.into_iter().filter_map(|(key, item)| LeftExecution::new(key, item, overdue)).collect()))
    }

    /// The keys of the executions that an earlier engine left in a shard.
    fn left(&self, shard: u16, overdue: bool) -> (Space, Range) {
        let (timers, running) = (&self.spaces.timers, &self.spaces.lists.running);
        match overdue {
            true => {
                let since = self.node.since(shard).unwrap_or_default();
                (timers.clone(), timers.range(shard_key(shard).to_vec()..due_key(shard, since)))
            }
            false => (running.clone(), running.prefix(shard_key(shard))),
        }
    }

    /// How many executions may be loaded together that were loaded this often before.
    fn group(&self, count: u32) -> usize {
        if count + 1 >= self.most_crashes { 1 } else { (BATCH >> (3 * (count - 1)).min(31)).max(1) }
    }

    /// Loads executions that an earlier engine left, after their loads were counted.
    async fn load_left(self: &Arc<EngineInner>, left: Vec<LeftExecution>, probation: Option<Probation>) {
        if left.is_empty() {
            return;
        }
        loop {
            match self.load_left_once(&left, &probation).await {
                Err(error) if error.kind() == ErrorKind::Unavailable && !self.is_stopped() => {
                    self.store.env().sleep(PAUSE).await;
                }
                loaded => {
                    // Errors of a single execution do not get here.
                    let error = loaded.err().filter(|_| !self.is_stopped());
                    error.iter().for_each(|error| tracing::error!(%error, "executions could not be loaded"));
                    return;
                }
            }
        }
    }

    async fn load_left_once(
        self: &Arc<EngineInner>,
        left: &[LeftExecution],
        probation: &Option<Probation>,
    ) -> Result<()> {
        // Executions that cannot run here are neither loaded nor counted.
        let mut ready = Vec::with_capacity(left.len());
        for left in left.iter().filter(|left| !self.is_resident(&left.id)) {
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

    /// Counts one more load of these executions before they are loaded. Returns the executions not to load: those that
    /// cannot be counted are set aside, and those in a shard of another engine are left to that engine.
    async fn count<'a>(&self, left: impl Iterator<Item = &'a LeftExecution> + Clone) -> Result<BTreeSet<ExecutionId>> {
        let counted = |left: &LeftExecution| {
            let part = self.node.for_owner(&left.id).at_rev(RECORD, &left.key, left.item.rev);
            part.put(&left.key, left.count().saturating_add(1).to_be_bytes().to_vec())
        };
        let mut left_out = BTreeSet::new();
        let all = left.clone().fold(Part::default(), |part, left| part.and(counted(left)));
        match self.store.commit(all.place(Commit::new()).0).await {
            Ok(Outcome::Applied(_)) => return Ok(left_out),
            Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error.into()),
            // Callers have loaded some of them meanwhile, or this is a second try; or a record of one of them is
            // damaged, or its shard is lost.
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

    /// Loads an execution whose last commit may still be in flight. A record with a later rev makes that commit fail.
    pub(crate) async fn load_fenced(self: &Arc<EngineInner>, id: &ExecutionId) -> Result<()> {
        if let (false, Some((execution, rev))) = (self.is_resident(id), self.read(id).await?)
            && !execution.status.is_terminal()
        {
            let key = self.record_of(id);
            let part = self.node.for_owner(id).at_rev(RECORD, &key, rev).put(&key, execution.encode());
            // A refusal means that a commit has landed since, or that this engine is no longer the owner.
            let _ = self.store.commit(part.place(Commit::new()).0).await?;
        }
        self.load(id).await
    }

    /// Loads an execution in a task of its own, and retries as long as the store is unavailable.
    pub(crate) fn spawn_load(self: &Arc<EngineInner>, id: &ExecutionId) {
        let (inner, id) = (self.clone(), id.clone());
        self.node.runtime.spawn(async move {
            while let Err(error) = inner.load(&id).await {
                if inner.is_stopped() || inner.unless_passing(&id, error).is_ok() {
                    return;
                }
                inner.store.env().sleep(PAUSE).await;
            }
        });
    }

    /// Loads an execution, if it is not in memory and has to run.
    pub(crate) async fn load(self: &Arc<EngineInner>, id: &ExecutionId) -> Result<()> {
        let is_ours = self.node.owns(id) || self.node.is_guest(id);
        if self.is_stopped() || self.idle || !is_ours || self.is_missed(id) {
            return Ok(());
        }
        if let Some(found) = self.ready(id).await? {
            // The crashes of an execution that is lent are counted by its owner.
            let loads = match self.node.is_guest(id) {
                true => self.loads(&self.counted_at(id, &found.execution)).await?,
                false => 0,
            };
            self.take_in(id, found, loads, None).await;
        }
        Ok(())
    }

    /// True if an execution is in memory. If so, it is looked at again when it leaves memory.
    pub(super) fn is_missed(&self, id: &ExecutionId) -> bool {
        let mut residents = self.residents.lock();
        residents.get_mut(id).map(|resident| resident.missed = true).is_some()
    }

    /// An execution that has to run and can. An execution that cannot run here is set aside.
    async fn ready(self: &Arc<EngineInner>, id: &ExecutionId) -> Result<Option<Ready>> {
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
        let Some((mut execution, mut rev)) = found else {
            self.node.host(id, false);
            return Ok(None);
        };
        let is_guest = self.node.is_guest(id);
        if is_guest && execution.runner != self.node.life() {
            self.node.host(id, false);
            return Ok(None);
        }
        if execution.status.is_terminal() || matches!(execution.status, StoredStatus::Parked(_)) {
            self.unbegun.forget(id);
            return Ok(None);
        }
        if execution.superseded == Some(Supersede::Terminate) {
            self.end_superseded(id);
            return Ok(None);
        }
        if self.runs_elsewhere(id, &execution) {
            return Ok(None);
        }
        if execution.runner.is_some() && !is_guest {
            let Some(moved) = self.take_back(id, &mut execution, rev).await? else {
                self.spawn_load(id);
                return Ok(None);
            };
            rev = moved;
        }
        let now = self.store.env().now().0;
        if execution.is_queued() {
            if execution.timer_us.is_some_and(|timer| timer <= now) {
                self.time_out_in_queue(id, execution, rev);
            }
            return Ok(None);
        }
        // It is looked at for another reason than its time, or its begin was postponed meanwhile.
        let is_put_off = execution.status == StoredStatus::Waiting && execution.cancel.is_none();
        if let Some(begins) = execution.begins_us.filter(|begins| is_put_off && *begins > now) {
            self.timers.set(id, Timestamp(begins));
            return Ok(None);
        }
        if execution.is_batch() {
            execution.input = self.gathered(id).await?;
        }
        let Some(definition) = self.definition_of(&execution).cloned() else {
            if !self.lend(id, &execution, rev).await? {
                self.cannot_run(id, &execution);
            }
            return Ok(None);
        };
        Ok(Some(Ready { execution, rev, definition }))
    }

    /// Sets an execution aside that no live node can run.
    fn cannot_run(&self, id: &ExecutionId, execution: &Execution) {
        self.set_aside.lock().insert(id.clone(), self.unrunnable_reason(execution));
        self.tell(id, News::End, false);
    }

    /// Why an execution of another node, which has to run now, is left alone: no live node can run it.
    pub(super) fn why_left(&self, id: &ExecutionId, execution: &Execution) -> Option<String> {
        let is_elsewhere = self.node.is_shared() && !self.node.owns(id) && !self.node.is_guest(id);
        let has_code = || self.definition_of(execution).is_some();
        let is_left = is_elsewhere && !has_code() && self.node.able(&execution.workflow, execution.version).is_none();
        is_left.then(|| self.unrunnable_reason(execution))
    }

    fn unrunnable_reason(&self, execution: &Execution) -> String {
        let Execution { workflow, version, .. } = execution;
        let is_known = self.definition(workflow).is_some() || self.node.known_elsewhere(workflow).is_some();
        match is_known {
            false if self.node.is_shared() => format!("workflow {workflow:?} is registered on no live node"),
            false => format!("workflow {workflow:?} is not registered"),
            true => format!("no registered definition of workflow {workflow:?} continues version {version}"),
        }
    }

    /// Runs an execution, or parks it if it was loaded too often without making progress.
    async fn take_in(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        Ready { execution, rev, definition }: Ready,
        count: u32,
        probation: Option<Probation>,
    ) {
        let run = Run::new(self.clone(), definition, id.clone(), execution, Some(rev)).loaded(count, probation);
        let run = Arc::new(run);
        if count > self.most_crashes {
            let times = count - 1;
            let reason =
                format!("it was loaded {times} times, and each time the process ended before it made progress");
            loop {
                match run.close(NextState::Rests(StoredStatus::Parked(reason.clone()))).await {
                    Err(Stop::Failed(error)) if error.kind() == ErrorKind::Unavailable && !self.is_stopped() => {
                        self.store.env().sleep(PAUSE).await;
                    }
                    // The parking cannot be stored.
                    Err(Stop::Parked(why)) => return self.put_aside(id, why),
                    _ => return self.tell(id, News::End, false),
                }
            }
        } else {
            self.set_aside.lock().remove(id);
            self.spawn_stored(run);
        }
    }
}
