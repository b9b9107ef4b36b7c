//! Replaces everything in the index at once: the index's part of a restore. Which versions result is decided elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use redb::ReadableTable;

use super::record::{Progress, decode_key, decode_version};
use super::take::{Current, Touched, put_current, put_floors, put_progress, put_receipt_row};
use super::{CURRENT, Failure, Index, PAST, TOUCHED};
use crate::backend::Room;
use crate::snapshot::BATCH_BYTES;
use crate::{Generation, Key, Result, SpaceId, Version};

/// Decides the new version of a key from its stored version and the wanted one.
type Decide<'a> = dyn Fn(&Key, Option<&Version>, Option<&Version>) -> Option<Version> + 'a;

/// Returns the new floors of the given spaces and of all other known ones. It is called last and may fail.
type Floors<'a> = dyn Fn(BTreeSet<SpaceId>) -> Result<BTreeMap<SpaceId, Generation>> + 'a;

impl Index {
    /// Replaces the last version of every key with the version that `decide` returns, and drops all history, in one
    /// durable transaction.
    pub(in crate::file) fn replace(
        &self,
        wanted: &mut dyn Iterator<Item = Result<(Key, Version)>>,
        decide: &Decide<'_>,
        floors: &Floors<'_>,
        progress: Progress,
    ) -> Result<()> {
        self.guarded(|| {
            let transaction = self.begin()?;
            transaction.delete_table(PAST)?;
            transaction.delete_table(TOUCHED)?;
            transaction.open_table(PAST)?;
            let floors = {
                let (current, touched) = (transaction.open_table(CURRENT)?, transaction.open_table(TOUCHED)?);
                let mut replacement = Replacement { current, touched, decide, met: BTreeSet::new() };
                replacement.run(&mut wanted.peekable())?;
                floors(replacement.met).map_err(Failure::Store)?
            };
            put_floors(&transaction, &floors)?;
            put_progress(&transaction, &progress)?;
            transaction.commit()?;
            Ok(())
        })
    }
}

struct Replacement<'a> {
    current: Current<'a>,
    touched: Touched<'a>,
    decide: &'a Decide<'a>,
    met: BTreeSet<SpaceId>,
}

impl Replacement<'_> {
    /// Merges the stored keys, page by page, with the wanted ones. Both are in key order.
    fn run(&mut self, wanted: &mut Wanted<'_>) -> Result<(), Failure> {
        let mut after: Option<Key> = None;
        loop {
            let page = self.page(after.as_ref())?;
            for (key, old) in &page {
                while let Some((key, new)) = next_below(wanted, Some(key))? {
                    self.put(&key, None, Some(&new))?;
                }
                let new = next_equal(wanted, key)?;
                self.put(key, Some(old), new.as_ref())?;
            }
            match page.into_iter().next_back() {
                Some((key, _)) => after = Some(key),
                None => break,
            }
        }
        while let Some((key, new)) = next_below(wanted, None)? {
            self.put(&key, None, Some(&new))?;
        }
        Ok(())
    }

    /// Reads a page of stored keys before they are changed: redb cannot iterate over a table while it is changed.
    fn page(&self, after: Option<&Key>) -> Result<Vec<(Key, Version)>, Failure> {
        let from = after.map_or(Bound::Unbounded, |key| Bound::Excluded(key.encoded()));
        let (mut page, mut room) = (Vec::new(), Room::of_bytes(BATCH_BYTES));
        let mut rows = self.current.range::<&[u8]>((from, Bound::Unbounded))?;
        while room.is_left()
            && let Some(row) = rows.next()
        {
            let (key, value) = row?;
            let (key, version) = (decode_key(key.value())?, decode_version(key.value(), value.value())?);
            room.take(&key, &version);
            page.push((key, version));
        }
        Ok(page)
    }

    fn put(&mut self, key: &Key, old: Option<&Version>, new: Option<&Version>) -> Result<(), Failure> {
        self.met.insert(key.space());
        let version = (self.decide)(key, old, new);
        if let Some(version) = &version {
            put_receipt_row(&mut self.touched, key, version)?;
        }
        put_current(&mut self.current, key, version.as_ref())
    }
}

type Wanted<'a> = std::iter::Peekable<&'a mut dyn Iterator<Item = Result<(Key, Version)>>>;

/// Returns the next wanted record if its key is below `key`; without a `key`, any next record.
fn next_below(wanted: &mut Wanted<'_>, key: Option<&Key>) -> Result<Option<(Key, Version)>, Failure> {
    let next = wanted.next_if(|next| match next {
        Ok((next, _)) => key.is_none_or(|key| next < key),
        Err(_) => true,
    });
    next.transpose().map_err(Failure::Store)
}

fn next_equal(wanted: &mut Wanted<'_>, key: &Key) -> Result<Option<Version>, Failure> {
    let next = wanted.next_if(|next| next.as_ref().is_ok_and(|(next, _)| next == key));
    next.transpose().map(|next| next.map(|(_, version)| version)).map_err(Failure::Store)
}
