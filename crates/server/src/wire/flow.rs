//! Flows on the wire: requests, their questions and their events, and what errors of flows become.

use latchwork::flow::{AnswerKind, FlowError, NumberedEvent, RequestInput, Suspension};
use latchwork::workflow::Description;
use latchwork::{Map, Value};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::entity::Note;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::review::DecisionWire;
use crate::wire::sse::SseEvent;
use crate::wire::time::TimeWire;
use crate::wire::workflow::{OutcomeWire, WaitWire};

/// A flow that the program has registered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Flow)]
pub(crate) struct FlowWire {
    pub(crate) name: String,
    /// The names of its actions.
    pub(crate) actions: Vec<String>,
}

/// A request to an action of a flow.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewRequest {
    /// The input, which must fit the action.
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) input: Value,
    /// The id of the request. Without one, a UUIDv7 is generated.
    pub(crate) id: Option<String>,
    /// The session that it belongs to.
    pub(crate) session: Option<String>,
    /// The user that it is for.
    pub(crate) user: Option<String>,
    /// The organisation that it is for.
    pub(crate) org: Option<String>,
}

/// A request that is stored, and survives any crash.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RequestStarted)]
pub(crate) struct StartedWire {
    /// It is also the id of an execution: everything that operators do to executions can be done to it.
    pub(crate) id: String,
    pub(crate) flow: String,
    pub(crate) action: String,
}

/// A request.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = FlowRequest)]
pub(crate) struct RequestWire {
    id: String,
    flow: String,
    action: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    #[serde(flatten)]
    outcome: OutcomeWire,
    #[schema(required)]
    session: Option<String>,
    #[schema(required)]
    user: Option<String>,
    #[schema(required)]
    org: Option<String>,
    #[schema(value_type = Value)]
    input: Value,
    started_at: TimeWire,
    /// When its record was last changed: of a request that has ended, its end.
    changed_at: TimeWire,
    /// What it waits for, if it is out of memory.
    waits: Vec<WaitWire>,
    /// Why its cancellation was requested.
    #[schema(required)]
    cancel_reason: Option<String>,
}

impl RequestWire {
    pub(crate) fn new(flow: &str, action: &str, description: Description) -> RequestWire {
        let status = description.status().name();
        let Description { id, state, input, started, changed, waits, cancel, .. } = description;
        // An input that is not one of a request is shown as it is.
        let given: RequestInput<Value> =
            serde_json::from_value(input.clone()).unwrap_or_else(|_| RequestInput::new(input));
        let RequestInput { input, asker, .. } = given;
        RequestWire {
            id: id.to_string(),
            flow: flow.into(),
            action: action.into(),
            status,
            outcome: OutcomeWire::of(&state),
            session: asker.session,
            user: asker.user,
            org: asker.org,
            input,
            started_at: started.into(),
            changed_at: changed.into(),
            waits: waits.iter().map(WaitWire::from).collect(),
            cancel_reason: cancel,
        }
    }
}

/// How a request has ended, or how far it is.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RequestResult)]
pub(crate) struct RequestResultWire {
    id: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    #[serde(flatten)]
    outcome: OutcomeWire,
}

impl From<Description> for RequestResultWire {
    fn from(description: Description) -> RequestResultWire {
        let (id, status) = (description.id.to_string(), description.status().name());
        RequestResultWire { id, status, outcome: OutcomeWire::of(&description.state) }
    }
}

/// Where a stream of events begins.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventsQuery {
    /// Continues after the event of this number, for clients that cannot send `Last-Event-ID`.
    pub(crate) after: Option<u64>,
}

/// An event of a stream. Its name is its `type`, its data are its fields, its number and its time.
pub(crate) fn sse_event(event: &NumberedEvent) -> Result<SseEvent, Problem> {
    let written = serde_json::to_value(&event.event);
    let written = written.map_err(|error| Problem::internal(&format!("an event cannot be written: {error}")))?;
    let Value::Object(mut data) = written else { return Err(Problem::internal("an event is not an object")) };
    let name = data.get("type").and_then(Value::as_str).map(str::to_string);
    data.insert("number".into(), event.number.into());
    data.insert("at".into(), TimeWire(event.at).to_string().into());
    Ok(SseEvent { position: event.number, name, data: Value::Object(data) })
}

/// A position after which nothing can be told yet.
pub(crate) fn future_event(asked: u64, last: Option<u64>) -> Problem {
    let detail = match last {
        Some(last) => format!("event {asked} does not exist yet; the last one is {last}"),
        None => format!("event {asked} does not exist yet; there are no events"),
    };
    Problem::new(ProblemCode::FutureEvent, detail).with("last_event", last)
}

/// Events between the asked position and the first one that is left are no longer kept.
pub(crate) fn dropped_events(oldest: u64) -> Problem {
    let detail = format!("this position is no longer kept; the oldest event left is {oldest}");
    Problem::new(ProblemCode::HistoryDropped, detail).with("oldest_event", oldest)
}

/// A question of a block to a person or program.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Suspension)]
pub(crate) struct SuspensionWire {
    id: String,
    /// The request that waits.
    request: String,
    /// The path of the block that asks.
    path: String,
    reason: String,
    /// The question in words.
    message: String,
    /// What it is about.
    #[schema(value_type = Value)]
    data: Value,
    /// The JSON schema of the answer's value.
    #[schema(required, value_type = Option<Object>)]
    schema: Option<Value>,
    /// The allowed answers.
    allow: Vec<AnswerWord>,
    opened_at: TimeWire,
    /// Until when it can be answered.
    #[schema(required)]
    until: Option<TimeWire>,
    /// True if it can be answered.
    is_open: bool,
    /// The answer that it got, without its value.
    #[schema(required)]
    decision: Option<DecisionWire>,
}

impl From<Suspension> for SuspensionWire {
    fn from(suspension: Suspension) -> SuspensionWire {
        let Suspension { id, request, path, reason, message, data, schema, allow, opened, until, is_open, .. } =
            suspension;
        let decision = suspension.decision.map(|mut decision| {
            decision.reason = Note::read(&decision.reason).0.into();
            DecisionWire::from(&decision)
        });
        SuspensionWire {
            id,
            request: request.to_string(),
            path,
            reason,
            message,
            data,
            schema,
            allow: allow.into_iter().filter_map(AnswerWord::of).collect(),
            opened_at: opened.into(),
            until: until.map(TimeWire),
            is_open,
            decision,
        }
    }
}

/// The kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AnswerWord {
    /// Yes.
    Approve,
    /// No.
    Reject,
    /// A value.
    Submit,
    /// The question is passed over.
    Skip,
}

impl AnswerWord {
    fn of(kind: AnswerKind) -> Option<AnswerWord> {
        match kind {
            AnswerKind::Approve => Some(AnswerWord::Approve),
            AnswerKind::Reject => Some(AnswerWord::Reject),
            AnswerKind::Submit => Some(AnswerWord::Submit),
            AnswerKind::Skip => Some(AnswerWord::Skip),
            _ => None,
        }
    }

    /// The option of the review that holds the question.
    pub(crate) fn word(self) -> &'static str {
        match self {
            AnswerWord::Approve => "approve",
            AnswerWord::Reject => "reject",
            AnswerWord::Submit => "submit",
            AnswerWord::Skip => "skip",
        }
    }
}

/// An answer to a question.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewAnswer {
    /// One of the allowed answers.
    pub(crate) answer: AnswerWord,
    /// The value, if the question asks for one.
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) value: Value,
    /// The person or program that answers. By default the name of the token.
    pub(crate) by: Option<String>,
    /// Why.
    pub(crate) reason: Option<String>,
}

/// The latest states of the blocks of a request, by their paths.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Checkpoints)]
pub(crate) struct CheckpointsWire {
    /// For each block its state, without transient fields.
    #[schema(value_type = Object)]
    pub(crate) checkpoints: Map<String, Value>,
}

impl From<FlowError> for Problem {
    fn from(error: FlowError) -> Problem {
        let problem = |code| Problem::new(code, error.to_string());
        match error.clone() {
            FlowError::Workflow(below) => below.into(),
            FlowError::UnknownAction { known, .. } => problem(ProblemCode::NotFound).with("known", known),
            FlowError::UnknownQuestion { id } => problem(ProblemCode::NotFound).with("id", id),
            FlowError::NotAllowed { allowed, .. } => problem(ProblemCode::Invalid).with("offered", allowed),
            FlowError::Answered { decision } => {
                problem(ProblemCode::ReviewDecided).with("decision", DecisionWire::from(&*decision))
            }
            FlowError::Closed { id } => problem(ProblemCode::ReviewClosed).with("review", id),
            // What is wrong with a flow is found when it is built, long before a request.
            _ => problem(ProblemCode::Invalid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    #[test]
    fn an_event_has_its_number_time_and_fields() {
        let event: NumberedEvent = serde_json::from_value(json!({
            "number": 3, "at": 1_700_000_000_000_001_u64,
            "event": {"type": "suspension", "id": "q", "path": "a/b", "reason": "why"},
        }))
        .unwrap();
        let SseEvent { position, name, data } = sse_event(&event).unwrap();
        assert_eq!((position, name.as_deref()), (3, Some("suspension")));
        let time = "2023-11-14T22:13:20.000001Z";
        assert_eq!(
            data,
            json!({"type": "suspension", "id": "q", "path": "a/b", "reason": "why", "number": 3, "at": time})
        );
    }

    #[test]
    fn words_of_answers_are_those_of_the_library() {
        for kind in [AnswerKind::Approve, AnswerKind::Reject, AnswerKind::Submit, AnswerKind::Skip] {
            let word = AnswerWord::of(kind).unwrap();
            assert_eq!(json!(kind), word.word());
            assert_eq!(json!(word), word.word());
        }
    }

    #[test]
    fn positions_are_told() {
        let future = future_event(7, Some(3)).document();
        assert_eq!((&future["code"], &future["last_event"]), (&json!("future-event"), &json!(3)));
        assert!(future_event(0, None).document()["last_event"].is_null());
        assert_eq!(dropped_events(4).status(), 410);
    }
}
