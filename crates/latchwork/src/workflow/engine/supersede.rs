//! Starts that take the place of another execution with the same id. One commit stores the first record of the new
//! execution and marks the old one to end. The commit that ends the old execution puts the new one in its place. The
//! new one has a higher run number, so that the journals of both cannot be confused.

use std::collections::HashSet;
use std::sync::Arc;

use crate::lane::{Part, Tag};
use crate::record::Record;
use crate::store::{Check, Commit, ErrorKind, Key, Order, Outcome, Range, Write};
use crate::workflow::admission::StartNeeds;
use crate::workflow::engine::EngineInner;
use crate::workflow::operate::steer::Ending;
use crate::workflow::stored::keys::keyed_key;
use crate::workflow::stored::record::{Admission, Execution, Needed, StoredStatus, Supersede, fetch};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// The records that the old execution left are unchanged.
const LEFT: Tag = Tag("left");

/// How many records the commit that ends the old execution deletes at most. If there are more, they are deleted before.
const MOST: usize = 1000;

/// Why the old execution ends.
const REASON: &str = "another start has taken its place";

impl Execution {
    fn is_parked(&self) -> bool {
        matches!(self.status, StoredStatus::Parked(_))
    }

    /// True if it needs the same permits.
    fn needs_as(&self, other: &Execution) -> bool {
        let keys = |it: &Execution| -> Vec<Option<String>> {
            it.admission.iter().flat_map(|admission| &admission.gates).map(|needed| needed.key.clone()).collect()
        };
        keys(self) == keys(other)
    }
}

/// The outcome of a start that takes the place of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marked {
    /// The execution is marked, and will end.
    Ends,
    /// No code of the execution had run, so it got the input of the new start.
    Given,
    /// The execution was changed meanwhile.
    Refused,
}

impl EngineInner {
    /// Makes a start take the place of the execution with its id. Returns whether there was one that had not ended.
    pub(crate) async fn take_place(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        successor: &Execution,
        asked: Option<&StartNeeds>,
        how: Supersede,
    ) -> Result<bool> {
        loop {
            let Some((before, _)) = self.read(id).await? else { return Ok(false) };
            if before.status.is_terminal() {
                return Ok(false);
            }
            if before.workflow != successor.workflow {
                let (asked, found) = (successor.workflow.clone(), before.workflow);
                return Err(WorkflowError::OtherWorkflow { id: id.clone(), asked, found });
            }
            let its = before.admission.iter().flat_map(|admission| &admission.gates).map(|needed| &needed.key);
            if !asked.map(|asked| asked.gates.iter()).into_iter().flatten().eq(its) {
                let reason = "the execution whose place it takes has other concurrency keys, so its permits do not fit";
                return Err(WorkflowError::Start { workflow: before.workflow, reason });
            }
            let gates = asked.iter().flat_map(|asked| &asked.gates);
            let gates: Vec<Needed> = gates.map(|key| Needed { key: key.clone(), permit: 0 }).collect();
            let admission = (!gates.is_empty()).then(|| Box::new(Admission { gates, ..Admission::default() }));
            let (engine, execution) = (self.clone(), id.clone());
            let first = Execution { admission, ..successor.clone() };
            let taken = self.node.runtime.run(async move {
                match how {
                    Supersede::Cancel if engine.known(&execution).await?.0.is_parked() => {
                        engine.replace_parked(&execution, &first).await
                    }
                    Supersede::Cancel => {
                        let marked = engine.supersede(&execution, &first, how).await?;
                        Ok(marked != Marked::Refused)
                    }
                    Supersede::Terminate => {
                        let ended = engine.terminate_now(&execution, REASON, Some(first), false).await;
                        ended.map(|()| true)
                    }
                }
            });
            match taken.await.unwrap_or(Err(WorkflowError::Stopped)) {
                Ok(true) => return Ok(true),
                Ok(false) | Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Marks an execution whose place another one takes.
    pub(crate) async fn supersede(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        successor: &Execution,
        how: Supersede,
    ) -> Result<Marked> {
        let (before, rev) = self.known(id).await?;
        if before.status.is_terminal() {
            return Err(WorkflowError::Ended { id: id.clone() });
        }
        // Another execution may have the id by now.
        if before.workflow != successor.workflow || !before.needs_as(successor) {
            return Ok(Marked::Refused);
        }
        let part = self.at_record(id, Some(rev));
        if before.is_queued() {
            // No code of it has run: it gets the input of the new start.
            let (input, labels) = (successor.input.clone(), successor.labels.clone());
            let begins_us = successor.begins_us;
            let mut after = Execution { input, labels, begins_us, ..before.clone() };
            let (part, _) = crate::workflow::run::with_record(self, part, id, Some(&before), &mut after, None);
            return Ok(self.send(part).await?.map_or(Marked::Refused, |_| Marked::Given));
        }
        let part = part.put(&self.kept(id).successor(), successor.encode());
        let mut marked = Execution { superseded: Some(how), ..before.clone() };
        if how == Supersede::Cancel && marked.status == StoredStatus::Waiting {
            (marked.status, marked.waits) = (StoredStatus::Running, Vec::new());
        }
        if how == Supersede::Cancel {
            marked.cancel = marked.cancel.or(Some(REASON.into()));
        }
        let (part, _) = crate::workflow::run::with_record(self, part, id, Some(&before), &mut marked, None);
        let (engine, id) = (self.clone(), id.clone());
        let part = part.then(move |landing| {
            if let Some(run) = engine.resident(&id) {
                run.cancelled(rev, landing.last(), marked);
            }
            if before.status == StoredStatus::Waiting {
                engine.spawn_load(&id);
            }
        });
        Ok(self.send(part).await?.map_or(Marked::Refused, |_| Marked::Ends))
    }

    /// Ends a parked execution as cancelled and puts another one in its place. It runs no code, so there is no cleanup
    /// to wait for. Returns whether that was done; an operator may have resumed it meanwhile.
    async fn replace_parked(self: &Arc<EngineInner>, id: &ExecutionId, successor: &Execution) -> Result<bool> {
        let view = self.store.view().await?;
        let (mut before, rev) = self.known(id).await?;
        let is_same = before.workflow == successor.workflow && before.needs_as(successor);
        if !before.is_parked() || !is_same || self.is_resident(id) {
            // The execution is about to leave memory, or to continue.
            tokio::task::yield_now().await;
            return Ok(false);
        }
        before.superseded = before.superseded.or(Some(Supersede::Cancel));
        let status = StoredStatus::Cancelled(before.cancel.clone().unwrap_or_else(|| REASON.into()));
        for is_large in [false, true] {
            let before = before.clone();
            let ending = Ending { before, rev, status: &status, successor: Some(successor), is_large };
            match self.end_stored(id, view.generation(), ending).await {
                Err(error) if error.kind() == ErrorKind::Invalid && !is_large => {}
                ended => return ended,
            }
        }
        Ok(false)
    }

    /// Marks an execution that cannot be ended in the same commit: it is in memory, or waits in a queue.
    pub(crate) async fn mark_if_need_be(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        successor: Option<&Execution>,
    ) -> Result<Option<Marked>> {
        let Some(successor) = successor else { return Ok(None) };
        if !self.is_resident(id) && !self.known(id).await?.0.is_queued() {
            return Ok(None);
        }
        self.supersede(id, successor, Supersede::Terminate).await.map(Some)
    }

    /// The record that replaces the record of an execution in the commit that ends it, if another one takes its place.
    /// Adds to `parts` what the commit has to hold for that.
    pub(crate) async fn succession(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        before: &Execution,
        parts: &mut Vec<Part>,
        successor: Option<&Execution>,
    ) -> Result<Option<Execution>> {
        if before.superseded.is_none() {
            return Ok(None);
        }
        let kept = self.kept(id);
        let left = [kept.all(), self.states.execution(id).all(), self.states.tree(id).all()];
        let gone = self.left_by(id, &left).await?;
        let view = self.store.view().await?;
        let place = || format!("the execution that takes the place of {id:?}");
        let stored = fetch::<Execution>(&view, &kept.successor(), place).await?.map(|(first, _)| first);
        let Some(first) = successor.cloned().or(stored) else {
            return Err(WorkflowError::corrupt(place()));
        };
        let written: HashSet<&Key> = parts.iter().flat_map(|part| part.writes()).map(Write::key).collect();
        let checks = left.into_iter().map(|range| Check::Unchanged(range, gone.1));
        let part = checks.fold(Part::default(), |part, check| part.check(LEFT, check));
        let key = before.key.as_ref().map(|key| self.spaces.keys.key(keyed_key(&before.workflow, key)));
        let its_parent = before.parent.as_ref().map(|parent| self.kept(&parent.id).child(id));
        let gone = gone.0.iter().chain(&key).chain(&its_parent).filter(|key| !written.contains(key));
        let part = gone.fold(part, Part::delete);
        let (engine, follows) = (self.clone(), id.clone());
        parts.push(part.then(move |_| engine.spawn_load(&follows)));
        let mut admission = before.admission.clone();
        admission.iter_mut().for_each(|admission| admission.gathers = None);
        Ok(Some(Execution { run: before.run + 1, admission, ..first }))
    }

    /// The remaining keys in these ranges, and the generation of that view. If there are many, most are deleted first.
    async fn left_by(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        ranges: &[Range],
    ) -> Result<(Vec<Key>, crate::store::Generation)> {
        loop {
            let view = self.store.view().await?;
            let mut found = Vec::new();
            for range in ranges {
                let more = view.scan(range, Order::Ascending, MOST - found.len().min(MOST)).await?;
                found.extend(more.into_iter().map(|(key, _)| key));
            }
            if found.len() < MOST {
                return Ok((found, view.generation()));
            }
            // Its code has ended. As long as this engine is the owner, its remaining records are not read.
            let successor = self.kept(id).successor();
            let gone = found.iter().filter(|key| **key != successor);
            // They belong to the execution as it was in this view.
            let rev = view.get(&self.record_of(id)).await?.map(|item| item.rev);
            let part = gone.fold(self.at_record(id, rev), Part::delete);
            if matches!(self.store.commit(part.place(Commit::new()).0).await?, Outcome::Refused(_)) {
                return Err(WorkflowError::Stopped);
            }
        }
    }

    /// True if the execution has ended and its successor has taken its place.
    pub(crate) fn is_followed(&self, found: &Execution, successor: Option<&Execution>) -> bool {
        successor.is_some_and(|it| found.superseded.is_none() && found.started_us == it.started_us)
    }

    /// Ends an execution that an earlier process marked for termination and did not end.
    pub(crate) fn end_superseded(self: &Arc<EngineInner>, id: &ExecutionId) {
        let (engine, id) = (self.clone(), id.clone());
        self.node.runtime.spawn(async move {
            match engine.terminate_now(&id, REASON, None, true).await {
                Ok(()) | Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                Err(error) => {
                    tracing::warn!(%id, %error, "an execution that another start replaces could not be ended yet");
                    engine.node.doubt();
                }
            }
        });
    }
}
