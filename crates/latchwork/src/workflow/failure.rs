//! Failures: errors in the form that is recorded, so that they are the same after a restart.

use std::any::type_name;
use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::entity::{EntityError, EntityId};
use crate::json::JsonError;
use crate::lock::{LockError, LockRefused};
use crate::state::StateError;
use crate::store::{Rev, StoreError};
use crate::workflow::{ChildCancelled, ChildTimedOut, RateLimitError, ReviewError, WorkflowError};

/// An error in the form that is recorded: steps, transactions and workflows fail with it.
///
/// `?` converts any [`std::error::Error`], `anyhow::Error`, `Box<dyn Error + Send + Sync>` and text to a failure.
/// [`Failure::typed`] also keeps the error's value. A failure is not itself a `std::error::Error`:
/// [`Failure::into_error`] returns one.
///
/// ```
/// use latchwork::workflow::Failure;
///
/// fn price(text: &str) -> Result<u32, Failure> {
///     let price: u32 = text.parse()?; // an error of the standard library
///     if price == 0 {
///         return Err("a price is at least 1".into()); // text
///     }
///     Ok(price)
/// }
/// assert_eq!(price("x").unwrap_err().code(), "ParseIntError");
/// assert_eq!(price("0").unwrap_err().message(), "a price is at least 1");
/// ```
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    message: String,
    /// Names the error's type: see [`kind_of`].
    kind: Box<str>,
    /// The code that was set. It stays even if the error's type is renamed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    code: Option<Box<str>>,
    /// The step or transaction that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    step: Option<Box<str>>,
    /// In a box: errors are moved often.
    #[serde(default, skip_serializing_if = "is_null")]
    details: Box<Value>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    final_: bool,
}

fn is_null(details: &Value) -> bool {
    details.is_null()
}

/// A [`Failure`] as a [`std::error::Error`], for code that needs one. `?` converts it back to the same failure, also
/// from `Box<dyn Error + Send + Sync>`.
#[derive(Clone, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct FailureError(pub Failure);

impl fmt::Debug for FailureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a cancelled operation or execution failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("cancelled: {reason}")]
pub struct Cancelled {
    /// The reason that the caller of `cancel` gave.
    pub reason: String,
}

/// Why a transaction failed that required a certain rev of an entity (`if_rev`): the entity is at another rev.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use latchwork::store::{Rev, Store};
/// use latchwork::entity::{Add, Update};
/// use latchwork::json;
/// use latchwork::workflow::{Ctx, Engine, Failure, RevisionConflict, Tx, workflow};
///
/// async fn reserve(ctx: Ctx, known: u64) -> Result<String, Failure> {
///     let update = ctx.transaction("reserve", async |tx: Tx| {
///         tx.update(Update::new("room-12").if_rev(Rev(known)).data(json!({"free": false})));
///         Ok(())
///     });
///     match update.await {
///         Ok(()) => Ok("reserved".into()),
///         Err(failure) => match failure.get::<RevisionConflict>() {
///             Some(conflict) => Ok(format!("{} was changed meanwhile, to rev {}", conflict.id, conflict.actual)),
///             None => Err(failure),
///         },
///     }
/// }
/// let reserve = workflow("reserve").run(reserve);
/// # let engine = Engine::on(&Store::memory().await?).register(&reserve).start().await?;
/// engine.entities().add(Add::new("room").id("room-12").data(json!({"free": true}))).await?;
/// assert_eq!(engine.start(&reserve, 1).await?.result().await?, "reserved");
/// assert_eq!(engine.start(&reserve, 1).await?.result().await?, "room-12 was changed meanwhile, to rev 2");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("entity {id:?} is at rev {actual}, not at {expected}; read it again and decide again")]
pub struct RevisionConflict {
    /// The entity.
    pub id: EntityId,
    /// The rev that the transaction asked for.
    #[serde(with = "rev")]
    pub expected: Rev,
    /// The rev that the entity was at.
    #[serde(with = "rev")]
    pub actual: Rev,
}

mod rev {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::store::Rev;

    pub(super) fn serialize<S: Serializer>(rev: &Rev, serializer: S) -> Result<S::Ok, S::Error> {
        rev.0.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Rev, D::Error> {
        u64::deserialize(deserializer).map(Rev)
    }
}

/// Why a wait failed: its time limit has passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the time is up")]
struct TimeIsUp;

impl Failure {
    /// The failure of a wait whose time is up.
    pub(crate) fn time() -> Failure {
        Failure::typed(TimeIsUp)
    }

    pub(crate) fn is_time(&self) -> bool {
        *self.kind == *TIMEOUT
    }

    /// The failure of operations in a cancelled execution.
    pub(crate) fn from_cancel(reason: String) -> Failure {
        Failure::typed(Cancelled { reason }).not_retryable()
    }

    /// True if the failure is a cancellation of the execution.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let slept = ctx.sleep(Duration::from_secs(3600)).await;
    /// if slept.as_ref().is_err_and(|failure| failure.is_cancelled()) {
    ///     ctx.shielded().run("give back", async || Ok(())).await?;
    /// }
    /// slept?;
    /// # Ok(()) }
    /// ```
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

    /// The failure of a transaction that the entities refuse. A rev conflict keeps its value.
    pub(crate) fn refused(error: EntityError) -> Failure {
        let conflict = |error: &EntityError| match error {
            EntityError::RevisionConflict { id, expected, actual } => {
                Some(RevisionConflict { id: id.clone(), expected: *expected, actual: *actual })
            }
            _ => None,
        };
        let found = match &error {
            EntityError::Rejected { failed } => failed.iter().find_map(|failed| conflict(&failed.error)),
            error => conflict(error),
        };
        match found {
            Some(found) => Failure { message: error.to_string(), ..Failure::typed(found).not_retryable() },
            None => error.into(),
        }
    }

    /// The failure of a child that the limits of its workflow do not admit.
    pub(crate) fn rejected(error: WorkflowError) -> Failure {
        let code = match &error {
            WorkflowError::LimitReached { .. } => "latchwork.limit_reached",
            WorkflowError::QueueFull { .. } => "latchwork.queue_full",
            _ => "latchwork.rate_limited",
        };
        Failure::from(error).with_code(code)
    }

    /// A failure with this message and nothing else.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// assert_eq!(Failure::new("sold out"), Failure::from("sold out"));
    /// ```
    pub fn new(message: impl Into<String>) -> Failure {
        let (code, step, details) = (None, None, Box::default());
        Failure { message: message.into(), kind: "".into(), code, step, details, final_: false }
    }

    /// A failure that keeps the error's own value: [`Failure::get`] returns it, also after a restart.
    ///
    /// ```
    /// use latchwork::workflow::Failure;
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
    /// #[error("the card was declined: {reason}")]
    /// struct Declined {
    ///     reason: String,
    /// }
    ///
    /// fn charge() -> Result<(), Declined> {
    ///     Err(Declined { reason: "no funds".into() })
    /// }
    ///
    /// async fn body() -> Result<(), Failure> {
    ///     charge().map_err(Failure::typed)?;
    ///     Ok(())
    /// }
    /// # let failure = charge().map_err(Failure::typed).unwrap_err();
    /// assert_eq!(failure.get::<Declined>().unwrap().reason, "no funds");
    /// ```
    pub fn typed<E: Error + Serialize>(error: E) -> Failure {
        let details = Box::new(crate::json::to_value(&error).unwrap_or_default());
        Failure { details, ..Failure::of(&error, kind_of::<E>()) }
    }

    fn of(error: &dyn Error, kind: String) -> Failure {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        Failure { kind: kind.into(), ..Failure::new(message) }
    }

    /// Marks the failure so that no retry policy tries again.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// fn quantity(text: &str) -> Result<u32, Failure> {
    ///     // Another attempt would read the same text.
    ///     text.parse().map_err(|error| Failure::from(error).not_retryable())
    /// }
    /// assert!(!quantity("x").unwrap_err().is_retryable());
    /// ```
    pub fn not_retryable(mut self) -> Failure {
        self.final_ = true;
        self
    }

    /// Sets the code of the failure, which stays even if the error's type is renamed. Codes that start with
    /// `latchwork.` belong to the library.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// assert_eq!(Failure::new("no funds").with_code("payment.declined").code(), "payment.declined");
    /// ```
    pub fn with_code(mut self, code: impl Into<String>) -> Failure {
        self.code = Some(code.into().into());
        self
    }

    /// Adds to the message.
    pub(crate) fn and(mut self, more: String) -> Failure {
        self.message = format!("{}; {more}", self.message);
        self
    }

    /// Sets the name of the failed step. If the failure already has a name, from an inner step, it keeps that.
    pub(crate) fn in_step(mut self, name: &str) -> Failure {
        self.step.get_or_insert_with(|| name.into());
        self
    }

    /// True if a retry policy may try again.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// assert!(Failure::new("the line is busy").is_retryable());
    /// assert!(!Failure::new("no such number").not_retryable().is_retryable());
    /// ```
    pub fn is_retryable(&self) -> bool {
        !self.final_
    }

    /// A copy without its value, with a message of at most `bytes` bytes.
    pub(crate) fn shortened(&self, bytes: usize) -> Failure {
        let message = crate::workflow::stored::record::shortened(&self.message, bytes).to_string();
        Failure { message, details: Box::default(), ..self.clone() }
    }

    /// The message of the error, followed by the messages of its causes. `Display` puts the name of the step before it.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// assert_eq!(Failure::new("sold out").message(), "sold out");
    /// ```
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The name of the step or transaction that failed. None if the failure comes from the code between steps.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// use latchwork::workflow::{Ctx, Engine, Failure, Retry, WorkflowError, workflow};
    ///
    /// async fn order(ctx: Ctx, _: u32) -> Result<(), Failure> {
    ///     ctx.run("charge", async || Err("no funds".into())).retry(Retry::never()).await
    /// }
    /// let order = workflow("order").run(order);
    /// # let engine = Engine::on(&Store::memory().await?).register(&order).start().await?;
    /// let failed = engine.start(&order, 1).id("order-1").await?.result().await.unwrap_err();
    /// assert_eq!(failed.to_string(), r#"execution "order-1" failed: step "charge": no funds"#);
    /// let WorkflowError::Failed { failure, .. } = failed else { panic!("it has failed") };
    /// assert_eq!((failure.step(), failure.message()), (Some("charge"), "no funds"));
    /// # Ok(()) }
    /// ```
    pub fn step(&self) -> Option<&str> {
        self.step.as_deref()
    }

    /// The failure as a [`std::error::Error`], for a function that returns `anyhow::Error` or `Box<dyn Error>`.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// fn outside(failure: Failure) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    ///     Err(failure.into_error())?
    /// }
    /// let failure = Failure::new("sold out").not_retryable();
    /// assert_eq!(Failure::from(outside(failure.clone()).unwrap_err()), failure);
    /// ```
    pub fn into_error(self) -> FailureError {
        FailureError(self)
    }

    /// The code of the failure: the code that was set, or else the name of the error's type without its path. The
    /// library's own failures have codes such as `latchwork.timeout`; docs/workflows/errors.md lists them. The code is
    /// empty if the failure has only a message.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// let failure = Failure::from("x".parse::<u32>().unwrap_err());
    /// assert_eq!(failure.code(), "ParseIntError");
    /// assert_eq!(failure.with_code("order.quantity").code(), "order.quantity");
    /// assert_eq!(Failure::new("sold out").code(), "");
    /// ```
    pub fn code(&self) -> &str {
        self.code.as_deref().unwrap_or(&self.kind)
    }

    /// The error that was passed to [`Failure::typed`], if its type has this name. The path to the type does not
    /// matter.
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
    /// #[error("the card was declined: {reason}")]
    /// struct Declined {
    ///     reason: String,
    /// }
    /// let failure = Failure::typed(Declined { reason: "no funds".into() });
    /// assert_eq!(failure.get::<Declined>().unwrap().reason, "no funds");
    /// assert!(failure.get::<String>().is_none());
    /// ```
    pub fn get<E: DeserializeOwned>(&self) -> Option<E> {
        if *self.kind == *kind_of::<E>() { self.details() } else { None }
    }

    /// The value that was passed to [`Failure::typed`], if it can be read as this type. The type's name does not
    /// matter. For failures that the code distinguishes by [`Failure::code`].
    ///
    /// ```
    /// # use latchwork::workflow::Failure;
    /// # use serde::{Deserialize, Serialize};
    /// #[derive(Debug, Serialize, Deserialize, thiserror::Error)]
    /// #[error("the card was declined: {reason}")]
    /// struct Declined {
    ///     reason: String,
    /// }
    /// let failure = Failure::typed(Declined { reason: "no funds".into() });
    /// let details: latchwork::Value = failure.details().unwrap();
    /// assert_eq!(details["reason"], "no funds");
    /// ```
    pub fn details<E: DeserializeOwned>(&self) -> Option<E> {
        E::deserialize(&*self.details).ok()
    }
}

const TIMEOUT: &str = "latchwork.timeout";
const CANCELLED: &str = "latchwork.cancelled";

type TypeName = fn() -> &'static str;

/// The codes of the library's own errors in records. A type may be renamed; its code must not change.
const CODES: &[(TypeName, &str)] = &[
    (type_name::<TimeIsUp>, TIMEOUT),
    (type_name::<Cancelled>, CANCELLED),
    (type_name::<RevisionConflict>, "latchwork.revision_conflict"),
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

/// The name of an error type in records: a code if the type belongs to the library, otherwise its name without its path
/// and without the paths of its type arguments. So a type can move to another module or crate. Text and boxed errors
/// have no name.
fn kind_of<E>() -> String {
    let name = type_name::<E>();
    let text: [TypeName; 3] = [type_name::<&str>, type_name::<String>, type_name::<Cow<'_, str>>];
    if text.iter().any(|text| text() == name) || name.starts_with("alloc::boxed::Box<dyn ") || name == "anyhow::Error" {
        return String::new();
    }
    if let Some((_, code)) = CODES.iter().find(|(own, _)| own() == name) {
        return (*code).into();
    }
    let ends_path = |symbol: char| !symbol.is_alphanumeric() && symbol != '_' && symbol != ':';
    name.split_inclusive(ends_path).map(|path| path.rsplit("::").next().unwrap_or(path)).collect()
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Failure {
        match error.into().downcast::<FailureError>() {
            Ok(failure) => failure.0,
            Err(error) => Failure::of(&*error, kind_of::<E>()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.step {
            Some(step) => write!(f, "step {step:?}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
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
