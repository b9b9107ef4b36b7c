//! One call of an endpoint: connect, send, read, and what the answer means. Redirects are not followed: the address is
//! part of the configuration. Nothing here repeats a call.

use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, HeaderMap, RETRY_AFTER, USER_AGENT};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use latchwork::Value;
use latchwork::store::{Env, Timestamp};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tracing::field::Empty;
use tracing::{Instrument, Span};

use crate::spans;
use crate::workers::endpoint::{Endpoint, EndpointPlace};
use crate::workers::signature::{SignedAs, sign};

/// The longest pause that an endpoint may ask for.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// How much of an endpoint's own words is kept.
const WORDS: usize = 500;

/// What a worker is asked to do: the body of a call, and in the same shape as a task that a worker takes.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Assignment {
    /// The name of the step, the action or the after-effect.
    pub(super) kind: String,
    /// The idempotency key: the same for each attempt.
    pub(super) key: String,
    /// Counted from 1.
    pub(super) attempt: u32,
    /// The fencing token.
    pub(super) token: u64,
    pub(super) input: Value,
}

/// A call that has failed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CallFailed {
    pub(super) message: String,
    pub(super) code: String,
    pub(super) next: NextCall,
}

/// Whether another call makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextCall {
    /// The endpoint has refused the work.
    Never,
    /// After the usual pause, or the endpoint's `Retry-After` if that is longer.
    Again(Option<Duration>),
}

impl Endpoint {
    /// Calls the endpoint once.
    pub(super) async fn call(&self, env: &Env, work: &Assignment) -> Result<Value, CallFailed> {
        let body = serde_json::to_vec(work).map_err(|error| CallFailed {
            message: error.to_string(),
            code: "endpoint-request".into(),
            next: NextCall::Never,
        })?;
        // Permits are never closed.
        let _permit = self.permits().acquire().await;
        let span = self.span_of(work);
        let called = self.answer(env, work, body.into(), &span).instrument(span.clone()).await;
        if let Err(failed) = &called {
            span.record("error", &failed.message);
        }
        called
    }

    /// The path is not told: it may hold a secret.
    fn span_of(&self, work: &Assignment) -> Span {
        let EndpointPlace { host, port, .. } = self.place();
        let (status, error) = (Empty, Empty);
        tracing::debug_span!("call", method = "POST", host, port, attempt = work.attempt, status, error)
    }

    /// Sends the call, and makes sense of its answer.
    async fn answer(&self, env: &Env, work: &Assignment, body: Bytes, span: &Span) -> Result<Value, CallFailed> {
        let again =
            |message: String, code: &str| CallFailed { message, code: code.into(), next: NextCall::Again(None) };
        let authority = &self.place().authority;
        let timeout = self.limits().timeout;
        let traceparent = spans::context_of(span).map(|context| context.to_string());
        let answered = tokio::select! {
            answered = self.send(env, work, body, traceparent) => answered,
            () = env.sleep(timeout) => {
                return Err(again(format!("{authority} did not answer within {timeout:?}"), "endpoint-timeout"));
            }
        };
        if let Ok((status, ..)) = &answered {
            span.record("status", status.as_u16());
        }
        match answered {
            Ok((status, headers, body)) => understood(authority, status, &headers, &body, env.now()),
            Err(Broken::TooLarge) => {
                let message = format!("the answer of {authority} has more than {} bytes", self.limits().answer_bytes);
                Err(CallFailed { message, code: "endpoint-answer".into(), next: NextCall::Never })
            }
            Err(Broken::Connection(cause)) => {
                Err(again(format!("the connection to {authority} failed: {cause}"), "endpoint-unreachable"))
            }
        }
    }

    async fn send(
        &self,
        env: &Env,
        work: &Assignment,
        body: Bytes,
        traceparent: Option<String>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), Broken> {
        let place = self.place();
        let stream = connect(place).await.map_err(|error| Broken::Connection(error.to_string()))?;
        let broken = |error: hyper::Error| Broken::Connection(error.to_string());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        let driver = Driver(tokio::spawn(connection));
        let SignedAs { id, timestamp, signature } = sign(self.secrets(), &work.key, env.now(), &body);
        let request = Request::builder()
            .method(Method::POST)
            .uri(&place.target)
            .header(HOST, &place.authority)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("latchwork/", env!("CARGO_PKG_VERSION")))
            .header("idempotency-key", &work.key)
            .header("latchwork-attempt", work.attempt)
            .header("latchwork-token", work.token)
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp);
        let request = signature.into_iter().fold(request, |request, it| request.header("webhook-signature", it));
        let request = traceparent.into_iter().fold(request, |request, it| request.header("traceparent", it));
        let request = request.body(Full::new(body)).map_err(|error| Broken::Connection(error.to_string()))?;
        let (parts, body) = sender.send_request(request).await.map_err(broken)?.into_parts();
        let read = Limited::new(body, self.limits().answer_bytes).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() { Broken::TooLarge } else { Broken::Connection(error.to_string()) }
        })?;
        drop(driver);
        Ok((parts.status, parts.headers, read.to_bytes()))
    }
}

/// Why there is no answer.
enum Broken {
    Connection(String),
    TooLarge,
}

/// Drives a connection until it is dropped.
struct Driver(tokio::task::JoinHandle<hyper::Result<()>>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

async fn connect(place: &EndpointPlace) -> std::io::Result<Box<dyn Wire>> {
    let stream = TcpStream::connect((place.host.as_str(), place.port)).await?;
    stream.set_nodelay(true)?;
    Ok(match &place.tls {
        None => Box::new(stream),
        Some((name, config)) => Box::new(TlsConnector::from(config.clone()).connect(name.clone(), stream).await?),
    })
}

/// What an answer means.
fn understood(
    authority: &str,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    now: Timestamp,
) -> Result<Value, CallFailed> {
    if status.is_success() {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Ok(Value::Null);
        }
        return serde_json::from_slice(body).map_err(|error| CallFailed {
            message: format!("the answer of {authority} is not JSON: {error}"),
            code: "endpoint-answer".into(),
            next: NextCall::Again(None),
        });
    }
    let (own_message, own_code) = words(body);
    let message = own_message.unwrap_or_else(|| format!("{authority} answered with status {}", status.as_u16()));
    let code = own_code.unwrap_or_else(|| format!("endpoint-{}", status.as_u16()));
    let next = match status.as_u16() {
        408 | 409 | 425 | 429 => NextCall::Again(retry_after(headers, now)),
        400..=499 => NextCall::Never,
        _ => NextCall::Again(retry_after(headers, now)),
    };
    Err(CallFailed { message, code, next })
}

/// The message and the code that the endpoint gives itself.
fn words(body: &[u8]) -> (Option<String>, Option<String>) {
    let Ok(Value::Object(fields)) = serde_json::from_slice(body) else { return (None, None) };
    let text = |names: &[&str]| {
        let found = names.iter().find_map(|name| fields.get(*name)?.as_str());
        found.filter(|text| !text.is_empty()).map(|text| text.chars().take(WORDS).collect())
    };
    (text(&["message", "detail", "title", "error"]), text(&["code"]))
}

/// The pause that the endpoint asks for: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match text.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = jiff::fmt::rfc2822::parse(text).ok()?.timestamp().as_microsecond();
            Duration::from_micros(u64::try_from(at).ok()?.saturating_sub(now.0))
        }
    };
    Some(pause.min(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::HeaderValue;
    use latchwork::json;

    #[test]
    fn what_an_answer_means() {
        let now = Timestamp(784_111_777_000_000);
        let means = |status: u16, after: Option<&str>, body: &str| {
            let mut headers = HeaderMap::new();
            after.map(|after| headers.insert(RETRY_AFTER, HeaderValue::from_str(after).unwrap()));
            understood("h", StatusCode::from_u16(status).unwrap(), &headers, body.as_bytes(), now)
        };
        assert_eq!(means(200, None, "{\"a\": 1}"), Ok(json!({"a": 1})));
        assert_eq!(means(204, None, ""), Ok(json!(null)));
        let next = |status, after| means(status, after, "").unwrap_err().next;
        for status in [400, 401, 403, 404, 410, 413, 422] {
            assert_eq!(next(status, Some("9")), NextCall::Never, "{status}");
        }
        for status in [301, 302, 307, 408, 409, 425, 429, 500, 502, 503, 504] {
            assert_eq!(next(status, None), NextCall::Again(None), "{status}");
            assert_eq!(next(status, Some("9")), NextCall::Again(Some(Duration::from_secs(9))), "{status}");
        }
        // Six minutes later than now.
        let date = Some("Sun, 06 Nov 1994 08:55:37 GMT");
        assert_eq!(next(503, date), NextCall::Again(Some(Duration::from_secs(360))));
        assert_eq!(next(503, Some("99999999")), NextCall::Again(Some(LONGEST)));
        assert_eq!(next(503, Some("soon")), NextCall::Again(None));
        let garbage = means(200, None, "<html>").unwrap_err();
        assert_eq!((garbage.code.as_str(), garbage.next), ("endpoint-answer", NextCall::Again(None)));
        let own = means(422, None, "{\"detail\": \"no such card\", \"code\": \"E7\"}").unwrap_err();
        assert_eq!((own.message.as_str(), own.code.as_str()), ("no such card", "E7"));
    }
}
