//! A backend with remote state, like a database server: every read is a round trip, commits are decided in groups on
//! facts that were read before, and pins are leases. The state is a store in memory, which other handles may use at the
//! same time. This proves that the trait needs nothing that only local storage can do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork_store::backend::*;
use latchwork_store::*;
use parking_lot::Mutex;
use tokio::sync::oneshot;

pub struct Remote(Arc<Server>);

struct Server {
    memory: MemoryBackend,
    env: Env,
    waiting: Mutex<Vec<(Commit, oneshot::Sender<Result<Outcome>>)>>,
    /// The row with the generation, which one transaction locks at a time. It contains the time of the last commit.
    row: tokio::sync::Mutex<Timestamp>,
    refused: AtomicU64,
    trips: AtomicU64,
}

impl Remote {
    pub fn new(env: Env) -> Remote {
        let memory = MemoryBackend::new(env.clone());
        let (row, trips) = (tokio::sync::Mutex::default(), AtomicU64::new(0));
        Remote(Arc::new(Server { memory, env, waiting: Mutex::default(), row, refused: AtomicU64::new(0), trips }))
    }

    /// A backend on the same storage, for another process.
    pub fn beside(&self) -> Remote {
        Remote(self.0.clone())
    }

    /// The number of round trips.
    pub fn trips(&self) -> u64 {
        self.0.trips.load(Ordering::SeqCst)
    }
}

impl Server {
    async fn trip(&self) {
        self.trips.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
    }

    /// Decides all waiting commits in one transaction.
    async fn transaction(&self) {
        let mut row = self.row.lock().await;
        let group = std::mem::take(&mut *self.waiting.lock());
        if group.is_empty() {
            return;
        }
        let mut facts = match self.facts(&group).await {
            Ok(facts) => facts,
            Err(error) => {
                return group.into_iter().for_each(|(_, answer)| drop(answer.send(Err(error.clone()))));
            }
        };
        self.trip().await;
        for (commit, answer) in group {
            let now = self.env.now().max(*row);
            let outcome = match evaluate(commit, &facts, now) {
                Err(error) => Err(error),
                Ok(Decision::Answer(receipt)) => Ok(Outcome::Applied(receipt)),
                Ok(Decision::Refuse(refusal)) => {
                    self.refused.fetch_add(1, Ordering::SeqCst);
                    Ok(Outcome::Refused(refusal))
                }
                Ok(Decision::Apply(committed, receipt)) => {
                    facts.apply(&committed);
                    *row = committed.time;
                    self.write(committed).await.map(|()| Outcome::Applied(receipt))
                }
            };
            let _ = answer.send(outcome);
        }
    }

    /// Two statements: one for the row and the heads, one for the ranges.
    async fn facts(&self, group: &[(Commit, oneshot::Sender<Result<Outcome>>)]) -> Result<Facts> {
        self.trip().await;
        let latest = self.memory.latest().await?;
        let mut facts = Facts::new(latest);
        for needs in group.iter().map(|(commit, _)| Needs::of(commit)) {
            for key in needs.heads() {
                let version = self.memory.get(key, latest).await?;
                let head = |Version { rev, generation, value, .. }| Head { rev, generation, live: value.is_some() };
                facts.add_head(key.clone(), version.map(head));
            }
            if let Some(key) = needs.receipt() {
                let version = self.memory.get(&key, latest).await?;
                facts.add_receipt(key, version);
            }
            for (range, since) in needs.ranges() {
                let changed = self.changed(range, since, latest).await;
                facts.add_range(range.clone(), since, changed);
            }
        }
        self.trip().await;
        Ok(facts)
    }

    async fn changed(&self, range: &Range, since: Generation, at: Generation) -> Result<Option<(Key, Generation)>> {
        let (space, oldest) = (range.space(), self.memory.floor(range.space()));
        if since < oldest {
            return Err(StoreError::HistoryDropped { space, asked: since, oldest });
        }
        let (limit, bytes) = (usize::MAX, usize::MAX);
        let scan = Scan { range: range.clone(), order: Order::Ascending, limit, bytes, with_deleted: true };
        let found = self.memory.scan(scan, at).await?.into_iter();
        Ok(found.map(|(key, version)| (key, version.generation)).find(|(_, generation)| *generation > since))
    }

    async fn write(&self, committed: Committed) -> Result<()> {
        let mut commit = Commit::new().meta(committed.meta);
        for Change { key, value, .. } in &committed.changes {
            commit = match value {
                Some(value) => commit.put(key, value.clone()),
                None => commit.delete(key),
            };
        }
        let receipt = self.memory.commit(commit).await?.applied().expect("nothing is checked");
        assert_eq!((receipt.generation, receipt.time), (committed.generation, committed.time));
        let revs: Vec<Rev> = receipt.revs.into_iter().flatten().collect();
        assert_eq!(revs, committed.changes.iter().map(|change| change.rev).collect::<Vec<_>>());
        Ok(())
    }
}

impl Backend for Remote {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            self.0.waiting.lock().push((commit, sender));
            let server = self.0.clone();
            tokio::spawn(async move { server.transaction().await });
            receiver.await.unwrap_or(Err(StoreError::Uncertain { cause: "the connection broke".into() }))
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(async {
            self.0.trip().await;
            self.0.memory.latest().await
        })
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(async move {
            self.0.trip().await;
            self.0.memory.get(key, at).await
        })
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(async move {
            self.0.trip().await;
            self.0.memory.scan(scan, at).await
        })
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        Box::pin(async move {
            self.0.trip().await;
            self.0.memory.versions(key, at, limit).await
        })
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        Box::pin(async move {
            self.0.trip().await;
            self.0.memory.changes(range, after, limit).await
        })
    }

    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        self.0.memory.newer(than, space)
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        Box::pin(async move {
            self.0.trip().await;
            self.0.memory.before(time, spaces).await
        })
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        Box::pin(async move {
            self.0.trip().await;
            let row = self.0.memory.pin(at).await?;
            Ok(Pin::leased(row.generation(), row.declared(), row))
        })
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.0.memory.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.0.memory.declare(space, rules, at);
    }

    fn maintain(&self) -> Answer<'_, bool> {
        self.0.memory.maintain()
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(async move {
            let mut row = self.0.row.lock().await;
            *row = contents.time.max(*row);
            self.0.memory.replace(contents).await
        })
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        self.0.memory.verify()
    }

    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(async {
            let mut stats = self.0.memory.stats().await?;
            stats.refused = self.0.refused.load(Ordering::SeqCst);
            Ok(stats)
        })
    }

    fn identity(&self) -> u128 {
        self.0.memory.identity()
    }

    fn close(&self) -> Answer<'_, ()> {
        self.0.memory.close()
    }
}

async fn two_processes() -> (Remote, Store, Store) {
    let (env, _clock) = Env::seeded(3);
    let remote = Remote::new(env.clone());
    let open = async |remote: Remote| {
        let (limits, disk) = (Limits::default(), Arc::new(latchwork_store::disk::RealDisk));
        Store::with_backend(Arc::new(remote), env.clone(), limits, disk).await.unwrap()
    };
    let (one, other) = (open(remote.beside()).await, open(remote.beside()).await);
    (remote, one, other)
}

#[tokio::test]
async fn a_space_of_another_process_is_learned_when_it_is_used() {
    let (_, one, other) = two_processes().await;
    for (number, history) in [History::Forever, History::None].into_iter().enumerate() {
        let space = other.space(SpaceSpec::new(format!("{number}")).history(history)).await.unwrap();
        match number {
            0 => assert!(one.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().is_applied()),
            _ => assert_eq!(one.view_at(Generation(1)).await.unwrap().get(&space.key("k")).await.unwrap(), None),
        }
    }
}

#[tokio::test]
async fn a_rule_that_another_process_changed_is_known_to_the_next_view() {
    let (remote, one, other) = two_processes().await;
    let spec = |history| SpaceSpec::new("a").history(history);
    let space = one.space(spec(History::Forever)).await.unwrap();
    assert!(one.watch(space.all(), Generation(1)).await.is_ok());
    other.space(spec(History::None)).await.unwrap();
    let refused = one.watch(space.all(), Generation(2)).await;
    assert!(matches!(refused, Err(StoreError::NotWatchable { .. })), "{refused:?}");
    other.space(spec(History::Generations(5))).await.unwrap();
    assert!(one.watch(space.all(), Generation(3)).await.is_ok());
    // While nothing is declared, rules are not read again.
    let before = remote.trips();
    one.view().await.unwrap();
    assert_eq!(remote.trips(), before + 1);
}

/// The next transaction decides the commits that arrive during a transaction, each on the writes of those before it.
#[tokio::test]
async fn a_group_is_decided_in_few_round_trips() {
    let (remote, store, _) = two_processes().await;
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let since = store.view().await.unwrap();
    let before = remote.trips();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..100_u64 {
        let (store, key, all) = (store.clone(), space.key("k"), space.all());
        let commit = match number % 3 {
            0 => Commit::new().id(CommitId([7; 16])).put(&key, "named"),
            1 => Commit::new().unchanged(&all, since.generation()).put(&key, "unchanged"),
            _ => Commit::new().at_rev(&key, Rev(1)).put(&key, "at rev"),
        };
        tasks.spawn(async move { store.commit(commit).await });
    }
    let mut applied = 0;
    for outcome in tasks.join_all().await {
        match outcome.map(Outcome::applied) {
            Ok(Ok(receipt)) if !receipt.repeated => applied += 1,
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(applied, 2, "the first, which has an id, and the first one on its rev");
    assert!(remote.trips() - before <= 6, "{}", remote.trips() - before);
    let item = store.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
    assert_eq!((item.rev, item.value), (Rev(2), "at rev".into()));
}
