//! The rules of the conditional commit, as one pure function over the newest state. Every backend decides with it and
//! has no rules of its own.

use bytes::Bytes;

use crate::backend::Rules;
use crate::codec::{self, Reader, put_number, put_optional, put_string};
use crate::commit::{Head, stamped};
use crate::space::{RECEIPTS, SPACES};
use crate::{
    Actual, Change, Check, Commit, CommitId, Committed, FailedCheck, Generation, Key, Range, Receipt, Refusal, Result,
    Rev, StoreError, Timestamp, Version, Write,
};

/// The newest state. It includes commits that are decided but not durable yet. Its methods answer without waiting: a
/// backend whose state is elsewhere first reads what [`crate::backend::Needs`] lists and then answers from
/// [`crate::backend::Facts`].
pub trait Present {
    /// The generation of the last decided commit.
    fn generation(&self) -> Generation;
    /// The head of a key, tombstones included.
    fn head(&self, key: &Key) -> Result<Option<Head>>;
    /// The last version of a key, with its value.
    fn version(&self, key: &Key) -> Result<Option<Version>>;
    /// Some key of the range that was written after `since`. Fails if the history that it needs is no longer kept.
    fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>>;
}

/// The decision about a commit.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// A check failed.
    Refuse(Refusal),
    /// Nothing is written. The receipt is the answer once the state that it was decided on is durable.
    Answer(Receipt),
    /// The commit is made durable and then answered with the receipt.
    Apply(Committed, Receipt),
}

/// Decides a commit. `now` is its time if it is applied.
pub fn evaluate(commit: Commit, present: &impl Present, now: Timestamp) -> Result<Decision> {
    let latest = present.generation();
    let fingerprint = commit.id.map(|_| fingerprint(&commit));
    if let (Some(id), Some(fingerprint)) = (commit.id, fingerprint)
        && let Some(first) = present.version(&receipt_key(id))?
        && let Some(value) = &first.value
    {
        return decode_receipt(value, first.generation, fingerprint, id).map(Decision::Answer);
    }
    let failed = failed_checks(&commit, present, latest)?;
    if !failed.is_empty() {
        return Ok(Decision::Refuse(Refusal { generation: latest, failed }));
    }
    let mut changes = Vec::with_capacity(commit.writes.len() + 1);
    let mut revs = Vec::with_capacity(commit.writes.len());
    for write in commit.writes {
        let head = present.head(write.key())?;
        let (key, value) = match write {
            Write::Put(key, value) => (key, Some(value)),
            Write::PutStamped(key, value, offset) => (key, Some(stamped(&value, offset, latest.next(), now))),
            Write::Delete(key) if head.is_some_and(|head| head.live) => (key, None),
            Write::Delete(_) => {
                revs.push(None);
                continue;
            }
        };
        let rev = head.map_or(Rev(1), |head| head.rev.next());
        revs.push(Some(rev));
        changes.push(Change { key, rev, value });
    }
    // A commit with an id always stores its receipt, and so gets a generation, even if it changes nothing else. If the
    // same commit is sent again later, it must not change anything then.
    if changes.is_empty() && commit.id.is_none() {
        return Ok(Decision::Answer(Receipt { generation: latest, time: now, revs, repeated: false }));
    }
    let generation = latest.next();
    if let (Some(id), Some(fingerprint)) = (commit.id, fingerprint) {
        let value = encode_receipt(fingerprint, now, &revs);
        changes.push(Change { key: receipt_key(id), rev: Rev(1), value: Some(value) });
    }
    let receipt = Receipt { generation, time: now, revs, repeated: false };
    Ok(Decision::Apply(Committed { generation, time: now, meta: commit.meta, changes }, receipt))
}

fn failed_checks(commit: &Commit, present: &impl Present, latest: Generation) -> Result<Vec<FailedCheck>> {
    let mut failed = Vec::new();
    for (index, check) in commit.checks.iter().enumerate() {
        let actual = match check {
            Check::AtRev(key, rev) => match present.head(key)?.filter(|head| head.live) {
                Some(head) if head.rev == *rev => None,
                Some(head) => Some(Actual::AtRev(head.rev)),
                None => Some(Actual::Absent),
            },
            Check::Absent(key) => present.head(key)?.filter(|head| head.live).map(|head| Actual::AtRev(head.rev)),
            Check::Present(key) => match present.head(key)?.filter(|head| head.live) {
                Some(_) => None,
                None => Some(Actual::Absent),
            },
            Check::AtGeneration(generation) => (*generation != latest).then_some(Actual::AtGeneration(latest)),
            Check::Unchanged(_, since) if *since > latest => {
                return Err(StoreError::FutureGeneration { asked: *since, latest });
            }
            Check::Unchanged(range, since) => {
                present.changed_since(range, *since)?.map(|(key, generation)| Actual::Changed(key, generation))
            }
        };
        failed.extend(actual.map(|actual| {
            let right = commit.rights.iter().find(|(guarded, _)| *guarded == index).map(|(_, lost)| lost.clone());
            FailedCheck { index, check: check.clone(), actual, right }
        }));
    }
    Ok(failed)
}

/// Returns the version of a key after a restore, which is the commit `generation` at `time`. `current` is the version
/// in the store, `wanted` the one in the snapshot. Every new rev is higher than all revs that the key ever had. A key
/// that does not change keeps its version.
pub(crate) fn restored(
    key: &Key,
    current: Option<&Version>,
    wanted: Option<&Version>,
    (generation, time): (Generation, Timestamp),
    rules: Rules,
) -> Option<Version> {
    match (key.space(), current, wanted) {
        // A space that was declared after the snapshot stays declared.
        (SPACES, Some(current), None) => return Some(current.clone()),
        // A commit that the restore undoes may be sent again. A commit that the snapshot contains keeps its receipt.
        (RECEIPTS, _, wanted) => return wanted.cloned(),
        _ => {}
    }
    let version = match (current, wanted) {
        (Some(current), Some(wanted)) if current == wanted => Some(current.clone()),
        (Some(current), None) if current.value.is_none() => Some(current.clone()),
        (Some(current), wanted) => {
            let rev = wanted.map_or(current.rev, |wanted| wanted.rev.max(current.rev)).next();
            Some(Version { rev, generation, time, value: wanted.and_then(|wanted| wanted.value.clone()) })
        }
        // A key that is used once may have existed and left no tombstone. No key was written more often than there are
        // generations, so this rev is higher than any that the key ever had.
        (None, Some(wanted)) if rules.used_once => {
            Some(Version { rev: Rev(generation.0), generation, time, value: wanted.value.clone() })
        }
        (None, wanted) => wanted.map(|wanted| Version { generation, time, ..wanted.clone() }),
    };
    // No view can read before the restore, so a key that is used once needs no tombstone.
    version.filter(|version| version.value.is_some() || !rules.used_once)
}

/// Rebuilds the commit that wrote a restored receipt, so that the receipt is removed when it expires.
pub(crate) fn restored_receipt(key: &Key, version: &Version) -> Option<Committed> {
    let value = version.value.as_ref().filter(|_| key.space() == RECEIPTS)?;
    let changes = vec![Change { key: key.clone(), rev: version.rev, value: Some(value.clone()) }];
    Some(Committed { generation: version.generation, time: version.time, meta: Bytes::new(), changes })
}

pub(crate) fn receipt_key(id: CommitId) -> Key {
    Key::new(RECEIPTS, &id.0)
}

const RECEIPT_VERSION: u8 = 1;

fn encode_receipt(fingerprint: u64, time: Timestamp, revs: &[Option<Rev>]) -> Bytes {
    let mut out = vec![RECEIPT_VERSION];
    out.extend_from_slice(&fingerprint.to_le_bytes());
    put_number(&mut out, time.0);
    put_number(&mut out, revs.len() as u64);
    for rev in revs {
        put_number(&mut out, rev.map_or(0, |rev| rev.0));
    }
    out.into()
}

fn decode_receipt(value: &Bytes, generation: Generation, fingerprint: u64, id: CommitId) -> Result<Receipt> {
    match read_receipt(value, generation) {
        Some((first, receipt)) if first == fingerprint => Ok(receipt),
        Some(_) => Err(StoreError::CommitIdReused { id }),
        None => Err(StoreError::corrupt(format!("the receipt of commit {id}"), "it cannot be read")),
    }
}

/// Returns the fingerprint of the commit and its receipt.
fn read_receipt(value: &Bytes, generation: Generation) -> Option<(u64, Receipt)> {
    let mut reader = Reader(value.clone());
    if reader.byte()? != RECEIPT_VERSION {
        return None;
    }
    let fingerprint = u64::from_le_bytes(reader.take(8)?.as_ref().try_into().ok()?);
    let time = Timestamp(reader.number()?);
    let count = reader.number()?;
    let revs = (0..count).map(|_| reader.number().map(|rev| (rev > 0).then_some(Rev(rev)))).collect::<Option<_>>()?;
    reader.end()?;
    Some((fingerprint, Receipt { generation, time, revs, repeated: true }))
}

/// A hash of the commit's contents. It shows whether two commits under one id are the same commit.
fn fingerprint(commit: &Commit) -> u64 {
    let mut out = Vec::new();
    put_string(&mut out, &commit.meta);
    for check in &commit.checks {
        match check {
            Check::AtRev(key, rev) => {
                out.push(1);
                put_string(&mut out, key.encoded());
                put_number(&mut out, rev.0);
            }
            Check::Absent(key) => {
                out.push(2);
                put_string(&mut out, key.encoded());
            }
            Check::Present(key) => {
                out.push(7);
                put_string(&mut out, key.encoded());
            }
            Check::AtGeneration(generation) => {
                out.push(3);
                put_number(&mut out, generation.0);
            }
            Check::Unchanged(range, since) => {
                out.push(4);
                put_string(&mut out, range.start());
                put_string(&mut out, range.end());
                put_number(&mut out, since.0);
            }
        }
    }
    for write in &commit.writes {
        let (kind, value, offset) = match write {
            Write::Put(_, value) => (5, Some(value), None),
            Write::PutStamped(_, value, offset) => (6, Some(value), Some(*offset)),
            Write::Delete(_) => (5, None, None),
        };
        out.push(kind);
        put_string(&mut out, write.key().encoded());
        put_optional(&mut out, value);
        offset.into_iter().for_each(|offset| put_number(&mut out, offset as u64));
    }
    codec::checksum(0, &out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpaceId;

    /// A version at a generation. Each generation is ten seconds after the one before.
    fn version(rev: u64, generation: u64, value: Option<&'static str>) -> Version {
        let (generation, time) = (Generation(generation), Timestamp(10_000_000 * generation));
        Version { rev: Rev(rev), generation, time, value: value.map(Bytes::from) }
    }

    #[test]
    fn a_restore_never_reuses_a_rev() {
        let (key, new) = (Key::new(SpaceId(16), b"k"), (Generation(90), Timestamp(900_000_000)));
        let check = |current: Option<Version>, wanted: Option<Version>, expected: Option<Version>| {
            assert_eq!(
                restored(&key, current.as_ref(), wanted.as_ref(), new, Rules::default()),
                expected,
                "{current:?} {wanted:?}"
            );
        };
        let old = version(3, 10, Some("old"));
        check(Some(old.clone()), Some(old.clone()), Some(old.clone()));
        check(Some(version(7, 50, Some("new"))), Some(old.clone()), Some(version(8, 90, Some("old"))));
        check(Some(version(7, 50, None)), Some(old.clone()), Some(version(8, 90, Some("old"))));
        check(Some(version(7, 50, Some("new"))), None, Some(version(8, 90, None)));
        check(Some(version(7, 50, None)), None, Some(version(7, 50, None)));
        check(None, Some(old.clone()), Some(version(3, 90, Some("old"))));
        // A copy of the store that was written independently may contain the same write with another time.
        let other = Version { time: Timestamp(7), ..old.clone() };
        check(Some(old), Some(other), Some(version(4, 90, Some("old"))));
        check(None, None, None);
    }

    #[test]
    fn a_receipt_is_read_back_and_other_contents_under_its_id_are_refused() {
        let id = CommitId([7; 16]);
        let key = Key::new(SpaceId(16), b"k");
        let one = fingerprint(&Commit::new().put(&key, "a"));
        let two = fingerprint(&Commit::new().put(&key, "b"));
        let revs = vec![Some(Rev(4)), None];
        let stored = encode_receipt(one, Timestamp(5), &revs);
        let receipt = decode_receipt(&stored, Generation(9), one, id).unwrap();
        assert_eq!(receipt, Receipt { generation: Generation(9), time: Timestamp(5), revs, repeated: true });
        assert!(matches!(decode_receipt(&stored, Generation(9), two, id), Err(StoreError::CommitIdReused { .. })));
    }
}
