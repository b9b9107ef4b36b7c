//! The machines of what an execution shows to others: its published values and its open reviews.

use std::collections::BTreeMap;

use crate::store::Key;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::stored::kept::Published;

/// The published values of an execution.
#[derive(Default)]
pub(crate) struct Publishing {
    /// `None` until they are loaded; they include values that are not committed yet.
    values: Option<Published>,
    /// True if no commit holds the values as they are now.
    is_new: bool,
    /// The values of the present poll.
    draft: BTreeMap<String, String>,
}

impl Publishing {
    pub(crate) fn is_loaded(&self) -> bool {
        self.values.is_some()
    }

    pub(crate) fn load(&mut self, values: Published) {
        self.values.get_or_insert(values);
    }

    /// The value under a name, as the code sees it.
    pub(crate) fn get(&self, name: &str) -> Option<&String> {
        let before = || self.values.as_ref().and_then(|values| values.0.get(name));
        self.draft.get(name).or_else(before)
    }

    pub(super) fn publish(&mut self, name: &str, text: String) {
        self.draft.insert(name.into(), text);
    }

    /// The poll is over: the next commit writes what was published in it.
    pub(super) fn release(&mut self) {
        let draft = std::mem::take(&mut self.draft);
        if !draft.is_empty() {
            self.values.get_or_insert_default().0.extend(draft);
            self.is_new = true;
        }
    }

    /// Takes the values for a commit, if it has to write them.
    pub(super) fn take(&mut self) -> Option<&Published> {
        std::mem::take(&mut self.is_new).then_some(self.values.as_ref())?
    }

    /// The commit failed: the next one writes the values.
    pub(super) fn put_back(&mut self) {
        self.is_new = self.values.is_some();
    }

    /// How many bytes all values take together with this one.
    pub(crate) fn bytes_with(&self, name: &str, text: &str) -> usize {
        let bytes = |(name, text): (&String, &String)| name.len() + text.len() + 8;
        let before = self.values.iter().flat_map(|values| &values.0);
        let before = before.filter(|(other, _)| *other != name && !self.draft.contains_key(*other)).map(bytes);
        let since = self.draft.iter().filter(|(other, _)| *other != name).map(bytes);
        before.chain(since).sum::<usize>() + name.len() + text.len() + 8
    }
}

/// The reviews that the code has opened, and those that are to be closed.
#[derive(Default)]
pub(crate) struct OpenReviews {
    /// The keys of the reviews that the code waits for, by the place where it opened them.
    open: BTreeMap<Place, Key>,
    /// The reviews that were given up. The next commit closes them.
    closing: Vec<Key>,
    /// Reviews that were given up in the present poll.
    draft: Vec<Key>,
}

impl OpenReviews {
    pub(crate) fn open(&mut self, place: &Place, key: Key) {
        self.open.insert(place.clone(), key);
    }

    pub(crate) fn decided(&mut self, place: &Place) {
        self.open.remove(place);
    }

    /// A branch was dropped: its reviews are closed.
    pub(super) fn give_up(&mut self, branch: &BranchPath) {
        let lost = self.open.extract_if(.., |place, _| place.branch.is_within(branch));
        self.draft.extend(lost.map(|(_, key)| key));
    }

    pub(super) fn close(&mut self, key: Key) {
        self.draft.push(key);
    }

    /// The poll is over: the next commit closes the reviews that were given up in it.
    pub(super) fn release(&mut self) {
        self.closing.append(&mut self.draft);
    }

    pub(super) fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.closing)
    }

    /// The commit failed: the next one closes the reviews.
    pub(super) fn put_back(&mut self, closing: Vec<Key>) {
        self.closing.extend(closing);
    }

    pub(super) fn begin_anew(&mut self) {
        self.open.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_written_by_the_first_commit_after_its_poll_and_again_if_that_commit_fails() {
        let mut publishing = Publishing::default();
        publishing.publish("stage", "1".into());
        assert!(publishing.take().is_none(), "the poll is not over");
        assert_eq!(publishing.get("stage").map(String::as_str), Some("1"), "the code sees its own value at once");
        publishing.release();
        assert!(publishing.take().is_some());
        assert!(publishing.take().is_none(), "a commit in flight holds it");
        publishing.put_back();
        assert!(publishing.take().is_some());
        publishing.publish("stage", "22".into());
        assert_eq!(publishing.bytes_with("other", "x"), "stage".len() + 2 + 8 + "other".len() + 1 + 8);
        assert_eq!(publishing.bytes_with("stage", "x"), "stage".len() + 1 + 8, "it replaces the earlier value");
    }
}
