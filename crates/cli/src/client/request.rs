//! Requests of the commands that show the answers of the API as they are: a method, a path, and what goes with it.

use anyhow::Result;
use hyper::Method;
use hyper::header::{HeaderName, IF_MATCH, IF_NONE_MATCH};
use latchwork::Value;

use crate::client::{ANSWERING, Client};

/// On what a change depends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// The thing exists, at whatever rev.
    Exists,
    /// The thing is at this rev.
    Rev(u64),
    /// The thing does not exist.
    Absent,
}

impl Condition {
    fn header(&self) -> (HeaderName, String) {
        match self {
            Condition::Exists => (IF_MATCH, "*".into()),
            Condition::Rev(rev) => (IF_MATCH, format!("\"r{rev}\"")),
            Condition::Absent => (IF_NONE_MATCH, "*".into()),
        }
    }
}

/// What the API is asked.
#[must_use = "it is sent by Client::call"]
pub(crate) struct ApiCall {
    method: Method,
    path: String,
    query: Vec<(&'static str, String)>,
    body: Option<Value>,
    condition: Option<Condition>,
    is_change: bool,
}

impl ApiCall {
    fn new(method: Method, path: String, is_change: bool) -> ApiCall {
        ApiCall { method, path, query: Vec::new(), body: None, condition: None, is_change }
    }

    /// Reads something.
    pub(crate) fn get(path: impl Into<String>) -> ApiCall {
        ApiCall::new(Method::GET, path.into(), false)
    }

    /// Reads something that a body describes.
    pub(crate) fn search(path: impl Into<String>) -> ApiCall {
        ApiCall::new(Method::POST, path.into(), false)
    }

    /// Changes something. If the connection breaks, it is sent again under the same key.
    pub(crate) fn change(method: Method, path: impl Into<String>) -> ApiCall {
        ApiCall::new(method, path.into(), true)
    }

    pub(crate) fn post(path: impl Into<String>) -> ApiCall {
        ApiCall::change(Method::POST, path)
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl ToString) -> ApiCall {
        self.query.push((name, value.to_string()));
        self
    }

    /// A parameter that may be missing.
    pub(crate) fn maybe(self, name: &'static str, value: Option<impl ToString>) -> ApiCall {
        match value {
            Some(value) => self.query(name, value),
            None => self,
        }
    }

    pub(crate) fn body(mut self, body: Value) -> ApiCall {
        self.body = Some(body);
        self
    }

    pub(crate) fn condition(mut self, condition: Option<Condition>) -> ApiCall {
        self.condition = condition;
        self
    }
}

/// An object of these fields, without those that have no value.
pub(crate) fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    fields.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
}

impl Client {
    /// Sends a request, and returns the answer as it is; null if it has no body.
    pub(crate) async fn call(&self, asked: ApiCall) -> Result<Value> {
        let ApiCall { method, path, query, body, condition, is_change } = asked;
        let mut ask = self.ask(method, &path, &query);
        ask.body = body.map(|body| serde_json::to_vec(&body)).transpose()?.map(Into::into);
        ask.headers.extend(condition.map(|condition| condition.header()));
        match is_change {
            true => self.change(ask).await,
            false => self.within(ANSWERING, self.json(&ask)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_is_a_header() {
        for (condition, name, value) in [
            (Condition::Exists, "if-match", "*"),
            (Condition::Rev(42), "if-match", "\"r42\""),
            (Condition::Absent, "if-none-match", "*"),
        ] {
            let (header, text) = condition.header();
            assert_eq!((header.as_str(), text.as_str()), (name, value));
        }
    }

    #[test]
    fn an_object_has_the_fields_that_have_a_value() {
        let fields = object([("a", Some(1.into())), ("b", None), ("c", Some(Value::Null))]);
        assert_eq!(fields, latchwork::json!({"a": 1, "c": null}));
    }
}
