//! A store in memory whose commits to a space can be held up, before or after they land. So a test makes two things
//! happen at the very same moment, every time. Answers can be lost, keys can be unreadable for a while, reads can
//! yield, and the process can end after a number of commits. Several engines can also work on one store, as if each
//! owned a part of it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::LockState;
use latchwork::store::backend::{
    Answer, Backend, Before, Changes, Contents, Damage, MemoryBackend, Pin, Rules, Scan, Stats,
};
use latchwork::store::disk::RealDisk;
use latchwork::store::{
    Check, Commit, Env, Generation, Key, Limits, Order, Outcome, Range, Space, SpaceId, Store, StoreError, Timestamp,
    Version, VirtualClock, Write,
};
use latchwork::testing::Side;
use latchwork::workflow::{Engine, EngineBuilder, ExecutionState};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// How often every task gets a turn. A task that is not done by then never will be.
const TURNS: usize = 200;

#[derive(Default)]
struct Ways {
    /// The space whose commits are held up unless a test names another: that of the locks.
    heads: Option<SpaceId>,
    space: Option<SpaceId>,
    /// The space of shard owners, if ownership is not checked.
    shards: Option<SpaceId>,
    /// The next commit to the space is held up.
    holds: Option<Side>,
    /// The answer to the next commit to the space is lost.
    loses: bool,
    /// A key that cannot be read.
    unreadable: Option<Key>,
    /// Keys whose records are damaged.
    damaged: BTreeSet<Key>,
    /// Whether every read yields once.
    is_slow: bool,
    /// The keys that scans have returned, if they are noted.
    scanned: Option<BTreeSet<Key>>,
    /// How many more commits land before the process ends.
    left: Option<u32>,
}

impl Ways {
    fn is_to_it(&self, commit: &Commit) -> bool {
        commit.writes().iter().any(|write| Some(write.key().space()) == self.space)
    }
}

struct Turnstile {
    memory: MemoryBackend,
    ways: Mutex<Ways>,
    opened: Semaphore,
}

impl Turnstile {
    /// The commit without its checks of ownership. Other checks keep their places.
    fn by_any_engine(&self, commit: Commit) -> Commit {
        let Some(shards) = self.ways.lock().shards else { return commit };
        if commit.writes().iter().any(|write| write.key().space() == shards) {
            return commit;
        }
        let checks = commit.checks().iter().cloned().map(|check| match check {
            Check::AtRev(key, _) if key.space() == shards => Check::Present(key),
            check => check,
        });
        commit.writes().iter().cloned().fold(checks.fold(Commit::new(), Commit::check), Commit::write)
    }

    /// Whether a commit is held up, and on which side.
    fn holds(&self, commit: &Commit) -> Option<Side> {
        let mut ways = self.ways.lock();
        let is_to_it = ways.is_to_it(commit);
        ways.holds.take_if(|_| is_to_it)
    }

    fn loses(&self, commit: &Commit) -> bool {
        let mut ways = self.ways.lock();
        let loses = ways.loses && ways.is_to_it(commit);
        ways.loses &= !loses;
        loses
    }

    /// Fails once the process has ended, and counts commits until then.
    fn lives(&self, is_commit: bool) -> latchwork::store::Result<()> {
        match &mut self.ways.lock().left {
            Some(0) => return Err(StoreError::Closed),
            Some(left) if is_commit => *left -= 1,
            _ => {}
        }
        Ok(())
    }

    /// Runs before every read.
    async fn read(&self) -> latchwork::store::Result<()> {
        if self.ways.lock().is_slow {
            tokio::task::yield_now().await;
        }
        self.lives(false)
    }

    /// Fails like a store that finds a wrong checksum in one of these records.
    fn intact<'a>(&self, mut keys: impl Iterator<Item = &'a Key>) -> latchwork::store::Result<()> {
        let damaged = &self.ways.lock().damaged;
        match keys.find(|key| damaged.contains(*key)) {
            Some(key) => Err(StoreError::Corrupt { place: key.to_string(), detail: "the checksum is wrong".into() }),
            None => Ok(()),
        }
    }

    async fn turn(&self) {
        self.opened.acquire().await.expect("it is never closed").forget();
    }
}

impl Backend for Turnstile {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move {
            self.lives(true)?;
            let checked = commit.checks().iter().filter_map(|check| match check {
                Check::AtRev(key, _) | Check::Present(key) | Check::Absent(key) => Some(key),
                _ => None,
            });
            self.intact(checked.chain(commit.writes().iter().map(Write::key)))?;
            let commit = self.by_any_engine(commit);
            let (holds, loses) = (self.holds(&commit), self.loses(&commit));
            if holds == Some(Side::Before) {
                self.turn().await;
            }
            let outcome = self.memory.commit(commit).await;
            if holds == Some(Side::After) {
                self.turn().await;
            }
            if loses {
                return Err(StoreError::Uncertain { cause: "the connection broke".into() });
            }
            outcome
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(async move {
            self.read().await?;
            self.memory.latest().await
        })
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        if self.ways.lock().unreadable.as_ref() == Some(key) {
            return Box::pin(std::future::ready(Err(StoreError::Uncertain { cause: "the connection broke".into() })));
        }
        Box::pin(async move {
            self.read().await?;
            self.intact(std::iter::once(key))?;
            self.memory.get(key, at).await
        })
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(async move {
            self.read().await?;
            let found = self.memory.scan(scan, at).await?;
            self.intact(found.iter().map(|(key, _)| key))?;
            let keys = found.iter().map(|(key, _)| key.clone());
            self.ways.lock().scanned.iter_mut().for_each(|scanned| scanned.extend(keys.clone()));
            Ok(found)
        })
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        Box::pin(async move {
            self.intact(std::iter::once(key))?;
            self.memory.versions(key, at, limit).await
        })
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        self.memory.changes(range, after, limit)
    }

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        self.memory.newer(than, space)
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        self.memory.before(time, spaces)
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        Box::pin(async move {
            if at.is_none() {
                self.read().await?;
            }
            self.memory.pin(at).await
        })
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
        self.memory.close()
    }
}

/// How a record is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    Nonsense,
    Checksum,
}

impl Harm {
    pub const ALL: [Harm; 2] = [Harm::Nonsense, Harm::Checksum];
}

/// An engine on such a store, whose time passes only when a test says so.
pub struct Stage {
    pub engine: Engine,
    turnstile: Arc<Turnstile>,
    pub clock: Arc<VirtualClock>,
}

impl Stage {
    pub async fn new(set_up: impl FnOnce(EngineBuilder) -> EngineBuilder) -> Stage {
        let (env, clock) = Env::seeded(1);
        let memory = MemoryBackend::new(env.clone());
        let turnstile = Arc::new(Turnstile { memory, ways: Mutex::default(), opened: Semaphore::new(0) });
        let store = Store::with_backend(turnstile.clone(), env, Limits::default(), Arc::new(RealDisk)).await.unwrap();
        let engine = set_up(Engine::on(&store)).start().await.unwrap();
        let stage = Stage { engine, turnstile, clock };
        let heads = Some(stage.space("lock.heads").await.all().space());
        let mut ways = stage.turnstile.ways.lock();
        (ways.heads, ways.space) = (heads, heads);
        drop(ways);
        stage
    }

    /// A second engine on the same store. From now on ownership is not checked.
    pub async fn second(&self) -> Engine {
        let shards = self.space("node.shards").await.all().space();
        self.turnstile.ways.lock().shards = Some(shards);
        Engine::on(self.engine.store()).start().await.unwrap()
    }

    pub async fn space(&self, name: &str) -> Space {
        let spaces = self.engine.store().spaces().await.unwrap();
        spaces.into_iter().find(|space| space.name() == name).expect("an engine has declared it")
    }

    pub async fn state(&self, lock: &str) -> LockState {
        self.engine.locks().inspect(lock).await.unwrap()
    }

    /// Holds up the next commit to a lock, before its checks or after it has landed.
    pub fn hold(&self, side: Side) {
        let mut ways = self.turnstile.ways.lock();
        (ways.space, ways.holds) = (ways.heads, Some(side));
    }

    /// Holds up the next commit to a space.
    pub async fn hold_to(&self, space: &str, side: Side) {
        let space = self.space(space).await.all().space();
        let mut ways = self.turnstile.ways.lock();
        (ways.space, ways.holds) = (Some(space), Some(side));
    }

    /// The next commit to a lock lands, and its answer is lost.
    pub fn lose_answer(&self) {
        let mut ways = self.turnstile.ways.lock();
        (ways.space, ways.loses) = (ways.heads, true);
    }

    /// Makes this key unreadable, until another key or `None` is given.
    pub fn break_off(&self, key: Option<Key>) {
        self.turnstile.ways.lock().unreadable = key;
    }

    /// The first key of a space that contains these bytes.
    pub async fn find(&self, space: &str, of: &[u8]) -> Key {
        let all = self.space(space).await.all();
        let found = self.engine.store().view().await.unwrap().scan(&all, Order::Ascending, usize::MAX).await.unwrap();
        let mut keys = found.into_iter().map(|(key, _)| key);
        keys.find(|key| key.bytes().windows(of.len()).any(|bytes| bytes == of)).expect("there is such a key")
    }

    /// Damages the record of that key: its value makes no sense, or its checksum is wrong.
    pub async fn damage(&self, space: &str, of: &[u8], harm: Harm) {
        let key = self.find(space, of).await;
        match harm {
            Harm::Nonsense => {
                let commit = Commit::new().put(&key, vec![255; 3]);
                self.engine.store().commit(commit).await.unwrap().applied().unwrap();
            }
            Harm::Checksum => self.break_checksum(key),
        }
    }

    pub fn break_checksum(&self, key: Key) {
        self.turnstile.ways.lock().damaged.insert(key);
    }

    /// From now on every read yields once.
    pub fn slow_down(&self) {
        self.turnstile.ways.lock().is_slow = true;
    }

    /// From now on the keys that scans return are noted. Returns the keys noted so far.
    pub fn scanned(&self) -> BTreeSet<Key> {
        self.turnstile.ways.lock().scanned.replace(BTreeSet::new()).unwrap_or_default()
    }

    /// The process ends after so many commits; with `None`, it lives again.
    pub fn end_after(&self, commits: Option<u32>) {
        self.turnstile.ways.lock().left = commits;
    }

    /// Lets the held-up commit continue.
    pub fn open(&self) {
        assert!(self.turnstile.ways.lock().holds.is_none(), "nothing was held up");
        self.open_next();
    }

    /// The same, when the next commit is to be held up as well.
    pub fn open_next(&self) {
        self.turnstile.opened.add_permits(1);
    }

    /// Gives every task turns, while no time passes.
    pub async fn turns(&self) {
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
    }

    pub async fn pass(&self, time: Duration) {
        self.turns().await;
        self.clock.advance(time);
        self.turns().await;
    }

    /// Begins a call, and lets it do everything that needs no time. A moment passes.
    pub async fn begins<T: Send + 'static>(&self, what: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        let begun = tokio::spawn(what);
        self.pass(Duration::from_secs(1)).await;
        begun
    }

    /// Returns the result of a call that needs no more time.
    pub async fn done<T>(&self, what: JoinHandle<T>) -> T {
        self.turns().await;
        assert!(what.is_finished(), "it does not end");
        what.await.unwrap()
    }
}

/// The tokens of the holders of a lock, and of its waiters.
pub fn tokens(state: &LockState) -> (Vec<u64>, Vec<u64>) {
    let tokens = |requests: &[latchwork::lock::Requested]| requests.iter().map(|request| request.token).collect();
    assert_eq!(state.used, state.holders.iter().map(|holder| holder.permits).sum::<u32>());
    assert_eq!(state.waiting, state.waiters.len() as u64);
    (tokens(&state.holders), tokens(&state.waiters))
}

pub fn has_ended(state: &ExecutionState) -> bool {
    !matches!(state, ExecutionState::Running | ExecutionState::Waiting | ExecutionState::Parked(_))
}
