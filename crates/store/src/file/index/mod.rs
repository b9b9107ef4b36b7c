//! The index: a redb file that follows the log. It holds the last version of every key, the past versions that are
//! still kept, and which keys each commit touched. One transaction folds a whole overlay. docs/format.md lists its
//! tables.

mod file;
mod reader;
mod record;
mod replace;
mod take;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use self::file::IndexFile;
use self::record::{decode_floor, decode_progress, decode_row, decode_version, with_segment};
use self::take::{clear_below, put_current, put_floors, put_progress, put_receipt_row, take_chain, take_commit};
use crate::disk::{DiskFile, ShadowFile};
use crate::{Generation, Key, Result, SpaceId, StoreError, Timestamp, Version};

pub(super) use self::reader::IndexReader;
pub(super) use self::record::Progress;
pub(super) use self::take::Fold;

const CURRENT: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("current");
const PAST: TableDefinition<'_, (&[u8], u64), &[u8]> = TableDefinition::new("past");
const TOUCHED: TableDefinition<'_, (u32, u64), &[u8]> = TableDefinition::new("touched");
const FLOORS: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("floors");
const STATE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("state");

#[derive(Debug)]
pub(super) struct Index {
    db: Handle,
    file: Arc<dyn DiskFile>,
    path: PathBuf,
}

/// redb writes to the file when it is dropped, and may panic if the file is damaged. The panic is caught, and nothing
/// is lost by it: what was folded is durable.
#[derive(Debug)]
struct Handle(Option<Database>);

impl std::ops::Deref for Handle {
    type Target = Database;

    fn deref(&self) -> &Database {
        self.0.as_ref().expect("the database exists until it is dropped")
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let db = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(db)));
    }
}

impl Index {
    /// Creates the file with empty tables.
    pub(super) fn create(file: Arc<dyn DiskFile>, path: PathBuf, cache: usize, progress: Progress) -> Result<Index> {
        let index = Index::open_file(file, path, cache)?;
        index.guarded(|| {
            let transaction = index.begin()?;
            {
                transaction.open_table(CURRENT)?;
                transaction.open_table(PAST)?;
                transaction.open_table(TOUCHED)?;
                transaction.open_table(FLOORS)?;
                put_progress(&transaction, &progress)?;
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
            let progress = progress.and_then(decode_progress);
            let segment = state.get("segment")?;
            // An index of an older version has no such record.
            let progress = match segment {
                Some(segment) => progress.and_then(|progress| with_segment(progress, segment.value())),
                None => progress,
            };
            Ok((
                progress,
                transaction.open_table(CURRENT)?,
                transaction.open_table(PAST)?,
                transaction.open_table(TOUCHED)?,
            ))
        });
        let (progress, current, past, touched) = state?;
        let Some(progress) = progress else {
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

    /// Folds an overlay and removes a slice of what lies below the floors, in one durable transaction. Returns whether
    /// more is left to remove.
    pub(super) fn fold(&self, fold: &Fold<'_>) -> Result<bool> {
        self.guarded(|| {
            let transaction = self.begin()?;
            let more;
            {
                let mut current = transaction.open_table(CURRENT)?;
                let mut past = transaction.open_table(PAST)?;
                let mut touched = transaction.open_table(TOUCHED)?;
                if let Some(overlay) = fold.overlay {
                    for (key, chain) in overlay.sorted() {
                        take_chain(&mut current, &mut past, fold, &key, &chain)?;
                    }
                    for commit in overlay.commits_after(Generation(0), usize::MAX) {
                        take_commit(&mut touched, fold, &commit)?;
                    }
                }
                more = clear_below(&mut current, &mut past, &mut touched, fold)?;
                put_floors(&transaction, fold.floors)?;
                put_progress(&transaction, &fold.progress)?;
            }
            transaction.commit()?;
            Ok(more)
        })
    }

    /// Adds records to a new index without changing them.
    pub(super) fn import(&self, records: &[(Key, Version)]) -> Result<()> {
        self.guarded(|| {
            let transaction = self.begin()?;
            {
                let mut current = transaction.open_table(CURRENT)?;
                let mut touched = transaction.open_table(TOUCHED)?;
                for (key, version) in records {
                    put_current(&mut current, key, Some(version))?;
                    put_receipt_row(&mut touched, key, version)?;
                }
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Sets the floors of a new index and the time of the last commit in it.
    pub(super) fn set_beginning(&self, floors: &BTreeMap<SpaceId, Generation>, time: Timestamp) -> Result<()> {
        let progress = Progress { time, ..self.reader()?.progress };
        self.guarded(|| {
            let transaction = self.begin()?;
            put_floors(&transaction, floors)?;
            put_progress(&transaction, &progress)?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Reads all pages and all records from the file through a separate handle. No fold may run meanwhile.
    pub(super) fn verify(&self) -> Vec<(String, String)> {
        let place = |what: &str| format!("{} ({what})", self.path.display());
        let mut found = Vec::new();
        let checked = caught(|| {
            let shadow = IndexFile(Arc::new(ShadowFile::over(self.file.clone())?));
            let mut db = redb::Builder::new().set_cache_size(16 << 20).create_with_backend(shadow)?;
            Ok(db.check_integrity()?)
        });
        match checked {
            Ok(true) => {}
            Ok(false) => found.push((place("pages"), "a page does not have the checksum it was written with".into())),
            Err(failure) => found.push((place("pages"), failure.detail())),
        }
        let records = caught(|| {
            let shadow = IndexFile(Arc::new(ShadowFile::over(self.file.clone())?));
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

    fn begin(&self) -> Result<redb::WriteTransaction, Failure> {
        let mut transaction = self.db.begin_write()?;
        transaction.set_quick_repair(true);
        Ok(transaction)
    }

    fn guarded<T>(&self, work: impl FnOnce() -> Result<T, Failure>) -> Result<T> {
        caught(work).map_err(|failure| failure.at(&self.path))
    }
}

/// An error of the index. The caller that knows the file's name adds it.
enum Failure {
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
                // A damaged page may refer to bytes behind the end of the file.
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

/// redb panics on some kinds of damage. The caller gets an error instead.
fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Failure::Record("redb cannot read it".into())))
}
