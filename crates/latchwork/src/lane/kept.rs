//! Answers under idempotency keys, as a space keeps them: each for a day, in the order of time, so that outdated ones
//! are found and removed. This file knows no answer and no change.

use std::time::Duration;

use crate::store::{Bytes, Commit, Key, Order, Space, StoreError, Timestamp, View, Write};

/// How long an answer is kept.
pub(crate) const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// The number of outdated answers that are removed at once.
const SWEPT: usize = 8;

const ANSWERS: u8 = 0;
const BY_TIME: u8 = 1;

/// The space of kept answers. There are two kinds of keys: the answers, and their order in time.
#[derive(Debug, Clone)]
pub(crate) struct KeptAnswers(pub(crate) Space);

impl KeptAnswers {
    /// The key of an answer.
    pub(crate) fn key(&self, name: &[u8]) -> Key {
        self.0.key([&[ANSWERS][..], name].concat())
    }

    /// Keeps an answer. The commit also checks that there is none under the key.
    pub(crate) fn put(&self, key: &Key, now: Timestamp, answer: Bytes) -> [Write; 2] {
        let place = self.0.key([&[BY_TIME][..], &now.0.to_be_bytes(), &key.bytes()[1..]].concat());
        [Write::Put(key.clone(), answer), Write::Put(place, Bytes::new())]
    }

    /// Adds the removal of some outdated answers to a commit.
    pub(crate) async fn sweep(&self, view: &View, now: Timestamp, mut commit: Commit) -> Result<Commit, StoreError> {
        let end = [&[BY_TIME][..], &now.minus(KEPT).0.to_be_bytes()].concat();
        let outdated = self.0.range(&[BY_TIME][..]..&end[..]);
        for (place, _) in view.scan(&outdated, Order::Ascending, SWEPT).await? {
            let answer = self.key(&place.bytes()[9..]);
            // If the answer was written again meanwhile, the check refuses the commit.
            if let Some(item) = view.get(&answer).await? {
                commit = commit.at_rev(&answer, item.rev).delete(&answer);
            }
            commit = commit.delete(&place);
        }
        Ok(commit)
    }
}
