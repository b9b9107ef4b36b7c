//! A store that crashes at a commit of one's choice, and can be opened again as it was left.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::store::backend::{Answer, Backend, Changes, Contents, Damage, MemoryBackend, Retention, Scan, Stats};
use crate::store::{Commit, Generation, Key, Outcome, Range, Result, StoreError, Timestamp, Version};

/// On which side of a commit the crash is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The commit is lost.
    Before,
    /// The commit is there, and nobody was told.
    After,
}

/// A crash at a commit, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crash {
    /// Which commit.
    pub commit: u64,
    /// On which side of it.
    pub side: Side,
}

/// A life of a store in memory: it ends with a crash, and what was committed is there for the next life.
pub(crate) struct Life {
    memory: Arc<MemoryBackend>,
    crash: Option<Crash>,
    commits: AtomicU64,
    crashed: AtomicU64,
}

impl Life {
    pub(crate) fn new(memory: Arc<MemoryBackend>, crash: Option<Crash>) -> Life {
        Life { memory, crash, commits: AtomicU64::new(0), crashed: AtomicU64::new(0) }
    }

    pub(crate) fn has_crashed(&self) -> bool {
        self.crashed.load(Ordering::SeqCst) != 0
    }

    /// How many commits there were so far.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Ordering::SeqCst)
    }

    fn check(&self) -> Result<()> {
        if self.has_crashed() { Err(StoreError::Closed) } else { Ok(()) }
    }
}

impl Backend for Life {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move {
            self.check()?;
            let number = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
            let crashes = |side| self.crash == Some(Crash { commit: number, side });
            if crashes(Side::Before) {
                self.crashed.store(1, Ordering::SeqCst);
                return Err(StoreError::Closed);
            }
            let outcome = self.memory.commit(commit).await;
            if crashes(Side::After) {
                self.crashed.store(1, Ordering::SeqCst);
                return Err(StoreError::Closed);
            }
            outcome
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(async move {
            self.check()?;
            self.memory.latest().await
        })
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(async move {
            self.check()?;
            self.memory.get(key, at).await
        })
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(async move {
            self.check()?;
            self.memory.scan(scan, at).await
        })
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        Box::pin(async move {
            self.check()?;
            self.memory.versions(key, at, limit).await
        })
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        self.memory.changes(range, after, limit)
    }

    fn newer(&self, than: Generation) -> Answer<'_, Generation> {
        self.memory.newer(than)
    }

    fn generation_at(&self, time: Timestamp) -> Answer<'_, Generation> {
        self.memory.generation_at(time)
    }

    fn retention(&self) -> &Arc<Retention> {
        self.memory.retention()
    }

    fn maintain(&self) -> Answer<'_, bool> {
        self.memory.maintain()
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        self.memory.replace(contents)
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        self.memory.verify()
    }

    fn stats(&self) -> Answer<'_, Stats> {
        self.memory.stats()
    }

    fn identity(&self) -> u128 {
        self.memory.identity()
    }

    fn close(&self) -> Answer<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}
