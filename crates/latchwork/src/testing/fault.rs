//! A store in memory with a gate in front. The gate decides about every call, so it can crash at a commit, lose answers
//! or not answer at all. The next life finds what was committed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::course::Course;
use crate::store::backend::{
    Answer, Backend, Before, Changes, Contents, Damage, MemoryBackend, Pin, Rules, Scan, Stats,
};
use crate::store::{Commit, Generation, Key, Outcome, Range, Result, SpaceId, StoreError, Timestamp, Version};

/// The side of a commit on which the crash is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The commit is lost.
    Before,
    /// The commit is stored, but no caller got the answer.
    After,
}

/// A crash at a commit, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crash {
    /// The number of the commit.
    pub commit: u64,
    /// The side of the commit.
    pub side: Side,
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Before => "before",
            Side::After => "after",
        };
        write!(f, "crash {side} commit {}", self.commit)
    }
}

/// Stands between an engine and the memory.
pub(crate) trait FaultGate: Send + Sync + 'static {
    /// Lets a read through, or not.
    fn pass(&self) -> Answer<'_, ()>;

    /// Decides what happens to a commit.
    fn commit<'a>(&'a self, memory: &'a Arc<MemoryBackend>, commit: Commit) -> Answer<'a, Outcome>;
}

/// A life of a store in memory. It ends when its gate says so, and the next life finds what was committed.
pub(crate) struct Life<G> {
    memory: Arc<MemoryBackend>,
    pub(crate) gate: G,
}

impl<G: FaultGate> Life<G> {
    pub(crate) fn through(memory: Arc<MemoryBackend>, gate: G) -> Life<G> {
        Life { memory, gate }
    }

    /// Reads from the memory, once the gate lets the read through.
    fn read<'a, T>(&'a self, read: impl FnOnce(&'a MemoryBackend) -> Answer<'a, T> + Send + 'a) -> Answer<'a, T> {
        Box::pin(async move {
            self.gate.pass().await?;
            read(&self.memory).await
        })
    }
}

/// Crashes at one commit. Commits count from the call of `begin`.
pub(crate) struct CrashAt {
    crash: Option<Crash>,
    counts: AtomicBool,
    commits: AtomicU64,
    crashed: AtomicBool,
    course: Option<Arc<Course>>,
}

impl Life<CrashAt> {
    /// A life whose commits are not recorded.
    pub(crate) fn new(memory: Arc<MemoryBackend>, crash: Option<Crash>) -> Life<CrashAt> {
        let (counts, commits, crashed) = Default::default();
        Life::through(memory, CrashAt { crash, counts, commits, crashed, course: None })
    }

    /// A life whose commits are recorded in `course`.
    pub(crate) fn recorded(memory: Arc<MemoryBackend>, crash: Option<Crash>, course: &Arc<Course>) -> Life<CrashAt> {
        let mut life = Life::new(memory, crash);
        life.gate.course = Some(course.clone());
        life
    }

    /// Counts commits from now on.
    pub(crate) fn begin(&self, spaces: BTreeMap<SpaceId, String>) {
        self.gate.counts.store(true, Ordering::SeqCst);
        if let Some(course) = &self.gate.course {
            course.begin(spaces);
        }
    }

    pub(crate) fn has_crashed(&self) -> bool {
        self.gate.crashed.load(Ordering::SeqCst)
    }

    /// The number of commits that have counted so far.
    pub(crate) fn commits(&self) -> u64 {
        self.gate.commits.load(Ordering::SeqCst)
    }
}

impl CrashAt {
    fn check(&self) -> Result<()> {
        if self.crashed.load(Ordering::SeqCst) { Err(StoreError::Closed) } else { Ok(()) }
    }

    fn crash_if(&self, crash: Crash) -> Result<()> {
        if self.crash == Some(crash) {
            self.crashed.store(true, Ordering::SeqCst);
        }
        self.check()
    }
}

impl FaultGate for CrashAt {
    fn pass(&self) -> Answer<'_, ()> {
        Box::pin(std::future::ready(self.check()))
    }

    fn commit<'a>(&'a self, memory: &'a Arc<MemoryBackend>, commit: Commit) -> Answer<'a, Outcome> {
        Box::pin(async move {
            self.check()?;
            if !self.counts.load(Ordering::SeqCst) {
                return memory.commit(commit).await;
            }
            let number = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
            if let Some(course) = &self.course {
                course.commit(number, &commit);
            }
            self.crash_if(Crash { commit: number, side: Side::Before })?;
            let outcome = memory.commit(commit).await;
            self.crash_if(Crash { commit: number, side: Side::After })?;
            outcome
        })
    }
}

impl<G: FaultGate> Backend for Life<G> {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        self.gate.commit(&self.memory, commit)
    }

    fn latest(&self) -> Answer<'_, Generation> {
        self.read(|memory| memory.latest())
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        self.read(move |memory| memory.get(key, at))
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        self.read(move |memory| memory.scan(scan, at))
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        self.read(move |memory| memory.versions(key, at, limit))
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        self.read(move |memory| memory.changes(range, after, limit))
    }

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        Box::pin(async move {
            let newer = self.memory.newer(than, space).await?;
            self.gate.pass().await?;
            Ok(newer)
        })
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        self.memory.before(time, spaces)
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        match at {
            None => self.read(|memory| memory.pin(None)),
            Some(_) => self.memory.pin(at),
        }
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.memory.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.memory.declare(space, rules, at);
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
