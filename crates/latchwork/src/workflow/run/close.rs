//! The end of an execution: everything that goes into the commit that ends it, and how that commit is sent.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::lane::{Part, Turn};
use crate::lock::Owner;
use crate::lock::free::Freed;
use crate::lock::lane::Ask;
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Order, Outcome, StoreError, Write};
use crate::workflow::admission::EndLane;
use crate::workflow::engine::EngineInner;
use crate::workflow::engine::post::Mail;
use crate::workflow::engine::spans::Birth;
use crate::workflow::run::{CommitOutcome, NextState, RefusalVerdict, Run, Stop};
use crate::workflow::stored::kept::{self, MessageBody};
use crate::workflow::stored::record::{Close, Execution, StoredStatus};
use crate::workflow::{ExecutionId, Result, WorkflowError};

impl Run {
    /// Admits an execution that ends or parks before its first commit. An execution that was terminated before its
    /// first commit is not admitted. Returns whether nothing is left to commit.
    async fn admitted_with(self: &Arc<Run>, next: &NextState) -> Result<bool, Stop> {
        let asked = self.with(|state| state.residency.take_asked());
        let is_parked = matches!(next, NextState::Rests(StoredStatus::Parked(_)));
        let Some(asked) = asked.filter(|_| is_parked || self.stop().is_none()) else { return Ok(false) };
        let first = if is_parked { next.clone() } else { NextState::Runs };
        match self.send_admitted(asked, first).await {
            CommitOutcome::Stopped(stop) => Err(stop),
            _ => Ok(is_parked),
        }
    }

    /// The record that `EngineInner::closing` uses.
    fn as_it_ends(&self) -> Execution {
        let has_finalizer = self.definition.finalizer.get().is_some();
        self.with(|state| state.known.ending(has_finalizer))
    }

    /// The parts that go with its end, and its state after the commit: another execution may take its place.
    async fn closing_as(
        &self,
        next: NextState,
        status: Option<&StoredStatus>,
        how: How,
    ) -> Result<(Closing, NextState)> {
        let before = self.as_it_ends();
        let mut closing = self.engine.closing(&self.id, &before, status, how).await?;
        let Some(status) = status else { return Ok((closing, next)) };
        let first = self.engine.succession(&self.id, &before, &mut closing.parts, None).await?;
        Ok((closing, first.map_or(next, |first| NextState::Succeeds(status.clone(), Box::new(first)))))
    }

    /// Commits its end, in a lane if there is one. None if the lane is unavailable.
    async fn send_end(&self, lane: Option<EndLane>, commit: Commit) -> Option<Result<Outcome, StoreError>> {
        match lane {
            Some(lane) => self.engine.admissions.end(lane, commit).await,
            None => Some(self.measured(commit).await),
        }
    }

    /// Commits how it ends. An end notifies the parent, cancels the children whose policy says so, and releases the
    /// locks. Continue-as-new only closes its locks and reviews.
    pub(crate) async fn close(self: &Arc<Run>, next: NextState) -> Result<(), Stop> {
        if self.admitted_with(&next).await? {
            return Ok(());
        }
        let status = match &next {
            NextState::Rests(status) if status.is_terminal() => Some(status.clone()),
            NextState::Rests(status) => {
                let status = status.clone();
                self.commit(next).await?;
                self.engine.metrics.ended(&self.definition.name, &status);
                return Ok(());
            }
            NextState::Continues(_) => None,
            _ => return self.commit(next).await,
        };
        let birth = self.with(|state| Birth::of(state.known.stored()));
        // Its pending effects on other records may delay the lane of its end, so it is committed alone.
        let mut how = How { is_alone: self.with(|state| state.has_effects()), ..How::default() };
        loop {
            let closed = self.closing_as(next.clone(), status.as_ref(), how).await;
            let (mut closing, next) = closed.map_err(|error| self.stops(error))?;
            self.forget_effects_on(&closing.parts);
            self.forget_reviews();
            let (mut commit, boarded) = self.board(Commit::new(), next);
            // The release of a lock may delete a message that this commit also receives.
            let is_written = |write: &Write| commit.writes().iter().any(|other| other.key() == write.key());
            let is_new = |write: &Write| !matches!(write, Write::Delete(_)) || !is_written(write);
            closing.parts.iter_mut().for_each(|part| part.retain_writes(is_new));
            let mut placed = Vec::with_capacity(closing.parts.len());
            for part in std::mem::take(&mut closing.parts) {
                let (place, rest);
                (commit, place, rest) = part.place_whole(commit);
                placed.push((rest, place));
            }
            let Some(outcome) = self.send_end(closing.lane.take(), commit).await else {
                self.put_back(boarded);
                how.is_alone = true;
                continue;
            };
            match outcome {
                Ok(Outcome::Applied(receipt)) => {
                    self.landed(boarded, &receipt);
                    status.iter().for_each(|status| self.engine.tell_end(&self.id, &birth, status));
                    placed.into_iter().for_each(|(rest, place)| rest.land(place.landing(&receipt)));
                    return Ok(());
                }
                // The parent, a child or a lock was changed meanwhile.
                Ok(Outcome::Refused(refusal)) => {
                    placed.into_iter().for_each(|(rest, place)| rest.refuse(&place, &refusal));
                    if let RefusalVerdict::Stop(stop) = self.refused(boarded, &refusal) {
                        return Err(stop);
                    }
                    how.from_store = true;
                }
                Err(error) if error.kind() == ErrorKind::Invalid && !how.is_large => {
                    self.put_back(boarded);
                    drop(closing);
                    how.is_large = true;
                    match self.stop() {
                        None => self.commit(NextState::Runs).await?,
                        // Only the end itself is still committed.
                        Some(_) => self.forget_pending(),
                    }
                }
                Err(error) => {
                    self.put_back(boarded);
                    self.engine.node.doubt();
                    return Err(self.failed(error));
                }
            }
        }
    }
}

/// How the commit of an end is made.
#[derive(Clone, Copy, Default)]
pub(crate) struct How {
    /// True if the data in memory was out of date: everything is read from the store.
    pub(crate) from_store: bool,
    /// True if the commit was too large: what can be done before or after it is done in other commits.
    pub(crate) is_large: bool,
    /// True if the end has its own commit, and does not admit the executions that wait for its permits.
    pub(crate) is_alone: bool,
}

/// The parts that go with the end of an execution. While this value exists, no other commit changes the locks in it.
pub(crate) struct Closing {
    pub(crate) parts: Vec<Part>,
    /// The lane of the commit, if the commit also admits executions that wait for the permits.
    pub(crate) lane: Option<EndLane>,
    _turns: Vec<Turn>,
}

impl EngineInner {
    /// The children of an execution that have not ended, and what its end means for them.
    pub(crate) async fn children(&self, id: &ExecutionId) -> Result<Vec<(ExecutionId, kept::ChildRecord)>> {
        let kept = self.kept(id);
        let found = self.store.view().await?.scan(&kept.children(), Order::Ascending, usize::MAX).await?;
        let mut children = Vec::with_capacity(found.len());
        for (key, item) in found {
            let Some(child) = kept.read_child(&key) else { continue };
            let how = match kept::ChildRecord::decode(&item.value) {
                Err(why) if why.is_version() => return Err(why.at(format!("child {child:?} of {id:?}")).into()),
                how => how.unwrap_or(kept::ChildRecord { close: Close::Cancel, birth: 0 }),
            };
            children.push((child, how));
        }
        Ok(children)
    }

    /// The parts that go with the end of an execution. They notify its parent and its schedule, cancel the children
    /// whose policy says so, release its locks, give back its permits, close its reviews and start its finalizer.
    /// Without a status, the execution continues as new: the parts only release locks and close reviews.
    pub(crate) async fn closing(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        before: &Execution,
        status: Option<&StoredStatus>,
        how: How,
    ) -> Result<Closing> {
        let mut mail = Mail::default();
        let parent = before.parent.as_ref().filter(|parent| parent.close != Close::Abandon);
        if let (Some(parent), Some(status)) = (parent, status) {
            let (child, birth, status) = (id.clone(), parent.birth, status.clone());
            mail.notice(&parent.id, MessageBody::Ended { child, birth, status });
        }
        if before.has_children && status.is_some() {
            let children = self.children(id).await?.into_iter().filter(|(_, it)| it.close == Close::Cancel);
            let reason = format!("its parent {id:?} has ended");
            for (child, _) in children {
                if !how.is_large {
                    mail.cancel(&child, reason.clone());
                    continue;
                }
                match self.cancel(&child, &reason).await {
                    Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(id = %child, %error, "a damaged child is not cancelled");
                    }
                    cancelled => cancelled?,
                }
            }
        }
        let owner = Owner::Execution(id.clone());
        if how.is_large && before.has_locks && status.is_none() {
            // The next run may request the same locks.
            for (lock, requests) in self.locks.requests_of(&owner).await? {
                for (ticket, _) in requests {
                    let ask = Ask::Release { ticket, id: None };
                    self.locks.ask(&lock, ask, None).await?;
                }
            }
        }
        let freed = match (before.has_locks, how.is_large) {
            (false, _) => Freed::default(),
            (true, true) => self.locks.freed_later(&owner).await?,
            (true, false) => self.locks.freed(&owner, how.from_store).await?,
        };
        freed.notices.into_iter().for_each(|notices| mail.notices(notices));
        // A commit writes each key once: ends that write other records do not share a commit.
        let is_alone = how.is_alone || how.is_large || before.has_locks || !mail.is_empty();
        let mut parts = mail.parts(self, how.from_store, &BTreeSet::new()).await?;
        parts.extend(freed.parts);
        // If another execution takes its place, that one keeps the permits.
        let gives_back = status.is_some() && before.superseded.is_none();
        let lane = (gives_back && !is_alone).then(|| self.admissions.lane_of_end(before)).flatten();
        parts.extend((gives_back && lane.is_none()).then(|| self.giving_back(id, before)).flatten());
        if let (Some(schedule), Some(_)) = (&before.schedule, status) {
            parts.push(self.ending_scheduled(schedule, id));
        }
        if before.has_reviews {
            parts.extend(self.closing_reviews(id, &before.workflow, status.is_some(), how).await?);
        }
        if let Some(status) = status {
            parts.extend(self.finalizing(id, before, status, how).await?);
        }
        Ok(Closing { parts, lane, _turns: freed.turns })
    }
}
