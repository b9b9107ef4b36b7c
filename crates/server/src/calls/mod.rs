//! `Idempotency-Key`: a call that changes something and is sent again takes effect once, and is answered again as it
//! was answered first.
//!
//! The record of a call says whether an attempt runs and what it answered. A process can die between the effect and the
//! record of the answer, so the record alone is not enough: each route gives the id of the [`Call`] to the library as
//! the library's own idempotency key, looks for what the call has written, or stores the answer with the change.

mod ledger;
mod stored;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequestParts, Request};
use axum::http::header::{CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH, LINK, LOCATION, RETRY_AFTER};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use latchwork::store::{Commit, ErrorKind, Generation, Timestamp, Uuid};
use latchwork::{Once, OnceError};
use sha2::{Digest as _, Sha256};

use std::sync::Arc;

use crate::access::Caller;
use crate::api::Namespace;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::read_body;

pub(crate) use ledger::Calls;
pub(crate) use stored::{AttemptRight, StoredAnswer};

use ledger::{Attempt, Begun, Ending};
use stored::Digest;

/// The header with the key.
pub(crate) const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The header of an answer that was given before.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The longest key, in bytes.
const KEY_BYTES: usize = 255;
/// The largest body of an answer that is kept. A record must fit into a value of the store.
const ANSWER_BYTES: usize = 3 << 20;
/// The headers of an answer that are kept.
const KEPT_HEADERS: [HeaderName; 4] = [CONTENT_TYPE, ETAG, LOCATION, LINK];

/// The call that a route carries out: an extractor of every route that changes something. Without an
/// `Idempotency-Key` it is empty.
#[derive(Debug, Clone, Default)]
pub(crate) struct Call(Option<Arc<Keyed>>);

#[derive(Debug)]
struct Keyed {
    id: Uuid,
    is_repeated: bool,
    since: Generation,
    began: Timestamp,
    right: AttemptRight,
    ending: Ending,
}

impl Call {
    fn of(attempt: &Attempt) -> Call {
        Call(Some(Arc::new(Keyed {
            id: attempt.id(),
            is_repeated: attempt.is_repeated(),
            since: attempt.since(),
            began: attempt.began(),
            right: attempt.right().clone(),
            ending: attempt.ending().clone(),
        })))
    }

    /// Begins a call as a request would, in tests of routes. Dropping the attempt stands for a process that dies.
    #[cfg(test)]
    pub(crate) async fn begin(calls: &Calls, key: u8) -> (Call, Attempt) {
        match calls.begin([key; 32], [0; 32]).await.unwrap() {
            Begun::Run(attempt) => (Call::of(&attempt), attempt),
            Begun::Answered(answer) => panic!("answered: {answer:?}"),
        }
    }

    /// The answer that is stored for a call, in tests.
    #[cfg(test)]
    pub(crate) async fn stored_answer(calls: &Calls, key: u8) -> Option<StoredAnswer> {
        match calls.begin([key; 32], [0; 32]).await {
            Ok(Begun::Answered(answer)) => Some(answer),
            _ => None,
        }
    }

    /// The id of the call, the same for each attempt at it: to be used as the library's own idempotency key.
    pub(crate) fn id(&self) -> Option<Uuid> {
        self.0.as_ref().map(|keyed| keyed.id)
    }

    /// The generation since which an earlier attempt may have taken effect; `None` if this is the first attempt.
    pub(crate) fn repeated_since(&self) -> Option<Generation> {
        self.0.as_ref().filter(|keyed| keyed.is_repeated).map(|keyed| keyed.since)
    }

    /// When the first attempt began; `None` if this is the first attempt.
    pub(crate) fn repeated_from(&self) -> Option<Timestamp> {
        self.0.as_ref().filter(|keyed| keyed.is_repeated).map(|keyed| keyed.began)
    }

    /// The key for a change that the library makes once.
    pub(crate) fn once(&self) -> Option<Once> {
        self.0.as_ref().map(|keyed| Once::new(keyed.id.to_string()).guard(&keyed.right))
    }

    /// Adds the answer to the commit of the change, so that both land or neither does. `None` if it cannot be stored.
    pub(crate) fn answered(&self, commit: Commit, answer: &StoredAnswer) -> Option<Commit> {
        match &self.0 {
            Some(keyed) => keyed.ending.finish(commit, answer.clone()),
            None => Some(commit),
        }
    }

    /// The commit with the answer has landed.
    pub(crate) fn has_landed(&self) {
        self.0.iter().for_each(|keyed| keyed.ending.has_landed());
    }

    /// The right that a commit is guarded by, so that an attempt that was taken over changes nothing.
    pub(crate) fn right(&self) -> Option<&AttemptRight> {
        self.0.as_ref().map(|keyed| &keyed.right)
    }
}

impl<S: Sync> FromRequestParts<S> for Call {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Call, Problem> {
        let missing = || Problem::internal("the route is not registered as one that changes something");
        parts.extensions.get::<Call>().cloned().ok_or_else(missing)
    }
}

/// Runs a call that changes something.
pub(crate) async fn run(namespace: &Namespace, caller: &Caller, mut request: Request, next: Next) -> Response {
    match key(&request) {
        Ok(None) => {
            request.extensions_mut().insert(Call::default());
            next.run(request).await
        }
        Ok(Some(key)) => match keyed(namespace, caller, &key, request, next).await {
            Ok(answer) => answer,
            Err(problem) => problem.into_response(),
        },
        Err(problem) => problem.into_response(),
    }
}

fn key(request: &Request) -> Result<Option<String>, Problem> {
    let wrong = || {
        let detail = format!("an Idempotency-Key has 1 to {KEY_BYTES} visible ASCII characters, and there is one");
        Problem::new(ProblemCode::InvalidHeader, detail)
    };
    let mut given = request.headers().get_all(KEY).iter();
    match (given.next(), given.next()) {
        (None, _) => Ok(None),
        (Some(key), None) => {
            let key = key.to_str().map_err(|_| wrong())?;
            let is_valid = (1..=KEY_BYTES).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic());
            is_valid.then(|| Some(key.to_string())).ok_or_else(wrong)
        }
        (Some(_), Some(_)) => Err(wrong()),
    }
}

async fn keyed(
    namespace: &Namespace,
    caller: &Caller,
    key: &str,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let (mut parts, body) = request.into_parts();
    let body = read_body(&parts.headers, body, namespace).await?;
    let digest = digest(&[caller.subject.as_bytes(), key.as_bytes()]);
    let attempt = match namespace.calls().begin(digest, fingerprint(&parts, &body)).await? {
        Begun::Answered(answer) => return Ok(replayed(answer)),
        Begun::Run(attempt) => attempt,
    };
    parts.extensions.insert(Call::of(&attempt));
    let request = Request::from_parts(parts, Body::from(body));
    // A client that closes the connection does not end the call: its answer is kept for the next request.
    let task = tokio::spawn(carried_out(attempt, request, next));
    task.await.unwrap_or_else(|_| Err(Problem::internal("the code of a route has panicked")))
}

/// Runs the route and keeps its answer.
async fn carried_out(attempt: Attempt, request: Request, next: Next) -> Result<Response, Problem> {
    let answer = tokio::select! {
        answer = next.run(request) => answer,
        never = attempt.keep_alive() => match never {},
    };
    if attempt.ending().is_over() {
        return Ok(answer);
    }
    if !is_final(&answer) {
        // Whether it took effect may not be known; the next attempt finds out.
        attempt.leave().await?;
        return Ok(answer);
    }
    let (parts, body) = answer.into_parts();
    let body = match to_bytes(body, ANSWER_BYTES).await {
        Ok(body) => body,
        Err(_) => {
            return Err(Problem::internal("the answer to a call with an Idempotency-Key is too large to be kept"));
        }
    };
    let kept = KEPT_HEADERS.iter().filter_map(|name| {
        let value = parts.headers.get(name)?.to_str().ok()?;
        Some((name.as_str().to_string(), value.to_string()))
    });
    let stored = StoredAnswer { status: parts.status.as_u16(), headers: kept.collect(), body: body.clone() };
    match attempt.finish(stored).await? {
        true => Ok(Response::from_parts(parts, Body::from(body))),
        false => {
            let detail = "another request under the same Idempotency-Key has taken over; send it again for its answer";
            Err(Problem::new(ProblemCode::KeyInUse, detail).retry_after(std::time::Duration::from_secs(1)))
        }
    }
}

/// True if a repeated call gets this answer again. An answer that asks to try again is not kept, and neither is one of
/// a failure.
fn is_final(answer: &Response) -> bool {
    let status = answer.status();
    !status.is_server_error() && status != StatusCode::REQUEST_TIMEOUT && !answer.headers().contains_key(RETRY_AFTER)
}

impl StoredAnswer {
    /// An answer with a JSON body.
    pub(crate) fn json(status: StatusCode, body: &impl serde::Serialize) -> StoredAnswer {
        let (body, headers) = (serde_json::to_vec(body), vec![(CONTENT_TYPE.to_string(), "application/json".into())]);
        // What is sent over the wire is written as JSON without fail; its maps have texts as keys.
        StoredAnswer { status: status.as_u16(), headers, body: body.unwrap_or_default().into() }
    }

    /// Adds a header.
    pub(crate) fn with(mut self, name: &HeaderName, value: String) -> StoredAnswer {
        self.headers.push((name.to_string(), value));
        self
    }
}

impl IntoResponse for StoredAnswer {
    fn into_response(self) -> Response {
        let StoredAnswer { status, headers, body } = self;
        let mut answer = Response::new(Body::from(body));
        *answer.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        for (name, value) in headers {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                answer.headers_mut().insert(name, value);
            }
        }
        answer
    }
}

impl From<OnceError> for Problem {
    fn from(error: OnceError) -> Problem {
        match &error {
            OnceError::Store(store) => store.clone().into(),
            // The call is now with another attempt.
            OnceError::Fenced { reason } => {
                Problem::new(ProblemCode::KeyInUse, reason).retry_after(std::time::Duration::from_secs(1))
            }
            OnceError::Corrupt { .. } => Problem::of_kind(ErrorKind::Corrupt, &error),
            // The id of a call is used for one change.
            _ => Problem::internal(&error.to_string()),
        }
    }
}

fn replayed(stored: StoredAnswer) -> Response {
    let mut answer = stored.into_response();
    answer.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    answer
}

/// Stands for what the request asks for. A condition is a part of it.
fn fingerprint(parts: &Parts, body: &Bytes) -> Digest {
    let target = parts.uri.path_and_query().map_or("", |target| target.as_str());
    let header = |name: HeaderName| parts.headers.get(name).map_or(&b""[..], HeaderValue::as_bytes);
    digest(&[parts.method.as_str().as_bytes(), target.as_bytes(), header(IF_MATCH), header(IF_NONE_MATCH), body])
}

/// A hash of several texts. Their lengths are a part of it.
fn digest(texts: &[&[u8]]) -> Digest {
    let mut hash = Sha256::new();
    for text in texts {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    }
    hash.finalize().into()
}
