//! Stores the execution of a start: either a run makes its first commit, or a prepared part is added to a commit.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::lane::{Part, Placed, Rider};
use crate::node::SHARD;
use crate::store::{Commit, Receipt, Refusal, StoreError, Timestamp};
use crate::workflow::admission::{Book, Ruling, StartNeeds};
use crate::workflow::engine::{EngineInner, check_name};
use crate::workflow::run::{Boarded, CommitOutcome, KEYED, NextState, RECORD, RefusalVerdict, Run, Stop, with_record};
use crate::workflow::stored::record::{Execution, Labels, StoredStatus};
use crate::workflow::{ExecutionId, Result};

/// The first record of an execution that does not run at once, as a part of a commit.
fn first_record(engine: &Arc<EngineInner>, id: &ExecutionId, first: &Execution) -> Part {
    let mut first = first.clone();
    // First the part, then the question who owns it: so the part either checks the shard or notifies its owner.
    let part = engine.at_record(id, None);
    let begins_here = first.status == StoredStatus::Running && engine.node.owns(id) && !engine.idle;
    let definition = engine.definition_of(&first).cloned().filter(|_| begins_here);
    let running = definition.map(|definition| (engine.set_running(id, &mut first), definition));
    let (part, _) = with_record(engine, part, id, None, &mut first, None);
    match (running, first.status == StoredStatus::Waiting, first.timer_us) {
        (Some((running, definition)), ..) => {
            let (engine, id) = (engine.clone(), id.clone());
            // A signal may come with the start.
            part.then(move |landing| {
                running.begin(Run::new(engine, definition, id, first, landing.last()).not_begun());
            })
        }
        (None, true, Some(timer)) => {
            let (timers, id) = (engine.timers.clone(), id.clone());
            part.then(move |_| timers.set(&id, Timestamp(timer)))
        }
        (None, true, None) => part,
        (None, false, _) => engine.waking(part, id),
    }
}

/// Stores an execution that is not in memory, together with the other writes of its start.
pub(crate) struct StoredStart {
    engine: Arc<EngineInner>,
    id: ExecutionId,
    with: Box<dyn Fn(Part) -> Part + Send>,
    placed: Option<(Placed, Part)>,
}

impl StoredStart {
    pub(crate) fn new(
        engine: &Arc<EngineInner>,
        id: &ExecutionId,
        with: impl Fn(Part) -> Part + Send + 'static,
    ) -> StoredStart {
        StoredStart { engine: engine.clone(), id: id.clone(), with: Box::new(with), placed: None }
    }

    /// Returns everything that stores the execution, with `first` as its first record.
    pub(crate) fn part(&self, first: &Execution) -> Part {
        (self.with)(first_record(&self.engine, &self.id, first))
    }
}

impl Rider<Execution, ()> for StoredStart {
    fn board(&mut self, commit: Commit, first: &Execution) -> Commit {
        let (commit, placed, rest) = self.part(first).place_whole(commit);
        self.placed = Some((placed, rest));
        commit
    }

    fn landed(&mut self, receipt: &Receipt) {
        if let Some((placed, rest)) = self.placed.take() {
            rest.land(placed.landing(receipt));
        }
    }

    fn refused(&mut self, refusal: &Refusal) -> bool {
        let Some((placed, rest)) = self.placed.take() else { return false };
        let is_own = placed.failed(refusal).next().is_some();
        rest.refuse(&placed, refusal);
        is_own
    }

    fn failed(&mut self, _: &StoreError) {}

    fn rests(&mut self, (): ()) {}
}

/// The first commit of an execution that is already in memory. The commit includes what its code has done so far. If
/// the execution must wait, that work is dropped and the execution leaves memory.
struct FirstCommit {
    run: Arc<Run>,
    next: NextState,
    boarded: Option<Boarded>,
    waits: Option<(Placed, Part, Option<Timestamp>)>,
    receipt: Arc<Mutex<Option<Receipt>>>,
}

impl FirstCommit {
    /// Undoes the boarding of a commit that did not land, so that the next commit can be boarded.
    fn rise(&mut self) {
        self.waits = None;
        self.boarded.take().into_iter().for_each(|boarded| self.run.put_back(boarded));
        self.run.with(|state| state.known.set_admission(None));
    }
}

impl Rider<Execution, ()> for FirstCommit {
    fn board(&mut self, commit: Commit, first: &Execution) -> Commit {
        self.rise();
        if first.status == StoredStatus::Running {
            self.run.with(|state| state.known.set_admission(first.admission.clone()));
            let (commit, boarded) = self.run.board(commit, self.next.clone());
            self.boarded = Some(boarded);
            return commit;
        }
        let part = first_record(&self.run.engine, &self.run.id, first);
        let (commit, placed, rest) = part.place_whole(commit);
        self.waits = Some((placed, rest, first.timer_us.map(Timestamp)));
        commit
    }

    fn landed(&mut self, receipt: &Receipt) {
        if let Some(boarded) = self.boarded.take() {
            self.run.landed(boarded, receipt);
            *self.receipt.lock() = Some(receipt.clone());
        } else if let Some((placed, rest, timer)) = self.waits.take() {
            rest.land(placed.landing(receipt));
            self.run.set_stop(Stop::Suspended(timer));
        }
    }

    fn refused(&mut self, refusal: &Refusal) -> bool {
        let stop = match (self.boarded.take(), self.waits.take()) {
            (Some(boarded), _) => match self.run.refused(boarded, refusal) {
                RefusalVerdict::Stop(stop) => Some(stop),
                RefusalVerdict::Again => None,
            },
            (None, Some((placed, rest, _))) => {
                let failed = |tag| placed.has_failed(refusal, tag);
                let stop = match () {
                    () if failed(SHARD) => Some(Stop::Fenced),
                    () if failed(RECORD) || failed(KEYED) => Some(Stop::Taken),
                    () => None,
                };
                rest.refuse(&placed, refusal);
                stop
            }
            (None, None) => None,
        };
        self.run.with(|state| state.known.set_admission(None));
        let is_own = stop.is_some();
        stop.into_iter().for_each(|stop| self.run.set_stop(stop));
        is_own
    }

    fn failed(&mut self, error: &StoreError) {
        self.rise();
        self.run.set_stop(self.run.failed(error.clone()));
    }

    fn rests(&mut self, (): ()) {}
}

impl Run {
    /// Makes the first commit of an execution whose workflow has limits. The same commit admits the execution.
    pub(crate) async fn send_admitted(self: &Arc<Run>, asked: StartNeeds, next: NextState) -> CommitOutcome {
        let first = self.with(|state| state.known.stored().clone());
        let receipt = Arc::new(Mutex::new(None));
        let (run, definition) = (self.clone(), self.definition.clone());
        let starter = Box::new(FirstCommit { run, next, boarded: None, waits: None, receipt: receipt.clone() });
        let started = self.engine.admissions.start(&definition, asked, &self.id, first, starter).await;
        let landed = receipt.lock().take();
        match (landed, started) {
            (Some(receipt), _) => CommitOutcome::Landed(receipt),
            (None, Err(error)) => CommitOutcome::Stopped(self.stop().unwrap_or(Stop::Rejected(error))),
            (None, Ok(_)) => CommitOutcome::Stopped(self.stop().unwrap_or(Stop::Fenced)),
        }
    }
}

impl EngineInner {
    /// Starts executions in a commit of another layer. They begin when the commit has landed, if they are admitted by
    /// then. A rejected start is an error. Inputs are JSON text.
    pub(crate) async fn starting(self: &Arc<EngineInner>, starts: &[(&str, String, ExecutionId)]) -> Result<Part> {
        self.starting_for(starts, None).await
    }

    /// The same for a schedule, if one is given: the end of the executions is reported to it.
    pub(crate) async fn starting_for(
        self: &Arc<EngineInner>,
        starts: &[(&str, String, ExecutionId)],
        schedule: Option<&str>,
    ) -> Result<Part> {
        let (now, mut part) = (self.store.env().now(), Part::default());
        let mut book = None;
        for (workflow, input, id) in starts {
            check_name("the id of an execution", id)?;
            let (definition, input) = self.accept(workflow, None, Ok(input.clone()))?;
            definition.check(&input)?;
            let asked = definition.asked(&input)?.map(StartNeeds::alone);
            let mut first = definition.first_record(definition.alone(input), Labels::default(), now, now);
            first.schedule = schedule.map(str::to_string);
            if let Some(asked) = asked {
                let book = match &mut book {
                    Some(book) => book,
                    none => none.insert(Book::new(self).await?),
                };
                if let Ruling::Rejected(error) = book.decide(&definition.policy, &asked, id, &mut first).await? {
                    return Err(error);
                }
            }
            part = part.and(StoredStart::new(self, id, |part| part).part(&first));
            let (engine, workflow) = (self.clone(), workflow.to_string());
            part = part.then(move |_| engine.metrics.started(&workflow));
        }
        Ok(match book {
            Some(book) => part.and(self.admissions.looking_later(book)),
            None => part,
        })
    }
}
