//! What is stored of calls under an `Idempotency-Key`, and its keys. Space `server.calls` holds three kinds of keys:
//! the records, their order in time, and the marks of attempts. Nothing here decides anything.

use latchwork::store::Check;
use latchwork::store::{Bytes, Key, Right, Space, Timestamp, Uuid};
use serde::{Deserialize, Serialize};

/// The name of the space.
pub(crate) const CALLS: &str = "server.calls";

const RECORD: u8 = 0;
const BY_TIME: u8 = 1;
const ATTEMPT: u8 = 2;

/// The version of the record.
const VERSION: u8 = 1;

/// Stands for a namespace's store, the subject and the key: SHA-256 of both.
pub(crate) type Digest = [u8; 32];

/// A call, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredCall {
    /// Generated at the first attempt. All attempts give it to the library as their own idempotency key.
    pub(crate) id: Uuid,
    /// Stands for method, path, conditions and body.
    pub(crate) request: Digest,
    /// When the first attempt began.
    pub(crate) began: Timestamp,
    /// The generation of the store before the first attempt began: what the call did is later.
    pub(crate) since: u64,
    /// The number of the attempt that ran last.
    pub(crate) attempt: u32,
    /// The life of the server that runs it.
    pub(crate) life: Uuid,
    /// The opening of the store in which it runs, if the store has openings.
    pub(crate) opening: Option<Uuid>,
    pub(crate) state: CallState,
}

/// How far a call is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CallState {
    /// An attempt runs, or was cut off.
    Running,
    /// The last attempt ended without an answer that can be kept: the next attempt runs at once.
    Undecided,
    /// The answer is known.
    Finished(StoredAnswer),
}

/// An answer that is given again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredAnswer {
    pub(crate) status: u16,
    /// Names and values.
    pub(crate) headers: Vec<(String, String)>,
    /// Stored behind the other fields, as bytes.
    #[serde(skip)]
    pub(crate) body: Bytes,
}

impl StoredCall {
    /// A byte for the version, the length of the fields as four bytes, the fields as JSON, the body of the answer.
    pub(crate) fn encode(&self) -> Option<Bytes> {
        let fields = serde_json::to_vec(self).ok()?;
        let length = u32::try_from(fields.len()).ok()?;
        let body: &[u8] = match &self.state {
            CallState::Finished(answer) => &answer.body,
            CallState::Running | CallState::Undecided => &[],
        };
        Some([&[VERSION][..], &length.to_be_bytes(), &fields, body].concat().into())
    }

    pub(crate) fn decode(stored: &Bytes) -> Option<StoredCall> {
        let (length, rest) = stored.strip_prefix(&[VERSION])?.split_first_chunk::<4>()?;
        let (fields, body) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        let mut call: StoredCall = serde_json::from_slice(fields).ok()?;
        if let CallState::Finished(answer) = &mut call.state {
            answer.body = Bytes::copy_from_slice(body);
        }
        Some(call)
    }
}

/// The keys of the space.
#[derive(Debug, Clone)]
pub(crate) struct CallKeys(pub(crate) Space);

impl CallKeys {
    pub(crate) fn record(&self, digest: &Digest) -> Key {
        self.0.key([&[RECORD][..], digest].concat())
    }

    /// The place of a record in the order of time.
    pub(crate) fn place(&self, began: Timestamp, digest: &Digest) -> Key {
        self.0.key([&[BY_TIME][..], &began.0.to_be_bytes(), digest].concat())
    }

    /// The places before a time.
    pub(crate) fn places_before(&self, time: Timestamp) -> latchwork::store::Range {
        self.0.range(&[BY_TIME][..]..&[&[BY_TIME][..], &time.0.to_be_bytes()].concat()[..])
    }

    /// The digest in the key of a place.
    pub(crate) fn digest_of(place: &Key) -> Option<Digest> {
        place.bytes().get(9..)?.try_into().ok()
    }

    /// The mark of an attempt: it exists as long as the attempt may change anything. Each key is used once, so that an
    /// attempt can never take the mark of another for its own.
    pub(crate) fn attempt(&self, id: Uuid, attempt: u32) -> Key {
        self.0.key([&[ATTEMPT][..], id.as_bytes(), &attempt.to_be_bytes()].concat())
    }
}

/// The right of an attempt to change something. It is lost when another attempt takes over.
#[derive(Debug, Clone)]
pub(crate) struct AttemptRight(pub(crate) Key);

impl Right for AttemptRight {
    fn check(&self) -> Check {
        Check::Present(self.0.clone())
    }

    fn lost(&self) -> String {
        "another request under the same Idempotency-Key has taken over".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_comes_back_as_it_was_stored() {
        let answer = StoredAnswer {
            status: 201,
            headers: vec![("etag".into(), "\"r1\"".into())],
            body: Bytes::from_static(b"{\"a\":\"\xff\"}"),
        };
        for state in [CallState::Running, CallState::Undecided, CallState::Finished(answer)] {
            let call = StoredCall {
                id: Uuid::from_u128(7),
                request: [9; 32],
                began: Timestamp(5),
                since: 12,
                attempt: 3,
                life: Uuid::from_u128(8),
                opening: Some(Uuid::from_u128(9)),
                state,
            };
            let stored = call.encode().unwrap();
            assert_eq!(stored[0], 1);
            assert_eq!(StoredCall::decode(&stored), Some(call));
            assert_eq!(StoredCall::decode(&stored.slice(..4)), None);
        }
    }
}
