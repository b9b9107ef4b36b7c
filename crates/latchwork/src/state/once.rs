//! Idempotency keys: the answer of a mutation is kept for a day, and written by the same commit as its change.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json;
use crate::record::Record;
use crate::state::Result;
use crate::store::{Bytes, Commit, Key, Order, Space, Store, Timestamp};

/// How long an answer is kept.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// The number of outdated answers that each new answer removes.
const SWEPT: usize = 8;

/// A kept answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct KeptAnswer {
    pub(crate) operation: String,
    /// The fingerprint of the call with its arguments.
    pub(crate) fingerprint: u64,
    pub(crate) value: Value,
    pub(crate) rev: u64,
    pub(crate) changed: bool,
}

impl Record for KeptAnswer {
    fn encode(&self) -> Bytes {
        let mut out = vec![Self::VERSION];
        serde_json::to_writer(&mut out, self).expect("an answer can be written as JSON");
        out.into()
    }

    fn read(_: u8, fields: &[u8]) -> Option<KeptAnswer> {
        json::parse_stored(fields)
    }
}

/// The kept answers. There are two kinds of keys: the answers, and their order in time.
pub(crate) struct Answers {
    pub(crate) space: Space,
}

const ANSWERS: u8 = 0;
const BY_TIME: u8 = 1;

fn text(out: &mut Vec<u8>, text: &str) {
    json::encode(out, Some(&Value::String(text.into())));
}

impl Answers {
    pub(crate) fn key(&self, container: &Key, once: &str) -> Key {
        let mut key = vec![ANSWERS];
        key.extend_from_slice(container.bytes());
        text(&mut key, once);
        self.space.key(key)
    }

    fn place(&self, time: Timestamp, answer: &Key) -> Key {
        let mut key = vec![BY_TIME];
        key.extend_from_slice(&time.0.to_be_bytes());
        key.extend_from_slice(&answer.bytes()[1..]);
        self.space.key(key)
    }

    pub(crate) async fn get(&self, store: &Store, key: &Key) -> Result<Option<KeptAnswer>> {
        let item = store.view().await?.get(key).await?;
        // An unreadable answer is an error: to run the mutation again would apply it twice.
        let answer = item.map(|item| KeptAnswer::decode(&item.value)).transpose();
        Ok(answer.map_err(|why| why.at("the answer to an idempotency key"))?)
    }

    /// Adds an answer to a commit, with the check that there is none yet.
    pub(crate) fn put(&self, commit: Commit, key: &Key, now: Timestamp, answer: &KeptAnswer) -> Commit {
        commit.absent(key).put(key, answer.encode()).put(&self.place(now, key), Vec::new())
    }

    /// Adds the removal of some outdated answers to a commit.
    pub(crate) async fn sweep(&self, store: &Store, mut commit: Commit) -> Result<Commit> {
        let mut end = vec![BY_TIME];
        end.extend_from_slice(&store.env().now().minus(KEPT).0.to_be_bytes());
        let outdated = self.space.range(&[BY_TIME][..]..&end[..]);
        let view = store.view().await?;
        for (place, _) in view.scan(&outdated, Order::Ascending, SWEPT).await? {
            let mut answer = vec![ANSWERS];
            answer.extend_from_slice(&place.bytes()[9..]);
            let answer = self.space.key(answer);
            // If the answer was written again meanwhile, the check refuses the commit.
            if let Some(item) = view.get(&answer).await? {
                commit = commit.at_rev(&answer, item.rev).delete(&answer);
            }
            commit = commit.delete(&place);
        }
        Ok(commit)
    }
}
