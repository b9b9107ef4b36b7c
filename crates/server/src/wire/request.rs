//! Reading requests and writing answers: bodies, paths and queries as extractors whose rejections are problems, within
//! the limits of the server. This file knows no route.

use std::pin::pin;

use axum::body::{Body, Bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::Namespace;
use crate::wire::problem::{Problem, ProblemCode};

/// A body that is JSON of this type.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Namespace> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, namespace: &Namespace) -> Result<JsonBody<T>, Problem> {
        let (parts, body) = request.into_parts();
        check_media_type(&parts.headers)?;
        let bytes = read_body(&parts.headers, body, namespace).await?;
        Ok(JsonBody(parse(&bytes, namespace.limits().json_depth)?))
    }
}

/// A body that is meant to be JSON, as text: for what reports mistakes by their positions itself.
pub(crate) struct JsonText(pub(crate) String);

impl FromRequest<Namespace> for JsonText {
    type Rejection = Problem;

    async fn from_request(request: Request, namespace: &Namespace) -> Result<JsonText, Problem> {
        let (parts, body) = request.into_parts();
        check_media_type(&parts.headers)?;
        let bytes = read_body(&parts.headers, body, namespace).await?;
        check_depth(&bytes, namespace.limits().json_depth)?;
        let wrong = |_| Problem::new(ProblemCode::InvalidBody, "the body is not UTF-8");
        String::from_utf8(bytes.into()).map(JsonText).map_err(wrong)
    }
}

/// The parameters of the path.
pub(crate) struct PathParams<T>(pub(crate) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Namespace> for PathParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, namespace: &Namespace) -> Result<PathParams<T>, Problem> {
        match Path::from_request_parts(parts, namespace).await {
            Ok(Path(params)) => Ok(PathParams(params)),
            Err(PathRejection::FailedToDeserializePathParams(error)) if error.status().is_client_error() => {
                Err(Problem::new(ProblemCode::InvalidPath, error.body_text()))
            }
            Err(error) => Err(Problem::internal(&error.body_text())),
        }
    }
}

/// The parameters of the query.
pub(crate) struct QueryParams<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Namespace> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, namespace: &Namespace) -> Result<QueryParams<T>, Problem> {
        match Query::from_request_parts(parts, namespace).await {
            Ok(Query(params)) => Ok(QueryParams(params)),
            Err(QueryRejection::FailedToDeserializeQueryString(error)) => {
                Err(Problem::new(ProblemCode::InvalidQuery, error.body_text()))
            }
            Err(error) => Err(Problem::new(ProblemCode::InvalidQuery, error.body_text())),
        }
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Problem> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json"));
    match is_json {
        true => Ok(()),
        false => Err(Problem::new(ProblemCode::MediaType, "send Content-Type: application/json")),
    }
}

/// Reads a whole body, within the limits on its size and on the time to send it.
pub(crate) async fn read_body(headers: &HeaderMap, body: Body, namespace: &Namespace) -> Result<Bytes, Problem> {
    let limits = namespace.limits();
    let too_large = || {
        let detail = format!("a body has at most {} bytes", limits.body_bytes);
        Problem::new(ProblemCode::TooLarge, detail).with("limit_bytes", limits.body_bytes)
    };
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limits.body_bytes as u64) {
        return Err(too_large());
    }
    let mut read = pin!(Limited::new(body, limits.body_bytes).collect());
    // Most bodies have arrived with their headers, and need no timer.
    let read = match read.as_mut().now_or_never() {
        Some(read) => read,
        None => tokio::select! {
            read = read => read,
            () = namespace.env().sleep(limits.body_time) => {
                let detail = format!("a body must be sent within {} s", limits.body_time.as_secs());
                return Err(Problem::new(ProblemCode::BodyTimeout, detail));
            }
        },
    };
    match read {
        Ok(read) => Ok(read.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(_) => Err(Problem::new(ProblemCode::InvalidBody, "the body ended before it was complete")),
    }
}

/// Reads JSON. The error names the place of the mistake.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8], depth: usize) -> Result<T, Problem> {
    check_depth(bytes, depth)?;
    let wrong = |detail: String| Problem::new(ProblemCode::InvalidBody, detail);
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| wrong(error.to_string()))?;
    json.end().map_err(|error| wrong(error.to_string()))?;
    Ok(value)
}

fn check_depth(bytes: &[u8], limit: usize) -> Result<(), Problem> {
    if depth_exceeds(bytes, limit) {
        let detail = format!("JSON may be nested {limit} levels deep");
        return Err(Problem::new(ProblemCode::TooDeep, detail).with("limit_depth", limit));
    }
    Ok(())
}

/// True if brackets nest deeper than this. Only counts brackets outside of strings: what is no JSON is refused later.
fn depth_exceeds(bytes: &[u8], limit: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => depth += 1,
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > limit {
            return true;
        }
    }
    false
}

/// A field that may be missing, or be there with null: `#[serde(default, deserialize_with = "present")]`.
pub(crate) fn present<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: serde::Deserialize<'de>,
    D: serde::Deserializer<'de>,
{
    T::deserialize(deserializer).map(Some)
}

/// An answer with a JSON body.
pub(crate) fn json_answer(body: &impl Serialize) -> Response {
    json_answer_at(StatusCode::OK, body)
}

/// An answer with a JSON body and a status of its own.
pub(crate) fn json_answer_at(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(error) => Problem::internal(&format!("an answer cannot be written: {error}")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_counted_outside_of_strings() {
        assert!(!depth_exceeds(br#"{"a": "[[[[\"[[", "b": [1]}"#, 2));
        assert!(depth_exceeds(br#"{"a": [[1]]}"#, 2));
        let deep = [b"[".repeat(128), b"]".repeat(128)].concat();
        assert_eq!(parse::<latchwork::Value>(&deep, 127).unwrap_err().code(), ProblemCode::TooDeep);
        let allowed = [b"[".repeat(127), b"]".repeat(127)].concat();
        assert!(parse::<latchwork::Value>(&allowed, 127).is_ok());
    }

    #[test]
    fn an_error_in_json_names_its_place() {
        #[derive(Debug, serde::Deserialize)]
        struct Inner {
            #[allow(dead_code)]
            rev: u64,
        }
        let error = parse::<Vec<Inner>>(br#"[{"rev": 1}, {"rev": "x"}]"#, 10).unwrap_err();
        assert!(error.detail().starts_with("[1].rev: "), "{}", error.detail());
        for wrong in [&b"{} {}"[..], b"", b"{", b"\xff", b"{\"a\": \"\xff\"}"] {
            assert_eq!(parse::<latchwork::Value>(wrong, 10).unwrap_err().code(), ProblemCode::InvalidBody);
        }
    }
}
