//! The store handle that callers use. It checks input, declares spaces and creates views and watches. The backend does
//! all storage.
//!
//! Most operations complete without waiting. So each operation uses some of its task's tokio budget, and a loop of
//! operations lets other tasks run in between. On other runtimes this has no effect.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn, ready};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use parking_lot::RwLock;
use tokio::task::coop;

use crate::backend::{Answer, Backend, Contents, MemoryBackend, Order, Rules, Scan, generation_at};
use crate::disk::{Disk, RealDisk};
use crate::space::{FIRST_DECLARED, SPACES, SpaceRecord};
use crate::{
    Check, Commit, CommitId, Damage, Env, FileOptions, Generation, History, Item, Key, Limits, Outcome, Range, Result,
    Space, SpaceId, SpaceSpec, Stats, StoreError, Timestamp, Uuid, Version, View, Watch, snapshot,
};

/// A handle to a store. Clones share the store; dropping the last handle closes it.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

struct Inner {
    backend: Arc<dyn Backend>,
    disk: Arc<dyn Disk>,
    env: Env,
    limits: Limits,
    /// The spaces that this handle knows, by number.
    spaces: RwLock<BTreeMap<SpaceId, Met>>,
    /// `spaces` contains every declaration up to this generation.
    declared: AtomicU64,
    /// The newest generation of a commit of this handle.
    landed: AtomicU64,
}

/// A space as this handle knows it.
struct Met {
    name: Arc<str>,
    rules: Rules,
    /// The generation of the declaration that its rules come from.
    declared: Generation,
}

/// The declared spaces by name, each with the generation of its declaration.
type Declarations = BTreeMap<String, (SpaceRecord, Generation)>;

/// The caller's confirmation that a restore replaces everything in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirm {
    /// Yes: replace everything.
    ReplaceEverything,
}

impl Store {
    /// Opens the data directory, or creates it: the embedded, durable store.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example() -> Result<()> {
    /// let store = Store::open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(directory: impl AsRef<Path>) -> Result<Store> {
        FileOptions::default().open(directory).await
    }

    /// Opens a data directory for reading and changes nothing there; see [`FileOptions::open_read_only`].
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example() -> Result<()> {
    /// let store = Store::open_read_only("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open_read_only(directory: impl AsRef<Path>) -> Result<Store> {
        FileOptions::default().open_read_only(directory).await
    }

    /// Creates a store in memory. It is gone when its last handle is dropped.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example() -> Result<()> {
    /// let store = Store::memory().await?;
    /// # Ok(()) }
    /// ```
    pub async fn memory() -> Result<Store> {
        Store::memory_with(Env::system(), Limits::default()).await
    }

    /// Creates a store in memory with the given environment and limits.
    ///
    /// ```
    /// # use latchwork_store::{Env, Limits, Result, Store};
    /// # async fn example() -> Result<()> {
    /// let mut limits = Limits::default();
    /// limits.value_bytes = 64 << 10;
    /// let store = Store::memory_with(Env::system(), limits).await?;
    /// # Ok(()) }
    /// ```
    pub async fn memory_with(env: Env, limits: Limits) -> Result<Store> {
        let backend = Arc::new(MemoryBackend::new(env.clone()));
        Store::with_backend(backend, env, limits, Arc::new(RealDisk)).await
    }

    /// Creates a store on a given backend. Snapshots are written to `disk`.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use latchwork_store::backend::MemoryBackend;
    /// # use latchwork_store::disk::RealDisk;
    /// # use latchwork_store::{Env, Limits, Result, Store};
    /// # async fn example() -> Result<()> {
    /// let env = Env::system();
    /// let backend = Arc::new(MemoryBackend::new(env.clone()));
    /// let store = Store::with_backend(backend, env, Limits::default(), Arc::new(RealDisk)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn with_backend(
        backend: Arc<dyn Backend>,
        env: Env,
        limits: Limits,
        disk: Arc<dyn Disk>,
    ) -> Result<Store> {
        let (declared, landed) = (AtomicU64::new(0), AtomicU64::new(0));
        let inner = Inner { backend, disk, env, limits, spaces: RwLock::default(), declared, landed };
        let store = Store { inner: Arc::new(inner) };
        store.learn_spaces().await?;
        Ok(store)
    }

    /// Declares a space, or opens the existing space of that name. If the spec sets a history that differs from the
    /// existing one, the history changes. If the spec sets no history, it stays.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// assert_eq!(accounts.name(), "accounts");
    /// # Ok(()) }
    /// ```
    pub async fn space(&self, spec: SpaceSpec) -> Result<Space> {
        spec.validate()?;
        loop {
            let view = self.view().await?;
            let declared = self.declarations(&view).await?;
            let stored = declared.get(spec.name.as_str()).copied();
            let id = match stored {
                Some((record, _)) => record.id,
                None => declared.values().map(|(record, _)| record.id).max().map_or(FIRST_DECLARED, next_id),
            };
            let record = SpaceRecord { id, rules: spec.rules(stored.map(|(stored, _)| stored.rules)) };
            // Compares the stored form, because storing rounds a history that is a time.
            if let Some((stored, declared)) = stored
                && stored.encode() == record.encode()
            {
                return Ok(self.learn(spec.name.as_str().into(), record, declared));
            }
            if let Some((stored, _)) = stored
                && stored.rules.used_once != spec.used_once
            {
                let said = |used_once| if used_once { "keys used once" } else { "keys that may come back" };
                let (stored, asked) = (said(stored.rules.used_once), said(spec.used_once));
                return Err(StoreError::SpaceMismatch { name: spec.name, stored, asked });
            }
            // The numbers in use are a read set: if another space is declared concurrently, this commit is refused and
            // the loop tries again. Each refusal means that another declaration was applied, so the loop ends.
            let commit = Commit::new()
                .unchanged(&Range::of_space(SPACES), view.generation())
                .put(&Key::new(SPACES, spec.name.as_bytes()), record.encode());
            if let Outcome::Applied(receipt) = self.inner.backend.commit(commit).await? {
                return Ok(self.learn(spec.name.as_str().into(), record, receipt.generation));
            }
        }
    }

    /// Returns the declared spaces in the order of their names.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(store.spaces().await?[0].name(), "accounts");
    /// # Ok(()) }
    /// ```
    pub async fn spaces(&self) -> Result<Vec<Space>> {
        self.learn_spaces().await?;
        let spaces = self.inner.spaces.read();
        let mut spaces: Vec<_> = spaces.iter().map(|(id, met)| Space { id: *id, name: met.name.clone() }).collect();
        spaces.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(spaces)
    }

    /// Applies a commit if all its checks hold. Every answer, also a refusal, is based on durable state only.
    ///
    /// Dropping the future does not cancel the commit: it may still be applied. Set an id on the commit to be able to
    /// send it again.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let outcome = store.commit(Commit::new().absent(&alice).put(&alice, "100")).await?;
    /// assert!(outcome.is_applied());
    /// let again = store.commit(Commit::new().absent(&alice).put(&alice, "100")).await?;
    /// assert!(!again.is_applied());
    /// # Ok(()) }
    /// ```
    // Not an `async fn`: its future, and the futures of its callers, would each contain another copy of the commit.
    pub fn commit(&self, commit: Commit) -> impl Future<Output = Result<Outcome>> + Send + use<'_> {
        let answer: Answer<'_, Outcome> = match self.check_commit(&commit) {
            Ok(()) => self.inner.backend.commit(commit),
            // Another process may have declared the space.
            Err(StoreError::UnknownSpace { .. }) => Box::pin(async move {
                self.learn_spaces().await?;
                self.check_commit(&commit)?;
                self.inner.backend.commit(commit).await
            }),
            Err(error) => Box::pin(ready(Err(error))),
        };
        async move {
            let outcome = answer.await;
            if let Ok(Outcome::Applied(receipt)) = &outcome {
                self.has_landed(receipt.generation);
            }
            let_others_run().await;
            outcome
        }
    }

    pub(crate) fn has_landed(&self, generation: Generation) {
        self.inner.landed.fetch_max(generation.0, Ordering::SeqCst);
    }

    /// The newest generation with which a commit of this handle, or of a clone of it, has landed so far.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let receipt = store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// assert_eq!(store.landed(), receipt.generation);
    /// # Ok(()) }
    /// ```
    pub fn landed(&self) -> Generation {
        Generation(self.inner.landed.load(Ordering::SeqCst))
    }

    /// Checks a commit as [`Store::commit`] does, for a backend that is given commits in another way.
    #[cfg(feature = "postgres")]
    pub(crate) async fn accepts(&self, commit: &Commit) -> Result<()> {
        match self.check_commit(commit) {
            Err(StoreError::UnknownSpace { .. }) => {
                self.learn_spaces().await?;
                self.check_commit(commit)
            }
            checked => checked,
        }
    }

    fn check_commit(&self, commit: &Commit) -> Result<()> {
        self.inner.limits.check_commit(commit)?;
        if commit.meta.len() > self.inner.limits.value_bytes {
            let (length, limit) = (commit.meta.len(), self.inner.limits.value_bytes);
            return Err(StoreError::MetaTooLong { length, limit });
        }
        let spaces = self.inner.spaces.read();
        let checked = commit.checks.iter().filter_map(|check| match check {
            Check::AtRev(key, _) | Check::Absent(key) | Check::Present(key) => Some(key.space()),
            Check::Unchanged(range, _) => Some(range.space()),
            Check::AtGeneration(_) => None,
        });
        let written = commit.writes.iter().map(|write| write.key().space());
        for space in checked.chain(written) {
            if !spaces.contains_key(&space) {
                return Err(StoreError::UnknownSpace { space });
            }
        }
        Ok(())
    }

    /// Returns a new commit id from the store's environment.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key, Store};
    /// # fn example(store: Store, alice: Key) {
    /// let deposit = Commit::new().id(store.commit_id()).put(&alice, "100");
    /// # }
    /// ```
    pub fn commit_id(&self) -> CommitId {
        self.inner.env.commit_id()
    }

    /// Pins the newest generation.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// let view = store.view().await?;
    /// assert_eq!(view.get(&alice).await?.unwrap().value, "100");
    /// # Ok(()) }
    /// ```
    pub async fn view(&self) -> Result<View> {
        let_others_run().await;
        let pin = self.inner.backend.pin(None).await?;
        let is_current = pin.declared().0 <= self.inner.declared.load(Ordering::Relaxed);
        let view = View::new(self.clone(), pin);
        if !is_current {
            self.learn_from(&view).await?;
        }
        Ok(view)
    }

    /// Returns the newest value of a key. For more than one key use a [view](Store::view), which shows them all at one
    /// moment.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// assert_eq!(store.get(&alice).await?.unwrap().value, "100");
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, key: &Key) -> Result<Option<Item>> {
        Ok(self.newest(key).await?.and_then(Item::of))
    }

    /// Returns the newest version of a key, also one that deletes it: the rev of the next write is one higher.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, Rev, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts")).await?;
    /// # let alice = accounts.key("alice");
    /// store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// store.commit(Commit::new().delete(&alice)).await?.applied()?;
    /// let newest = store.newest(&alice).await?.unwrap();
    /// assert_eq!((newest.rev, newest.value), (Rev(2), None));
    /// # Ok(()) }
    /// ```
    pub async fn newest(&self, key: &Key) -> Result<Option<Version>> {
        let_others_run().await;
        self.check_key(key).await?;
        self.inner.backend.newest(key).await
    }

    /// Pins a past generation. Reading a space that no longer keeps it fails.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// let before = store.generation().await?;
    /// store.commit(Commit::new().put(&alice, "70")).await?.applied()?;
    /// assert_eq!(store.view_at(before).await?.get(&alice).await?.unwrap().value, "100");
    /// # Ok(()) }
    /// ```
    pub async fn view_at(&self, generation: Generation) -> Result<View> {
        let_others_run().await;
        let pin = self.inner.backend.pin(Some(generation)).await?;
        let latest = self.inner.backend.latest().await?;
        if generation > latest {
            return Err(StoreError::FutureGeneration { asked: generation, latest });
        }
        Ok(View::new(self.clone(), pin))
    }

    /// Pins the newest generation that was committed at or before `time`, as far as spaces with history remember it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// let yesterday = store.env().now().minus(Duration::from_secs(24 * 3600));
    /// let view = store.view_at_time(yesterday).await?;
    /// # Ok(()) }
    /// ```
    pub async fn view_at_time(&self, time: Timestamp) -> Result<View> {
        self.view().await?.release();
        let spaces = self.with_history();
        let before = self.inner.backend.before(time, spaces.clone()).await?;
        self.view_at(generation_at(time, &spaces, before)?).await
    }

    /// Follows every commit after `after` that touches `range`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let mut watch = store.watch(accounts.all(), store.generation().await?).await?;
    /// store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// assert_eq!(watch.next().await?.changes[0].key, alice);
    /// # Ok(()) }
    /// ```
    pub async fn watch(&self, range: Range, after: Generation) -> Result<Watch> {
        let space = range.space();
        // Another process may have changed the history of the space. Opening a view reads the current declarations.
        let latest = self.view().await?.generation();
        let rules = self.inner.spaces.read().get(&space).map(|met| met.rules);
        if rules.ok_or(StoreError::UnknownSpace { space })?.history == History::None {
            return Err(StoreError::NotWatchable { space });
        }
        if after > latest {
            return Err(StoreError::FutureGeneration { asked: after, latest });
        }
        Ok(Watch::new(self.clone(), range, after))
    }

    /// The newest generation.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let receipt = store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// assert_eq!(store.generation().await?, receipt.generation);
    /// # Ok(()) }
    /// ```
    pub async fn generation(&self) -> Result<Generation> {
        let_others_run().await;
        self.inner.backend.latest().await
    }

    /// The oldest generation at which the space can be read.
    ///
    /// ```
    /// # use latchwork_store::{Space, Store};
    /// # fn example(store: Store, accounts: Space) {
    /// println!("readable from generation {} on", store.oldest(&accounts));
    /// # }
    /// ```
    pub fn oldest(&self, space: &Space) -> Generation {
        self.inner.backend.floor(space.id)
    }

    /// Does a bounded part of the work that otherwise happens in the background: raises the floors as the spaces' rules
    /// allow and drops what lies below. Returns whether more is left to do.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// while store.maintain().await? {}
    /// # Ok(()) }
    /// ```
    pub async fn maintain(&self) -> Result<bool> {
        self.inner.backend.maintain().await
    }

    /// Replaces everything in the store with a snapshot that [`View::persist`] wrote. New generations and revs are
    /// higher than all earlier ones. History starts again. Spaces that were declared after the snapshot stay declared
    /// and are empty.
    ///
    /// ```
    /// # use latchwork_store::{Confirm, Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// let generation = store.restore("./backup", Confirm::ReplaceEverything).await?;
    /// # Ok(()) }
    /// ```
    pub async fn restore(&self, snapshot: impl AsRef<Path>, confirm: Confirm) -> Result<Generation> {
        let Confirm::ReplaceEverything = confirm;
        let mut contents = snapshot::read(&self.inner.disk, snapshot.as_ref())?;
        // The spaces of the snapshot are declared to the backend first, so that their history starts with the restore.
        for record in self.snapshot_spaces(&mut contents).await? {
            if !self.inner.spaces.read().contains_key(&record.id) {
                self.inner.backend.declare(record.id, record.rules, Generation(0));
            }
        }
        let generation = self.inner.backend.replace(contents).await?;
        self.learn_spaces().await?;
        Ok(generation)
    }

    /// Reads everything from the medium, if there is one, and returns all damage.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// for damage in store.verify().await? {
    ///     println!("{}: {}", damage.place, damage.detail);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn verify(&self) -> Result<Vec<Damage>> {
        self.inner.backend.verify().await
    }

    /// Figures about the store.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// let stats = store.stats().await?;
    /// println!("{} commits applied, {} refused", stats.applied, stats.refused);
    /// # Ok(()) }
    /// ```
    pub async fn stats(&self) -> Result<Stats> {
        self.inner.backend.stats().await
    }

    /// Makes everything durable and releases the storage. Every later call on any handle fails.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// store.close().await?;
    /// # Ok(()) }
    /// ```
    pub async fn close(&self) -> Result<()> {
        self.inner.backend.close().await
    }

    /// The id of this opening, if only one process can have the store open at a time. Work that an earlier opening
    /// started is over. `None` for a store that processes share and for a store in memory.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::Store;
    /// # let store = Store::memory().await?;
    /// assert_eq!(store.opening(), None);
    /// # Ok(()) }
    /// ```
    pub fn opening(&self) -> Option<Uuid> {
        self.inner.backend.opening()
    }

    /// True if several processes can have the store open at once, as on PostgreSQL.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::Store;
    /// assert!(!Store::memory().await?.is_shared());
    /// # Ok(()) }
    /// ```
    pub fn is_shared(&self) -> bool {
        self.inner.backend.is_shared()
    }

    /// Returns when the store was closed or has stopped. Never returns if the store has no [opening](Store::opening).
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// store.ended().await;
    /// println!("the store was closed or has stopped");
    /// # Ok(()) }
    /// ```
    pub async fn ended(&self) {
        let _ = self.inner.backend.ended().await;
    }

    /// True if both handles belong to the same open store.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::Store;
    /// # let store = Store::memory().await?;
    /// assert!(store.is_same(&store.clone()));
    /// assert!(!store.is_same(&Store::memory().await?));
    /// # Ok(()) }
    /// ```
    pub fn is_same(&self, other: &Store) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The environment the store runs in.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// println!("it is {}", store.env().now());
    /// # Ok(()) }
    /// ```
    pub fn env(&self) -> &Env {
        &self.inner.env
    }

    /// The largest sizes that the store accepts.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::Store;
    /// # let store = Store::memory().await?;
    /// assert_eq!(store.limits().operations, 10_000);
    /// # Ok(()) }
    /// ```
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.inner.backend
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.inner.disk
    }

    pub(crate) async fn check_key(&self, key: &Key) -> Result<()> {
        self.inner.limits.check_key(key)?;
        self.check_space(key.space()).await
    }

    pub(crate) async fn check_space(&self, space: SpaceId) -> Result<()> {
        let is_known = || self.inner.spaces.read().contains_key(&space);
        if is_known() {
            return Ok(());
        }
        // Another process may have declared the space.
        self.learn_spaces().await?;
        if is_known() { Ok(()) } else { Err(StoreError::UnknownSpace { space }) }
    }

    /// The spaces that keep history by their rules, the store's own included, with their floors.
    fn with_history(&self) -> Vec<(SpaceId, Generation)> {
        let spaces = self.inner.spaces.read();
        let own = Rules::own().into_iter();
        let all = own.chain(spaces.iter().map(|(space, met)| (*space, met.rules)));
        let kept = all.filter(|(_, rules)| rules.history != History::None);
        kept.map(|(space, _)| (space, self.inner.backend.floor(space))).collect()
    }

    /// Every space that may hold records, the store's own included, in the order of their keys.
    pub(crate) async fn stored_spaces(&self) -> Result<Vec<SpaceId>> {
        self.learn_spaces().await?;
        let declared: Vec<SpaceId> = self.inner.spaces.read().keys().copied().collect();
        Ok(snapshot::OWN_SPACES.into_iter().chain(declared).collect())
    }

    /// Returns the spaces that a snapshot declares. Fails if a space has the same name or the same number as a
    /// different space of this store.
    async fn snapshot_spaces(&self, contents: &mut Contents) -> Result<Vec<SpaceRecord>> {
        let declared = self.declarations(&self.view().await?).await?;
        let nothing = Box::new(std::iter::empty());
        let mut records = std::mem::replace(&mut contents.records, nothing).peekable();
        let (mut read, mut found) = (Vec::new(), Vec::new());
        while let Some(record) = records.next_if(|next| next.as_ref().map_or(true, |(key, _)| key.space() == SPACES)) {
            read.push(record?);
        }
        for (key, version) in &read {
            let Some(record) = version.value.as_ref().and_then(SpaceRecord::decode) else { continue };
            let clash = |(name, (ours, _)): (&String, &(SpaceRecord, Generation))| {
                (name.as_bytes() == key.bytes()) != (ours.id == record.id)
            };
            if declared.iter().any(clash) {
                return Err(StoreError::ForeignSnapshot);
            }
            found.push(record);
        }
        contents.records = Box::new(read.into_iter().map(Ok).chain(records));
        Ok(found)
    }

    async fn learn_spaces(&self) -> Result<()> {
        let view = View::new(self.clone(), self.inner.backend.pin(None).await?);
        self.learn_from(&view).await
    }

    /// Learns all declarations at a view of the newest generation.
    async fn learn_from(&self, view: &View) -> Result<()> {
        for (name, (record, declared)) in self.declarations(view).await? {
            self.learn(name.into(), record, declared);
        }
        self.inner.declared.fetch_max(view.generation().0, Ordering::Relaxed);
        Ok(())
    }

    /// Learns a declaration, unless a newer one of the same space is already known.
    fn learn(&self, name: Arc<str>, record: SpaceRecord, declared: Generation) -> Space {
        let mut spaces = self.inner.spaces.write();
        if spaces.get(&record.id).is_none_or(|met| met.declared <= declared) {
            self.inner.backend.declare(record.id, record.rules, declared);
            spaces.insert(record.id, Met { name: name.clone(), rules: record.rules, declared });
        }
        Space { id: record.id, name }
    }

    async fn declarations(&self, view: &View) -> Result<Declarations> {
        let range = Range::of_space(SPACES);
        let scan = Scan { range, order: Order::Ascending, limit: usize::MAX, bytes: usize::MAX, with_deleted: false };
        let mut declared = Declarations::new();
        for (key, version) in self.inner.backend.scan(scan, view.generation()).await? {
            let name = String::from_utf8_lossy(key.bytes()).into_owned();
            let record = version.value.as_ref().and_then(SpaceRecord::decode);
            let Some(record) = record else {
                return Err(StoreError::corrupt(format!("the declaration of space {name:?}"), "it cannot be read"));
            };
            declared.insert(name, (record, version.generation));
        }
        Ok(declared)
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

fn next_id(id: SpaceId) -> SpaceId {
    SpaceId(id.0 + 1)
}

/// Uses some of the task's budget, and yields once if none is left. It yields only once: code that polls in a loop by
/// hand never lets the runtime renew the budget, and must make progress all the same.
pub(crate) async fn let_others_run() {
    let mut yielded = false;
    poll_fn(|context| {
        if !yielded && !coop::has_budget_remaining() {
            yielded = true;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if let Poll::Ready(used) = coop::poll_proceed(context) {
            used.made_progress();
        }
        Poll::Ready(())
    })
    .await;
}
