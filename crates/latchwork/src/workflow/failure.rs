//! Failures: errors as they are recorded, so that they come back the same after a restart.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// An error that is recorded. Any [`std::error::Error`] becomes one by `?`; [`Failure::typed`] keeps its value, too.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    message: String,
    /// The name of the error's type.
    kind: String,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    details: Value,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    final_: bool,
}

/// Why an operation failed, or a whole execution, that was to be cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("cancelled: {reason}")]
pub struct Cancelled {
    /// What was said when it was.
    pub reason: String,
}

/// Why a wait came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the time is up")]
struct TimeIsUp;

impl Failure {
    /// What a wait fails with when its time is up.
    pub(crate) fn time() -> Failure {
        Failure::typed(TimeIsUp)
    }

    pub(crate) fn is_time(&self) -> bool {
        self.kind == std::any::type_name::<TimeIsUp>()
    }

    /// What operations fail with when the execution is cancelled.
    pub(crate) fn from_cancel(reason: String) -> Failure {
        Failure::typed(Cancelled { reason }).not_retryable()
    }

    /// Whether this is because the execution is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.kind == std::any::type_name::<Cancelled>()
    }

    /// A failure that says just this.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), kind: String::new(), details: Value::Null, final_: false }
    }

    /// A failure that keeps the error's own value: [`Failure::get`] gives it back, also after a restart.
    pub fn typed<E: std::error::Error + Serialize>(error: E) -> Failure {
        let details = crate::json::to_value(&error).unwrap_or_default();
        Failure { details, ..Failure::of(&error, std::any::type_name::<E>()) }
    }

    fn of(error: &dyn std::error::Error, kind: &str) -> Failure {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Failure { kind: kind.into(), ..Failure::new(message) }
    }

    /// The same failure, that no retry policy tries again.
    pub fn not_retryable(mut self) -> Failure {
        self.final_ = true;
        self
    }

    /// The same failure, with something more to say.
    pub(crate) fn and(mut self, more: String) -> Failure {
        self.message = format!("{}; {more}", self.message);
        self
    }

    /// Whether a retry policy may try again.
    pub fn is_retryable(&self) -> bool {
        !self.final_
    }

    /// The same, without its value and with a message of at most so many bytes.
    pub(crate) fn shortened(&self, bytes: usize) -> Failure {
        let message = crate::workflow::record::shortened(&self.message, bytes).to_string();
        Failure { message, details: Value::Null, kind: self.kind.clone(), final_: self.final_ }
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The name of the type of the error that this was.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The error that [`Failure::typed`] was given, if it was one of this type.
    pub fn get<E: DeserializeOwned>(&self) -> Option<E> {
        if self.kind != std::any::type_name::<E>() {
            return None;
        }
        E::deserialize(&self.details).ok()
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::of(&error, std::any::type_name::<E>())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.message)
    }
}
