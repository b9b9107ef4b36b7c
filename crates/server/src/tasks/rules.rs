//! The rules of one task, as functions of its record: what a lease, its end, an answer or a failure make of it. They
//! read no clock and write nothing.

use std::time::Duration;

use latchwork::Value;
use latchwork::store::Timestamp;

use crate::tasks::TaskError;
use crate::tasks::stored::{Task, TaskFailure, TaskRetry, TaskState};

/// The code of a failure if a worker was silent for too long.
pub(crate) const LEASE_OVER: &str = "lease-over";

/// A lease that a worker asks for.
#[derive(Debug, Clone)]
pub(crate) struct Lease {
    pub(crate) worker: String,
    pub(crate) length: Duration,
}

/// What is to be stored after an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Changed,
    /// An earlier operation has done the same.
    Same,
}

impl TaskRetry {
    /// The pause after this attempt.
    fn pause(self, attempt: u32) -> Duration {
        let doubled = self.pause_us.saturating_mul(1_u64.checked_shl(attempt.saturating_sub(1)).unwrap_or(u64::MAX));
        Duration::from_micros(doubled.min(self.longest_us))
    }
}

impl Task {
    /// True if it can be taken.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        matches!(self.state, TaskState::Open { due } if due <= now)
    }

    pub(crate) fn take(&mut self, lease: &Lease, token: u64, now: Timestamp) {
        self.attempt = self.attempt.saturating_add(1);
        self.token = token;
        self.lease(lease.worker.clone(), lease.length, now);
    }

    fn lease(&mut self, worker: String, length: Duration, now: Timestamp) {
        let lease_us = u64::try_from(length.as_micros()).unwrap_or(u64::MAX);
        self.state = TaskState::Leased { worker, until: now.plus(length), lease_us };
    }

    fn lost(&self) -> TaskError {
        TaskError::LeaseLost { id: self.id.clone(), state: self.word() }
    }

    /// The worker that has this token, if its lease was not taken away. A lease whose time is over lasts until another
    /// caller notices.
    fn holder(&self, token: u64) -> Result<(String, Duration), TaskError> {
        match &self.state {
            TaskState::Leased { worker, lease_us, .. } if self.token == token => {
                Ok((worker.clone(), Duration::from_micros(*lease_us)))
            }
            _ => Err(self.lost()),
        }
    }

    /// The worker is alive. Without a length, the lease is as long as before.
    pub(crate) fn renew(&mut self, token: u64, length: Option<Duration>, now: Timestamp) -> Result<Change, TaskError> {
        let (worker, before) = self.holder(token)?;
        self.lease(worker, length.unwrap_or(before), now);
        Ok(Change::Changed)
    }

    /// The worker has done it. Only the first answer under a token counts.
    pub(crate) fn complete(&mut self, token: u64, output: &Value, now: Timestamp) -> Result<Change, TaskError> {
        if matches!(self.state, TaskState::Done { .. }) && self.token == token {
            return Ok(Change::Same);
        }
        self.holder(token)?;
        self.state = TaskState::Done { output: output.clone(), at: now };
        Ok(Change::Changed)
    }

    /// The worker has failed. With a pause, the next attempt is due after it.
    pub(crate) fn fail(
        &mut self,
        token: u64,
        failure: &TaskFailure,
        again: Option<Option<Duration>>,
        now: Timestamp,
    ) -> Result<Change, TaskError> {
        self.holder(token)?;
        self.failure = Some(failure.clone());
        self.state = match again {
            Some(pause) if self.attempt < self.retry.attempts => {
                TaskState::Open { due: now.plus(pause.unwrap_or(self.retry.pause(self.attempt))) }
            }
            _ => TaskState::Failed { at: now },
        };
        Ok(Change::Changed)
    }

    /// Takes a lease away that is over. The pause was long enough: the next attempt is due at once.
    pub(crate) fn expire(&mut self, now: Timestamp) -> Change {
        let TaskState::Leased { worker, until, .. } = &self.state else { return Change::Same };
        if *until > now {
            return Change::Same;
        }
        let message = format!("worker {worker:?} gave no sign of life within its lease");
        self.failure = Some(TaskFailure { message, code: Some(LEASE_OVER.into()), details: Value::Null });
        self.state = match self.attempt < self.retry.attempts {
            true => TaskState::Open { due: now },
            false => TaskState::Failed { at: now },
        };
        Change::Changed
    }

    pub(crate) fn cancel(&mut self, reason: &str, now: Timestamp) -> Result<Change, TaskError> {
        match &self.state {
            TaskState::Open { .. } | TaskState::Leased { .. } => {
                self.state = TaskState::Cancelled { reason: reason.into(), at: now };
                Ok(Change::Changed)
            }
            _ => Err(TaskError::Ended { id: self.id.clone(), state: self.word() }),
        }
    }

    /// The word for its state.
    pub(crate) fn word(&self) -> &'static str {
        match self.state {
            TaskState::Open { .. } => "open",
            TaskState::Leased { .. } => "leased",
            TaskState::Done { .. } => "done",
            TaskState::Failed { .. } => "failed",
            TaskState::Cancelled { .. } => "cancelled",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    const NOW: Timestamp = Timestamp(1_000_000);
    const SECOND: Duration = Duration::from_secs(1);

    fn task(attempts: u32) -> Task {
        let retry = TaskRetry { attempts, pause_us: 1_000_000, longest_us: 3_000_000 };
        Task {
            id: "t".into(),
            kind: "k".into(),
            input: json!(null),
            key: "t".into(),
            put_at: NOW,
            retry,
            attempt: 0,
            token: 0,
            state: TaskState::Open { due: NOW },
            failure: None,
            completion: None,
            told: false,
            guard: None,
        }
    }

    fn lease() -> Lease {
        Lease { worker: "w".into(), length: SECOND }
    }

    fn failure() -> TaskFailure {
        TaskFailure { message: "no".into(), code: None, details: json!(null) }
    }

    #[test]
    fn an_answer_counts_once_and_only_under_the_last_token() {
        let mut task = task(3);
        task.take(&lease(), 5, NOW);
        assert_eq!(task.expire(NOW.plus(SECOND / 2)), Change::Same);
        // The time is over, and no other caller has noticed: the answer counts.
        let mut late = task.clone();
        assert_eq!(late.complete(5, &json!(1), NOW.plus(SECOND * 9)).unwrap(), Change::Changed);
        assert_eq!(late.complete(5, &json!(2), NOW).unwrap(), Change::Same);
        assert!(matches!(late.state, TaskState::Done { output, .. } if output == json!(1)));
        // Another caller has noticed.
        assert_eq!(task.expire(NOW.plus(SECOND)), Change::Changed);
        assert!(task.is_due(NOW.plus(SECOND)));
        task.complete(5, &json!(1), NOW).unwrap_err();
        task.take(&lease(), 9, NOW);
        assert_eq!(task.attempt, 2);
        for token in [0, 5, 10] {
            task.complete(token, &json!(1), NOW).unwrap_err();
            task.renew(token, None, NOW).unwrap_err();
            task.fail(token, &failure(), None, NOW).unwrap_err();
        }
        task.renew(9, Some(SECOND * 7), NOW).unwrap();
        assert_eq!(task.expire(NOW.plus(SECOND * 6)), Change::Same);
    }

    #[test]
    fn attempts_are_limited_and_their_pauses_double() {
        let mut task = task(4);
        for (token, pause) in [(1, 1), (2, 2), (3, 3)] {
            task.take(&lease(), token, NOW);
            task.fail(token, &failure(), Some(None), NOW).unwrap();
            assert_eq!(task.state, TaskState::Open { due: NOW.plus(SECOND * pause) });
        }
        task.take(&lease(), 4, NOW);
        task.fail(4, &failure(), Some(None), NOW).unwrap();
        assert_eq!(task.state, TaskState::Failed { at: NOW });
        assert!(matches!(task.cancel("why", NOW), Err(TaskError::Ended { .. })));
    }

    #[test]
    fn a_worker_may_ask_for_a_pause_or_give_up() {
        let mut once = task(9);
        once.take(&lease(), 1, NOW);
        once.fail(1, &failure(), Some(Some(SECOND * 40)), NOW).unwrap();
        assert_eq!(once.state, TaskState::Open { due: NOW.plus(SECOND * 40) });
        let mut never = task(9);
        never.take(&lease(), 1, NOW);
        never.fail(1, &failure(), None, NOW).unwrap();
        assert_eq!(never.state, TaskState::Failed { at: NOW });
        let mut silent = task(1);
        silent.take(&lease(), 1, NOW);
        silent.expire(NOW.plus(SECOND));
        assert!(matches!(silent.state, TaskState::Failed { .. }));
        assert_eq!(silent.failure.unwrap().code.as_deref(), Some(LEASE_OVER));
    }
}
