//! The size limits of a store. Every commit is checked against them before it reaches the backend.

use std::collections::BTreeSet;

use crate::commit::STAMP_BYTES;
use crate::key::SPACE_BYTES;
use crate::{Check, Commit, Key, Result, StoreError, Write};

/// The largest sizes that a store accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value, and of a commit's meta.
    pub value_bytes: usize,
    /// Checks and writes of a commit, in total.
    pub operations: usize,
    /// Bytes of a commit: all written keys and values, and the meta.
    pub commit_bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { key_bytes: 2048, value_bytes: 4 << 20, operations: 10_000, commit_bytes: 12 << 20 }
    }
}

impl Limits {
    pub(crate) fn check_key(&self, key: &Key) -> Result<()> {
        match key.bytes().len() {
            0 => Err(StoreError::EmptyKey { space: key.space() }),
            length if length > self.key_bytes => {
                Err(StoreError::KeyTooLong { key: key.clone(), length, limit: self.key_bytes })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_commit(&self, commit: &Commit) -> Result<()> {
        let count = commit.checks.len() + commit.writes.len();
        if count > self.operations {
            return Err(StoreError::TooManyOperations { count, limit: self.operations });
        }
        let mut length = commit.meta.len();
        for check in &commit.checks {
            match check {
                Check::AtRev(key, _) | Check::Absent(key) | Check::Present(key) => self.check_key(key)?,
                Check::Unchanged(range, _) if range.bound_length().saturating_sub(1) > self.key_bytes => {
                    let key = Key::new(range.space(), &range.end()[SPACE_BYTES.min(range.end().len())..]);
                    return Err(StoreError::KeyTooLong { key, length: range.bound_length(), limit: self.key_bytes });
                }
                Check::AtGeneration(_) | Check::Unchanged(..) => {}
            }
        }
        for write in &commit.writes {
            self.check_key(write.key())?;
            length += write.key().bytes().len();
            if let Write::PutStamped(key, value, offset) = write
                && offset.checked_add(STAMP_BYTES).is_none_or(|end| end > value.len())
            {
                return Err(StoreError::Stamp { key: key.clone(), offset: *offset, length: value.len() });
            }
            if let Write::Put(key, value) | Write::PutStamped(key, value, _) = write {
                length += value.len();
                if value.len() > self.value_bytes {
                    let (key, length) = (key.clone(), value.len());
                    return Err(StoreError::ValueTooLong { key, length, limit: self.value_bytes });
                }
            }
        }
        if length > self.commit_bytes {
            return Err(StoreError::CommitTooLarge { length, limit: self.commit_bytes });
        }
        self.check_written_once(&commit.writes)
    }

    fn check_written_once(&self, writes: &[Write]) -> Result<()> {
        let twice = |write: &Write| Err(StoreError::WrittenTwice { key: write.key().clone() });
        if writes.len() <= 8 {
            for (index, write) in writes.iter().enumerate() {
                if writes[..index].iter().any(|earlier| earlier.key() == write.key()) {
                    return twice(write);
                }
            }
            return Ok(());
        }
        let mut seen = BTreeSet::new();
        for write in writes {
            if !seen.insert(write.key()) {
                return twice(write);
            }
        }
        Ok(())
    }
}
