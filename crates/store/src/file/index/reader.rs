//! Reads the index: the last versions, past versions, and which keys each commit touched. It changes nothing.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use redb::{AccessGuard as Guard, ReadableTable, ReadableTableMetadata, StorageError};

use super::record::{Progress, Row, decode_head, decode_key, decode_row, decode_version};
use super::{Failure, caught};
use crate::space::SPACES;
use crate::{Change, Committed, Generation, Key, Range, Result, SpaceId, StoreError, Timestamp, Version};

/// A consistent view of the index.
pub(in crate::file) struct IndexReader {
    pub(super) current: redb::ReadOnlyTable<&'static [u8], &'static [u8]>,
    pub(super) past: redb::ReadOnlyTable<(&'static [u8], u64), &'static [u8]>,
    pub(super) touched: redb::ReadOnlyTable<(u32, u64), &'static [u8]>,
    pub(in crate::file) progress: Progress,
}

impl IndexReader {
    /// The last version of a key.
    pub(in crate::file) fn newest(&self, key: &Key) -> Result<Option<Version>> {
        reading(|| {
            let value = self.current.get(key.encoded())?;
            value.map(|value| decode_version(key.encoded(), value.value())).transpose()
        })
    }

    /// The newest version of a key that is not newer than `at`.
    pub(in crate::file) fn at(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        /// A view that is older than this many generations looks at past versions first, because it probably reads
        /// overwritten ones.
        const FAR: u64 = 1 << 14;
        if at.0 + FAR < self.progress.applied.0
            && let Some(version) = self.overwritten(key, at)?
        {
            return Ok(Some(version).filter(|version| version.generation <= at));
        }
        let newest = reading(|| {
            let Some(record) = self.current.get(key.encoded())? else { return Ok(None) };
            let head = decode_head(key.encoded(), record.value())?;
            let version = (head.generation <= at).then(|| decode_version(key.encoded(), record.value()));
            Ok(Some(version.transpose()?))
        })?;
        match newest {
            None => Ok(None),
            Some(Some(version)) => Ok(Some(version)),
            Some(None) => self.past_at(key, at),
        }
    }

    /// The version of a key at `at`, if its last version is newer than `at`.
    pub(in crate::file) fn past_at(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        Ok(self.overwritten(key, at)?.filter(|version| version.generation <= at))
    }

    /// The first version of a key that was overwritten after `at`. It is the version at `at`, unless the key was
    /// created later.
    fn overwritten(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        reading(|| {
            let mut cursor = self.past.lower_bound(Bound::Excluded((key.encoded(), at.0)))?;
            let Some((row, record)) = cursor.peek_next()? else { return Ok(None) };
            let same = row.value().0 == key.encoded();
            same.then(|| decode_version(key.encoded(), record.value())).transpose()
        })
    }

    /// The past versions of a key up to `at`, newest first.
    pub(in crate::file) fn past_versions(&self, key: &Key, at: Generation, limit: usize) -> Result<Vec<Version>> {
        let mut versions: Vec<Version> = self.past_at(key, at)?.into_iter().collect();
        let older = reading(|| {
            let rows = self.past.range((key.encoded(), 0)..=(key.encoded(), at.0))?.rev().take(limit);
            rows.map(|row| decode_version(key.encoded(), row?.1.value())).collect::<Result<Vec<_>, _>>()
        });
        versions.extend(older?);
        versions.truncate(limit);
        Ok(versions)
    }

    /// The last versions of the keys of a range.
    pub(in crate::file) fn range<'a>(
        &'a self,
        range: &Range,
    ) -> Result<impl DoubleEndedIterator<Item = Result<(Key, Version)>> + use<'a>> {
        let rows = reading(|| Ok(self.current.range::<&[u8]>(range.start()..range.end())?))?;
        let read = |row: Stored<&'static [u8]>| {
            let (key, value) = row?;
            Ok((decode_key(key.value())?, decode_version(key.value(), value.value())?))
        };
        Ok(Rows { rows: Some(rows), read })
    }

    /// Some key of the range that was written after `since`, which is not below the floor of its space.
    pub(in crate::file) fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        /// In a range with more keys than this, the commits since are searched instead of the keys.
        const SMALL: usize = 512;
        if self.progress.applied <= since || range.is_empty() {
            return Ok(None);
        }
        let mut seen = 0;
        for row in self.range(range)?.take(SMALL) {
            let (key, version) = row?;
            if version.generation > since {
                return Ok(Some((key, version.generation)));
            }
            seen += 1;
        }
        if seen < SMALL {
            return Ok(None);
        }
        for row in self.rows(range.space(), since)? {
            let (generation, row) = row?;
            if let Some((key, ..)) = row.touched.into_iter().find(|(key, ..)| range.contains(key)) {
                // The row is the key's first write since. The answer is its last write.
                let last = self.newest(&key)?.map_or(generation, |newest| newest.generation);
                return Ok(Some((key, last)));
            }
        }
        Ok(None)
    }

    /// True if there is history below the floors that was not removed yet.
    pub(in crate::file) fn has_rows_below(&self, floors: &BTreeMap<SpaceId, Generation>) -> Result<bool> {
        for (space, floor) in floors {
            let first = reading(|| Ok(self.touched.range((space.0, 0)..=(space.0, floor.0))?.next().is_some()))?;
            if first {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// True if anything except declarations of spaces is stored.
    pub(in crate::file) fn has_user_records(&self) -> Result<bool> {
        let first = Key::new(SpaceId(SPACES.0 + 1), &[]);
        reading(|| Ok(self.current.range::<&[u8]>(first.encoded()..)?.next().is_some()))
    }

    /// The number of keys and of past versions.
    pub(in crate::file) fn counts(&self) -> Result<(u64, u64)> {
        reading(|| Ok((self.current.len()?, self.past.len()?)))
    }

    fn rows<'a>(
        &'a self,
        space: SpaceId,
        after: Generation,
    ) -> Result<impl Iterator<Item = Result<(Generation, Row)>> + use<'a>> {
        let rows = reading(|| Ok(self.touched.range((space.0, after.0.saturating_add(1))..=(space.0, u64::MAX))?))?;
        let read = |row: Stored<(u32, u64)>| {
            let (key, value) = row?;
            let (space, generation) = key.value();
            Ok((Generation(generation), decode_row(space, generation, value.value())?))
        };
        Ok(Rows { rows: Some(rows), read })
    }

    /// Returns the commits after `after` that touched `range`, and the generation up to which they are complete. Reads
    /// at most `effort` rows.
    pub(in crate::file) fn changes(
        &self,
        range: &Range,
        after: Generation,
        limit: usize,
        effort: usize,
    ) -> Result<(Vec<Committed>, Generation)> {
        let mut commits = Vec::new();
        for (index, row) in self.rows(range.space(), after)?.enumerate() {
            let (generation, row) = row?;
            let mut changes = Vec::new();
            for (key, rev, live) in row.touched.into_iter().filter(|(key, ..)| range.contains(key)) {
                let value = if live { self.value_of(&key, generation)? } else { None };
                changes.push(Change { key, rev, value });
            }
            if !changes.is_empty() {
                commits.push(Committed { generation, time: row.time, meta: row.meta, changes });
            }
            if commits.len() >= limit || index + 1 >= effort {
                return Ok((commits, generation));
            }
        }
        Ok((commits, self.progress.applied))
    }

    /// The value that was written at exactly this generation.
    fn value_of(&self, key: &Key, generation: Generation) -> Result<Option<Bytes>> {
        match self.at(key, generation)? {
            Some(version) if version.generation == generation => Ok(version.value),
            _ => {
                Err(StoreError::corrupt(format!("the index at {key}"), format!("its version {generation} is missing")))
            }
        }
    }

    /// The last generation above the floor that touched a space not later than `time`.
    pub(in crate::file) fn last_at(
        &self,
        space: SpaceId,
        floor: Generation,
        time: Timestamp,
    ) -> Result<Option<Generation>> {
        let (mut low, mut high) = (floor.0, self.progress.applied.0);
        let mut found = None;
        while low < high {
            // Is there a row in (middle, high] that is early enough? Rows have gaps, so read the first row in there.
            let middle = low + (high - low) / 2;
            match self.rows(space, Generation(middle))?.next().transpose()? {
                Some((generation, row)) if generation.0 <= high && row.time <= time => {
                    found = Some(generation);
                    low = generation.0;
                }
                _ => high = middle,
            }
        }
        Ok(found)
    }
}

/// A row as redb returns it: a key of some kind and bytes.
type Stored<K> = Result<(Guard<'static, K>, Guard<'static, &'static [u8]>), StorageError>;

/// An iterator over rows. redb may panic at any row, so a panic is caught at each. The first row that cannot be read is
/// the last.
struct Rows<I, F> {
    rows: Option<I>,
    read: F,
}

impl<I: Iterator, T, F: FnMut(I::Item) -> Result<T, Failure>> Rows<I, F> {
    fn step(&mut self, take: impl FnOnce(&mut I) -> Option<I::Item>) -> Option<Result<T>> {
        let mut rows = self.rows.take()?;
        let row = reading(|| take(&mut rows).map(&mut self.read).transpose()).transpose();
        if matches!(row, Some(Ok(_))) {
            self.rows = Some(rows);
        }
        row
    }
}

impl<I: Iterator, T, F: FnMut(I::Item) -> Result<T, Failure>> Iterator for Rows<I, F> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        self.step(I::next)
    }
}

impl<I: DoubleEndedIterator, T, F: FnMut(I::Item) -> Result<T, Failure>> DoubleEndedIterator for Rows<I, F> {
    fn next_back(&mut self) -> Option<Result<T>> {
        self.step(I::next_back)
    }
}

fn reading<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
    caught(work).map_err(|failure| failure.at(std::path::Path::new("the index")))
}
