//! Runs each command on a store and on the reference, and returns the first difference.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use latchwork_store::Receipt;
use latchwork_store::disk::sim::SimDisk;
use latchwork_store::{
    Change, Check, Commit, CommitId, Committed, Env, FileOptions, Generation, History, Key, Limits, Order, Outcome,
    PostgresOptions, Range, Rev, Space, SpaceId, SpaceSpec, Store, Timestamp, Version, View, VirtualClock, Watch,
};

use super::Kept;
use super::command::{Command, Condition, KEYS, Part, Place, SPACES};
use crate::reference::{Answer, Reference, dropped};

/// The histories of the spaces. Keys of the last one are used once.
const HISTORIES: [History; SPACES] =
    [History::None, History::Generations(6), History::For(Duration::from_secs(10)), History::Generations(2)];
const USED_ONCE: usize = 3;

/// How long a watch on a server may take to deliver a commit.
const PATIENCE: Duration = Duration::from_secs(3);

pub(super) struct World {
    kept: Kept,
    schema: String,
    env: Env,
    clock: Arc<VirtualClock>,
    disk: SimDisk,
    /// `None` only while the store is being reopened.
    store: Option<Store>,
    spaces: Vec<Space>,
    views: Vec<View>,
    watches: BTreeMap<usize, Watch>,
    reference: Reference,
    time: Timestamp,
    floors: Vec<Generation>,
    /// The commits that were applied under each id.
    sent: BTreeMap<u8, (Bytes, Commit)>,
}

type Compared = Result<(), String>;

fn same<T: PartialEq + Debug>(what: &str, store: T, reference: T) -> Compared {
    if store == reference { Ok(()) } else { Err(format!("{what}: store {store:?}, reference {reference:?}")) }
}

thread_local! {
    /// The runtime of a store on a server.
    static RUNTIME: std::cell::OnceCell<tokio::runtime::Runtime> = const { std::cell::OnceCell::new() };
}

/// Tells the schemas of this process apart.
static SCHEMAS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

fn on_runtime<T>(future: impl Future<Output = T>) -> T {
    RUNTIME.with(|runtime| {
        let new = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.get_or_init(new).block_on(future)
    })
}

/// Without a server, everything here runs on the caller's thread, so it is enough to poll again.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    if RUNTIME.with(|runtime| runtime.get().is_some()) {
        return on_runtime(future);
    }
    let mut future = std::pin::pin!(future);
    for _ in 0..1000 {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
    }
    panic!("the store waits for another thread")
}

fn said<T>(result: latchwork_store::Result<T>) -> Result<T, String> {
    result.map_err(|error| error.to_string())
}

impl World {
    pub(super) fn new(kept: Kept) -> World {
        let (env, clock) = Env::seeded(1);
        let time = env.now();
        let number = SCHEMAS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut world = World {
            kept,
            schema: format!("t_{}_model_{number}", std::process::id()),
            env,
            clock,
            disk: SimDisk::new(),
            store: None,
            spaces: Vec::new(),
            views: Vec::new(),
            watches: BTreeMap::new(),
            reference: Reference::at(Generation(SPACES as u64)),
            time,
            floors: vec![Generation(0); SPACES],
            sent: BTreeMap::new(),
        };
        world.open();
        world
    }

    fn open(&mut self) {
        let mut limits = Limits::default();
        limits.commit_bytes = 16 << 10;
        limits.value_bytes = 4 << 10;
        limits.operations = 64;
        let store = match self.kept {
            Kept::Memory => block_on(Store::memory_with(self.env.clone(), limits)),
            Kept::Files(sabotage) => {
                let options = FileOptions::new()
                    .env(self.env.clone())
                    .disk(self.disk.clone())
                    .without_threads()
                    .limits(limits)
                    .segment_bytes(64 << 10)
                    .overlay_bytes(24 << 10)
                    .cache_bytes(1 << 20);
                let options = sabotage.into_iter().fold(options, FileOptions::sabotage);
                block_on(options.open("/store"))
            }
            Kept::Postgres(url) => {
                let options = PostgresOptions::new().schema(&self.schema).connections(1).without_upkeep();
                on_runtime(options.env(self.env.clone()).limits(limits).connect(url))
            }
        };
        let store = store.expect("the store opens");
        self.spaces = (0..SPACES)
            .map(|number| {
                let spec = SpaceSpec::new(format!("{number}")).history(HISTORIES[number]);
                let spec = if number == USED_ONCE { spec.keys_used_once() } else { spec };
                block_on(store.space(spec)).expect("the space is declared")
            })
            .collect();
        for (number, space) in self.spaces.iter().enumerate().skip(1) {
            let position = self.watches.get(&number).map_or(Generation(0), Watch::position);
            let watch = block_on(store.watch(space.all(), position)).expect("the space is watched");
            self.watches.insert(number, watch);
        }
        self.store = Some(store);
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("the store is open")
    }

    fn key(&self, place: Place) -> Key {
        self.spaces[place.space].key([b'a' + place.key])
    }

    fn range(&self, part: Part) -> Range {
        self.spaces[part.space].range([b'a' + part.from]..[b'a' + part.to])
    }

    fn ago(&self, back: i64) -> Generation {
        Generation(self.reference.generation().0.saturating_add_signed(-back))
    }

    fn view(&self, number: u8) -> Option<&View> {
        (!self.views.is_empty()).then(|| &self.views[usize::from(number) % self.views.len()])
    }

    pub(super) fn play(&mut self, command: &Command) -> Compared {
        match command {
            Command::Commit { id, meta, checks, writes } => self.commit(*id, *meta, checks, writes),
            Command::Resend(id) => match self.sent.get(id).cloned() {
                Some((meta, commit)) => self.send(Some(*id), &meta, commit),
                None => Ok(()),
            },
            Command::Open(back) => {
                let wanted = back.map_or(self.reference.generation(), |back| self.ago(i64::from(back)));
                let view =
                    if back.is_some() { block_on(self.store().view_at(wanted)) } else { block_on(self.store().view()) };
                let view = said(view)?;
                same("the view's generation", view.generation(), wanted)?;
                self.views.push(view);
                Ok(())
            }
            Command::Read(view) => self.view(*view).map_or(Ok(()), |view| self.read(view)),
            Command::Drop(view) => {
                if !self.views.is_empty() {
                    self.views.swap_remove(usize::from(*view) % self.views.len());
                }
                Ok(())
            }
            Command::Changes { view, part, back, limit } => {
                let Some(view) = self.view(*view) else { return Ok(()) };
                self.changes(view, *part, self.ago(i64::from(*back)), *limit)
            }
            Command::Drain => self.drain(),
            Command::Maintain => self.maintain(),
            Command::Reopen => {
                if !matches!(self.kept, Kept::Memory) {
                    self.reopen();
                }
                Ok(())
            }
            Command::Advance(seconds) => {
                let by = Duration::from_secs(u64::from(seconds.unsigned_abs()));
                let now = self.env.now();
                self.clock.jump_to(if *seconds < 0 { now.minus(by) } else { now.plus(by) });
                Ok(())
            }
        }
    }

    fn reopen(&mut self) {
        self.views.clear();
        let positions: Vec<_> = self.watches.iter().map(|(space, watch)| (*space, watch.position())).collect();
        self.watches.clear();
        // The lease of a process on a server that has not closed its store would hold the floors.
        if let (Kept::Postgres(_), Some(store)) = (self.kept, &self.store) {
            block_on(store.close()).expect("the store closes");
        }
        self.store = None;
        self.open();
        for (space, position) in positions {
            let watch = block_on(self.store().watch(self.spaces[space].all(), position)).expect("the space is watched");
            self.watches.insert(space, watch);
        }
    }

    fn commit(&mut self, id: Option<u8>, meta: u8, checks: &[Condition], writes: &[(Place, Option<u8>)]) -> Compared {
        let meta = Bytes::from(vec![meta; usize::from(meta)]);
        let mut commit = Commit::new();
        let now = self.reference.generation();
        for check in checks {
            commit = commit.check(match *check {
                Condition::AtRev(place, off) => {
                    let key = self.key(place);
                    let rev = self.reference.version(&key, now).map_or(0, |version| version.rev.0);
                    Check::AtRev(key, Rev(rev.saturating_add_signed(i64::from(off))))
                }
                Condition::Absent(place) => Check::Absent(self.key(place)),
                Condition::Present(place) => Check::Present(self.key(place)),
                Condition::AtGeneration(back) => Check::AtGeneration(self.ago(i64::from(back))),
                Condition::Unchanged(part, back) => Check::Unchanged(self.range(part), self.ago(i64::from(back))),
            });
        }
        let mut written = Vec::new();
        for (place, value) in writes {
            let key = self.key(*place);
            let gone = self.reference.version(&key, now).is_some_and(|version| version.value.is_none());
            // A commit writes each key only once, and a deleted key that is used once is not created again.
            if written.contains(&key) || (place.space == USED_ONCE && gone) {
                continue;
            }
            commit = match value {
                Some(value) => commit.put(&key, vec![*value; usize::from(*value)]),
                None => commit.delete(&key),
            };
            written.push(key);
        }
        self.send(id, &meta, commit)
    }

    fn send(&mut self, id: Option<u8>, meta: &Bytes, commit: Commit) -> Compared {
        let commit_id = id.map(|id| CommitId([id; 16]));
        let floors: BTreeMap<SpaceId, Generation> =
            self.spaces.iter().map(|s| (s.id(), self.store().oldest(s))).collect();
        let time = self.env.now().max(self.time);
        let expected = self.reference.commit((commit_id, meta, &commit), time, |space| floors[&space]);
        let sent = commit.clone().meta(meta.clone());
        let sent = commit_id.into_iter().fold(sent, Commit::id);
        let answer = said(block_on(self.store().commit(sent))).map(|outcome| match outcome {
            Outcome::Refused(refusal) => Outcome::Refused(self.reference.canonical(refusal)),
            applied => applied,
        });
        if let (Ok(Outcome::Applied(_)), Some(id)) = (&expected, id) {
            self.sent.insert(id, (meta.clone(), commit));
        }
        let lands = |receipt: &Receipt| (receipt.changed() || id.is_some()) && !receipt.repeated;
        if matches!(&expected, Ok(Outcome::Applied(receipt)) if lands(receipt)) {
            self.time = time;
        }
        same::<Answer>("the answer", answer, expected)?;
        same("the generation", said(block_on(self.store().generation())), Ok(self.reference.generation()))
    }

    fn read(&self, view: &View) -> Compared {
        let at = view.generation();
        for (number, space) in self.spaces.iter().enumerate() {
            let floor = self.store().oldest(space);
            let below = (at < floor).then(|| dropped(space.id(), at, floor));
            for key in 0..KEYS {
                let key = self.key(Place { space: number, key });
                let expected = below.clone().map_or(Ok(self.reference.item(&key, at)), Err);
                same("get", said(block_on(view.get(&key))), expected)?;
                let history = said(block_on(view.history(&key, 99)));
                let expected = below.clone().map_or(Ok(self.reference.history(&key, at, floor)), Err);
                let trace = |version: &Version| version.value.is_none() && version.generation <= floor;
                let known = |history: Result<Vec<Version>, String>| {
                    history.map(|mut history| {
                        // The tombstone of a key that is used once is removed some time after the floor has passed it.
                        history.pop_if(|last| number == USED_ONCE && trace(last));
                        history
                    })
                };
                same("history", known(history), known(expected))?;
            }
            for (from, to, limit) in [(0, KEYS, 99), (0, KEYS, 2), (1, 3, 99), (2, 1, 99)] {
                let range = self.range(Part { space: number, from, to });
                let mut expected = self.reference.scan(&range, at);
                for order in [Order::Ascending, Order::Descending] {
                    let found = said(block_on(view.scan(&range, order, limit)));
                    let wanted = expected.iter().take(limit).cloned().collect();
                    same("scan", found, below.clone().map_or(Ok(wanted), Err))?;
                    expected.reverse();
                }
            }
        }
        Ok(())
    }

    fn changes(&self, view: &View, part: Part, mut since: Generation, limit: usize) -> Compared {
        let (range, floor) = (self.range(part), self.store().oldest(&self.spaces[part.space]));
        let first = said(block_on(view.changes_since(&range, since, limit)));
        if since < floor {
            let expected = dropped(range.space(), since, floor);
            return same("changes", first.map(|_| ()), Err(expected));
        }
        let (mut found, expected) = (Vec::new(), self.reference.changes(&range, since, view.generation()));
        while since < view.generation() && limit > 0 {
            let changes = said(block_on(view.changes_since(&range, since, limit)))?;
            if changes.through <= since || changes.commits.len() > limit {
                return Err(format!("changes after {since} do not continue: {changes:?}"));
            }
            since = changes.through;
            found.extend(changes.commits);
        }
        if limit == 0 { Ok(()) } else { same("changes", sorted(found), sorted(expected)) }
    }

    fn drain(&mut self) -> Compared {
        let latest = self.reference.generation();
        for (number, watch) in &mut self.watches {
            let space = &self.spaces[*number];
            let floor = self.store.as_ref().expect("the store is open").oldest(space);
            let position = watch.position();
            let mut delivered = Vec::new();
            let is_remote = matches!(self.kept, Kept::Postgres(_));
            let left = |watch: &Watch| !self.reference.changes(&space.all(), watch.position(), latest).is_empty();
            loop {
                let next = match is_remote {
                    false => std::pin::pin!(watch.next()).poll(&mut Context::from_waker(Waker::noop())),
                    // A watch that has caught up waits. What it should not deliver is noticed the next time.
                    true if watch.position() >= floor && !left(watch) => Poll::Pending,
                    // The position of a watch that has caught up may be before the floor: it then waits, and has to.
                    true => match block_on(async { tokio::time::timeout(PATIENCE, watch.next()).await }) {
                        Ok(next) => Poll::Ready(next),
                        Err(_) if left(watch) => return Err(format!("the watch of {space:?} delivers nothing more")),
                        Err(_) => Poll::Pending,
                    },
                };
                match next {
                    Poll::Pending => break,
                    Poll::Ready(Ok(commit)) => delivered.push(commit),
                    Poll::Ready(Err(error)) => {
                        // A watch that has found no commit has moved on before the floor was raised: the clean-up of a
                        // server works beside the calls.
                        let position = watch.position();
                        same("the watch's error", error.to_string(), dropped(space.id(), position, floor))?;
                        if position >= floor || !delivered.is_empty() {
                            return Err(format!("{error}, but the watch of {space:?} is at {position}"));
                        }
                        let store = self.store.as_ref().expect("the store is open");
                        *watch = said(block_on(store.watch(space.all(), floor)))?;
                        delivered = self.reference.changes(&space.all(), position, floor);
                    }
                }
            }
            let expected = self.reference.changes(&space.all(), position, latest);
            same("watched", sorted(delivered), sorted(expected))?;
            if !is_remote {
                same("the watch's position", watch.position(), latest)?;
            }
        }
        Ok(())
    }

    fn maintain(&mut self) -> Compared {
        while said(block_on(self.store().maintain()))? {}
        if !self.views.is_empty() {
            return Ok(());
        }
        for (number, space) in self.spaces.iter().enumerate() {
            // A floor that depends on time may rise late. A floor that depends on generations is exact.
            if !matches!(HISTORIES[number], History::For(_)) {
                same("the floor", self.store().oldest(space), self.floors[number].max(self.allowed(number)))?;
            }
        }
        Ok(())
    }

    /// The highest floor that the rules of a space permit now.
    fn allowed(&self, space: usize) -> Generation {
        let latest = self.reference.generation();
        match HISTORIES[space] {
            History::None => latest,
            History::Generations(count) => Generation(latest.0.saturating_sub(count)),
            History::For(duration) => self.reference.newest_at(self.env.now().max(self.time).minus(duration)),
            History::Forever => Generation(0),
        }
    }

    /// A floor rises only as far as rules and views permit, and never falls.
    pub(super) fn check_floors(&mut self) -> Compared {
        let pinned = self.views.iter().map(View::generation).min();
        for number in 0..SPACES {
            let (before, now) = (self.floors[number], self.store().oldest(&self.spaces[number]));
            let allowed = self.allowed(number);
            let allowed = pinned.map_or(allowed, |pinned| allowed.min(pinned));
            if now < before || (now > before && now > allowed) {
                return Err(format!("the floor of space {number} went from {before} to {now}; allowed is {allowed}"));
            }
            self.floors[number] = now;
        }
        Ok(())
    }

    /// Checks the open views, the watches and the newest generation at the end, and sometimes verifies the store.
    pub(super) fn finish(mut self) -> Compared {
        for view in std::mem::take(&mut self.views) {
            self.read(&view)?;
        }
        self.drain()?;
        self.read(&said(block_on(self.store().view()))?)?;
        if self.reference.generation().0.is_multiple_of(8) {
            same("damage", said(block_on(self.store().verify())), Ok(Vec::new()))?;
        }
        Ok(())
    }
}

/// Thousands of schemas would fill the disk.
impl Drop for World {
    fn drop(&mut self) {
        let Kept::Postgres(url) = self.kept else { return };
        let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", self.schema);
        self.views.clear();
        self.watches.clear();
        self.store = None;
        on_runtime(async {
            let Ok((client, connection)) = tokio_postgres::connect(url, tokio_postgres::NoTls).await else { return };
            let serving = tokio::spawn(connection);
            let _ = client.batch_execute(&drop).await;
            serving.abort();
        });
    }
}

/// The order of the changes in a commit is not defined, so they are sorted.
fn sorted(mut commits: Vec<Committed>) -> Vec<Committed> {
    for commit in &mut commits {
        commit.changes.sort_by(|a: &Change, b: &Change| a.key.cmp(&b.key));
    }
    commits
}
