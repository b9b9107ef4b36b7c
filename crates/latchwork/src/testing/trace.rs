//! What happened in a simulation, in order. The same seed gives the same trace, to the letter.

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
pub struct Event {
    /// How much virtual time had passed since the beginning.
    pub at: Duration,
    /// The time of day, which may have jumped.
    pub time: Timestamp,
    /// In which engine's life, counted from 1.
    pub life: u32,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum What {
    /// The engine has become the owner of all executions; whoever was it before is refused from now on.
    Owner,
    /// The engine runs.
    Engine,
    /// The engine could not be started, and its process has ended.
    NoEngine(String),
    /// A start was acknowledged.
    Started(ExecutionId),
    /// The body of a step begins; how often a body of that name has begun in that execution, in all lives.
    Body {
        /// The execution.
        id: ExecutionId,
        /// The name of the step.
        step: String,
        /// 1 for the first time.
        run: u32,
    },
    /// A commit landed: its generation, and how many records it wrote in which spaces.
    Commit(Generation, String),
    /// A commit was refused.
    Refused(String),
    /// The answer to a commit was lost.
    Lost {
        /// Whether the commit was decided, or lost as well.
        decided: bool,
    },
    /// A commit, or its answer, takes so long.
    Slow(Duration),
    /// The process is gone.
    Crash(Side),
    /// The process stands still, on this side of a commit, for so long.
    Pause(Side, Duration),
    /// The process goes on.
    Woke,
    /// The engine was stopped.
    Stopped,
    /// Another engine is started beside this one.
    Superseded,
    /// The time of day jumped, by so many microseconds.
    Jump(i64),
    /// The execution has ended: completed, failed or timed out.
    Ended(ExecutionId),
    /// What it came to, as read when all was over.
    Result(ExecutionId, String),
    /// A lock was granted, by the commit before.
    Granted {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// How many permits.
        permits: u32,
        /// To whom.
        owner: Owner,
    },
    /// A lock is no longer held, by the commit before.
    Released {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// Who held it.
        owner: Owner,
    },
    /// An operator has had somebody let go of a lock, or of a place in its queue, by the commit before. The same commit
    /// may have granted it.
    Forced {
        /// The lock.
        lock: LockName,
        /// The token.
        token: u64,
        /// Who held it, or waited for it.
        owner: Owner,
        /// Whether it was held.
        was_held: bool,
    },
    /// A session was ended because it was not renewed.
    Expired(Uuid),
    /// What a caller had to say.
    Note(String),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.6} life {} ", self.at.as_secs_f64(), self.life)?;
        match &self.what {
            What::Owner => write!(f, "owns all executions"),
            What::Engine => write!(f, "engine runs"),
            What::NoEngine(error) => write!(f, "engine does not start: {error}"),
            What::Started(id) => write!(f, "started {id}"),
            What::Body { id, step, run } => write!(f, "body {id} {step} #{run}"),
            What::Commit(generation, writes) => write!(f, "commit {generation}: {writes}"),
            What::Refused(refusal) => write!(f, "{refusal}"),
            What::Lost { decided: true } => write!(f, "answer lost"),
            What::Lost { decided: false } => write!(f, "commit and answer lost"),
            What::Slow(delay) => write!(f, "slow commit: {delay:?}"),
            What::Crash(side) => write!(f, "crash {} a commit", said(*side)),
            What::Pause(side, length) => write!(f, "pause {} a commit, for {length:?}", said(*side)),
            What::Woke => write!(f, "goes on after its pause"),
            What::Stopped => write!(f, "engine stopped"),
            What::Superseded => write!(f, "another engine starts beside it"),
            What::Jump(by) => write!(f, "the time of day jumps by {:.6} s, to {}", *by as f64 / 1e6, self.time),
            What::Ended(id) => write!(f, "ended {id}"),
            What::Result(id, result) => write!(f, "result of {id}: {result}"),
            What::Granted { lock, token, permits, owner } => {
                write!(f, "{owner} has {permits} of {lock}, token {token}")
            }
            What::Released { lock, token, owner } => write!(f, "{owner} no longer has {lock}, token {token}"),
            What::Forced { lock, token, owner, was_held } => {
                let what = if *was_held { "holding" } else { "waiting for" };
                write!(f, "{owner} was kept from {what} {lock}, token {token}")
            }
            What::Expired(session) => write!(f, "session {session} was not renewed"),
            What::Note(text) => write!(f, "{text}"),
        }
    }
}

fn said(side: Side) -> &'static str {
    match side {
        Side::Before => "before",
        Side::After => "after",
    }
}

/// Where events are written down.
#[derive(Default)]
pub(crate) struct Trace {
    events: Mutex<Vec<Event>>,
    bodies: Mutex<BTreeMap<(ExecutionId, String), u32>>,
}

impl Trace {
    pub(crate) fn push(&self, event: Event) {
        self.events.lock().push(event);
    }

    /// How often a body has begun, this time included.
    pub(crate) fn count_body(&self, id: &ExecutionId, step: &str) -> u32 {
        let mut bodies = self.bodies.lock();
        let runs = bodies.entry((id.clone(), step.into())).or_default();
        *runs += 1;
        *runs
    }

    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock())
    }
}
