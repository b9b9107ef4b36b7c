//! One request to a collector: connect, send, read, and what the answer means. Redirects are not followed: the headers
//! may be secret. Nothing here sends a batch again.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, CONTENT_TYPE, HOST, USER_AGENT};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use latchwork::store::Env;

use crate::config::traces::Collector;
use crate::serve::traces::otlp;

/// How long a collector may take to take a batch.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of an answer, at most.
const ANSWER: usize = 64 << 10;

/// What became of a batch.
pub(crate) enum Posted {
    /// It was taken, without the spans that are refused.
    Taken { refused: u64, message: String },
    /// It will never be taken.
    Refused(String),
    /// It may be taken later.
    NotNow(String),
}

/// Drives a connection until it is dropped.
struct Driver(tokio::task::JoinHandle<hyper::Result<()>>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Sends a batch once.
pub(crate) async fn post(collector: &Collector, env: &Env, body: Bytes) -> Posted {
    let place = &collector.place;
    let answered = tokio::select! {
        answered = send(collector, body) => answered,
        () = env.sleep(TIMEOUT) => return Posted::NotNow(format!("{place} did not answer within {TIMEOUT:?}")),
    };
    match answered {
        Ok((status, answer)) if status.is_success() => {
            let (refused, message) = otlp::refused(&answer);
            Posted::Taken { refused, message }
        }
        Ok((status, _)) => {
            let why = format!("{place} answered with status {}", status.as_u16());
            // The protocol names these.
            match status.as_u16() {
                429 | 502 | 503 | 504 => Posted::NotNow(why),
                _ => Posted::Refused(why),
            }
        }
        Err(cause) => Posted::NotNow(format!("the connection to {place} failed: {cause}")),
    }
}

type Broken = Box<dyn std::error::Error + Send + Sync>;

async fn send(collector: &Collector, body: Bytes) -> Result<(StatusCode, Bytes), Broken> {
    let stream = collector.place.connect().await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let _driver = Driver(tokio::spawn(connection));
    let request = Request::post(&collector.target)
        .header(HOST, collector.place.host())
        .header(CONTENT_TYPE, "application/x-protobuf")
        .header(USER_AGENT, concat!("latchwork/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close");
    let mut request = request.body(Full::new(body))?;
    for (name, value) in &collector.headers {
        request.headers_mut().insert(name, value.clone());
    }
    let (parts, body) = sender.send_request(request).await?.into_parts();
    let answer = Limited::new(body, ANSWER).collect().await?.to_bytes();
    Ok((parts.status, answer))
}
