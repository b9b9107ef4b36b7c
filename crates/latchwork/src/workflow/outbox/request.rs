//! The requests of the outbox as they are written: JSON, with a word for the kind. docs/format.md describes them.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::entity::WrittenTransaction;
use crate::node::shard_of;
use crate::workflow::ExecutionId;

/// What a row asks for.
pub(super) enum OutboxRequest {
    Start(StartRequest),
    Signal(SignalRequest),
    Entities(WrittenTransaction),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct StartRequest {
    pub(super) workflow: String,
    pub(super) id: ExecutionId,
    pub(super) input: Box<RawValue>,
    /// An execution of this id that exists is left as it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) join: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SignalRequest {
    pub(super) execution: ExecutionId,
    pub(super) name: String,
    pub(super) payload: Box<RawValue>,
}

const START: &str = "start";
const SIGNAL: &str = "signal";
const ENTITIES: &str = "entities";

impl OutboxRequest {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            OutboxRequest::Start(_) => START,
            OutboxRequest::Signal(_) => SIGNAL,
            OutboxRequest::Entities(_) => ENTITIES,
        }
    }

    pub(super) fn write(&self) -> serde_json::Result<String> {
        match self {
            OutboxRequest::Start(start) => serde_json::to_string(start),
            OutboxRequest::Signal(signal) => serde_json::to_string(signal),
            OutboxRequest::Entities(entities) => serde_json::to_string(entities),
        }
    }

    /// Reads a request. The error says what is wrong with it.
    pub(super) fn read(kind: &str, body: &str) -> Result<OutboxRequest, String> {
        let read = match kind {
            START => serde_json::from_str(body).map(OutboxRequest::Start),
            SIGNAL => serde_json::from_str(body).map(OutboxRequest::Signal),
            ENTITIES => serde_json::from_str(body).map(OutboxRequest::Entities),
            _ => return Err(format!("this program knows no request {kind:?}; a newer program may have written it")),
        };
        read.map_err(|error| format!("the request cannot be read: {error}"))
    }

    /// What the request is about. Requests about the same name are done one after the other.
    pub(super) fn name(&self) -> &str {
        match self {
            OutboxRequest::Start(start) => &start.id,
            OutboxRequest::Signal(signal) => &signal.execution,
            OutboxRequest::Entities(entities) => entities.name(),
        }
    }

    pub(super) fn shard(&self) -> u16 {
        shard_of(self.name().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entity::{Add, Remove, Transaction, Update};
    use crate::store::Rev;
    use serde_json::json;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.into()).unwrap()
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let entities = Transaction::new()
            .add(Add::new("person").id("ada").subtype("user").data(json!({"n": 1})).if_absent(true))
            .update(Update::new("bob").without_subtype().metadata(json!({"a": null})).if_rev(Rev(7)))
            .remove(Remove::new("carol"))
            .require_absent("dora")
            .author("eve");
        let written = WrittenTransaction::of(entities, || "new".into()).unwrap();
        let start = StartRequest { workflow: "w".into(), id: "x".into(), input: raw("[1,2.50]"), join: true };
        let signal = SignalRequest { execution: "x".into(), name: "paid".into(), payload: raw("{\"a\":1}") };
        for (request, name) in [
            (OutboxRequest::Start(start), "x"),
            (OutboxRequest::Signal(signal), "x"),
            (OutboxRequest::Entities(written), "ada"),
        ] {
            let body = request.write().unwrap();
            let again = OutboxRequest::read(request.kind(), &body).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((again.write().unwrap(), again.name(), again.kind()), (body, name, request.kind()));
        }
    }

    #[test]
    fn a_request_that_cannot_be_read_says_why() {
        for (kind, body, said) in [
            ("sing", "{}", "knows no request \"sing\""),
            ("start", "{", "cannot be read"),
            ("start", r#"{"workflow":"w","id":"x","input":1,"more":2}"#, "unknown field `more`"),
            ("signal", r#"{"execution":"x","name":"n"}"#, "missing field `payload`"),
            ("entities", r#"{"ops":[{"sing":{}}]}"#, "unknown variant `sing`"),
        ] {
            let Err(error) = OutboxRequest::read(kind, body) else { panic!("{kind} {body} is read") };
            assert!(error.contains(said), "{error}");
        }
    }
}
