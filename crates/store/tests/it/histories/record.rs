//! Records a history: tasks commit, read and watch. A shared counter shows when each call began and ended.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use latchwork_store::{
    Actual, Check, Commit, CommitId, Committed, Generation, History, Item, Key, Outcome, Range, Rev, SpaceSpec, Store,
};
use tokio::sync::Barrier;

use super::check::Violation;

const TASKS: usize = 8;
const WATCHERS: usize = 2;
/// A history that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// All calls and answers of one history.
pub(crate) struct Recorded {
    /// The generation at which it began.
    pub(crate) start: Generation,
    pub(crate) events: Vec<Event>,
    pub(crate) watched: Range,
    /// The commits that each watch returned, from `start` on.
    pub(crate) deliveries: Vec<Vec<Committed>>,
}

/// One call and its answer.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) what: What,
}

#[derive(Debug)]
pub(crate) enum What {
    Commit { id: Option<CommitId>, commit: Commit, outcome: Outcome },
    Read { generation: Generation, found: Vec<(Key, Option<Item>)> },
}

/// What the tasks of a history share.
struct Scene {
    store: Store,
    ticks: AtomicU64,
    keys: Vec<Key>,
    watched: Range,
    /// All tasks begin together: tasks that run one after the other do not compete.
    together: Barrier,
}

struct Task {
    scene: Arc<Scene>,
    rng: Rng,
    /// The revs that this task last saw. Other tasks may have written since.
    known: BTreeMap<Key, Option<Rev>>,
    read_at: Generation,
    events: Vec<Event>,
}

fn broken(error: impl Display) -> Violation {
    Violation::Broken(format!("a call failed: {error}"))
}

pub(crate) async fn record(store: &Store, seed: u64, operations: usize) -> Result<Recorded, Violation> {
    let recorded = tokio::time::timeout(PATIENCE, record_all(store, seed, operations)).await;
    recorded.unwrap_or_else(|_| Err(Violation::Broken("the history hangs".into())))
}

async fn record_all(store: &Store, seed: u64, operations: usize) -> Result<Recorded, Violation> {
    let watched = store.space(SpaceSpec::new("watched").history(History::Forever)).await.map_err(broken)?;
    // A store that is broken on purpose may answer before a declaration is visible. This makes sure that it is.
    store.maintain().await.map_err(broken)?;
    let bare = store.space(SpaceSpec::new("bare")).await.map_err(broken)?;
    store.maintain().await.map_err(broken)?;
    let start = store.generation().await.map_err(broken)?;
    let keys = ["a", "b", "c", "d"].map(|name| watched.key(name)).into_iter();
    let keys = keys.chain(["x", "y"].map(|name| bare.key(name))).collect();
    let (ticks, together) = (AtomicU64::new(0), Barrier::new(TASKS));
    let scene = Arc::new(Scene { store: store.clone(), ticks, keys, watched: watched.all(), together });
    let end = watched.key("end");
    let mut watchers = tokio::task::JoinSet::new();
    for _ in 0..WATCHERS {
        watchers.spawn(watch(store.clone(), watched.all(), start, end.clone()));
    }
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..TASKS {
        let rng = Rng::with_seed(seed << 8 | number as u64);
        let (scene, known) = (scene.clone(), BTreeMap::new());
        let task = Task { scene, rng, known, read_at: start, events: Vec::with_capacity(operations / TASKS) };
        tasks.spawn(task.run(operations / TASKS));
    }
    let mut events = Vec::with_capacity(operations + 1);
    for task in tasks.join_all().await {
        events.extend(task?);
    }
    events.push(scene.commit(None, Commit::new().put(&end, "")).await?);
    let deliveries = watchers.join_all().await.into_iter().collect::<Result<_, _>>()?;
    Ok(Recorded { start, events, watched: watched.all(), deliveries })
}

/// Follows the range until the last key of the history is written.
async fn watch(store: Store, range: Range, start: Generation, end: Key) -> Result<Vec<Committed>, Violation> {
    let mut watch = store.watch(range, start).await.map_err(broken)?;
    let mut delivered: Vec<Committed> = Vec::new();
    loop {
        let commit = watch.next().await.map_err(broken)?;
        let (given, visible) = (commit.generation, store.generation().await.map_err(broken)?);
        if given > visible {
            return Err(Violation::Broken(format!("a watch returned {given} while readers see {visible}")));
        }
        let last = commit.changes.iter().any(|change| change.key == end);
        delivered.push(commit);
        if last {
            return Ok(delivered);
        }
    }
}

impl Scene {
    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst)
    }

    async fn commit(&self, id: Option<CommitId>, commit: Commit) -> Result<Event, Violation> {
        let sent = id.into_iter().fold(commit.clone(), Commit::id);
        let began = self.tick();
        let outcome = self.store.commit(sent).await.map_err(broken)?;
        let ended = self.tick();
        Ok(Event { began, ended, what: What::Commit { id, commit, outcome } })
    }
}

impl Task {
    async fn run(mut self, operations: usize) -> Result<Vec<Event>, Violation> {
        self.scene.together.wait().await;
        while self.events.len() < operations {
            match self.rng.u32(..100) {
                0..30 => self.read().await?,
                30..34 => self.send_twice().await?,
                _ => {
                    let commit = self.make_up();
                    let event = self.scene.commit(None, commit).await?;
                    self.note(event);
                }
            }
            // Lets other tasks run, so that the revs that this task knows become out of date.
            if self.rng.u32(..100) < 80 {
                tokio::task::yield_now().await;
            }
            if self.rng.u32(..1000) < 3 {
                self.scene.store.maintain().await.map_err(broken)?;
            }
        }
        Ok(self.events)
    }

    async fn read(&mut self) -> Result<(), Violation> {
        let began = self.scene.tick();
        let view = self.scene.store.view().await.map_err(broken)?;
        let mut found = Vec::new();
        for key in &self.scene.keys {
            let item = view.get(key).await.map_err(broken)?;
            self.known.insert(key.clone(), item.as_ref().map(|item| item.rev));
            found.push((key.clone(), item));
        }
        let ended = self.scene.tick();
        self.read_at = view.generation();
        self.events.push(Event { began, ended, what: What::Read { generation: view.generation(), found } });
        Ok(())
    }

    /// Sends one commit twice at the same time, like a caller that retries after a timeout.
    async fn send_twice(&mut self) -> Result<(), Violation> {
        let (id, commit) = (CommitId(self.rng.u128(..).to_be_bytes()), self.make_up());
        let (first, second) =
            tokio::join!(self.scene.commit(Some(id), commit.clone()), self.scene.commit(Some(id), commit));
        self.note(first?);
        self.note(second?);
        Ok(())
    }

    /// A commit that is based on the revs that this task knows. They may be out of date.
    fn make_up(&mut self) -> Commit {
        let mut commit = Commit::new();
        let keys = self.scene.keys.clone();
        let mut chosen: Vec<Key> = self.rng.choose_multiple(&keys, 2).into_iter().cloned().collect();
        chosen.truncate(self.rng.usize(1..=2));
        for key in &chosen {
            commit = match (self.rng.u32(..10), self.known.get(key)) {
                (0, _) => commit,
                (_, Some(Some(rev))) => commit.at_rev(key, *rev),
                _ => commit.absent(key),
            };
        }
        if self.rng.u32(..20) == 0 {
            commit = commit.unchanged(&self.scene.watched, self.read_at);
        }
        if self.rng.u32(..50) == 0 {
            commit = commit.at_generation(self.read_at);
        }
        for key in chosen {
            commit = match self.rng.u32(..20) {
                0 => commit,
                1..4 => commit.delete(&key),
                _ => commit.put(&key, format!("{}", self.rng.u32(..))),
            };
        }
        commit
    }

    /// Learns the revs of an answer and records it.
    fn note(&mut self, event: Event) {
        if let What::Commit { commit, outcome, .. } = &event.what {
            match outcome {
                Outcome::Applied(receipt) => {
                    for (write, rev) in commit.writes().iter().zip(&receipt.revs) {
                        let put = !matches!(write, latchwork_store::Write::Delete(_));
                        self.known.insert(write.key().clone(), rev.filter(|_| put));
                    }
                }
                Outcome::Refused(refusal) => {
                    for failed in &refusal.failed {
                        if let Check::AtRev(key, _) | Check::Absent(key) | Check::Present(key) = &failed.check {
                            let rev = if let Actual::AtRev(rev) = failed.actual { Some(rev) } else { None };
                            self.known.insert(key.clone(), rev);
                        }
                    }
                }
            }
        }
        self.events.push(event);
    }
}
