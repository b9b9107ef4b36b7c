//! Taking executions into memory: all that were running when the engine starts, and each that waits when it is due.
//! Those that take the process with them each time are counted, and parked.

use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use crate::record::Record;
use crate::store::{Commit, ErrorKind, Item, Key, Order, Outcome, Range, Rev, Space, Timestamp, View};
use crate::workflow::alarm::{Alarms, Due, Keeper};
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::listed::{Shelf, by_status, read_by_status, read_end};
use crate::workflow::record::{Execution, Status, read_alarm_key, read_count};
use crate::workflow::run::{Next, Probation, Run, Stop};
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
        let mut rest = inner.left(overdue);
        drop(inner);
        loop {
            let found = match before.scan(&rest, Order::Ascending, BATCH).await {
                Ok(found) => found,
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
            let Some((last, _)) = found.last() else { break };
            rest = rest.after(last);
            let left = found.into_iter().filter_map(|(key, item)| Left::new(key, item, overdue));
            let (fresh, others): (Vec<Left>, Vec<Left>) = left.partition(|left| left.count() == 0);
            suspects.extend(others);
            let Some(inner) = engine.upgrade() else { return };
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
        let doubted = inner.doubted.clone();
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
                inner.doubt();
            }
        }
    }
}

impl Left {
    fn new(key: Key, item: Item, overdue: bool) -> Option<Left> {
        let id = match overdue {
            true => read_alarm_key(key.bytes())?.1,
            false => read_end(read_by_status(key.bytes())?.1)?.1,
        };
        Some(Left { id, key, item })
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
            engine.pick_up(&due.id).await?;
        }
        Ok(())
    }
}

impl Inner {
    /// A commit had no answer; whoever was to be told of it was not.
    pub(crate) fn doubt(&self) {
        self.doubted.notify_one();
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
        self.listen_again().await?;
        let mut rest = self.left(false);
        loop {
            let found = self.store.view().await?.scan(&rest, Order::Ascending, BATCH).await?;
            let Some((last, _)) = found.last() else { return Ok(()) };
            rest = rest.after(last);
            let left = found.into_iter().filter_map(|(key, item)| Left::new(key, item, false));
            for left in left.filter(|left| !self.is_resident(&left.id)) {
                self.pick_up(&left.id).await?;
            }
        }
    }

    /// Where executions are found that an earlier engine has left.
    fn left(&self, overdue: bool) -> Range {
        match overdue {
            true => self.spaces.timers.range(&[0][..]..&self.since.0.to_be_bytes()[..]),
            false => self.spaces.listed.prefix(by_status(Shelf::Running, None)),
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
                _ => return,
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
        let counts = self.count(ready.iter().map(|(left, _)| *left)).await?;
        for ((left, found), count) in ready.into_iter().zip(counts) {
            self.take_in(&left.id, found, count, probation.clone()).await;
        }
        Ok(())
    }

    /// Counts that these are taken up once more, before they are. Gives how often they were by now.
    async fn count<'a>(&self, left: impl Iterator<Item = &'a Left> + Clone) -> Result<Vec<u32>> {
        let count = |left: &Left| left.count().saturating_add(1);
        let counted = |commit: Commit, left: &Left| {
            commit.at_rev(&left.key, left.item.rev).put(&left.key, count(left).to_be_bytes().to_vec())
        };
        if let Outcome::Refused(_) = self.store.commit(left.clone().fold(self.owned(), counted)).await? {
            // Some of them were taken up meanwhile by somebody who asked for it, or this is a second try.
            for left in left.clone() {
                let _ = self.store.commit(counted(self.owned(), left)).await?;
            }
        }
        Ok(left.map(count).collect())
    }

    /// Takes an execution up whose last commit may still be on its way. A record of a later rev has that refused.
    pub(crate) async fn pick_up_fenced(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        let resident = self.residents.lock().contains_key(id);
        if let (false, Some((execution, rev))) = (resident, self.read(id).await?)
            && !execution.status.is_terminal()
        {
            let key = self.spaces.executions.key(id.as_bytes());
            let commit = Commit::new().check(self.shard_check(id)).at_rev(&key, rev).put(&key, execution.encode());
            // If it is refused, something has landed since, or this engine is no longer the owner.
            let _ = self.store.commit(commit).await?;
        }
        self.pick_up(id).await
    }

    /// Takes an execution into memory, in a task of its own, however long the store does not serve.
    pub(crate) fn wake_up(self: &Arc<Inner>, id: &ExecutionId) {
        let (inner, id) = (self.clone(), id.clone());
        self.runtime.spawn(async move {
            while let Err(error) = inner.pick_up(&id).await {
                if inner.is_stopped() || error.kind() != ErrorKind::Unavailable {
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
                self.set_aside.lock().insert(id.clone(), error.to_string());
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
            let parked = || run.close(Next::Rests(Status::Parked(reason.clone())));
            while let Err(Stop::Failed(error)) = parked().await {
                if self.is_stopped() || error.kind() != ErrorKind::Unavailable {
                    return;
                }
                self.store.env().sleep(PAUSE).await;
            }
        } else if !self.spawn(run) {
            self.is_missed(id);
        }
    }
}
