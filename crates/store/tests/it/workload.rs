//! The workload of the crash tests while the disk is recorded: commits of all kinds, folds, restores, restarts and
//! kills. A kill ends the process, but the cache of the operating system stays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use latchwork_store::disk::sim::{Attempt, Fault, Recording, SimDisk};
use latchwork_store::*;

use crate::ledger::{Entry, KEPT_SPACES, Ledger, restored, specs};
use crate::recovered::{DIRECTORY, ensure, options};

/// A workload that has ended: the recording of the disk and the answers to callers.
pub struct Run {
    pub recording: Recording,
    pub ledger: Ledger,
    pub now: Timestamp,
}

struct Worker {
    disk: SimDisk,
    env: Env,
    clock: Arc<VirtualClock>,
    random: fastrand::Rng,
    sabotage: Option<Sabotage>,
    store: Option<Store>,
    spaces: Vec<Space>,
    ledger: Ledger,
    /// The commit that was sent and not answered. It may have been applied.
    pending: Option<Entry>,
    /// True if the process is killed now and then.
    mortal: bool,
    /// True if the process will be killed soon.
    doomed: bool,
    /// The last snapshot: its directory and generation.
    snapshot: Option<(String, u64)>,
    numbers: u64,
    /// How many of 100 steps are folds.
    folds: u8,
}

/// Why a step ended early: the store failed, which a kill explains, or its answer was wrong.
enum Trouble {
    Failed(StoreError),
    Wrong(String),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Trouble {
        Trouble::Failed(error)
    }
}

impl From<String> for Trouble {
    fn from(what: String) -> Trouble {
        Trouble::Wrong(what)
    }
}

/// Runs `steps` steps in one task and without threads, so that a seed always produces the same recording.
pub async fn alone(seed: u64, steps: usize, sabotage: Option<Sabotage>) -> Result<Run, String> {
    let disk = SimDisk::new();
    let recording = disk.record();
    let mut worker = Worker::new(seed, disk, sabotage);
    worker.mortal = true;
    if worker.random.u8(..4) == 0 {
        worker.doom(60);
    }
    for step in 0..steps {
        match worker.step().await {
            Ok(()) => {}
            Err(Trouble::Failed(_)) if worker.doomed => {
                worker.revive().await.map_err(|what| format!("step {step}, after a kill: {what}"))?;
            }
            Err(Trouble::Failed(error)) => return Err(format!("step {step}: {error}")),
            Err(Trouble::Wrong(what)) => return Err(format!("step {step}: {what}")),
        }
    }
    worker.disk.clear_faults();
    worker.store = None;
    Ok(Run { recording: recording.stop(), ledger: worker.ledger, now: worker.env.now() })
}

/// A workload up to its first failure.
pub struct Failing {
    pub error: Option<StoreError>,
    /// The store that failed; `None` if it was being opened or closed.
    pub store: Option<Store>,
    /// The acknowledged commits, and after them the commit that was sent and not answered.
    pub ledger: Ledger,
    pub acknowledged: u64,
    pub now: Timestamp,
}

/// Runs steps on a disk that may fail, without kills, and stops at the first failure.
pub async fn failing(seed: u64, steps: usize, disk: SimDisk) -> Result<Failing, String> {
    let mut worker = Worker::new(seed, disk, None);
    let mut error = None;
    for step in 0..steps {
        match worker.step().await {
            Ok(()) => {}
            Err(Trouble::Failed(failed)) => {
                error = Some(failed);
                break;
            }
            Err(Trouble::Wrong(what)) => return Err(format!("step {step}: {what}")),
        }
    }
    let Worker { store, mut ledger, pending, env, .. } = worker;
    let acknowledged = ledger.last();
    pending.into_iter().for_each(|entry| ledger.push(entry));
    Ok(Failing { error, store, ledger, acknowledged, now: env.now() })
}

impl Worker {
    fn new(seed: u64, disk: SimDisk, sabotage: Option<Sabotage>) -> Worker {
        let (env, clock) = Env::seeded(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let folds = *random.choice(&[1, 4, 12]).expect("some choices");
        Worker {
            disk,
            env,
            clock,
            random,
            sabotage,
            store: None,
            spaces: Vec::new(),
            ledger: Ledger::default(),
            pending: None,
            mortal: false,
            doomed: false,
            snapshot: None,
            numbers: 0,
            folds,
        }
    }

    async fn step(&mut self) -> Result<(), Trouble> {
        self.clock.advance(Duration::from_millis(self.random.u64(..40)));
        if self.store.is_none() {
            return self.open().await;
        }
        if self.spaces.len() < specs().len() {
            return self.declare().await;
        }
        match self.random.u8(..100) {
            0..=3 if self.mortal && !self.doomed => self.doom(50),
            4..=5 => self.store = None,
            6..=7 => {
                let store = self.store().clone();
                self.store = None;
                store.close().await?;
            }
            8..=9 => self.persist().await?,
            10..=11 => self.restore().await?,
            12..=14 => self.repeat().await?,
            15.. if self.random.u8(..100) < self.folds => {
                self.store().maintain().await?;
            }
            _ => self.commit().await?,
        }
        Ok(())
    }

    /// Lets the process live for up to `most` more operations on the disk, or until it syncs a directory: such syncs
    /// are rare, and much depends on them.
    fn doom(&mut self, most: u32) {
        self.doomed = true;
        let mut left = self.random.u32(..most);
        let at_names = self.random.bool();
        let mut dead = false;
        self.disk.set_faults(move |attempt, _| {
            dead |= if at_names { attempt == Attempt::SyncDirectory } else { left == 0 };
            left = left.saturating_sub(1);
            dead.then_some(Fault::Error(std::io::ErrorKind::Other))
        });
    }

    /// Starts a new process on the same files. Everything written is there, synced or not.
    async fn revive(&mut self) -> Result<(), String> {
        self.store = None;
        self.disk.clear_faults();
        self.doomed = false;
        self.open().await.map_err(|trouble| match trouble {
            Trouble::Failed(error) => format!("opening: {error}"),
            Trouble::Wrong(what) => what,
        })
    }

    async fn open(&mut self) -> Result<(), Trouble> {
        let mut options = options(&self.disk, &self.env).without_threads();
        if let Some(sabotage) = self.sabotage {
            options = options.sabotage(sabotage);
        }
        let store = options.open(DIRECTORY).await?;
        let generation = store.generation().await?.0;
        self.store = Some(store);
        match self.pending.take() {
            Some(entry) if entry.generation == generation => {
                self.spaces.extend(entry.declares.as_ref().map(|(space, _)| space.clone()));
                self.ledger.push(entry);
            }
            _ => {}
        }
        let last = self.ledger.last();
        if last != generation {
            return Err(format!("opened at generation {generation}, but {last} was acknowledged").into());
        }
        self.disk.note(generation);
        Ok(())
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("a step with a store")
    }

    fn entry(&self) -> Entry {
        let last = self.ledger.last();
        Entry::new(last + 1, self.env.now().max(self.ledger.time(last)))
    }

    fn acknowledged(&mut self, entry: Entry) {
        self.pending = None;
        self.disk.note(entry.generation);
        self.ledger.push(entry);
    }

    async fn declare(&mut self) -> Result<(), Trouble> {
        let (spec, history) = specs().swap_remove(self.spaces.len());
        let entry = self.entry();
        match self.store().space(spec.clone()).await {
            Ok(space) => {
                self.spaces.push(space.clone());
                self.acknowledged(Entry { declares: Some((space, history)), ..entry });
                Ok(())
            }
            Err(error) => {
                // The space may have been declared all the same. A store in memory shows which number it would get.
                let double = Store::memory().await?;
                let mut space = None;
                for (spec, _) in specs().into_iter().take(self.spaces.len() + 1) {
                    space = Some(double.space(spec).await?);
                }
                self.pending = space.map(|space| Entry { declares: Some((space, history)), ..entry });
                Err(error.into())
            }
        }
    }

    async fn persist(&mut self) -> Result<(), Trouble> {
        self.numbers += 1;
        let directory = format!("/snapshot-{}", self.numbers);
        self.store().view().await?.persist(&directory).await?;
        self.snapshot = Some((directory, self.ledger.last()));
        Ok(())
    }

    async fn restore(&mut self) -> Result<(), Trouble> {
        let Some((directory, taken)) = self.snapshot.clone() else { return Ok(()) };
        let known: BTreeSet<CommitId> =
            self.ledger.named(taken).iter().filter_map(|entry| Some(entry.named.as_ref()?.0)).collect();
        let mut changes = Vec::new();
        for (key, current) in self.ledger.state(self.ledger.last()) {
            changes
                .extend(restored(current, self.ledger.held(key, taken)).map(|(rev, value)| (key.clone(), rev, value)));
        }
        let entry = Entry { changes, restored: Some(known), ..self.entry() };
        self.pending = Some(entry.clone());
        let generation = self.store().restore(&directory, Confirm::ReplaceEverything).await?;
        if generation.0 != entry.generation {
            return Err(format!("a restore got generation {generation} instead of {}", entry.generation).into());
        }
        self.acknowledged(entry);
        Ok(())
    }

    /// Sends an answered commit again.
    async fn repeat(&mut self) -> Result<(), Trouble> {
        let named = self.ledger.named(self.ledger.last());
        let Some(entry) = named.get(self.random.usize(..named.len().max(1))) else { return Ok(()) };
        let Some((id, commit, revs)) = entry.named.clone() else { return Ok(()) };
        match self.store().commit(commit.id(id)).await? {
            Outcome::Applied(receipt) if receipt.repeated && receipt.revs == revs => Ok(()),
            outcome => Err(format!("a commit sent again was answered with {outcome:?}").into()),
        }
    }

    async fn commit(&mut self) -> Result<(), Trouble> {
        let (commit, entry, refused) = self.invent();
        let changes = !refused && !entry.changes.is_empty();
        if changes {
            self.pending = Some(entry.clone());
        }
        let commit = match &entry.named {
            Some((id, ..)) => commit.id(*id),
            None => commit,
        };
        let outcome = self.store().commit(commit).await?;
        check_outcome(&outcome, &entry, refused)?;
        if changes {
            self.acknowledged(entry);
        }
        Ok(())
    }

    /// Returns a commit, its expected effect, and whether it must be refused.
    fn invent(&mut self) -> (Commit, Entry, bool) {
        let mut commit = Commit::new();
        let mut entry = self.entry();
        let mut revs = Vec::new();
        let mut room = 14_000;
        let mut written = BTreeSet::new();
        let count = if self.random.u8(..20) == 0 { 30 } else { self.random.usize(1..=5) };
        for _ in 0..count {
            let (key, delete) = self.pick();
            if !written.insert(key.clone()) {
                continue;
            }
            let held = self.ledger.held(&key, self.ledger.last()).cloned();
            let live = held.as_ref().filter(|(.., value)| value.is_some()).map(|(rev, ..)| *rev);
            if self.random.u8(..3) == 0 {
                commit = match live {
                    Some(rev) => commit.at_rev(&key, rev),
                    None => commit.absent(&key),
                };
            }
            let rev = held.map_or(Rev(1), |(rev, ..)| rev.next());
            if delete {
                commit = commit.delete(&key);
                revs.push(live.map(|_| rev));
                entry.changes.extend(live.map(|_| (key, rev, None)));
            } else {
                let value = self.value(&mut room);
                commit = commit.put(&key, value.clone());
                revs.push(Some(rev));
                entry.changes.push((key, rev, Some(value)));
            }
        }
        let refused = self.random.u8(..8) == 0;
        if refused {
            commit = commit.at_generation(Generation(self.ledger.last() + 7));
        }
        if self.random.u8(..3) == 0 && !refused && !entry.changes.is_empty() {
            let id = CommitId(self.random.u128(..).to_le_bytes());
            entry.named = Some((id, commit.clone(), revs));
        }
        (commit, entry, refused)
    }

    /// Returns a key to write, and whether to delete it.
    fn pick(&mut self) -> (Key, bool) {
        let index = self.random.usize(..self.spaces.len());
        let space = self.spaces[index].clone();
        if index < KEPT_SPACES {
            return (space.key(format!("k{}", self.random.u8(..12))), self.random.u8(..4) == 0);
        }
        // A key in a snapshot is not deleted: after a restore it is not defined whether its rev is still known.
        let since = self.snapshot.as_ref().map_or(0, |(_, taken)| *taken);
        let live = self.ledger.live(&space, self.ledger.last());
        let old = live.iter().find(|(key, _)| self.ledger.held(key, since).is_none());
        match old {
            Some((key, _)) if self.random.bool() => (key.clone(), true),
            _ => {
                self.numbers += 1;
                (space.key(format!("once{}", self.numbers)), false)
            }
        }
    }

    fn value(&mut self, room: &mut usize) -> Vec<u8> {
        let length = match self.random.u8(..12) {
            0 => 0,
            1..=8 => self.random.usize(..150),
            9..=10 => self.random.usize(500..2500),
            _ => self.random.usize(4000..9000),
        };
        let length = length.min(*room);
        *room -= length;
        let mut value = vec![0; length];
        self.random.fill(&mut value);
        value
    }
}

fn check_outcome(outcome: &Outcome, entry: &Entry, refused: bool) -> Result<(), String> {
    match outcome {
        Outcome::Refused(refusal) => {
            ensure!(refused, "a commit that should have been applied: {refusal}");
        }
        Outcome::Applied(receipt) => {
            ensure!(!refused && !receipt.repeated, "a commit that should have been refused: {receipt:?}");
            let revs: Vec<Rev> = receipt.revs.iter().copied().flatten().collect();
            let wanted: Vec<Rev> = entry.changes.iter().map(|(_, rev, _)| *rev).collect();
            ensure!(revs == wanted, "revs {revs:?} instead of {wanted:?}");
            let generation = if wanted.is_empty() { entry.generation - 1 } else { entry.generation };
            ensure!(receipt.generation.0 == generation, "generation {} instead of {generation}", receipt.generation);
            ensure!(receipt.time == entry.time, "time {} instead of {}", receipt.time, entry.time);
        }
    }
    Ok(())
}
