//! Idempotency keys: the answer of a mutation is kept for a day, and written by the same commit as its change.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json;
use crate::lane::KeptAnswers;
use crate::record::Record;
use crate::state::Result;
use crate::store::{Bytes, Commit, Key, Store, Timestamp};

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

/// The kept answers of a store.
pub(crate) struct Answers(pub(crate) KeptAnswers);

impl Answers {
    pub(crate) fn key(&self, container: &Key, once: &str) -> Key {
        let mut name = container.bytes().to_vec();
        json::encode(&mut name, Some(&Value::String(once.into())));
        self.0.key(&name)
    }

    pub(crate) async fn get(&self, store: &Store, key: &Key) -> Result<Option<KeptAnswer>> {
        let item = store.get(key).await?;
        // An unreadable answer is an error: to run the mutation again would apply it twice.
        let answer = item.map(|item| KeptAnswer::decode(&item.value)).transpose();
        Ok(answer.map_err(|why| why.at("the answer to an idempotency key"))?)
    }

    /// Adds an answer to a commit, with the check that there is none yet.
    pub(crate) fn put(&self, commit: Commit, key: &Key, now: Timestamp, answer: &KeptAnswer) -> Commit {
        self.0.put(key, now, answer.encode()).into_iter().fold(commit.absent(key), Commit::write)
    }

    /// Adds the removal of some outdated answers to a commit.
    pub(crate) async fn sweep(&self, store: &Store, commit: Commit) -> Result<Commit> {
        let view = store.view().await?;
        Ok(self.0.sweep(&view, store.env().now(), commit).await?)
    }
}
