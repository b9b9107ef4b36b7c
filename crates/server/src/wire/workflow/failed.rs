//! What errors of workflows, of their schedules and of reviews become on the wire.

use latchwork::workflow::{Decision, ScheduleError, WorkflowError};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::review::DecisionWire;
use crate::wire::workflow::FailureWire;

impl From<WorkflowError> for Problem {
    fn from(error: WorkflowError) -> Problem {
        use WorkflowError::*;
        let detail = error.to_string();
        let problem = |code| Problem::new(code, detail.clone());
        match &error {
            Store(error) => error.clone().into(),
            Once(error) => error.clone().into(),
            Entity(error) => error.clone().into(),
            Cursor(error) => error.clone().into(),
            Schedule(error) => error.clone().into(),
            Lock(error) => error.clone().into(),
            State(error) => Problem::of_kind(error.kind(), error),
            NotFound { id } => problem(ProblemCode::NotFound).with("id", &**id),
            UnknownReview { review } => problem(ProblemCode::NotFound).with("review", review),
            UnknownToken { token } => problem(ProblemCode::NotFound).with("token", token),
            NotRegistered { name } => problem(ProblemCode::NotRegistered).with("workflow", name),
            RulesElsewhere { name } => problem(ProblemCode::RegisteredElsewhere).with("workflow", name),
            AlreadyStarted { id } => problem(ProblemCode::AlreadyExists).with("id", &**id),
            OtherWorkflow { id, found, .. } => problem(ProblemCode::Conflict).with("id", &**id).with("workflow", found),
            KeyReused { key, id } => problem(ProblemCode::StartKeyReused).with("key", key).with("id", &**id),
            MessageReused { id, message } => {
                problem(ProblemCode::MessageReused).with("id", &**id).with("message", message)
            }
            Ended { id } | TimedOut { id } => problem(ProblemCode::Ended).with("id", &**id),
            Cancelled { id, reason } => problem(ProblemCode::Ended).with("id", &**id).with("reason", reason),
            Failed { id, failure } => {
                problem(ProblemCode::Ended).with("id", &**id).with("failure", FailureWire::of(failure))
            }
            UpdateRefused { id, failure } => {
                problem(ProblemCode::UpdateRefused).with("id", &**id).with("failure", FailureWire::of(failure))
            }
            Parked { id, reason } => problem(ProblemCode::Parked).with("id", &**id).with("reason", reason),
            NotParked { id } => problem(ProblemCode::NotParked).with("id", &**id),
            NotRetrying { id } => problem(ProblemCode::NotRetrying).with("id", &**id),
            Fork { id, at, .. } => problem(ProblemCode::NoFork).with("id", &**id).with("at", at),
            TokenUsed { token } => problem(ProblemCode::Conflict).with("token", token),
            ReviewDecided { review, decision } => decided(problem(ProblemCode::ReviewDecided), review, decision),
            ReviewClosed { review } => problem(ProblemCode::ReviewClosed).with("review", review),
            NotOffered { review, offered, .. } => {
                problem(ProblemCode::Invalid).with("review", review).with("offered", offered)
            }
            InputTooLong { length, limit, .. } | PayloadTooLong { length, limit, .. } => {
                problem(ProblemCode::TooLarge).with("length_bytes", length).with("limit_bytes", limit)
            }
            Input { workflow, .. } => problem(ProblemCode::Invalid).with("workflow", workflow),
            List { .. } => problem(ProblemCode::InvalidQuery),
            LimitReached { workflow, key, limit } => {
                problem(ProblemCode::LimitReached).with("workflow", workflow).with("key", key).with("limit", limit)
            }
            QueueFull { workflow, key, depth } => {
                problem(ProblemCode::QueueFull).with("workflow", workflow).with("key", key).with("depth", depth)
            }
            RateLimited { workflow, key, retry_after, .. } => {
                let limited = problem(ProblemCode::RateLimited).with("workflow", workflow).with("key", key);
                limited.retry_after(*retry_after)
            }
            // The client cannot have caused it: a record of a newer program.
            UnknownVersion { .. } => Problem::unavailable(&error),
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}

fn decided(problem: Problem, review: &str, decision: &Decision) -> Problem {
    problem.with("review", review).with("decision", DecisionWire::from(decision))
}

impl From<ScheduleError> for Problem {
    fn from(error: ScheduleError) -> Problem {
        let detail = error.to_string();
        match &error {
            ScheduleError::NotFound { name } => Problem::new(ProblemCode::NotFound, detail).with("schedule", name),
            // The engine takes what waits within moments.
            ScheduleError::Busy { name, count, .. } => {
                Problem::new(ProblemCode::ScheduleBusy, detail).with("schedule", name).with("waiting", count)
            }
            ScheduleError::Cron { at, .. } => Problem::new(ProblemCode::Invalid, detail).with("at", at),
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::Value;
    use latchwork::workflow::Failure;
    use std::time::Duration;

    #[test]
    fn errors_have_stable_codes_and_fields() {
        let id = || "order-1".into();
        let check = |error: WorkflowError, status: u16, code: &str, field: &str| {
            let problem = Problem::from(error);
            assert_eq!((problem.status(), problem.code().slug()), (status, code));
            assert_ne!(problem.document()[field], Value::Null, "{code} has no {field}");
        };
        check(WorkflowError::NotFound { id: id() }, 404, "not-found", "id");
        check(WorkflowError::AlreadyStarted { id: id() }, 409, "already-exists", "id");
        let other = WorkflowError::OtherWorkflow { id: id(), asked: "w".into(), found: "v".into() };
        check(other, 409, "conflict", "workflow");
        check(WorkflowError::Ended { id: id() }, 409, "execution-ended", "id");
        check(WorkflowError::NotRegistered { name: "w".into() }, 404, "workflow-not-registered", "workflow");
        let failure = Failure::new("no").with_code("bank.no");
        check(WorkflowError::UpdateRefused { id: id(), failure }, 409, "update-refused", "failure");
        let (workflow, key, per) = (String::from("w"), String::from("k"), Duration::from_secs(1));
        let reached = WorkflowError::LimitReached { workflow: workflow.clone(), key: key.clone(), limit: 1 };
        check(reached, 429, "limit-reached", "retry_after_ms");
        let retry_after = Duration::from_millis(1500);
        let limited = WorkflowError::RateLimited { workflow, key, max: 1, per, retry_after };
        assert_eq!(Problem::from(limited.clone()).document()["retry_after_ms"], 1500);
        check(limited, 429, "rate-limited", "key");
        let busy = ScheduleError::Busy { name: "s".into(), what: "triggers", count: 1000 };
        check(busy.into(), 429, "schedule-busy", "waiting");
        check(WorkflowError::Stopped, 503, "unavailable", "retry_after_ms");
    }
}
