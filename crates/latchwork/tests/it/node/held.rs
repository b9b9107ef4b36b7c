//! A store in memory as one node of several sees it. A test says what happens to each commit of the node, and whether
//! the node reads and hears what others commit. So a moment between two commits can last as long as a test needs it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use latchwork::store::backend::{
    Answer, Backend, Before, Changes, Contents, Damage, MemoryBackend, Pin, Rules, Scan, Stats,
};
use latchwork::store::disk::RealDisk;
use latchwork::store::{
    Commit, Env, Generation, Key, Limits, Outcome, Range, Space, SpaceId, Store, StoreError, Timestamp, Version,
};
use tokio::sync::watch;

type Answered<T> = Result<T, StoreError>;

/// What happens to a commit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Lands,
    /// It is not decided before another rule says so.
    Waits,
    /// It lands, and its answer waits for another rule.
    AnswerWaits,
    /// It does not land, and its node is told that nothing is known of it.
    IsLost,
    /// The same is told, and it lands.
    AnswerIsLost,
}

type Rule = Arc<dyn Fn(&Commit) -> Fate + Send + Sync>;

pub(super) struct HeldBackend {
    memory: Arc<MemoryBackend>,
    rule: watch::Sender<Rule>,
    reads: watch::Sender<bool>,
    hears: watch::Sender<bool>,
    /// How many reads there are until one fails, and none if it is negative.
    until_failure: AtomicI64,
}

pub(super) fn memory() -> Arc<MemoryBackend> {
    Arc::new(MemoryBackend::new(Env::system()))
}

/// The store of one node, and what holds it.
pub(super) async fn store_of(memory: &Arc<MemoryBackend>) -> (Store, Arc<HeldBackend>) {
    let lands: Rule = Arc::new(|_: &Commit| Fate::Lands);
    let (rule, open) = (watch::Sender::new(lands), || watch::Sender::new(true));
    let held = Arc::new(HeldBackend {
        memory: memory.clone(),
        rule,
        reads: open(),
        hears: open(),
        until_failure: AtomicI64::new(-1),
    });
    let store = Store::with_backend(held.clone(), Env::system(), Limits::default(), Arc::new(RealDisk));
    (store.await.unwrap(), held)
}

/// True if the commit writes into one of these spaces.
pub(super) fn writes_into(commit: &Commit, spaces: &[SpaceId]) -> bool {
    commit.writes().iter().any(|write| spaces.contains(&write.key().space()))
}

/// The space of this name, as it was declared before.
pub(super) async fn space(store: &Store, name: &str) -> Space {
    store.spaces().await.unwrap().into_iter().find(|space| space.name() == name).unwrap()
}

/// The numbers of the spaces with these names.
pub(super) async fn spaces(store: &Store, names: &[&str]) -> Vec<SpaceId> {
    let mut found = Vec::new();
    for name in names {
        found.push(space(store, name).await.key("").space());
    }
    found
}

impl HeldBackend {
    pub(super) fn rule(&self, rule: impl Fn(&Commit) -> Fate + Send + Sync + 'static) {
        self.rule.send_replace(Arc::new(rule));
    }

    /// What happens to commits of a kind; all others land. The future is ready after the first of that kind has come.
    pub(super) fn rule_for(
        &self,
        fate: Fate,
        is_it: impl Fn(&Commit) -> bool + Send + Sync + 'static,
    ) -> futures_util::future::BoxFuture<'static, ()> {
        let (comes, mut came) = watch::channel(false);
        self.rule(move |commit| {
            let is_it = is_it(commit);
            comes.send_if_modified(|comes| is_it && !std::mem::replace(comes, true));
            if is_it { fate } else { Fate::Lands }
        });
        Box::pin(async move {
            assert!(came.wait_for(|came| *came).await.is_ok(), "the rule was replaced before such a commit");
        })
    }

    /// Whether the node can read.
    pub(super) fn reads(&self, reads: bool) {
        self.reads.send_replace(reads);
    }

    /// Whether the node hears of commits.
    pub(super) fn hears(&self, hears: bool) {
        self.hears.send_replace(hears);
    }

    /// Makes one read fail, after this many others.
    pub(super) fn fail_read(&self, after: i64) {
        self.until_failure.store(after, Ordering::SeqCst);
    }

    /// Waits until the fate of a commit is none of these.
    async fn until_not(&self, commit: &Commit, fates: &[Fate]) -> Answered<Fate> {
        let mut rules = self.rule.subscribe();
        loop {
            let rule = rules.borrow_and_update().clone();
            let fate = rule(commit);
            if !fates.contains(&fate) {
                return Ok(fate);
            }
            rules.changed().await.map_err(|_| StoreError::Closed)?;
        }
    }

    async fn open(&self, gate: &watch::Sender<bool>) -> Answered<()> {
        gate.subscribe().wait_for(|open| *open).await.map(drop).map_err(|_| StoreError::Closed)
    }

    async fn commit(&self, commit: Commit) -> Answered<Outcome> {
        let fate = self.until_not(&commit, &[Fate::Waits]).await?;
        let unknown = || StoreError::Uncertain { cause: "the commit or its answer was lost".into() };
        if fate == Fate::IsLost {
            return Err(unknown());
        }
        let outcome = self.memory.commit(commit.clone()).await?;
        if fate == Fate::AnswerIsLost {
            return Err(unknown());
        }
        if fate == Fate::AnswerWaits {
            self.until_not(&commit, &[Fate::AnswerWaits]).await?;
        }
        Ok(outcome)
    }
}

macro_rules! read {
    ($self:ident, $gate:ident, $read:expr) => {
        Box::pin(async move {
            $self.open(&$self.$gate).await?;
            if $self.until_failure.fetch_sub(1, Ordering::SeqCst) == 0 {
                return Err(StoreError::Uncertain { cause: "a read failed".into() });
            }
            let answer = $read.await;
            // It may have waited for something to happen.
            $self.open(&$self.$gate).await?;
            answer
        })
    };
}

impl Backend for HeldBackend {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(self.commit(commit))
    }
    fn latest(&self) -> Answer<'_, Generation> {
        read!(self, reads, self.memory.latest())
    }
    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        read!(self, reads, self.memory.get(key, at))
    }
    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        read!(self, reads, self.memory.scan(scan, at))
    }
    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        read!(self, reads, self.memory.versions(key, at, limit))
    }
    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        read!(self, hears, self.memory.changes(range, after, limit))
    }
    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        read!(self, hears, self.memory.newer(than, space))
    }
    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        read!(self, reads, self.memory.before(time, spaces))
    }
    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        read!(self, reads, self.memory.pin(at))
    }
    fn floor(&self, space: SpaceId) -> Generation {
        self.memory.floor(space)
    }
    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.memory.declare(space, rules, at);
    }
    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(self.memory.maintain())
    }
    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(self.memory.replace(contents))
    }
    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(self.memory.verify())
    }
    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(self.memory.stats())
    }
    fn identity(&self) -> u128 {
        self.memory.identity()
    }
    fn close(&self) -> Answer<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}
