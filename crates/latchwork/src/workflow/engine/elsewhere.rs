//! Engines on other nodes of the same store: what this engine hears from them, and what it tells them. On a store that
//! is not shared, nothing of this file does anything.
//!
//! A commit that changes an execution of another node holds a notice for its owner. A caller that waits for an
//! execution of another node asks the owner for news; the owner tells of news by a notice of its own. An execution
//! whose workflow only another node can run is *lent* to that node: its record names the node, and only the rev of the
//! record fences the commits of that node.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::lane::Part;
use crate::lock::LockError;
use crate::node::{NodeEvents, NodeNotice, NodeWork, shard_of};
use crate::record::Record;
use crate::store::{ErrorKind, Generation, Key, Rev, Timestamp, Uuid};
use crate::workflow::admission;
use crate::workflow::engine::listen::News;
use crate::workflow::engine::{EngineInner, recover};
use crate::workflow::run::{RECORD, with_record};
use crate::workflow::stored::keys::read_count;
use crate::workflow::stored::record::{Execution, StoredStatus};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions' news share a commit at most.
const MOST_NEWS: usize = 256;

impl NodeEvents for EngineInner {
    fn heard(self: Arc<Self>, notice: NodeNotice, at: Generation) {
        match notice {
            NodeNotice::Execution(id) => self.hear_of(id),
            NodeNotice::Schedule(name) if self.node.owns_name(name.as_bytes()) => {
                self.scheduling.alarms.set(&name.into(), Timestamp(0));
            }
            NodeNotice::Session(session) if self.locks.sessions.is_used(session) => {
                self.locks.count_heard();
                let inner = self.clone();
                self.node.runtime.spawn(async move { inner.locks.listen_at_last().await });
            }
            NodeNotice::Effects(shard) if self.node.owned().contains(&shard) => {
                self.node.gained.send_modify(|gained| *gained += 1);
            }
            NodeNotice::Alarm(shard) if self.node.owned().contains(&shard) => self.node.look_at_alarms(&[shard]),
            NodeNotice::Locks(shard) if self.node.owned().contains(&shard) => self.finish_locks(),
            NodeNotice::Listens { id, .. } if self.node.is_named(&id) => {
                self.remote.lock().insert(id.clone());
                // What has happened since the caller asked is told now: this node did not know of the caller.
                if self.untold.load(Ordering::SeqCst) > at.0 {
                    let _ = self.news.send(id);
                }
            }
            NodeNotice::News(id) => self.tell_of(&id),
            NodeNotice::Lent { id, node } if self.node.life() == Some(node) => {
                {
                    // An earlier stay of it may be about to end: under this lock it either sees the mark or is gone.
                    let mut residents = self.residents.lock();
                    residents.get_mut(&id).into_iter().for_each(|resident| resident.missed = true);
                    self.node.host(&id, true);
                }
                self.spawn_load(&id);
            }
            _ => {}
        }
    }

    fn taken(self: Arc<Self>, shards: Vec<u16>) -> NodeWork<'static> {
        Box::pin(async move {
            let weak = Arc::downgrade(&self);
            self.node.runtime.spawn(recover::recover(weak.clone(), shards, None));
            self.node.runtime.spawn(admission::look_once(weak));
            self.finish_locks();
        })
    }

    fn evict(self: Arc<Self>) {
        self.let_go(true);
    }

    fn lost(self: Arc<Self>) {
        self.let_go(true);
        self.remote.lock().retain(|id| self.node.owns(id));
        self.set_aside.lock().retain(|id, _| self.node.owns(id) || self.node.is_guest(id));
        self.node.forget_lent();
    }

    fn has_any_in(&self, shards: &[u16]) -> bool {
        let is_in = |id: &ExecutionId| shards.contains(&shard_of(id.as_bytes())) && !self.node.is_guest(id);
        self.residents.lock().keys().any(is_in)
    }

    fn clear_marks<'a>(self: Arc<Self>, shards: &'a [u16]) -> NodeWork<'a> {
        Box::pin(async move { self.clear_counts(shards).await })
    }

    fn moved(self: Arc<Self>) {
        // Callers that wait for executions of other nodes ask the new owners for news.
        self.tell_all();
    }

    fn joined(self: Arc<Self>) {
        // The node may be able to run what this one could not.
        let aside: Vec<ExecutionId> = self.set_aside.lock().keys().cloned().collect();
        aside.iter().filter(|id| self.node.owns(id)).for_each(|id| self.spawn_load(id));
    }

    fn left(self: Arc<Self>, life: Uuid) {
        // The node may have given them back before, so they are not only loaded: one that waits has nothing to do.
        self.node.lent_to(life).into_iter().for_each(|id| self.spawn_look_after(id));
        // The node may have stopped between a commit and what it would have done after it.
        self.finish_locks();
        let inner = self.clone();
        self.node.runtime.spawn(async move {
            let what = "executions that wait for each other could not be looked for";
            inner.node.at_last(what, LockError::kind, || inner.suspect_all()).await;
        });
        self.node.doubt();
    }

    fn behind(self: Arc<Self>) {
        self.finish_locks();
        self.node.gained.send_modify(|gained| *gained += 1);
        let inner = self.clone();
        self.node.runtime.spawn(async move {
            inner.node.at_last("lent executions could not be read", WorkflowError::kind, || inner.find_lent()).await;
        });
        self.node.doubt();
    }

    fn residents(&self) -> u64 {
        self.residents.lock().len() as u64
    }
}

impl EngineInner {
    /// Another node has changed something of an execution.
    fn hear_of(self: Arc<Self>, id: ExecutionId) {
        let is_ours = self.node.owns(&id) || self.node.is_guest(&id);
        if let Some(run) = self.resident(&id) {
            run.doubt();
        }
        self.tell_of(&id);
        if !is_ours || self.is_missed(&id) {
            return;
        }
        self.spawn_look_after(id);
    }

    fn spawn_look_after(self: &Arc<Self>, id: ExecutionId) {
        let inner = self.clone();
        self.node.runtime.spawn(async move {
            let look = || inner.look_after(&id);
            inner.node.at_last("an execution that another node has changed", WorkflowError::kind, look).await;
        });
    }

    /// Does what the record of an execution asks for: loads it, or sets its alarms.
    async fn look_after(self: &Arc<Self>, id: &ExecutionId) -> Result<()> {
        let found = match self.read(id).await {
            Err(error) if error.kind() != ErrorKind::Unavailable => return self.unless_passing(id, error),
            found => found?,
        };
        let Some((execution, _)) = found else {
            self.node.lend(id, None);
            return Ok(());
        };
        let is_back = execution.runner.is_none_or(|life| !self.node.is_alive(life));
        if is_back && self.node.is_lent(id) {
            self.node.lend(id, None);
            // It may have left journals to be removed.
            self.removals.set(id, Timestamp(0));
        }
        if let Some(timer) = execution.timer_us.filter(|_| !execution.status.is_terminal()) {
            self.timers.set(id, Timestamp(timer));
        }
        match execution.status {
            StoredStatus::Running => self.load(id).await.or_else(|error| self.unless_passing(id, error)),
            StoredStatus::Waiting | StoredStatus::Parked(_) => Ok(()),
            _ => {
                execution.removal_us.iter().for_each(|due| self.removals.set(id, Timestamp(*due)));
                Ok(())
            }
        }
    }

    /// Notifies all callers that wait for anything of an execution.
    fn tell_of(&self, id: &ExecutionId) {
        let listening = self.listening.lock();
        let its = listening.range((id.clone(), News::End)..).take_while(|((listened, _), _)| listened == id);
        its.for_each(|(_, listener)| listener.told.notify_waiters());
    }

    /// Adds to a part, which is news of an execution, that callers on other nodes are told of it, if there are any.
    /// Returns whether the commit of the part tells them.
    pub(crate) fn with_news(&self, part: Part, id: &ExecutionId) -> (Part, bool) {
        // The commits of a guest tell every node that it has changed.
        if self.node.is_guest(id) {
            return (part, true);
        }
        let is_remote = self.node.is_shared() && self.remote.lock().contains(id);
        (if is_remote { self.node.noticed(part, || NodeNotice::News(id.clone())) } else { part }, is_remote)
    }

    /// There is news of an execution, which no commit has told. Callers on other nodes are told if there are any.
    pub(crate) fn tell_elsewhere(&self, id: &ExecutionId) {
        if !self.node.is_shared() {
            return;
        }
        // A caller that is heard of from now on, and has asked before the news landed, has to be told as well.
        self.untold.fetch_max(self.store.landed().0, Ordering::SeqCst);
        if self.node.is_guest(id) || self.remote.lock().contains(id) {
            let _ = self.news.send(id.clone());
        }
    }

    /// An execution has ended, and no other has taken its place.
    pub(crate) fn forget_callers(&self, id: &ExecutionId) {
        self.remote.lock().remove(id);
    }

    /// A commit without an answer may have landed: the callers on other nodes, and those that are heard of later, look
    /// at what there is.
    pub(crate) async fn tell_again(&self) -> Result<()> {
        if self.node.is_shared() {
            self.untold.fetch_max(self.store.generation().await?.0, Ordering::SeqCst);
            self.remote.lock().iter().for_each(|id| drop(self.news.send(id.clone())));
        }
        Ok(())
    }

    /// Adds to a part that this node listens for news of an execution, if another node owns it.
    pub(crate) fn listens(&self, part: Part, id: &ExecutionId) -> Part {
        if !self.node.is_shared() || self.node.owns(id) {
            return part;
        }
        let node = self.node.life().unwrap_or_default();
        self.node.noticed(part, || NodeNotice::Listens { id: id.clone(), node })
    }

    /// Asks the owner of an execution for news of it. Returns false if that is not needed.
    pub(crate) async fn listen_elsewhere(&self, id: &ExecutionId, asked: &mut Option<Option<Rev>>) -> Result<bool> {
        if !self.node.is_shared() || self.node.owns(id) {
            return Ok(false);
        }
        let epoch = self.node.epoch(id.as_bytes());
        if asked.replace(epoch) == Some(epoch) {
            return Ok(false);
        }
        self.send(self.listens(Part::default(), id)).await?;
        Ok(true)
    }

    /// Grants locks whose release another node has not finished.
    fn finish_locks(self: &Arc<Self>) {
        let locks = self.locks.clone();
        self.node.runtime.spawn(async move {
            let what = "the locks of other processes could not be released";
            locks.node.at_last(what, LockError::kind, || locks.finish_all()).await;
        });
    }

    /// Clears the counts of loads of executions that leave memory because their shard moves: they have not crashed.
    async fn clear_counts(self: &Arc<Self>, shards: &[u16]) {
        let residents: Vec<_> = self.residents.lock().values().map(|resident| resident.run.clone()).collect();
        let part = |id: &ExecutionId, rev: Rev, stored: &Execution| {
            let part = self.node.for_owner(id).at_rev(RECORD, &self.record_of(id), rev);
            part.put(&self.counted_at(id, stored), Vec::new())
        };
        for run in residents.iter().filter(|run| shards.contains(&shard_of(run.id.as_bytes()))) {
            let counted = run.with(|state| {
                let is_counted = state.residency.loads() > 0 && !self.node.is_guest(&run.id);
                let rev = state.known.rev().filter(|_| is_counted)?;
                Some(part(&run.id, rev, state.known.stored()))
            });
            if let Some(part) = counted
                && let Err(error) = self.send(part).await
            {
                tracing::debug!(id = %run.id, %error, "the count of loads could not be cleared");
            }
        }
    }

    /// True if the execution runs on another live node, to which its owner has lent it. A guest runs here.
    pub(crate) fn runs_elsewhere(&self, id: &ExecutionId, execution: &Execution) -> bool {
        let Some(life) = execution.runner else { return false };
        if Some(life) == self.node.life() || !self.node.is_alive(life) {
            return false;
        }
        self.node.lend(id, Some(life));
        true
    }

    /// Takes back an execution that was lent to a node that is gone. The rev of its record moves, so nothing that the
    /// node has sent can land late. Returns the new rev, or `None` if the record has changed.
    pub(crate) async fn take_back(
        self: &Arc<Self>,
        id: &ExecutionId,
        execution: &mut Execution,
        rev: Rev,
    ) -> Result<Option<Rev>> {
        // The node may be gone because of this execution: it counts as a crash.
        let counted = self.counted_at(id, execution);
        let loads = self.loads(&counted).await?.saturating_add(1);
        execution.runner = None;
        let key = self.record_of(id);
        let part = self.node.for_owner(id).at_rev(RECORD, &key, rev).put(&key, execution.encode());
        let part = part.put(&counted, loads.to_be_bytes().to_vec());
        let receipt = self.send(part).await?;
        Ok(receipt.and_then(|receipt| receipt.revs.first().copied().flatten()))
    }

    /// How often an execution was loaded without making progress, as stored under this key.
    pub(crate) async fn loads(&self, counted: &Key) -> Result<u32> {
        Ok(self.get(counted).await?.map_or(0, |item| read_count(&item.value)))
    }

    /// Lends an execution to a node that can run it. Returns false if no live node can.
    pub(crate) async fn lend(self: &Arc<Self>, id: &ExecutionId, execution: &Execution, rev: Rev) -> Result<bool> {
        let Some(node) = self.node.able(&execution.workflow, execution.version) else { return Ok(false) };
        let mut after = execution.clone();
        (after.runner, after.status, after.waits) = (Some(node), StoredStatus::Running, Vec::new());
        let part = self.node.for_owner(id).at_rev(RECORD, &self.record_of(id), rev);
        let (part, _) = with_record(self, part, id, Some(execution), &mut after, None);
        let part = self.node.noticed(part, || NodeNotice::Lent { id: id.clone(), node });
        self.node.lend(id, Some(node));
        match self.send(part).await {
            Ok(Some(_)) => {
                self.set_aside.lock().remove(id);
                tracing::debug!(%id, workflow = execution.workflow, "lent to a node that can run it");
            }
            // It has changed meanwhile, and is looked at again.
            Ok(None) => self.spawn_load(id),
            Err(error) => {
                self.node.lend(id, None);
                return Err(error);
            }
        }
        Ok(true)
    }

    /// Finds the executions that are lent to this node, after notices were missed.
    async fn find_lent(self: &Arc<Self>) -> Result<()> {
        let life = self.node.life();
        for shard in (0..crate::node::COUNT).filter(|shard| !self.node.owned().contains(shard)) {
            let running = &self.spaces.lists.running;
            let range = running.prefix(crate::node::shard_key(shard));
            let found = crate::damage::scan_around(&self.store.view().await?, running, &range, usize::MAX).await?.found;
            for id in found.iter().filter_map(|(key, _)| recover::read_running(key)) {
                let lent =
                    self.read(&id).await.ok().flatten().filter(|(it, _)| it.runner.is_some() && it.runner == life);
                if lent.is_some() && !self.is_resident(&id) {
                    self.node.host(&id, true);
                    self.spawn_load(&id);
                }
            }
        }
        Ok(())
    }
}

/// Tells other nodes of news that their callers wait for. News that come together share a commit.
pub(crate) async fn tell_news(engine: Weak<EngineInner>, mut news: UnboundedReceiver<ExecutionId>) {
    let mut ids = Vec::new();
    while news.recv_many(&mut ids, MOST_NEWS).await > 0 {
        let Some(inner) = engine.upgrade().filter(|inner| !inner.is_stopped()) else { return };
        let told: BTreeSet<ExecutionId> = ids.drain(..).collect();
        let send = || async {
            let part =
                told.iter().fold(Part::default(), |part, id| inner.node.noticed(part, || NodeNotice::News(id.clone())));
            inner.send(part).await.map(drop)
        };
        inner.node.at_last("other nodes could not be told of news", WorkflowError::kind, send).await;
    }
}
