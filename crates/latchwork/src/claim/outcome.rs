//! What a firing comes to, and what an action says of itself. Losing a race is a value here, and so is a failure that
//! an action returns.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::entity::EntityId;
use crate::store::{Rev, Timestamp};

/// What an action comes to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// It has done its work: what it has written lands together with the final status.
    Success {
        /// What the caller is given.
        #[serde(default)]
        output: Value,
    },
    /// It could not do its work. The claim is released, and nothing that it has written through its context exists.
    Failure(ActionFailure),
    /// It was asked for something that cannot be (`is_invalid`). The claim is released.
    Rejection(Rejection),
}

/// A failure that an action returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionFailure {
    /// What has failed.
    pub message: String,
    /// What programs tell it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// A validation that did not pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// What is wrong with what was asked for.
    pub message: String,
    /// The part of the input that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl Outcome {
    /// Success, with nothing to tell.
    pub fn done() -> Outcome {
        Outcome::Success { output: Value::Null }
    }

    /// Success, with an output.
    pub fn output(output: impl Into<Value>) -> Outcome {
        Outcome::Success { output: output.into() }
    }

    /// A failure.
    pub fn failure(message: impl Into<String>) -> Outcome {
        Outcome::Failure(ActionFailure { message: message.into(), code: None })
    }

    /// A rejection.
    pub fn rejection(message: impl Into<String>) -> Outcome {
        Outcome::Rejection(Rejection { message: message.into(), field: None })
    }
}

/// What firing a step came to.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fired {
    /// The transition is durable.
    Done(Transitioned),
    /// Another caller has claimed the entity, or was faster. The action was not run.
    ClaimFailed(ClaimFailed),
    /// The step is not claimed, and the entity has changed while the action ran. Nothing that the action has written
    /// through its context exists.
    Conflict(Conflict),
    /// The action returned a failure.
    Failure(ActionFailure),
    /// The action rejected what was asked for.
    Rejection(Rejection),
    /// The step cannot be fired as things are: all reasons.
    NotPermitted(NotPermitted),
    /// The action ran, but the claim was taken away from it before it was done: nothing that it has written through its
    /// context exists.
    Lost(Lost),
}

/// A transition that was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Transitioned {
    /// The status before.
    pub from: String,
    /// The status from now on.
    pub to: String,
    /// The entity's rev from now on.
    pub rev: Rev,
    /// What the action gave.
    pub output: Value,
}

/// Who has claimed an entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ClaimFailed {
    /// The entity's status.
    pub status: String,
    /// The claim that stands in the way. None if it has ended by now.
    pub holder: Option<Holder>,
}

/// The holder of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// The session or the execution that holds it.
    pub owner: String,
    /// The requester that it was fired for.
    pub requester: String,
    /// Who has fired it, if that was said.
    pub actor: Option<String>,
    /// The step that it was fired by.
    pub step: String,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// What is left of the lease, if it is not renewed. An execution has no lease.
    #[serde(rename = "lease_left_ms", serialize_with = "millis")]
    pub lease_left: Option<Duration>,
    /// Why an operator has to look at it, if so.
    pub needs_review: Option<String>,
}

fn millis<S: Serializer>(left: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
}

/// An entity that has changed while an action ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Conflict {
    /// Its status now; none if it was removed.
    pub status: Option<String>,
    /// The rev that the action was run at.
    pub expected: Rev,
}

/// Why a step cannot be fired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NotPermitted {
    /// The entity's status.
    pub status: String,
    /// All reasons.
    pub reasons: Vec<Reason>,
}

/// A reason against a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[non_exhaustive]
pub enum Reason {
    /// The entity is not at the step's status.
    Status {
        /// The status that the step leads from.
        expected: Vec<String>,
    },
    /// The entity is at a claiming status.
    Claimed {
        /// Who has claimed it, if that is known.
        holder: Option<Box<Holder>>,
    },
    /// The step is not for this requester.
    Requester {
        /// The requesters that it is for.
        allowed: Vec<String>,
    },
    /// A guard refuses.
    Guard {
        /// The guard.
        guard: String,
        /// Why.
        message: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Status { expected } => write!(f, "the entity is not at status {}", expected.join(" or ")),
            Reason::Claimed { holder: Some(holder) } => {
                write!(f, "it is claimed by {} for step {}", holder.owner, holder.step)
            }
            Reason::Claimed { holder: None } => f.write_str("it is at a claiming status"),
            Reason::Requester { allowed } => write!(f, "the step is for {} only", allowed.join(", ")),
            Reason::Guard { guard, message } => write!(f, "guard {guard}: {message}"),
        }
    }
}

/// A claim that was taken away from its action.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Lost {
    /// The entity.
    pub entity: EntityId,
    /// What has happened to it.
    pub reason: String,
}

impl Fired {
    /// The transition, if it was made.
    pub fn done(self) -> Option<Transitioned> {
        match self {
            Fired::Done(done) => Some(done),
            _ => None,
        }
    }

    /// Whether the transition was made.
    pub fn is_done(&self) -> bool {
        matches!(self, Fired::Done(_))
    }

    /// Whether the action was not run, because the step was taken or not possible.
    pub fn is_refused(&self) -> bool {
        matches!(self, Fired::ClaimFailed(_) | Fired::NotPermitted(_))
    }

    fn word(&self) -> &'static str {
        match self {
            Fired::Done(_) => "done",
            Fired::ClaimFailed(_) => "claim_failed",
            Fired::Conflict(_) => "conflict",
            Fired::Failure(_) => "failure",
            Fired::Rejection(_) => "rejection",
            Fired::NotPermitted(_) => "not_permitted",
            Fired::Lost(_) => "lost",
        }
    }
}

impl Serialize for Fired {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = |value: serde_json::Result<Value>| value.map_err(serde::ser::Error::custom);
        let fields = match self {
            Fired::Done(it) => of(serde_json::to_value(it))?,
            Fired::ClaimFailed(it) => of(serde_json::to_value(it))?,
            Fired::Conflict(it) => of(serde_json::to_value(it))?,
            Fired::Failure(it) => of(serde_json::to_value(it))?,
            Fired::Rejection(it) => of(serde_json::to_value(it))?,
            Fired::NotPermitted(it) => of(serde_json::to_value(it))?,
            Fired::Lost(it) => of(serde_json::to_value(it))?,
        };
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("outcome", self.word())?;
        for (name, value) in fields.as_object().into_iter().flatten() {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}
