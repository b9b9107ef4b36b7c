//! A part of a commit: what one layer adds to it. Every check carries a tag that names its purpose, so a refusal is
//! understood by tags and not by positions.

use std::ops::Range;

use crate::store::{Bytes, Check, Commit, FailedCheck, Generation, Key, Receipt, Refusal, Rev, Space, Write};

/// The purpose of a check. Only the layer that has set a tag reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag(pub(crate) &'static str);

/// Returns the check that a key is still as it was found: at a rev, or absent.
pub(crate) fn as_found(key: Key, rev: Option<Rev>) -> Check {
    match rev {
        Some(rev) => Check::AtRev(key, rev),
        None => Check::Absent(key),
    }
}

/// The checks and writes of one layer, and callbacks for when they land or fail.
#[derive(Default)]
pub(crate) struct Part {
    checks: Vec<(Tag, Check)>,
    writes: Vec<Write>,
    /// Written after all others, and not counted among them.
    numbered: Vec<NumberedWrite>,
    /// Each with the range of writes whose revs it gets.
    landed: Vec<(Range<usize>, Landed)>,
    /// Each with the index of its check.
    failed: Vec<(usize, Failed)>,
}

/// A write whose key is a prefix and its number among the writes of the commit under that prefix. So several parts of a
/// commit can each have one, and the space has only as many keys as the largest commit.
#[derive(Clone)]
struct NumberedWrite {
    space: Space,
    prefix: Vec<u8>,
    value: Bytes,
}

impl NumberedWrite {
    fn place(self, commit: Commit) -> Commit {
        let range = self.space.prefix(&self.prefix[..]);
        let number = commit.writes().iter().filter(|write| range.contains(write.key())).count() as u32;
        let key = self.space.key([&self.prefix[..], &number.to_be_bytes()].concat());
        commit.write(Write::Put(key, self.value))
    }
}

type Landed = Box<dyn FnOnce(Landing<'_>) + Send>;
type Failed = Box<dyn FnOnce() + Send>;

/// The result of a landed part: the commit's generation, and the revs of the part's own writes.
#[derive(Clone, Copy)]
pub(crate) struct Landing<'a> {
    pub(crate) generation: Generation,
    pub(crate) revs: &'a [Option<Rev>],
}

impl Landing<'_> {
    /// The new rev of the key of the last write.
    pub(crate) fn last(&self) -> Option<Rev> {
        self.revs.last().copied().flatten()
    }

    /// The new rev of the key of a write.
    pub(crate) fn rev(&self, write: usize) -> Option<Rev> {
        self.revs.get(write).copied().flatten()
    }
}

/// The position of a part in a commit.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    first_check: usize,
    tags: Vec<Tag>,
    writes: Range<usize>,
}

impl Part {
    pub(crate) fn check(mut self, tag: Tag, check: Check) -> Part {
        self.checks.push((tag, check));
        self
    }

    /// Adds a check, and a callback that runs if it fails.
    pub(crate) fn check_or(mut self, tag: Tag, check: Check, failed: impl FnOnce() + Send + 'static) -> Part {
        self.failed.push((self.checks.len(), Box::new(failed)));
        self.check(tag, check)
    }

    pub(crate) fn at_rev(self, tag: Tag, key: &Key, rev: Rev) -> Part {
        self.check(tag, Check::AtRev(key.clone(), rev))
    }

    pub(crate) fn absent(self, tag: Tag, key: &Key) -> Part {
        self.check(tag, Check::Absent(key.clone()))
    }

    pub(crate) fn write(mut self, write: Write) -> Part {
        self.writes.push(write);
        self
    }

    pub(crate) fn put(self, key: &Key, value: impl Into<Bytes>) -> Part {
        self.write(Write::Put(key.clone(), value.into()))
    }

    pub(crate) fn delete(self, key: &Key) -> Part {
        self.write(Write::Delete(key.clone()))
    }

    /// Adds a write under the prefix and a number that is free in the commit. Callbacks do not get its rev.
    pub(crate) fn put_numbered(mut self, space: &Space, prefix: Vec<u8>, value: Bytes) -> Part {
        self.numbered.push(NumberedWrite { space: space.clone(), prefix, value });
        self
    }

    /// Adds a callback that runs when the part has landed. It gets the revs of the writes added so far.
    pub(crate) fn then(mut self, landed: impl FnOnce(Landing<'_>) + Send + 'static) -> Part {
        self.landed.push((0..self.writes.len(), Box::new(landed)));
        self
    }

    /// Merges two parts.
    pub(crate) fn and(mut self, other: Part) -> Part {
        let (from, first) = (self.writes.len(), self.checks.len());
        self.failed.extend(other.failed.into_iter().map(|(check, failed)| (check + first, failed)));
        self.checks.extend(other.checks);
        self.writes.extend(other.writes);
        self.numbered.extend(other.numbered);
        self.landed.extend(other.landed.into_iter().map(|(its, landed)| (its.start + from..its.end + from, landed)));
        self
    }

    pub(crate) fn writes(&self) -> &[Write] {
        &self.writes
    }

    /// True if both parts write the same key, which one commit cannot do.
    pub(crate) fn writes_any_of(&self, other: &Part) -> bool {
        other.writes.iter().any(|write| self.writes.iter().any(|own| own.key() == write.key()))
    }

    /// Removes the writes that `keep` rejects.
    pub(crate) fn retain_writes(&mut self, keep: impl Fn(&Write) -> bool) {
        let kept: Vec<bool> = self.writes.iter().map(&keep).collect();
        let before = |place: usize| kept[..place].iter().filter(|kept| **kept).count();
        self.landed.iter_mut().for_each(|(its, _)| *its = before(its.start)..before(its.end));
        self.writes.retain(keep);
    }

    /// About the number of bytes that the part adds to a commit.
    pub(crate) fn bytes(&self) -> usize {
        let value = |write: &Write| if let Write::Put(_, value) = write { value.len() } else { 0 };
        let numbered = self.numbered.iter().map(|it| it.prefix.len() + it.value.len() + 64).sum::<usize>();
        numbered + self.writes.iter().map(|write| value(write) + 64).sum::<usize>()
    }

    /// Adds the part to a commit.
    pub(crate) fn place(&self, commit: Commit) -> (Commit, Placed) {
        let (first_check, first_write) = (commit.checks().len(), commit.writes().len());
        let tags = self.checks.iter().map(|(tag, _)| *tag).collect();
        let commit = self.checks.iter().fold(commit, |commit, (_, check)| commit.check(check.clone()));
        let commit = self.writes.iter().fold(commit, |commit, write| commit.write(write.clone()));
        let writes = first_write..commit.writes().len();
        let commit = self.numbered.iter().cloned().fold(commit, |commit, numbered| numbered.place(commit));
        (commit, Placed { first_check, tags, writes })
    }

    /// The same for a part that is not sent again. The returned part has the callbacks only.
    pub(crate) fn place_whole(self, commit: Commit) -> (Commit, Placed, Part) {
        let (first_check, first_write) = (commit.checks().len(), commit.writes().len());
        let mut tags = Vec::with_capacity(self.checks.len());
        let mut commit = commit;
        for (tag, check) in self.checks {
            tags.push(tag);
            commit = commit.check(check);
        }
        commit = self.writes.into_iter().fold(commit, Commit::write);
        let writes = first_write..commit.writes().len();
        commit = self.numbered.into_iter().fold(commit, |commit, numbered| numbered.place(commit));
        let rest = Part { landed: self.landed, failed: self.failed, ..Part::default() };
        (commit, Placed { first_check, tags, writes }, rest)
    }

    /// Runs the callbacks of the checks that have failed.
    pub(crate) fn refuse(self, placed: &Placed, refusal: &Refusal) {
        let failed: Vec<usize> = placed.failed(refusal).map(|(place, ..)| place).collect();
        self.failed.into_iter().filter(|(check, _)| failed.contains(check)).for_each(|(_, failed)| failed());
    }

    /// Runs the callbacks of a landed part.
    pub(crate) fn land(self, landing: Landing<'_>) {
        for (its, landed) in self.landed {
            landed(Landing { revs: landing.revs.get(its).unwrap_or_default(), ..landing });
        }
    }
}

impl Placed {
    /// The checks of this part that have failed, each with its index in the part.
    pub(crate) fn failed<'a>(
        &'a self,
        refusal: &'a Refusal,
    ) -> impl Iterator<Item = (usize, Tag, &'a FailedCheck)> + 'a {
        refusal.failed.iter().filter_map(|failed| {
            let place = failed.index.checked_sub(self.first_check)?;
            Some((place, *self.tags.get(place)?, failed))
        })
    }

    /// True if a check of this part with this tag has failed.
    pub(crate) fn has_failed(&self, refusal: &Refusal, tag: Tag) -> bool {
        self.failed(refusal).any(|(_, failed, _)| failed == tag)
    }

    /// The revs and the generation with which the part has landed.
    pub(crate) fn landing<'a>(&self, receipt: &'a Receipt) -> Landing<'a> {
        Landing { generation: receipt.generation, revs: receipt.revs.get(self.writes.clone()).unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::store::{Outcome, SpaceSpec, Store};

    const A: Tag = Tag("a");
    const B: Tag = Tag("b");

    /// Each of the two parts of the commit is merged from two. Every callback gets the revs of its own writes, and a
    /// refusal is found under the tags of the part whose check has failed.
    #[tokio::test]
    async fn each_part_gets_its_own_revs_and_failed_checks() {
        let store = Store::memory().await.unwrap();
        let space = store.space(SpaceSpec::new("s")).await.unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|key| space.key(key));
        assert!(store.commit(Commit::new().put(&b, "0")).await.unwrap().is_applied());
        let told = Arc::new(Mutex::new(Vec::new()));
        let part = |key: &Key, tag: Tag| {
            let (told, name) = (told.clone(), tag.0);
            let part = Part::default().check(tag, Check::Absent(c.clone())).put(key, "1");
            part.then(move |landing| told.lock().unwrap().push((name, landing.rev(0), landing.revs.len())))
        };
        let send = async || {
            let (commit, first) = part(&a, A).place(Commit::new());
            let (commit, second, rest) = part(&b, B).and(Part::default().put(&c, "1")).place_whole(commit);
            (store.commit(commit).await.unwrap(), first, second, rest)
        };
        let (Outcome::Applied(receipt), first, second, rest) = send().await else { panic!("it lands") };
        part(&a, A).land(first.landing(&receipt));
        rest.land(second.landing(&receipt));
        assert_eq!(*told.lock().unwrap(), [("a", Some(Rev(1)), 1), ("b", Some(Rev(2)), 1)]);
        let (Outcome::Refused(refusal), first, second, _) = send().await else { panic!("it is refused") };
        assert!(first.has_failed(&refusal, A) && !first.has_failed(&refusal, B));
        assert!(second.has_failed(&refusal, B) && !second.has_failed(&refusal, A));
    }
}
