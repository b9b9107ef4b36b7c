//! Failures: errors as they are recorded, so that they come back the same after a restart.

use std::any::type_name;
use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::entity::EntityError;
use crate::json::JsonError;
use crate::lock::{LockError, LockRefused};
use crate::state::StateError;
use crate::store::StoreError;
use crate::workflow::{ChildCancelled, ChildTimedOut, RateLimitError, ReviewError, WorkflowError};

/// An error that is recorded. Any [`std::error::Error`] becomes one by `?`; [`Failure::typed`] keeps its value, too.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    message: String,
    /// Names the error's type: see [`kind_of`].
    kind: Box<str>,
    /// What the failure is called whatever becomes of the type, if that was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    code: Option<Box<str>>,
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
        *self.kind == *TIMEOUT
    }

    /// What operations fail with when the execution is cancelled.
    pub(crate) fn from_cancel(reason: String) -> Failure {
        Failure::typed(Cancelled { reason }).not_retryable()
    }

    /// Whether this is because the execution is cancelled.
    pub fn is_cancelled(&self) -> bool {
        *self.kind == *CANCELLED
    }

    /// A value that JSON cannot hold.
    pub(crate) fn no_json(what: impl fmt::Display, error: &JsonError) -> Failure {
        Failure::new(format!("{what}: {error}")).with_code("latchwork.json")
    }

    /// A recorded or sent value that does not fit the type it is read as.
    pub(crate) fn misfit(what: impl fmt::Display, error: &serde_json::Error) -> Failure {
        Failure::new(format!("{what} does not fit: {error}")).with_code("latchwork.mismatch")
    }

    /// Reads such a value from JSON text.
    pub(crate) fn read<T: DeserializeOwned>(what: impl fmt::Display, text: &str) -> Result<T, Failure> {
        serde_json::from_str(text).map_err(|error| Failure::misfit(what, &error))
    }

    /// A child that is not admitted by the limits of its workflow.
    pub(crate) fn rejected(error: WorkflowError) -> Failure {
        let code = match &error {
            WorkflowError::LimitReached { .. } => "latchwork.limit_reached",
            WorkflowError::QueueFull { .. } => "latchwork.queue_full",
            _ => "latchwork.rate_limited",
        };
        Failure::from(error).with_code(code)
    }

    /// A failure that says just this.
    pub fn new(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), kind: "".into(), code: None, details: Value::Null, final_: false }
    }

    /// A failure that keeps the error's own value: [`Failure::get`] gives it back, also after a restart.
    pub fn typed<E: std::error::Error + Serialize>(error: E) -> Failure {
        let details = crate::json::to_value(&error).unwrap_or_default();
        Failure { details, ..Failure::of(&error, kind_of::<E>()) }
    }

    fn of(error: &dyn std::error::Error, kind: String) -> Failure {
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

    /// The same failure under a code of its own, which stays even if the error's type is renamed:
    /// `Failure::typed(error).with_code("payment.declined")`. Codes that start with `latchwork.` are the library's.
    pub fn with_code(mut self, code: impl Into<String>) -> Failure {
        self.code = Some(code.into().into());
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
        let message = crate::workflow::stored::record::shortened(&self.message, bytes).to_string();
        Failure { message, details: Value::Null, kind: self.kind.clone(), code: self.code.clone(), final_: self.final_ }
    }

    /// What went wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What the failure is called: the code it was given, or else the name of the error's type without its path.
    /// The library's own failures have codes such as `latchwork.timeout`; docs/workflows/errors.md lists them. Empty
    /// for a failure that is a message only.
    pub fn code(&self) -> &str {
        self.code.as_deref().unwrap_or(&self.kind)
    }

    /// The error that [`Failure::typed`] was given, if its type has this name; the path to the type does not matter.
    pub fn get<E: DeserializeOwned>(&self) -> Option<E> {
        if *self.kind == *kind_of::<E>() { self.details() } else { None }
    }

    /// The value that [`Failure::typed`] was given, if it can be read as this type, whatever the type was called. For
    /// failures that are told apart by [`Failure::code`].
    pub fn details<E: DeserializeOwned>(&self) -> Option<E> {
        E::deserialize(&self.details).ok()
    }
}

const TIMEOUT: &str = "latchwork.timeout";
const CANCELLED: &str = "latchwork.cancelled";

type TypeName = fn() -> &'static str;

/// What the library's own errors are called in records. A type may be renamed; its code must not be.
const CODES: &[(TypeName, &str)] = &[
    (type_name::<TimeIsUp>, TIMEOUT),
    (type_name::<Cancelled>, CANCELLED),
    (type_name::<ChildTimedOut>, "latchwork.child.timed_out"),
    (type_name::<ChildCancelled>, "latchwork.child.cancelled"),
    (type_name::<LockRefused>, "latchwork.lock.refused"),
    (type_name::<RateLimitError>, "latchwork.rate_limit"),
    (type_name::<ReviewError>, "latchwork.review"),
    (type_name::<LockError>, "latchwork.lock"),
    (type_name::<WorkflowError>, "latchwork.workflow"),
    (type_name::<StateError>, "latchwork.state"),
    (type_name::<EntityError>, "latchwork.entity"),
    (type_name::<JsonError>, "latchwork.json"),
    (type_name::<StoreError>, "latchwork.store"),
];

/// What a type of errors is called in records: by a code if it is the library's, otherwise by its name without the path
/// to it, and without those to its arguments. So a type can be moved to another module or crate.
fn kind_of<E>() -> String {
    let name = type_name::<E>();
    if let Some((_, code)) = CODES.iter().find(|(own, _)| own() == name) {
        return (*code).into();
    }
    let ends_path = |symbol: char| !symbol.is_alphanumeric() && symbol != '_' && symbol != ':';
    name.split_inclusive(ends_path).map(|path| path.rsplit("::").next().unwrap_or(path)).collect()
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::of(&error, kind_of::<E>())
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

#[cfg(test)]
mod tests {
    use super::*;

    mod before {
        #[derive(Debug, serde::Serialize, serde::Deserialize, thiserror::Error)]
        #[error("declined by {bank}")]
        pub(super) struct Declined {
            pub(super) bank: String,
        }

        #[derive(Debug, thiserror::Error)]
        #[error("{0:?}")]
        pub(super) struct Wrapped<T: std::fmt::Debug>(pub(super) T);
    }

    #[derive(Debug, serde::Deserialize)]
    struct Declined {
        bank: String,
    }

    #[derive(Debug, serde::Deserialize)]
    struct Refused {
        bank: String,
    }

    fn stored(failure: &Failure) -> Failure {
        serde_json::from_str(&crate::workflow::stored::record::failure_text(failure)).unwrap()
    }

    // The type of an error moves to another module between two deployments.
    #[test]
    fn an_error_is_found_by_its_name_wherever_its_type_is() {
        let failure = stored(&Failure::typed(before::Declined { bank: "b".into() }));
        assert_eq!(failure.code(), "Declined");
        assert_eq!(failure.get::<Declined>().unwrap().bank, "b");
        assert!(failure.get::<Refused>().is_none());
        let wrapped = Failure::from(before::Wrapped(Some(vec![before::Declined { bank: "b".into() }])));
        assert_eq!(wrapped.code(), "Wrapped<Option<Vec<Declined>>>");
    }

    // The type of an error is renamed between two deployments.
    #[test]
    fn a_code_stays_whatever_the_type_is_called() {
        let failure = Failure::typed(before::Declined { bank: "b".into() }).with_code("payment.declined");
        let failure = stored(&failure);
        assert_eq!((failure.code(), failure.details::<Refused>().unwrap().bank), ("payment.declined", "b".into()));
        assert_eq!(failure.get::<Declined>().unwrap().bank, "b", "it is found by its type as well");
    }

    // Recorded time-outs and cancellations must never turn into ordinary failures: these codes are in stores.
    #[test]
    fn the_librarys_own_failures_have_codes_that_stay() {
        let refused = LockRefused::Forced { lock: "l".into(), reason: "r".into() };
        let child = ChildTimedOut { id: "c".into() };
        let cancelled = ChildCancelled { id: "c".into(), reason: "r".into() };
        for (failure, code) in [
            (Failure::time(), "latchwork.timeout"),
            (Failure::from_cancel("r".into()), "latchwork.cancelled"),
            (Failure::typed(child), "latchwork.child.timed_out"),
            (Failure::typed(cancelled), "latchwork.child.cancelled"),
            (Failure::typed(refused), "latchwork.lock.refused"),
            (WorkflowError::Stopped.into(), "latchwork.workflow"),
            (LockError::Stopped.into(), "latchwork.lock"),
            (StoreError::Closed.into(), "latchwork.store"),
        ] {
            assert_eq!(stored(&failure).code(), code);
        }
        let read = |text: &str| serde_json::from_str::<Failure>(text).unwrap();
        assert!(read(r#"{"message": "", "kind": "latchwork.timeout"}"#).is_time());
        assert!(read(r#"{"message": "", "kind": "latchwork.cancelled"}"#).is_cancelled());
        let users = Failure::typed(before::Declined { bank: "b".into() }).with_code(TIMEOUT);
        assert!(!users.is_time(), "what is waited for goes by the type, which no code can pretend");
    }
}
