//! Errors on the wire: problem documents (RFC 9457) with stable codes. This file owns the table of all codes; what an
//! error of the library becomes is decided beside the shapes of its layer.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use latchwork::store::ErrorKind;
use latchwork::{Map, Value, json};
use serde::Serialize;
use utoipa::ToSchema;

/// Defines the codes: name, slug, status, title.
macro_rules! codes {
    ($($code:ident $slug:literal $status:ident $title:literal;)*) => {
        /// The stable codes of problems. On the wire, `code` is the slug, and `type` is `urn:latchwork:problem:` and
        /// the slug.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum ProblemCode {
            $(#[doc = $title] $code,)*
        }

        impl ProblemCode {
            /// Every code.
            pub const ALL: &[ProblemCode] = &[$(ProblemCode::$code),*];

            /// The code on the wire.
            ///
            /// ```
            /// # use latchwork_server::ProblemCode;
            /// assert_eq!(ProblemCode::RevisionConflict.slug(), "revision-conflict");
            /// ```
            pub fn slug(self) -> &'static str {
                match self {
                    $(ProblemCode::$code => $slug,)*
                }
            }

            /// The title: what every problem of this code has in common.
            ///
            /// ```
            /// # use latchwork_server::ProblemCode;
            /// assert_eq!(ProblemCode::NotFound.title(), "The requested thing does not exist");
            /// ```
            pub fn title(self) -> &'static str {
                match self {
                    $(ProblemCode::$code => $title,)*
                }
            }

            /// The status of a problem of this code, if the route names no other.
            pub(crate) fn status(self) -> StatusCode {
                match self {
                    $(ProblemCode::$code => StatusCode::$status,)*
                }
            }
        }
    };
}

codes! {
    // The request itself.
    Invalid "invalid" BAD_REQUEST "The request is not valid";
    InvalidBody "invalid-body" BAD_REQUEST "The body is not the JSON that the route takes";
    InvalidPath "invalid-path" BAD_REQUEST "The path is not valid";
    InvalidQuery "invalid-query" BAD_REQUEST "The query is not valid";
    InvalidHeader "invalid-header" BAD_REQUEST "A header is not valid";
    InvalidCursor "invalid-cursor" BAD_REQUEST "The cursor does not continue this list";
    TooDeep "too-deep" BAD_REQUEST "The JSON is nested too deeply";
    TooLarge "too-large" PAYLOAD_TOO_LARGE "The body is too large";
    HeadersTooLarge "headers-too-large" REQUEST_HEADER_FIELDS_TOO_LARGE "The headers are too large";
    MediaType "media-type" UNSUPPORTED_MEDIA_TYPE "The body must be JSON";
    BodyTimeout "body-timeout" REQUEST_TIMEOUT "The body was sent too slowly";
    NoRoute "no-route" NOT_FOUND "There is no such route";
    Method "method-not-allowed" METHOD_NOT_ALLOWED "The route does not take this method";

    // Who may do what.
    Host "host-not-allowed" MISDIRECTED_REQUEST "The server does not serve this host";
    Origin "origin-not-allowed" FORBIDDEN "The request comes from another origin";
    Unauthenticated "unauthenticated" UNAUTHORIZED "A valid token is needed";
    Forbidden "forbidden" FORBIDDEN "The token does not allow this";
    NamespaceNotFound "namespace-not-found" NOT_FOUND "There is no such namespace";

    // Conditions and conflicts.
    NotFound "not-found" NOT_FOUND "The requested thing does not exist";
    RevisionConflict "revision-conflict" CONFLICT "The thing was changed since it was read";
    PreconditionRequired "precondition-required" PRECONDITION_REQUIRED "A change needs If-Match or If-None-Match";
    AlreadyExists "already-exists" CONFLICT "The id is taken";
    UniqueViolation "unique-violation" CONFLICT "A value that must be unique belongs to another entity";
    Fenced "fenced" CONFLICT "The right that guards the write is lost";
    Rejected "transaction-rejected" CONFLICT "Some checks of the transaction failed";
    Contended "contended" SERVICE_UNAVAILABLE "Other writers were faster each time";
    Conflict "conflict" CONFLICT "The state of the thing does not allow this";

    // Executions, schedules and reviews.
    NotRegistered "workflow-not-registered" NOT_FOUND "No workflow of this name is registered";
    RegisteredElsewhere "workflow-registered-elsewhere" CONFLICT "Only another node can decide this";
    StartKeyReused "start-key-reused" CONFLICT "The idempotency key of the start was used with another input";
    MessageReused "message-reused" CONFLICT "The id of the message was used for another message";
    Ended "execution-ended" CONFLICT "The execution has ended";
    Parked "execution-parked" CONFLICT "The execution waits for an operator";
    NotParked "not-parked" CONFLICT "The execution is not parked";
    NotRetrying "not-retrying" CONFLICT "The execution does not wait for another attempt";
    NoFork "cannot-fork" CONFLICT "The execution cannot be forked there";
    UpdateRefused "update-refused" CONFLICT "The workflow has refused the update";
    LimitReached "limit-reached" TOO_MANY_REQUESTS "As many executions run as the limit allows";
    QueueFull "queue-full" TOO_MANY_REQUESTS "The queue of the limit is full";
    RateLimited "rate-limited" TOO_MANY_REQUESTS "The rate limit does not allow this now";
    ReviewDecided "review-decided" CONFLICT "The review was decided before";
    ReviewClosed "review-closed" CONFLICT "The review is closed without a decision";
    ScheduleBusy "schedule-busy" TOO_MANY_REQUESTS "Too many requests to the schedule wait";

    // Claims.
    Claimed "claimed" CONFLICT "Another caller holds the claim, or was faster";
    NotPermitted "not-permitted" CONFLICT "The step cannot be fired at the moment";
    ClaimLost "claim-lost" CONFLICT "The claim was taken away while its action ran";
    ActionFailed "action-failed" UNPROCESSABLE_ENTITY "The action could not do its work";
    ActionRejected "action-rejected" UNPROCESSABLE_ENTITY "The action does not accept its input";
    ActionError "action-error" INTERNAL_SERVER_ERROR "The action has ended with an error";

    // Tasks.
    LeaseLost "lease-lost" CONFLICT "The token does not hold the task any more";
    TaskEnded "task-ended" CONFLICT "The task has ended";

    // Locks.
    LockHeld "lock-held" CONFLICT "The lock is held";
    LockKind "lock-kind" CONFLICT "The lock is of another kind";
    LockForced "lock-forced" CONFLICT "An operator has removed the request";
    RequestReused "lock-request-reused" CONFLICT "The id of the request was used with other permits";
    SessionLost "session-lost" GONE "The session has ended, and with it every lock that it held";

    // Positions in history.
    FutureGeneration "future-generation" BAD_REQUEST "The position does not exist yet";
    FutureEvent "future-event" BAD_REQUEST "The event does not exist yet";
    HistoryDropped "history-dropped" GONE "The position is no longer kept";

    // Idempotency keys.
    KeyReused "idempotency-key-reused" UNPROCESSABLE_ENTITY "The Idempotency-Key was used for another request";
    KeyInUse "idempotency-key-in-use" CONFLICT "The first request under this Idempotency-Key is still running";
    OutcomeUnknown "outcome-unknown" CONFLICT "It is not known whether the first request took effect";

    // The server.
    TooManyRequests "too-many-requests" TOO_MANY_REQUESTS "Too many requests";
    Unavailable "unavailable" SERVICE_UNAVAILABLE "The server cannot answer at the moment";
    Damaged "damaged" INTERNAL_SERVER_ERROR "Stored data is damaged";
    Internal "internal" INTERNAL_SERVER_ERROR "The server has failed";
}

/// An error as it goes over the wire.
///
/// ```
/// use latchwork_server::{Problem, ProblemCode};
///
/// let problem = Problem::new(ProblemCode::NotFound, "there is no lock \"printer\"").with("lock", "printer");
/// assert_eq!(problem.status(), 404);
/// ```
#[derive(Debug, Clone)]
#[must_use = "a problem is an answer: return it"]
pub struct Problem(Box<Parts>);

#[derive(Debug, Clone)]
struct Parts {
    code: ProblemCode,
    status: StatusCode,
    detail: String,
    fields: Map<String, Value>,
    retry_after: Option<Duration>,
}

/// The pause that clients are asked to make if nothing better is known.
const PAUSE: Duration = Duration::from_secs(1);

impl Problem {
    /// A problem with the status of its code. The detail says what went wrong this time, for the reader of the answer:
    /// it must not name paths or secrets of the server.
    pub fn new(code: ProblemCode, detail: impl Into<String>) -> Problem {
        let status = code.status();
        let retry_after = match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => Some(PAUSE),
            _ => None,
        };
        Problem(Box::new(Parts { code, status, detail: detail.into(), fields: Map::new(), retry_after }))
    }

    /// Adds a field of its own, such as `current_rev`.
    pub fn with(mut self, field: &str, value: impl Serialize) -> Problem {
        self.0.fields.insert(field.into(), json!(value));
        self
    }

    /// Asks the client to try again after this time.
    pub fn retry_after(mut self, pause: Duration) -> Problem {
        self.0.retry_after = Some(pause);
        self
    }

    /// The code.
    pub fn code(&self) -> ProblemCode {
        self.0.code
    }

    /// The status of the answer.
    pub fn status(&self) -> u16 {
        self.0.status.as_u16()
    }

    /// What went wrong this time.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// Sets another status than that of the code.
    pub(crate) fn at_status(mut self, status: StatusCode) -> Problem {
        self.0.status = status;
        self
    }

    /// The problem of a library error, by its kind alone. The message of an error that is no fault of the client goes
    /// to the log, not to the client.
    pub(crate) fn of_kind(kind: ErrorKind, error: &dyn std::error::Error) -> Problem {
        match kind {
            ErrorKind::Invalid => Problem::new(ProblemCode::Invalid, error.to_string()),
            ErrorKind::NotFound => Problem::new(ProblemCode::NotFound, error.to_string()),
            ErrorKind::Conflict => Problem::new(ProblemCode::Conflict, error.to_string()),
            ErrorKind::Unavailable => Problem::unavailable(error),
            ErrorKind::Corrupt => {
                tracing::error!(%error, "stored data is damaged");
                Problem::new(ProblemCode::Damaged, "stored data cannot be read; the log of the server names the place")
            }
        }
    }

    /// The store or the engine cannot answer. The cause goes to the log.
    pub(crate) fn unavailable(error: &dyn std::error::Error) -> Problem {
        tracing::warn!(%error, "a request could not be answered");
        let detail = "the store or the engine cannot answer at the moment; the log of the server names the cause";
        Problem::new(ProblemCode::Unavailable, detail)
    }

    /// The server has failed. The cause goes to the log.
    pub(crate) fn internal(cause: &str) -> Problem {
        tracing::error!(cause, "a request has failed");
        Problem::new(ProblemCode::Internal, "the request has failed; the log of the server names the cause")
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        if let Some(pause) = self.0.retry_after {
            let seconds = pause.as_secs() + u64::from(pause.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.0.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.0.status == StatusCode::REQUEST_TIMEOUT {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        headers
    }

    /// The document, for an answer or for an event of a stream.
    pub(crate) fn document(&self) -> Value {
        let Parts { code, status, detail, fields, retry_after } = &*self.0;
        let mut document = fields.clone();
        document.insert("type".into(), format!("urn:latchwork:problem:{}", code.slug()).into());
        document.insert("title".into(), code.title().into());
        document.insert("status".into(), status.as_u16().into());
        document.insert("detail".into(), detail.as_str().into());
        document.insert("code".into(), code.slug().into());
        if let Some(pause) = retry_after {
            document.insert("retry_after_ms".into(), u64::try_from(pause.as_millis()).unwrap_or(u64::MAX).into());
        }
        Value::Object(document)
    }
}

/// The media type of problems.
pub(crate) const PROBLEM_JSON: &str = "application/problem+json";

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.0.status, self.headers(), self.document().to_string()).into_response()
    }
}

/// Makes a problem of an error that another layer answered without one, for example of an unknown route.
pub(crate) async fn ensure(answer: Response) -> Response {
    let status = answer.status();
    let is_error = status.is_client_error() || status.is_server_error();
    if !is_error || answer.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == PROBLEM_JSON) {
        return answer;
    }
    let problem = match status {
        StatusCode::NOT_FOUND => Problem::new(ProblemCode::NoRoute, "see /openapi.json for all routes"),
        StatusCode::METHOD_NOT_ALLOWED => Problem::new(ProblemCode::Method, "the header Allow lists the methods"),
        status if status.is_client_error() => Problem::new(ProblemCode::Invalid, "").at_status(status),
        _ => Problem::internal("a layer answered without a problem").at_status(status),
    };
    let mut replaced = problem.into_response();
    if let Some(allowed) = answer.headers().get(ALLOW) {
        replaced.headers_mut().insert(ALLOW, allowed.clone());
    }
    replaced
}

/// The answer if the code of a route panics. The panic itself is in the log.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send + 'static>) -> Response<Body> {
    Problem::internal("the code of a route has panicked").into_response()
}

/// A problem in the OpenAPI document.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct ProblemShape {
    /// `urn:latchwork:problem:` and the code.
    #[serde(rename = "type")]
    kind: String,
    /// What every problem of this code has in common.
    title: String,
    /// The status of the answer.
    status: u16,
    /// What went wrong this time.
    detail: String,
    /// The stable code.
    code: String,
    /// The pause after which the request may succeed.
    retry_after_ms: Option<u64>,
    /// The present rev, if a condition on the rev failed.
    current_rev: Option<u64>,
}
