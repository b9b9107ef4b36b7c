//! What happened in a simulation, in order. The same seed makes exactly the same trace.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use parking_lot::Mutex;

use super::fault::Side;
use crate::lock::{LockName, Owner};
use crate::store::{Generation, Timestamp, Uuid};
use crate::workflow::ExecutionId;

/// Something that happened in a simulation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TraceEvent {
    /// How much virtual time has passed since the beginning.
    pub at: Duration,
    /// The time of day, which may have jumped.
    pub time: Timestamp,
    /// The number of the engine's life, from 1.
    pub life: u32,
    /// What happened.
    pub what: TraceKind,
}

/// A kind of event.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum TraceKind {
    /// The engine has become the owner of all executions. Commits of the previous owner are refused from now on.
    Owner,
    /// The engine runs.
    Engine,
    /// The engine could not be started, and its process has ended.
    NoEngine(String),
    /// A start was acknowledged.
    Started(ExecutionId),
    /// The body of a step begins.
    Body {
        /// The execution.
        id: ExecutionId,
        /// The name of the step.
        step: String,
        /// How often a body of that name has begun in that execution, in all lives: 1 for the first time.
        run: u32,
    },
    /// A commit landed: its generation, and how many records it wrote in each space.
    Commit(Generation, String),
    /// A commit was refused.
    Refused(String),
    /// The answer to a commit was lost.
    Lost {
        /// True if the commit was decided; false if it was lost, too.
        decided: bool,
    },
    /// A commit, or its answer, takes this long.
    Slow(Duration),
    /// The process is gone.
    Crash(Side),
    /// The process is paused, on this side of a commit, for this long.
    Pause(Side, Duration),
    /// The process continues.
    Woke,
    /// The engine was stopped.
    Stopped,
    /// Another engine is started beside this one.
    Superseded,
    /// The time of day jumped by this many microseconds.
    Jump(i64),
    /// The execution has ended: completed, failed or timed out.
    Ended(ExecutionId),
    /// The result of an execution, read at the end of the simulation.
    Result(ExecutionId, String),
    /// The commit before granted a lock.
    Granted {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// The number of permits.
        permits: u32,
        /// The new holder.
        owner: Owner,
    },
    /// The commit before released a lock.
    Released {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// The previous holder.
        owner: Owner,
    },
    /// The commit before is an operator's forced release of a lock, or of a waiting request. The same commit may have
    /// granted the lock to the next request.
    Forced {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// The owner of the request.
        owner: Owner,
        /// True if the request held the lock; false if it waited.
        was_held: bool,
    },
    /// A session was ended because it was not renewed.
    Expired(Uuid),
    /// A note of a caller.
    Note(String),
}

impl fmt::Display for TraceEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.6} life {} ", self.at.as_secs_f64(), self.life)?;
        match &self.what {
            TraceKind::Owner => write!(f, "owns all executions"),
            TraceKind::Engine => write!(f, "engine runs"),
            TraceKind::NoEngine(error) => write!(f, "engine does not start: {error}"),
            TraceKind::Started(id) => write!(f, "started {id}"),
            TraceKind::Body { id, step, run } => write!(f, "body {id} {step} #{run}"),
            TraceKind::Commit(generation, writes) => write!(f, "commit {generation}: {writes}"),
            TraceKind::Refused(refusal) => write!(f, "{refusal}"),
            TraceKind::Lost { decided: true } => write!(f, "answer lost"),
            TraceKind::Lost { decided: false } => write!(f, "commit and answer lost"),
            TraceKind::Slow(delay) => write!(f, "slow commit: {delay:?}"),
            TraceKind::Crash(side) => write!(f, "crash {} a commit", said(*side)),
            TraceKind::Pause(side, length) => write!(f, "pause {} a commit, for {length:?}", said(*side)),
            TraceKind::Woke => write!(f, "continues after its pause"),
            TraceKind::Stopped => write!(f, "engine stopped"),
            TraceKind::Superseded => write!(f, "another engine starts beside it"),
            TraceKind::Jump(by) => write!(f, "the time of day jumps by {:.6} s, to {}", *by as f64 / 1e6, self.time),
            TraceKind::Ended(id) => write!(f, "ended {id}"),
            TraceKind::Result(id, result) => write!(f, "result of {id}: {result}"),
            TraceKind::Granted { lock, token, permits, owner } => {
                write!(f, "{owner} has {permits} of {lock}, token {token}")
            }
            TraceKind::Released { lock, token, owner } => write!(f, "{owner} no longer has {lock}, token {token}"),
            TraceKind::Forced { lock, token, owner, was_held } => {
                let what = if *was_held { "holding" } else { "waiting for" };
                write!(f, "an operator stopped {owner} from {what} {lock}, token {token}")
            }
            TraceKind::Expired(session) => write!(f, "session {session} was not renewed"),
            TraceKind::Note(text) => write!(f, "{text}"),
        }
    }
}

fn said(side: Side) -> &'static str {
    match side {
        Side::Before => "before",
        Side::After => "after",
    }
}

/// Collects the events.
#[derive(Default)]
pub(crate) struct Trace {
    events: Mutex<Vec<TraceEvent>>,
    bodies: Mutex<BTreeMap<(ExecutionId, String), u32>>,
}

impl Trace {
    pub(crate) fn push(&self, event: TraceEvent) {
        self.events.lock().push(event);
    }

    /// How often a body has begun, including this time.
    pub(crate) fn count_body(&self, id: &ExecutionId, step: &str) -> u32 {
        let mut bodies = self.bodies.lock();
        let runs = bodies.entry((id.clone(), step.into())).or_default();
        *runs += 1;
        *runs
    }

    pub(crate) fn take(&self) -> Vec<TraceEvent> {
        std::mem::take(&mut self.events.lock())
    }
}
