//! What clients send about executions: starts, messages, and what operators ask for.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::Value;
use latchwork::store::Uuid;
use latchwork::workflow::{Attribute, Engine, Fork, Start, Supersede};
use serde::Deserialize;
use utoipa::ToSchema;

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::when::GivenTime;

/// A start of an execution.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewExecution {
    /// The name of the workflow.
    pub(crate) workflow: String,
    /// The input, which must fit the input type of the workflow.
    #[serde(default)]
    #[schema(value_type = Value)]
    input: Value,
    /// Without one, a UUIDv7 is generated.
    pub(crate) id: Option<String>,
    /// All starts of the workflow under one key start one execution, as long as it is kept. An `Idempotency-Key` of the
    /// request does the same for the request alone.
    idempotency_key: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    /// Search attributes: texts, numbers, booleans, or `{"time": "2026-11-30T12:00:00Z"}`.
    #[serde(default)]
    attributes: BTreeMap<String, AttributeValue>,
    /// It begins after this time.
    delay_ms: Option<u64>,
    /// It begins at this time.
    begins_at: Option<GivenTime>,
    /// Joins the execution of this id if there is one, whatever its input was.
    #[serde(default)]
    join: bool,
    /// Starts again if the execution of this id has ended.
    #[serde(default)]
    restart: bool,
    /// Takes the place of the execution of this id: it is made to end, and this one follows.
    supersede: Option<SupersedeWord>,
    /// Is sent in the same commit. An execution of this id that has not ended gets it, and is joined.
    signal: Option<NewSignal>,
}

/// How an execution is made to end for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SupersedeWord {
    Cancel,
    Terminate,
}

/// The value of a search attribute.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum AttributeValue {
    Boolean(bool),
    Integer(i64),
    Real(f64),
    Text(String),
    Time(AttributeTime),
}

/// A search attribute that is a time.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AttributeTime {
    time: GivenTime,
}

impl From<AttributeValue> for Attribute {
    fn from(value: AttributeValue) -> Attribute {
        match value {
            AttributeValue::Boolean(value) => value.into(),
            AttributeValue::Integer(value) => value.into(),
            AttributeValue::Real(value) => value.into(),
            AttributeValue::Text(value) => value.into(),
            AttributeValue::Time(AttributeTime { time }) => time.0.into(),
        }
    }
}

/// The tag of an execution that takes the place of another for a call under an `Idempotency-Key`.
pub(crate) fn call_tag(call: Uuid) -> String {
    format!("call:{call}")
}

impl NewExecution {
    /// The id of the execution that this start takes the place of.
    pub(crate) fn superseded(&self) -> Option<&str> {
        self.supersede.and(self.id.as_deref())
    }

    /// The start. All attempts of a call are one start: they have one idempotency key, or, where the library allows
    /// none, one tag.
    pub(crate) fn into_start(self, engine: &Engine, call: Option<Uuid>) -> Result<Start<Value>, Problem> {
        if self.delay_ms.is_some() && self.begins_at.is_some() {
            return Err(Problem::new(ProblemCode::InvalidBody, "delay_ms and begins_at exclude each other"));
        }
        let mut start = engine.start_by_name(&self.workflow, self.input);
        start = self.id.into_iter().fold(start, Start::id);
        start = match (self.supersede, call) {
            (Some(_), Some(call)) => start.tag(call_tag(call)),
            (None, Some(call)) if self.idempotency_key.is_none() => start.idempotency_key(call.to_string()),
            _ => start,
        };
        start = self.idempotency_key.into_iter().fold(start, Start::idempotency_key);
        start = self.tags.into_iter().fold(start, Start::tag);
        start = self.attributes.into_iter().fold(start, |start, (name, value)| start.attribute(name, value));
        start = self.delay_ms.into_iter().fold(start, |start, ms| start.delay(Duration::from_millis(ms)));
        start = self.begins_at.into_iter().fold(start, |start, time| start.at(time.0));
        start = if self.join { start.or_join() } else { start };
        start = if self.restart { start.or_restart() } else { start };
        start = match self.supersede {
            Some(SupersedeWord::Cancel) => start.supersede(Supersede::Cancel),
            Some(SupersedeWord::Terminate) => start.supersede(Supersede::Terminate),
            None => start,
        };
        if let Some(signal) = self.signal {
            let id = signal.id.or(call.map(|call| call.to_string()));
            start = id.into_iter().fold(start.signal(&signal.name, &signal.payload), Start::signal_id);
        }
        Ok(start)
    }
}

/// A signal.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSignal {
    pub(crate) name: String,
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) payload: Value,
    /// However often the signal is sent under one id, it counts once.
    pub(crate) id: Option<String>,
}

/// An update.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewUpdate {
    pub(crate) name: String,
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) request: Value,
    /// However often the update is sent under one id, it counts once, and has one answer.
    pub(crate) id: Option<String>,
}

/// Why an operator does this.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Because {
    /// The reason, which the execution or the schedule keeps.
    #[schema(min_length = 1)]
    reason: String,
}

impl Because {
    pub(crate) fn reason(self) -> Result<String, Problem> {
        match self.reason.trim().is_empty() {
            true => Err(Problem::new(ProblemCode::InvalidBody, "reason: a reason is needed")),
            false => Ok(self.reason),
        }
    }
}

/// A fork of an execution.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewFork {
    /// The id of the fork. Without one, a UUIDv7 is generated.
    pub(crate) id: Option<String>,
    /// The place of the first operation that runs again, such as `3` or `3.1/0`.
    at: Option<String>,
    /// The first step of this name is the first operation that runs again. Without a place and a step, all run again.
    at_step: Option<String>,
    /// Another input. Null is an input, too.
    #[serde(default, deserialize_with = "crate::wire::request::present")]
    #[schema(value_type = Option<Value>)]
    pub(crate) input: Option<Value>,
}

impl NewFork {
    /// The fork, under this id if the client gives none.
    pub(crate) fn into_fork(self, engine: &Engine, source: &str, call: Option<Uuid>) -> Result<Fork, Problem> {
        let fork = match (self.at, self.at_step) {
            (Some(_), Some(_)) => {
                return Err(Problem::new(ProblemCode::InvalidBody, "at and at_step exclude each other"));
            }
            (Some(place), None) => engine.fork(source).at(place),
            (None, Some(step)) => engine.fork(source).at_step(step),
            (None, None) => engine.fork(source),
        };
        let fork = self.id.or(call.map(|call| call.to_string())).into_iter().fold(fork, Fork::id);
        Ok(self.input.iter().fold(fork, Fork::input))
    }
}
