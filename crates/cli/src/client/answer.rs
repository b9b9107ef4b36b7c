//! Answers of a server: read whole or in pieces, and problems as a command tells them.

use anyhow::Result;
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Bytes;
use hyper::{Response, StatusCode};
use serde_json::{Map, Value};

use crate::client::Client;
use crate::output::{Exit, Problem};

/// The longest answer that is read whole.
const LONGEST: usize = 256 << 20;

/// The body of an answer, wherever it comes from.
type AnswerBody = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// An answer whose body is still to be read.
pub(crate) struct Download {
    answer: Response<AnswerBody>,
    server: String,
}

impl Download {
    pub(crate) fn new(answer: Response<AnswerBody>, server: String) -> Download {
        Download { answer, server }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.answer.status()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.answer.headers().get(name).and_then(|value| value.to_str().ok())
    }

    /// The next piece of the body.
    pub(crate) async fn piece(&mut self) -> Result<Option<Bytes>> {
        while let Some(frame) = self.answer.frame().await {
            let frame = frame.map_err(|error| {
                Problem::new(Exit::Unreachable, format!("the answer of {} broke off: {error}", self.server))
            })?;
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// The whole body.
    pub(crate) async fn text(mut self) -> Result<String> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            all.extend_from_slice(&piece);
            if all.len() > LONGEST {
                return Err(Problem::new(Exit::Failed, format!("the answer of {} is too long", self.server)).into());
            }
        }
        String::from_utf8(all)
            .map_err(|_| Problem::new(Exit::Failed, format!("the answer of {} is not a text", self.server)).into())
    }
}

/// What an answer that is no success means to a command.
pub(crate) fn problem(client: &Client, status: StatusCode, text: &str) -> Problem {
    let document: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    let word = |name: &str| document.get(name).and_then(Value::as_str);
    let code = word("code").unwrap_or_default();
    let message = match (word("detail").or(word("title")), code) {
        (_, "no-route") => format!("{client} does not have this route: is it older than this program?"),
        (Some(message), _) => message.to_string(),
        (None, _) => format!("{client} answered with status {status}"),
    };
    let mut problem = Problem::new(exit(status, code), message).with("problem", code).with("status", status.as_u16());
    for (name, value) in document {
        if !["code", "detail", "instance", "status", "title", "type"].contains(&name.as_str()) {
            problem = problem.with(&name, value);
        }
    }
    problem
}

fn exit(status: StatusCode, code: &str) -> Exit {
    match (status.as_u16(), code) {
        (_, "no-route") => Exit::Failed,
        (401 | 403 | 421, _) => Exit::NotAllowed,
        (404 | 410, _) => Exit::NotFound,
        (409 | 412, _) => Exit::Conflict,
        (408 | 429 | 503 | 504, _) => Exit::Busy,
        (400..=499, _) => Exit::Usage,
        _ => Exit::Failed,
    }
}
