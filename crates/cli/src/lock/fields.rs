//! The fields of locks in JSON, which are stable, and the words for people. docs/cli.md lists the fields.

use std::borrow::Cow;

use latchwork::lock::{ForcedRelease, LockKind, LockName, LockScope, LockState, LockSummary, Owner, Requested};
use latchwork::store::{Timestamp, Uuid};
use latchwork::workflow::ExecutionId;
use serde::{Deserialize, Serialize};

use crate::time::Time;

/// The name of a lock and its scope.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct NameFields {
    pub(crate) name: String,
    /// The workflow whose executions share it.
    workflow: Option<String>,
    /// The execution that shares it with its descendants.
    tree: Option<ExecutionId>,
}

impl NameFields {
    pub(crate) fn of(lock: &LockName) -> NameFields {
        let (mut workflow, mut tree) = (None, None);
        match &lock.scope {
            LockScope::Workflow(name) => workflow = Some(name.clone()),
            LockScope::Tree(root) => tree = Some(root.clone()),
            _ => {}
        }
        NameFields { name: lock.name.clone(), workflow, tree }
    }

    /// The scope, for people.
    pub(crate) fn scope(&self) -> String {
        match (&self.workflow, &self.tree) {
            (Some(workflow), _) => format!("workflow {workflow}"),
            (_, Some(root)) => format!("execution {root}"),
            _ => String::new(),
        }
    }

    /// For example `lock "account-42" of workflow "order"`.
    pub(crate) fn words(&self) -> String {
        match (&self.workflow, &self.tree) {
            (Some(workflow), _) => format!("lock {:?} of workflow {workflow:?}", self.name),
            (_, Some(root)) => format!("lock {:?} of execution {:?}", self.name, &**root),
            _ => format!("lock {:?}", self.name),
        }
    }
}

/// A lock in a list.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LockFields {
    #[serde(flatten)]
    pub(crate) name: NameFields,
    /// `mutex`, `semaphore` or `read_write`.
    kind: Cow<'static, str>,
    /// How many permits the lock has; `None` for a read-write lock.
    permits: Option<u32>,
    /// How many permits are held; a writer counts as one.
    used: u32,
    /// True if the holder excludes all others.
    exclusive: bool,
    pub(crate) waiting: u64,
}

impl LockFields {
    fn new(name: &LockName, kind: LockKind, used: u32, waiting: u64) -> LockFields {
        let (word, permits) = match kind {
            LockKind::Mutex => ("mutex", Some(1)),
            LockKind::Semaphore { permits } => ("semaphore", Some(permits)),
            _ => ("read_write", None),
        };
        let is_written = permits.is_none() && used == u32::MAX;
        let exclusive = is_written || (permits == Some(1) && used == 1);
        let used = if is_written { 1 } else { used };
        LockFields { name: NameFields::of(name), kind: word.into(), permits, used, exclusive, waiting }
    }

    pub(crate) fn of(lock: &LockSummary) -> LockFields {
        LockFields::new(&lock.name, lock.kind, lock.used, lock.waiting)
    }

    pub(crate) fn of_state(lock: &LockState) -> LockFields {
        LockFields::new(&lock.name, lock.kind, lock.used, lock.waiting)
    }

    /// For example `semaphore of 3`.
    pub(crate) fn kind(&self) -> String {
        match (&*self.kind, self.permits) {
            ("semaphore", Some(permits)) => format!("semaphore of {permits}"),
            ("read_write", _) => "read-write lock".into(),
            (kind, _) => kind.into(),
        }
    }

    /// For example `2 of 3`.
    pub(crate) fn held(&self) -> String {
        match (self.permits, self.used) {
            (_, 0) => "free".into(),
            (Some(1), _) => "held".into(),
            (Some(permits), used) => format!("{used} of {permits}"),
            (None, _) if self.exclusive => "a writer".into(),
            (None, 1) => "1 reader".into(),
            (None, used) => format!("{used} readers"),
        }
    }
}

/// A holder or a waiter of a lock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct OwnerFields {
    pub(crate) execution: Option<ExecutionId>,
    session: Option<Uuid>,
    /// The label of the session.
    label: Option<String>,
}

impl OwnerFields {
    pub(crate) fn of(owner: &Owner, label: Option<&str>) -> OwnerFields {
        let (mut execution, mut session) = (None, None);
        match owner {
            Owner::Execution(id) => execution = Some(id.clone()),
            Owner::Session(id) => session = Some(*id),
            _ => {}
        }
        OwnerFields { execution, session, label: label.map(Into::into) }
    }

    /// For example `execution "order-7"`.
    pub(crate) fn words(&self) -> String {
        match (&self.execution, &self.session, &self.label) {
            (Some(id), ..) => format!("execution {:?}", &**id),
            (_, Some(id), Some(label)) if !label.is_empty() => format!("session {label:?} ({id})"),
            (_, Some(id), _) => format!("session {id}"),
            _ => "an unknown owner".into(),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RequestFields {
    #[serde(flatten)]
    pub(crate) owner: OwnerFields,
    pub(crate) token: u64,
    /// How many permits; a writer counts as one.
    permits: u32,
    exclusive: bool,
    /// The time of the request.
    pub(crate) since: Time,
    pub(crate) granted_at: Option<Time>,
    /// The position in the queue, from 0.
    pub(crate) position: Option<u64>,
    lease_renewed_at: Option<Time>,
    /// When the session expires if it is not renewed.
    lease_until: Option<Time>,
}

impl RequestFields {
    pub(crate) fn of(request: &Requested, kind: LockKind) -> RequestFields {
        let is_written = kind == LockKind::ReadWrite && request.permits == u32::MAX;
        RequestFields {
            owner: OwnerFields::of(&request.owner, request.label.as_deref()),
            token: request.token,
            permits: if is_written { 1 } else { request.permits },
            exclusive: is_written || kind == LockKind::Mutex,
            since: Time(request.since),
            granted_at: request.granted.map(Time),
            position: request.position,
            lease_renewed_at: request.lease.map(|lease| Time(lease.renewed)),
            lease_until: request.lease.map(|lease| Time(lease.until())),
        }
    }

    /// How many permits, or whether to read or to write.
    pub(crate) fn share(&self, lock: &LockFields) -> String {
        match (lock.permits, self.exclusive) {
            (None, true) => "to write".into(),
            (None, false) => "to read".into(),
            _ => self.permits.to_string(),
        }
    }

    pub(crate) fn lease(&self, now: Timestamp) -> String {
        match self.lease_until {
            None => String::new(),
            Some(until) if until.0 <= now => format!("over, {}", until.relative_to(now)),
            Some(until) => format!("ends {}", until.relative_to(now)),
        }
    }

    /// For example `execution "order-7" (token 12, for 3m 2s)`.
    pub(crate) fn words(&self, now: Timestamp) -> String {
        let since = self.granted_at.unwrap_or(self.since).relative_to(now);
        let since = since.strip_suffix(" ago").map_or(since.clone(), |long| format!("for {long}"));
        format!("{} (token {}, {since})", self.owner.words(), self.token)
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ForcedFields {
    #[serde(flatten)]
    pub(crate) owner: OwnerFields,
    pub(crate) token: u64,
    /// True if it was held; false if it was waited for.
    pub(crate) was_held: bool,
    pub(crate) at: Time,
    pub(crate) reason: String,
}

impl ForcedFields {
    pub(crate) fn of(forced: &ForcedRelease) -> ForcedFields {
        ForcedFields {
            owner: OwnerFields::of(&forced.owner, None),
            token: forced.token,
            was_held: forced.was_held,
            at: Time(forced.at),
            reason: forced.reason.clone(),
        }
    }
}
