//! Does what the requests of the outbox ask for. Each request is one transaction: it removes the row and commits the
//! start, the message or the change. So a crash at any point leaves the request either done or untouched.

use std::collections::BTreeMap;
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
    /// Does the oldest requests. Returns whether there were any.
    async fn drain(self: &Arc<EngineInner>, postgres: &Postgres) -> Result<bool> {
        let shards: Vec<i32> = self.node.owned().into_iter().map(i32::from).collect();
        let rows = postgres.outbox_due(&shards, PAGE).await?;
        let has_any = !rows.is_empty();
        let mut queues: BTreeMap<String, Vec<DueRequest>> = BTreeMap::new();
        for row in rows {
            let request = OutboxRequest::read(&row.kind, &row.body);
            let name = request.as_ref().map_or_else(|_| row.id.to_string(), |request| request.name().to_string());
            queues.entry(name).or_default().push((row, request));
        }
        let work = |queue: Vec<DueRequest>| async move {
            for (row, request) in queue {
                self.fulfil(postgres, &row, request).await?;
            }
            Ok(())
        };
        let mut working = stream::iter(queues.into_values()).map(work).buffer_unordered(AT_ONCE);
        let mut failed = None;
        while let Some(worked) = working.next().await {
            failed = failed.or(worked.err());
        }
        failed.map_or(Ok(has_any), Err)
    }

    /// Does a request. A request that cannot be done is noted, and does not stop the others. An error means that it
    /// must be tried again later.
    async fn fulfil(
        self: &Arc<EngineInner>,
        postgres: &Postgres,
        row: &OutboxRow,
        request: Result<OutboxRequest, String>,
    ) -> Result<()> {
        let env = self.store.env();
        let mut reason = "other writers were faster each time".to_string();
        for tries in 1..=TRIES {
            let tried = match &request {
                Ok(request) => self.attempt(postgres, row, request, tries > 1).await,
                Err(error) => Ok(RequestOutcome::Failed(error.clone())),
            };
            match tried {
                Ok(RequestOutcome::Done) => return Ok(()),
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
        Ok(())
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
            OutboxRequest::Start(start) => self.start_request(start).await?,
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
