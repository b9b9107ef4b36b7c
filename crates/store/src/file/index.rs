//! The index: a redb file that follows the log. It holds the last version of every key, the past versions that are
//! still kept, and which keys each commit touched; one transaction of it takes a whole overlay. Its tables are listed
//! in docs/format.md.
//!
//! Every record carries a checksum of its own over key and value, because redb checks its pages only when asked.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use redb::{
    AccessGuard as Guard, Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, StorageError,
    TableDefinition,
};

use super::frame::Position;
use super::index_file::{IndexFile, ShadowFile};
use super::overlay::Overlay;
use crate::codec::{self, Reader, put_number, put_string};
use crate::disk::DiskFile;
use crate::space::SPACES;
use crate::{Change, Committed, Generation, Key, Range, Result, Rev, Rules, SpaceId, StoreError, Timestamp, Version};

const CURRENT: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("current");
const PAST: TableDefinition<'_, (&[u8], u64), &[u8]> = TableDefinition::new("past");
const TOUCHED: TableDefinition<'_, (u32, u64), &[u8]> = TableDefinition::new("touched");
const FLOORS: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("floors");
const STATE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("state");

/// A row as redb gives it: a key of some kind and bytes.
type Stored<K> = Result<(Guard<'static, K>, Guard<'static, &'static [u8]>), StorageError>;
/// What becomes of a key, of which there is a version here, a wanted one, or both.
type Decide<'a> = dyn Fn(&Key, Option<&Version>, Option<&Version>) -> Option<Version> + 'a;
type Bytestrings = redb::ReadOnlyTable<&'static [u8], &'static [u8]>;

/// How far the index has followed the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Everything up to here is in the index.
    pub(super) applied: Generation,
    /// The time of the last commit taken.
    pub(super) time: Timestamp,
    /// Where the log goes on.
    pub(super) log: Position,
}

#[derive(Debug)]
pub(super) struct Index {
    db: Handle,
    file: Arc<dyn DiskFile>,
    path: PathBuf,
}

/// redb writes to the file when it goes, and on a damaged one it may panic then. Nothing is lost by that: what was
/// folded is durable.
#[derive(Debug)]
struct Handle(Option<Database>);

impl std::ops::Deref for Handle {
    type Target = Database;

    fn deref(&self) -> &Database {
        self.0.as_ref().expect("the database is there until it is dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let db = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(db)));
    }
}

/// A consistent picture of the index.
pub(super) struct IndexReader {
    current: Bytestrings,
    past: redb::ReadOnlyTable<(&'static [u8], u64), &'static [u8]>,
    touched: redb::ReadOnlyTable<(u32, u64), &'static [u8]>,
    pub(super) progress: Progress,
}

/// One step of the index behind the log.
pub(super) struct Fold<'a> {
    pub(super) overlay: Option<&'a Overlay>,
    pub(super) floors: &'a BTreeMap<SpaceId, Generation>,
    pub(super) rules: &'a dyn Fn(SpaceId) -> Rules,
    pub(super) progress: Progress,
    /// How many rows of dropped history may be cleared away.
    pub(super) budget: usize,
}

/// What remains of a commit in one space.
struct Row {
    time: Timestamp,
    meta: Bytes,
    touched: Vec<(Key, Rev, bool)>,
}

impl Index {
    /// Creates the file's tables with nothing in them.
    pub(super) fn create(file: Arc<dyn DiskFile>, path: PathBuf, cache: usize, progress: Progress) -> Result<Index> {
        let index = Index::open_file(file, path, cache)?;
        index.guarded(|| {
            let transaction = index.begin()?;
            {
                transaction.open_table(CURRENT)?;
                transaction.open_table(PAST)?;
                transaction.open_table(TOUCHED)?;
                transaction.open_table(FLOORS)?;
                let state = encode_progress(&progress);
                transaction.open_table(STATE)?.insert("progress", state.as_slice())?;
            }
            transaction.commit()?;
            Ok(())
        })?;
        Ok(index)
    }

    pub(super) fn open_file(file: Arc<dyn DiskFile>, path: PathBuf, cache: usize) -> Result<Index> {
        let opened = caught(|| {
            let backend = IndexFile(file.clone());
            Ok(redb::Builder::new().set_cache_size(cache).create_with_backend(backend)?)
        });
        let db = opened.map_err(|failure| failure.at(&path))?;
        Ok(Index { db: Handle(Some(db)), file, path })
    }

    pub(super) fn reader(&self) -> Result<IndexReader> {
        let state = self.guarded(|| {
            let transaction = self.db.begin_read()?;
            let state = transaction.open_table(STATE)?;
            let progress = state.get("progress")?.map(|value| Bytes::copy_from_slice(value.value()));
            Ok((
                progress,
                transaction.open_table(CURRENT)?,
                transaction.open_table(PAST)?,
                transaction.open_table(TOUCHED)?,
            ))
        });
        let (progress, current, past, touched) = state?;
        let Some(progress) = progress.and_then(decode_progress) else {
            return Err(StoreError::corrupt(self.path.display().to_string(), "the state record cannot be read"));
        };
        Ok(IndexReader { current, past, touched, progress })
    }

    pub(super) fn floors(&self) -> Result<BTreeMap<SpaceId, Generation>> {
        self.guarded(|| {
            let table = self.db.begin_read()?.open_table(FLOORS)?;
            let mut floors = BTreeMap::new();
            for row in table.iter()? {
                let (space, floor) = row?;
                let space = SpaceId(space.value());
                floors.insert(space, decode_floor(space, floor.value())?);
            }
            Ok(floors)
        })
    }

    /// Takes an overlay and clears away a slice of what lies below the floors, in one durable transaction. Tells
    /// whether more is to be cleared away.
    pub(super) fn fold(&self, fold: &Fold<'_>) -> Result<bool> {
        self.guarded(|| {
            let transaction = self.begin()?;
            let more;
            {
                let mut current = transaction.open_table(CURRENT)?;
                let mut past = transaction.open_table(PAST)?;
                let mut touched = transaction.open_table(TOUCHED)?;
                if let Some(overlay) = fold.overlay {
                    for (key, versions) in overlay.chains() {
                        take_chain(&mut current, &mut past, fold, &key, &versions)?;
                    }
                    for commit in overlay.commits_after(Generation(0), usize::MAX) {
                        take_commit(&mut touched, fold, &commit)?;
                    }
                }
                more = clear_below(&mut current, &mut past, &mut touched, fold)?;
                put_floors(&transaction, fold.floors)?;
                let state = encode_progress(&fold.progress);
                transaction.open_table(STATE)?.insert("progress", state.as_slice())?;
            }
            transaction.commit()?;
            Ok(more)
        })
    }

    /// Replaces the last version of every key by what `decide` makes of it and of the wanted one, and drops all
    /// history, in one durable transaction.
    pub(super) fn replace(
        &self,
        wanted: &mut dyn Iterator<Item = Result<(Key, Version)>>,
        decide: &Decide<'_>,
        floors: &dyn Fn() -> BTreeMap<SpaceId, Generation>,
        progress: Progress,
    ) -> Result<()> {
        const PAGE: usize = 1000;
        self.guarded(|| {
            let transaction = self.begin()?;
            transaction.delete_table(PAST)?;
            transaction.delete_table(TOUCHED)?;
            {
                transaction.open_table(PAST)?;
                transaction.open_table(TOUCHED)?;
                let mut current = transaction.open_table(CURRENT)?;
                // Two passes, because the table cannot be walked and changed at once: first what is there, page by
                // page, against what is wanted; what is wanted and not there is written on the way.
                let mut wanted = wanted.peekable();
                let mut after: Option<Vec<u8>> = None;
                loop {
                    let mut page = Vec::with_capacity(PAGE);
                    {
                        let from = after.as_deref().map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
                        for row in current.range::<&[u8]>((from, std::ops::Bound::Unbounded))?.take(PAGE) {
                            let (key, value) = row?;
                            page.push((decode_key(key.value())?, decode_version(key.value(), value.value())?));
                        }
                    }
                    for (key, old) in &page {
                        while let Some((key, new)) = next_below(&mut wanted, Some(key))? {
                            put_current(&mut current, &key, decide(&key, None, Some(&new)).as_ref())?;
                        }
                        let new = next_equal(&mut wanted, key)?;
                        put_current(&mut current, key, decide(key, Some(old), new.as_ref()).as_ref())?;
                    }
                    match page.last() {
                        Some((key, _)) => after = Some(key.encoded().to_vec()),
                        None => break,
                    }
                }
                while let Some((key, new)) = next_below(&mut wanted, None)? {
                    put_current(&mut current, &key, decide(&key, None, Some(&new)).as_ref())?;
                }
                put_floors(&transaction, &floors())?;
                let state = encode_progress(&progress);
                transaction.open_table(STATE)?.insert("progress", state.as_slice())?;
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Adds records to a new index, as they are.
    pub(super) fn import(&self, records: &[(Key, Version)]) -> Result<()> {
        self.guarded(|| {
            let transaction = self.begin()?;
            {
                let mut current = transaction.open_table(CURRENT)?;
                for (key, version) in records {
                    put_current(&mut current, key, Some(version))?;
                }
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Sets where history begins in a new index.
    pub(super) fn set_floors(&self, floors: &BTreeMap<SpaceId, Generation>) -> Result<()> {
        self.guarded(|| {
            let transaction = self.begin()?;
            put_floors(&transaction, floors)?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Reads all pages and all records from the file, without disturbing this handle. Nothing may be folded meanwhile.
    pub(super) fn verify(&self) -> Vec<(String, String)> {
        let place = |what: &str| format!("{} ({what})", self.path.display());
        let mut found = Vec::new();
        let checked = caught(|| {
            let shadow = ShadowFile::over(self.file.clone())?;
            let mut db = redb::Builder::new().set_cache_size(16 << 20).create_with_backend(shadow)?;
            Ok(db.check_integrity()?)
        });
        match checked {
            Ok(true) => {}
            Ok(false) => found.push((place("pages"), "a page does not have the checksum it was written with".into())),
            Err(failure) => found.push((place("pages"), failure.detail())),
        }
        let records = caught(|| {
            let shadow = ShadowFile::over(self.file.clone())?;
            let db = redb::Builder::new().set_cache_size(16 << 20).create_with_backend(shadow)?;
            let transaction = db.begin_read()?;
            for row in transaction.open_table(CURRENT)?.iter()? {
                let (key, value) = row?;
                if let Err(failure) = decode_version(key.value(), value.value()) {
                    found.push((place(&format!("current {}", key.value().escape_ascii())), failure.detail()));
                }
            }
            for row in transaction.open_table(PAST)?.iter()? {
                let (key, value) = row?;
                let (key, generation) = key.value();
                if let Err(failure) = decode_version(key, value.value()) {
                    found.push((place(&format!("past {} at {generation}", key.escape_ascii())), failure.detail()));
                }
            }
            for row in transaction.open_table(TOUCHED)?.iter()? {
                let (key, value) = row?;
                let (space, generation) = key.value();
                if let Err(failure) = decode_row(space, generation, value.value()) {
                    found.push((place(&format!("touched #{space} at {generation}")), failure.detail()));
                }
            }
            for row in transaction.open_table(FLOORS)?.iter()? {
                let (space, floor) = row?;
                if let Err(failure) = decode_floor(SpaceId(space.value()), floor.value()) {
                    found.push((place("floors"), failure.detail()));
                }
            }
            Ok(())
        });
        if let Err(failure) = records {
            found.push((place("records"), failure.detail()));
        }
        found
    }

    /// Records, past versions, and the size of the file.
    pub(super) fn sizes(&self, reader: &IndexReader) -> Result<(u64, u64, u64)> {
        let length = self.file.length().map_err(|cause| StoreError::io("measure", self.path.clone(), cause))?;
        self.guarded(|| Ok((reader.current.len()?, reader.past.len()?, length)))
    }

    fn begin(&self) -> Result<redb::WriteTransaction, Failure> {
        let mut transaction = self.db.begin_write()?;
        transaction.set_quick_repair(true);
        Ok(transaction)
    }

    fn guarded<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        caught(work).map_err(|failure| failure.at(&self.path))
    }
}

/// Why something with the index did not work. The file's name is added where it is known.
pub(super) enum Failure {
    Redb(Box<redb::Error>),
    Store(StoreError),
    Record(String),
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Redb(Box::new(error.into()))
    }
}

impl Failure {
    fn detail(self) -> String {
        match self {
            Failure::Redb(error) => error.to_string(),
            Failure::Store(error) => error.to_string(),
            Failure::Record(detail) => detail,
        }
    }

    fn at(self, path: &std::path::Path) -> StoreError {
        match self {
            Failure::Redb(error) => match *error {
                // A damaged page may point behind the end of the file.
                redb::Error::Io(cause) if matches!(cause.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData) => {
                    StoreError::corrupt(path.display().to_string(), cause.to_string())
                }
                redb::Error::Io(cause) => StoreError::io("use", path, cause),
                redb::Error::DatabaseClosed => StoreError::Closed,
                other => StoreError::corrupt(path.display().to_string(), other.to_string()),
            },
            Failure::Store(error) => error,
            Failure::Record(detail) => StoreError::corrupt(path.display().to_string(), detail),
        }
    }
}

/// redb panics on some kinds of damage; a caller gets an error all the same.
fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Failure::Record("redb cannot make sense of it".into())))
}

type Current<'a> = redb::Table<'a, &'static [u8], &'static [u8]>;
type Past<'a> = redb::Table<'a, (&'static [u8], u64), &'static [u8]>;
type Touched<'a> = redb::Table<'a, (u32, u64), &'static [u8]>;

/// Takes the versions of one key, oldest first: the last becomes the current one, those before go to the past as far
/// as somebody may still read them.
fn take_chain(
    current: &mut Current<'_>,
    past: &mut Past<'_>,
    fold: &Fold<'_>,
    key: &Key,
    versions: &[Version],
) -> Result<(), Failure> {
    let Some(newest) = versions.last() else { return Ok(()) };
    let floor = fold.floors.get(&key.space()).copied().unwrap_or_default();
    if newest.generation > floor {
        let first = versions.first().map_or(newest.generation, |version| version.generation);
        if first > floor {
            let base = current.get(key.encoded())?.map(|value| value.value().to_vec());
            if let Some(base) = base {
                let version = decode_version(key.encoded(), &base)?;
                past.insert((key.encoded(), version.generation.0), base.as_slice())?;
            }
        }
        for pair in versions.windows(2).filter(|pair| pair[1].generation > floor) {
            past.insert((key.encoded(), pair[0].generation.0), encode_version(key, &pair[0]).as_slice())?;
        }
    }
    let traceless = newest.value.is_none() && newest.generation <= floor && (fold.rules)(key.space()).used_once;
    put_current(current, key, if traceless { None } else { Some(newest) })
}

fn put_floors(transaction: &redb::WriteTransaction, floors: &BTreeMap<SpaceId, Generation>) -> Result<(), Failure> {
    let mut table = transaction.open_table(FLOORS)?;
    for (space, floor) in floors {
        table.insert(space.0, encode_floor(*space, *floor).as_slice())?;
    }
    Ok(())
}

fn put_current(current: &mut Current<'_>, key: &Key, version: Option<&Version>) -> Result<(), Failure> {
    match version {
        Some(version) => current.insert(key.encoded(), encode_version(key, version).as_slice())?,
        None => current.remove(key.encoded())?,
    };
    Ok(())
}

/// Notes which keys of each space a commit touched, for spaces that can still be read before it.
fn take_commit(touched: &mut Touched<'_>, fold: &Fold<'_>, commit: &Committed) -> Result<(), Failure> {
    let mut rows: BTreeMap<SpaceId, Vec<&Change>> = BTreeMap::new();
    for change in &commit.changes {
        let space = change.key.space();
        if commit.generation > fold.floors.get(&space).copied().unwrap_or_default() {
            rows.entry(space).or_default().push(change);
        }
    }
    for (space, changes) in rows {
        let row = encode_row(space, commit, &changes);
        touched.insert((space.0, commit.generation.0), row.as_slice())?;
    }
    Ok(())
}

fn clear_below(
    current: &mut Current<'_>,
    past: &mut Past<'_>,
    touched: &mut Touched<'_>,
    fold: &Fold<'_>,
) -> Result<bool, Failure> {
    let mut budget = fold.budget;
    for (space, floor) in fold.floors {
        let rules = (fold.rules)(*space);
        loop {
            let mut rows = Vec::new();
            for row in touched.range((space.0, 0)..=(space.0, floor.0))?.take(budget.min(256)) {
                let (key, value) = row?;
                let (space, generation) = key.value();
                rows.push((generation, decode_row(space, generation, value.value())?));
            }
            if rows.is_empty() {
                break;
            }
            for (generation, row) in rows {
                budget = budget.saturating_sub(1);
                for (key, _, live) in row.touched {
                    clear_versions(past, &key, generation)?;
                    let last = current.get(key.encoded())?.map(|value| decode_version(key.encoded(), value.value()));
                    let is_last = last.transpose()?.is_some_and(|version| version.generation.0 == generation);
                    if is_last && (rules.expires || (rules.used_once && !live)) {
                        current.remove(key.encoded())?;
                    }
                }
                touched.remove((space.0, generation))?;
            }
            if budget == 0 {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Removes the past versions of a key that were overwritten at `generation` or before.
fn clear_versions(past: &mut Past<'_>, key: &Key, generation: u64) -> Result<(), Failure> {
    loop {
        let oldest = past.range((key.encoded(), 0)..(key.encoded(), generation))?.next();
        let Some(oldest) = oldest.transpose()?.map(|(row, _)| row.value().1) else { return Ok(()) };
        past.remove((key.encoded(), oldest))?;
    }
}

type Wanted<'a> = std::iter::Peekable<&'a mut dyn Iterator<Item = Result<(Key, Version)>>>;

/// The next wanted record if it comes before `key`, or any.
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

impl IndexReader {
    /// The last version of a key.
    pub(super) fn newest(&self, key: &Key) -> Result<Option<Version>> {
        reading(|| {
            let value = self.current.get(key.encoded())?;
            value.map(|value| decode_version(key.encoded(), value.value())).transpose()
        })
    }

    /// The newest version of a key that is not newer than `at`.
    pub(super) fn at(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        match self.newest(key)? {
            Some(newest) if newest.generation > at => self.past_at(key, at),
            newest => Ok(newest),
        }
    }

    pub(super) fn past_at(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        reading(|| {
            let found = self.past.range((key.encoded(), 0)..=(key.encoded(), at.0))?.next_back();
            found.transpose()?.map(|(_, value)| decode_version(key.encoded(), value.value())).transpose()
        })
    }

    /// The past versions of a key up to `at`, newest first.
    pub(super) fn past_versions(&self, key: &Key, at: Generation, limit: usize) -> Result<Vec<Version>> {
        reading(|| {
            let rows = self.past.range((key.encoded(), 0)..=(key.encoded(), at.0))?.rev().take(limit);
            rows.map(|row| decode_version(key.encoded(), row?.1.value())).collect()
        })
    }

    /// The last versions of the keys of a range.
    pub(super) fn range<'a>(
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
    pub(super) fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        /// A range with more keys than this is looked up by what was written since, not by what it holds.
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
                return Ok(Some((key, generation)));
            }
        }
        Ok(None)
    }

    /// Whether there is history below the floors that was not cleared away yet.
    pub(super) fn has_rows_below(&self, floors: &BTreeMap<SpaceId, Generation>) -> Result<bool> {
        for (space, floor) in floors {
            let first = reading(|| Ok(self.touched.range((space.0, 0)..=(space.0, floor.0))?.next().is_some()))?;
            if first {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether anything but declarations of spaces is stored.
    pub(super) fn has_user_records(&self) -> Result<bool> {
        let first = Key::new(SpaceId(SPACES.0 + 1), &[]);
        reading(|| Ok(self.current.range::<&[u8]>(first.encoded()..)?.next().is_some()))
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

    /// The commits after `after` that touched `range`, and up to where nothing was left out. Looks at `effort` rows.
    pub(super) fn changes(
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
    pub(super) fn last_at(&self, space: SpaceId, floor: Generation, time: Timestamp) -> Result<Option<Generation>> {
        let (mut low, mut high) = (floor.0, self.progress.applied.0);
        let mut found = None;
        while low < high {
            // Is there a row in (middle, high] that is early enough? Rows are sparse, so ask for the first one there.
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

/// Rows that are asked for one by one. redb may panic at any of them, so each is read under guard; the first that
/// cannot be read is the last.
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

fn decode_key(encoded: &[u8]) -> Result<Key, Failure> {
    let key = Key::from_encoded(Bytes::copy_from_slice(encoded));
    key.ok_or_else(|| Failure::Record("a key is too short".into()))
}

/// Checksum, then what is checked: rev, generation, and the value behind a mark whether there is one.
fn encode_version(key: &Key, version: &Version) -> Vec<u8> {
    let value = version.value.as_ref();
    let mut out = Vec::with_capacity(20 + value.map_or(0, |value| value.len()));
    out.extend_from_slice(&[0; 4]);
    out.push(u8::from(value.is_some()));
    put_number(&mut out, version.rev.0);
    put_number(&mut out, version.generation.0);
    out.extend_from_slice(value.map_or(&[][..], |value| value));
    seal(&mut out, codec::checksum(0, key.encoded()));
    out
}

fn decode_version(key: &[u8], record: &[u8]) -> Result<Version, Failure> {
    let wrong = || Failure::Record(format!("the record of key {} is not what was written", key.escape_ascii()));
    let body = opened(record, codec::checksum(0, key)).ok_or_else(wrong)?;
    let read = || {
        let mut reader = Reader(Bytes::copy_from_slice(body));
        let live = reader.byte()? != 0;
        let (rev, generation) = (Rev(reader.number()?), Generation(reader.number()?));
        Some(Version { rev, generation, value: live.then_some(reader.0) })
    };
    read().ok_or_else(wrong)
}

fn row_seed(space: u32, generation: u64) -> u64 {
    codec::checksum(u64::from(space), &generation.to_le_bytes())
}

fn encode_row(space: SpaceId, commit: &Committed, changes: &[&Change]) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_number(&mut out, commit.time.0);
    put_string(&mut out, &commit.meta);
    put_number(&mut out, changes.len() as u64);
    for change in changes {
        put_string(&mut out, change.key.bytes());
        put_number(&mut out, change.rev.0 << 1 | u64::from(change.value.is_some()));
    }
    seal(&mut out, row_seed(space.0, commit.generation.0));
    out
}

fn decode_row(space: u32, generation: u64, record: &[u8]) -> Result<Row, Failure> {
    let wrong = || Failure::Record(format!("what generation {generation} did in space #{space} cannot be read"));
    let body = opened(record, row_seed(space, generation)).ok_or_else(wrong)?;
    let read = || {
        let mut reader = Reader(Bytes::copy_from_slice(body));
        let (time, meta) = (Timestamp(reader.number()?), reader.string()?);
        let count = reader.number()?;
        let mut touched = Vec::with_capacity(count.min(1024) as usize);
        for _ in 0..count {
            let key = Key::new(SpaceId(space), &reader.string()?);
            let rev = reader.number()?;
            touched.push((key, Rev(rev >> 1), rev & 1 == 1));
        }
        reader.end()?;
        Some(Row { time, meta, touched })
    };
    read().ok_or_else(wrong)
}

fn encode_floor(space: SpaceId, floor: Generation) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_number(&mut out, floor.0);
    seal(&mut out, u64::from(space.0));
    out
}

fn decode_floor(space: SpaceId, record: &[u8]) -> Result<Generation, Failure> {
    let wrong = || Failure::Record(format!("where the history of space {space} begins cannot be read"));
    let body = opened(record, u64::from(space.0)).ok_or_else(wrong)?;
    Reader(Bytes::copy_from_slice(body)).number().map(Generation).ok_or_else(wrong)
}

const PROGRESS_SEED: u64 = 0x4c57;

fn encode_progress(progress: &Progress) -> Vec<u8> {
    let Progress { applied, time, log } = progress;
    let mut out = vec![0; 4];
    for number in [applied.0, time.0, log.segment, log.page, log.chain] {
        put_number(&mut out, number);
    }
    seal(&mut out, PROGRESS_SEED);
    out
}

fn decode_progress(record: Bytes) -> Option<Progress> {
    let mut reader = Reader(Bytes::copy_from_slice(opened(&record, PROGRESS_SEED)?));
    let (applied, time) = (Generation(reader.number()?), Timestamp(reader.number()?));
    let log = Position { segment: reader.number()?, page: reader.number()?, chain: reader.number()? };
    reader.end()?;
    Some(Progress { applied, time, log })
}

/// Fills the four bytes in front with the checksum of the rest.
fn seal(record: &mut [u8], seed: u64) {
    let checksum = codec::checksum(seed, &record[4..]) as u32;
    record[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// The rest behind the checksum, if the checksum is right.
fn opened(record: &[u8], seed: u64) -> Option<&[u8]> {
    let (checksum, body) = record.split_at_checked(4)?;
    (codec::checksum(seed, body) as u32 == u32::from_le_bytes(checksum.try_into().ok()?)).then_some(body)
}
