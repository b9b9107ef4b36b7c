//! Does what the requests of the outbox ask for. Each request is one transaction: it removes the row and commits the
//! start, the message or the change. So a crash at any point leaves the request either done or untouched.
//!
//! The owner of a shard does its requests. A start whose workflow only other nodes have is left to them: a node looks
//! at the requests of owners that lack one of its workflows, too. The removal of the row decides which node does it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{StreamExt, stream};

use crate::backoff::{doubled, jittered};
use crate::entity::{Transaction, Understood};
use crate::lane::{Part, Placed};
use crate::node::SHARD;
use crate::store::{Commit, ErrorKind, OutboxRow, Outcome, Postgres, Refusal, SqlEnded, SqlError};
use crate::workflow::engine::EngineInner;
use crate::workflow::outbox::request::{OutboxRequest, SignalRequest, StartRequest};
use crate::workflow::outbox::unavailable;
use crate::workflow::run::RECORD;
use crate::workflow::stored::kept::MessageBody;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many requests are read at once, and how many are done side by side.
const PAGE: usize = 256;
const AT_ONCE: usize = 4;

/// How often a request is tried while other commits are faster.
const TRIES: u32 = 1000;

/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(200));

/// The pause after the database could not be reached.
const AWAY: Duration = Duration::from_millis(500);

/// Does requests until the engine ends.
pub(crate) async fn keep(engine: Weak<EngineInner>, postgres: Postgres) {
    loop {
        let Some(inner) = engine.upgrade().filter(|inner| !inner.is_stopped()) else { return };
        let env = inner.store.env().clone();
        let drained = inner.drain(&postgres).await;
        drop(inner);
        match drained {
            Ok(true) => {}
            Ok(false) => postgres.outbox_changed().await,
            Err(WorkflowError::Stopped) if engine.upgrade().is_none_or(|inner| inner.is_stopped()) => return,
            Err(WorkflowError::Store(error)) if error.is_final() => return,
            Err(error) => {
                tracing::warn!(%error, "the outbox of the database could not be worked off yet");
                env.sleep(AWAY).await;
            }
        }
    }
}

/// What came of one try of a request.
enum RequestOutcome {
    Done,
    /// Only another node has the code for it, or may have it.
    Left(WorkflowError),
    /// Another commit was faster.
    Again,
    /// It cannot be done.
    Failed(String),
}

/// A commit that does what a request asks for.
struct ReadyRequest {
    commit: Commit,
    then: Then,
}

/// A row, and the request in it, or why that cannot be read.
type DueRequest = (OutboxRow, Result<OutboxRequest, String>);

/// What the answer to the commit means.
enum Then {
    /// For the part of a start or a signal. With the id that must be free, if there is one.
    Part(Placed, Part, Option<ExecutionId>),
    Entities(Understood),
}

impl ReadyRequest {
    fn of(part: Part, must_be_free: Option<ExecutionId>) -> ReadyRequest {
        let (commit, placed, rest) = part.place_whole(Commit::new());
        ReadyRequest { commit, then: Then::Part(placed, rest, must_be_free) }
    }
}

impl EngineInner {
    /// Does the requests that are due, the oldest first. Returns whether it has done any.
    async fn drain(self: &Arc<EngineInner>, postgres: &Postgres) -> Result<bool> {
        let own: BTreeSet<i32> = self.node.owned().into_iter().map(i32::from).collect();
        let helped = self.node.shards_lacking(self.definitions.names()).into_iter().map(i32::from);
        let shards: Vec<i32> = own.iter().copied().chain(helped).collect();
        let (mut left, mut after, mut has_done) = (BTreeSet::new(), 0, false);
        loop {
            let rows = postgres.outbox_due(&shards, after, PAGE).await?;
            let Some(last) = rows.last() else { return Ok(has_done) };
            after = last.position;
            let is_last = rows.len() < PAGE;
            let mut queues: BTreeMap<String, Vec<DueRequest>> = BTreeMap::new();
            for row in rows {
                let request = OutboxRequest::read(&row.kind, &row.body);
                let name = request.as_ref().map_or_else(|_| row.id.to_string(), |request| request.name().to_string());
                queues.entry(name).or_default().push((row, request));
            }
            // What is left to others is passed over, and so is what comes after it under the same name.
            queues.retain(|name, _| !left.contains(name));
            for (name, queue) in queues.extract_if(.., |_, queue| !self.may_do(&own, queue)) {
                tracing::trace!(name, requests = queue.len(), "requests of another node");
                left.insert(name);
            }
            let (done, passed) = self.work_off(postgres, queues).await?;
            has_done |= done;
            left.extend(passed);
            if left.is_empty() || is_last {
                return Ok(has_done);
            }
        }
    }

    /// True if this node does the requests under a name: it owns them, or their owner cannot start the workflow.
    fn may_do(&self, own: &BTreeSet<i32>, queue: &[DueRequest]) -> bool {
        match queue.first() {
            Some((row, _)) if own.contains(&row.shard) => true,
            Some((row, Ok(OutboxRequest::Start(start)))) => {
                let shard = u16::try_from(row.shard).unwrap_or(u16::MAX);
                self.definition(&start.workflow).is_some() && self.node.owner_lacks(shard, &start.workflow)
            }
            _ => false,
        }
    }

    /// Does requests, several names at a time. Returns whether any is done, and the names of those left to others.
    async fn work_off(
        self: &Arc<EngineInner>,
        postgres: &Postgres,
        queues: BTreeMap<String, Vec<DueRequest>>,
    ) -> Result<(bool, Vec<String>)> {
        let work = |(name, queue): (String, Vec<DueRequest>)| async move {
            let mut has_done = false;
            for (row, request) in queue {
                if !self.fulfil(postgres, &row, request).await? {
                    return Ok((has_done, Some(name)));
                }
                has_done = true;
            }
            Ok((has_done, None))
        };
        let mut working = stream::iter(queues).map(work).buffer_unordered(AT_ONCE);
        let (mut has_done, mut left, mut failed) = (false, Vec::new(), None);
        while let Some(worked) = working.next().await {
            match worked {
                Ok((done, passed)) => {
                    has_done |= done;
                    left.extend(passed);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok((has_done, left)), Err)
    }

    /// Does a request. A request that cannot be done is noted, and does not stop the others. Returns false if it is
    /// left to another node. An error means that it must be tried again later.
    async fn fulfil(
        self: &Arc<EngineInner>,
        postgres: &Postgres,
        row: &OutboxRow,
        request: Result<OutboxRequest, String>,
    ) -> Result<bool> {
        let env = self.store.env();
        let mut reason = "other writers were faster each time".to_string();
        for tries in 1..=TRIES {
            let tried = match &request {
                Ok(request) => self.attempt(postgres, row, request, tries > 1).await,
                Err(error) => Ok(RequestOutcome::Failed(error.clone())),
            };
            match tried {
                Ok(RequestOutcome::Done) => return Ok(true),
                Ok(RequestOutcome::Left(why)) => {
                    tracing::warn!(id = %row.id, %why, "a request of the outbox is left to other nodes");
                    return Ok(false);
                }
                Ok(RequestOutcome::Again) => {
                    let pause = doubled(PAUSES.0, tries).min(PAUSES.1);
                    env.sleep(jittered(pause, 0.5, env)).await;
                    continue;
                }
                Ok(RequestOutcome::Failed(said)) => reason = said,
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => reason = error.to_string(),
            }
            break;
        }
        tracing::error!(id = %row.id, kind = row.kind, reason, "a request of the outbox cannot be done");
        postgres.outbox_fail(row.id, &reason).await?;
        Ok(true)
    }

    /// One transaction: the row is removed, and what it asks for is committed.
    async fn attempt(
        self: &Arc<EngineInner>,
        postgres: &Postgres,
        row: &OutboxRow,
        request: &OutboxRequest,
        from_store: bool,
    ) -> Result<RequestOutcome> {
        let ready = match request {
            OutboxRequest::Start(start) => match self.start_request(start).await {
                Err(error @ WorkflowError::RulesElsewhere { .. }) => return Ok(RequestOutcome::Left(error)),
                Err(error @ WorkflowError::NotRegistered { .. }) if self.node.has_others() => {
                    return Ok(RequestOutcome::Left(error));
                }
                ready => ready?,
            },
            OutboxRequest::Signal(signal) => self.signal_request(signal, from_store).await?,
            OutboxRequest::Entities(written) => match self.entities_request(written.clone().read()).await? {
                Ok(ready) => ready,
                Err(tried) => return Ok(tried),
            },
        };
        let transaction = postgres.begin().await?;
        match transaction.take_from_outbox(row.id).await {
            Ok(true) => {}
            // Another engine has done it, or an operator has removed it.
            Ok(false) => {
                transaction.roll_back().await;
                return Ok(RequestOutcome::Done);
            }
            Err(error) => {
                transaction.roll_back().await;
                return broken(error);
            }
        }
        let ended = transaction.commit(ready.commit).await.inspect_err(|_| self.node.doubt())?;
        match ended {
            SqlEnded::Applied(receipt) => {
                if let Then::Part(placed, rest, _) = ready.then {
                    rest.land(placed.landing(&receipt));
                }
                Ok(RequestOutcome::Done)
            }
            SqlEnded::Refused(refusal) => self.refused_request(ready.then, refusal).await,
            SqlEnded::RolledBack(error) => broken(error),
        }
    }

    async fn refused_request(&self, then: Then, refusal: Refusal) -> Result<RequestOutcome> {
        match then {
            Then::Part(placed, rest, must_be_free) => {
                let is_fenced = placed.has_failed(&refusal, SHARD) && !self.node.is_shared();
                let is_taken = placed.has_failed(&refusal, RECORD);
                rest.refuse(&placed, &refusal);
                match must_be_free {
                    _ if is_fenced => Err(WorkflowError::Stopped),
                    Some(id) if is_taken => Err(WorkflowError::AlreadyStarted { id }),
                    _ => Ok(RequestOutcome::Again),
                }
            }
            Then::Entities(understood) => match self.entities.outrun(refusal, &understood).await {
                Ok(()) => Ok(RequestOutcome::Again),
                Err(error) => Err(error.into()),
            },
        }
    }

    async fn start_request(self: &Arc<EngineInner>, start: &StartRequest) -> Result<ReadyRequest> {
        let StartRequest { workflow, id, input, join } = start;
        if *join && self.read(id).await?.is_some() {
            return Ok(ReadyRequest::of(Part::default(), None));
        }
        let part = self.starting(&[(workflow, input.get().to_string(), id.clone())]).await?;
        Ok(ReadyRequest::of(part, (!join).then(|| id.clone())))
    }

    async fn signal_request(self: &Arc<EngineInner>, signal: &SignalRequest, from_store: bool) -> Result<ReadyRequest> {
        let SignalRequest { execution, name, payload } = signal;
        let target = self.target(execution, from_store).await?;
        let letter = MessageBody::Signal { name: name.clone(), payload: payload.get().to_string() };
        Ok(ReadyRequest::of(self.deliveries(execution, target, vec![letter]), None))
    }

    async fn entities_request(
        &self,
        transaction: Transaction,
    ) -> Result<std::result::Result<ReadyRequest, RequestOutcome>> {
        let checked = self.entities.checked(transaction)?;
        let prepared = self.entities.prepare(&self.store.view().await?, &checked).await?;
        let is_doomed = prepared.doomed;
        let (commit, understood) = prepared.split();
        if !is_doomed {
            return Ok(Ok(ReadyRequest { commit, then: Then::Entities(understood) }));
        }
        // The commit has only checks. It tells why the change cannot be made, and the row stays.
        match self.store.commit(commit).await? {
            Outcome::Applied(_) => Ok(Err(RequestOutcome::Again)),
            Outcome::Refused(refusal) => self.refused_request(Then::Entities(understood), refusal).await.map(Err),
        }
    }
}

/// A transaction that was rolled back.
fn broken(error: SqlError) -> Result<RequestOutcome> {
    match error {
        SqlError::Store(error) => Err(error.into()),
        error if error.runs_again() => Ok(RequestOutcome::Again),
        error => Err(unavailable(&error).into()),
    }
}
