//! The result of a firing, and the result that an action returns. Losing a race is a value here, and so is a failure
//! that an action returns.

use std::fmt;
use std::time::Duration;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::claim::error::ActionError;
use crate::entity::EntityId;
use crate::store::{Rev, Timestamp};

/// The result that an action returns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// The action has done its work. Its writes are committed together with the final status.
    Success {
        /// The output for the caller.
        #[serde(default)]
        output: Value,
    },
    /// The action could not do its work. The claim is released, and no write through the action's context is committed.
    Failure(ActionFailure),
    /// The action cannot accept its input (`is_invalid`). The claim is released.
    Rejection(Rejection),
}

/// A failure that an action returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActionFailure {
    /// What failed.
    pub message: String,
    /// A code for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
}

/// A validation that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejection {
    /// What is wrong with the input.
    pub message: String,
    /// The field of the input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl Outcome {
    /// Success without an output.
    ///
    /// ```
    /// # use latchwork::claim::Outcome;
    /// assert!(matches!(Outcome::done(), Outcome::Success { .. }));
    /// ```
    pub fn done() -> Outcome {
        Outcome::Success { output: Value::Null }
    }

    /// Success with an output.
    ///
    /// ```
    /// # use latchwork::claim::Outcome;
    /// # use latchwork::json;
    /// let outcome = Outcome::output(json!({"paid": 7}));
    /// assert_eq!(outcome, Outcome::Success { output: json!({"paid": 7}) });
    /// ```
    pub fn output(output: impl Into<Value>) -> Outcome {
        Outcome::Success { output: output.into() }
    }

    /// A failure.
    ///
    /// ```
    /// # use latchwork::claim::Outcome;
    /// assert!(matches!(Outcome::failure("the card was refused"), Outcome::Failure(_)));
    /// ```
    pub fn failure(message: impl Into<String>) -> Outcome {
        Outcome::Failure(ActionFailure { message: message.into(), code: None })
    }

    /// A rejection.
    ///
    /// ```
    /// # use latchwork::claim::Outcome;
    /// assert!(matches!(Outcome::rejection("the amount is not positive"), Outcome::Rejection(_)));
    /// ```
    pub fn rejection(message: impl Into<String>) -> Outcome {
        Outcome::Rejection(Rejection { message: message.into(), field: None })
    }
}

/// What an action returns: an [`Outcome`], or a `Result` with an error of any type if it can fail. The caller gets that
/// error unchanged, in [`ClaimError::Action`](crate::claim::ClaimError::Action), so its type is the action's choice. A
/// closure that uses `?` says which it is:
///
/// ```
/// # use latchwork::claim::{ActionCtx, ActionError, Claims, Outcome};
/// # use latchwork::workflow::Engine;
/// # fn example(engine: &Engine) {
/// let claims = Claims::on(engine)
///     .action("Pay", async |ctx: ActionCtx| Outcome::output(ctx.key()))
///     .action("Read", async |_: ActionCtx| -> Result<Outcome, ActionError> {
///         Ok(Outcome::output(std::fs::read_to_string("./rates")?))
///     });
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "an action returns an `Outcome`, or a `Result` of an `Outcome`",
    label = "this action returns `{Self}`"
)]
pub trait IntoOutcome {
    /// The outcome, or the error with which the action has failed.
    fn into_outcome(self) -> Result<Outcome, ActionError>;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Result<Outcome, ActionError> {
        Ok(self)
    }
}

impl<E: Into<ActionError>> IntoOutcome for Result<Outcome, E> {
    fn into_outcome(self) -> Result<Outcome, ActionError> {
        self.map_err(Into::into)
    }
}

/// What the handler of an after-effect returns: nothing, or a `Result` with an error that can be printed. After an
/// error the handler is called again.
///
/// ```
/// # use latchwork::claim::{AfterEffect, Claims};
/// # use latchwork::workflow::Engine;
/// # fn example(engine: &Engine) {
/// let claims = Claims::on(engine)
///     .after_effect("Print", async |paid: AfterEffect| println!("{} is paid", paid.entity))
///     .after_effect("Write", async |paid: AfterEffect| std::fs::write("./paid", &paid.key));
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "the handler of an after-effect returns nothing, or a `Result` of nothing",
    label = "this handler returns `{Self}`"
)]
pub trait IntoDelivery {
    /// Nothing, or the message of the error.
    fn into_delivery(self) -> Result<(), String>;
}

impl IntoDelivery for () {
    fn into_delivery(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: fmt::Display> IntoDelivery for Result<(), E> {
    fn into_delivery(self) -> Result<(), String> {
        self.map_err(|error| error.to_string())
    }
}

/// The result of firing a step.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Fired {
    /// The transition is durable.
    Done(Transitioned),
    /// Another caller has claimed the entity, or was faster. The action was not run.
    ClaimFailed(ClaimFailed),
    /// The step is not claimed, and the entity has changed while the action ran. No write through the action's context
    /// was committed.
    Conflict(Conflict),
    /// The action returned a failure.
    Failure(ActionFailure),
    /// The action rejected its input.
    Rejection(Rejection),
    /// The step cannot be fired at the moment. All reasons are listed.
    NotPermitted(NotPermitted),
    /// The same firing was asked for before, under the same idempotency key, and has not ended.
    Running(Box<ClaimHolder>),
    /// The action ran, but the claim was taken away from it before it ended. No write through the action's context was
    /// committed.
    Lost(Lost),
}

/// A transition that was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Transitioned {
    /// The status before.
    pub from: String,
    /// The status after.
    pub to: String,
    /// The entity's rev after the transition.
    pub rev: Rev,
    /// The output of the action.
    pub output: Value,
    /// True if this is the answer to an earlier firing under the same idempotency key.
    #[serde(skip)]
    pub repeated: bool,
}

/// The claim that another caller has on the entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ClaimFailed {
    /// The entity's status.
    pub status: String,
    /// The holder of the other claim. `None` if that claim has ended by now.
    pub holder: Option<ClaimHolder>,
}

/// The holder of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ClaimHolder {
    /// The session or the execution that holds it.
    pub owner: String,
    /// The requester that the step was fired for.
    pub requester: String,
    /// The actor that has fired the step, if one was given.
    pub actor: Option<String>,
    /// The step that was fired.
    pub step: String,
    /// When the claim was made.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// The rest of the lease, if it is not renewed. An execution has no lease.
    #[serde(rename = "lease_left_ms", serialize_with = "millis")]
    pub lease_left: Option<Duration>,
    /// Why the claim waits for an operator, if it does.
    pub needs_review: Option<String>,
}

fn millis<S: Serializer>(left: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)).serialize(serializer)
}

/// An entity that has changed while an action ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Conflict {
    /// Its status now. `None` if the entity was removed.
    pub status: Option<String>,
    /// The rev at which the action ran.
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

/// A reason why a step cannot be fired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[non_exhaustive]
pub enum Reason {
    /// The entity is not at the step's status.
    Status {
        /// The statuses that the step starts at.
        expected: Vec<String>,
    },
    /// The entity is claimed.
    Claimed {
        /// The holder of the claim, if it is known.
        holder: Option<Box<ClaimHolder>>,
    },
    /// The step is not for this requester.
    Requester {
        /// The requesters that can fire it.
        allowed: Vec<String>,
    },
    /// A guard refuses.
    Guard {
        /// The guard.
        guard: String,
        /// The reason of the guard.
        message: String,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Status { expected } => write!(f, "the entity is not at status {}", expected.join(" or ")),
            Reason::Claimed { holder: Some(holder) } => {
                write!(f, "the entity is claimed by {} for step {}", holder.owner, holder.step)
            }
            Reason::Claimed { holder: None } => f.write_str("the entity is at a claiming status"),
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
    /// Why it was taken away.
    pub reason: String,
}

impl Fired {
    /// The transition, if it was made.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// if let Some(done) = claims.fire("invoice", "pay", "i-1").await?.done() {
    ///     println!("from {} to {}", done.from, done.to);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn done(self) -> Option<Transitioned> {
        match self {
            Fired::Done(done) => Some(done),
            _ => None,
        }
    }

    /// True if the transition was made.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let is_paid = claims.fire("invoice", "pay", "i-1").await?.is_done();
    /// # Ok(()) }
    /// ```
    pub fn is_done(&self) -> bool {
        matches!(self, Fired::Done(_))
    }

    /// True if the action did not run, because another caller was faster or the step cannot be fired.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// if claims.fire("invoice", "pay", "i-1").await?.is_refused() {
    ///     println!("another caller was faster, or the invoice cannot be paid");
    /// }
    /// # Ok(()) }
    /// ```
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
            Fired::Running(_) => "running",
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
            Fired::Running(it) => of(serde_json::to_value(it))?,
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
