//! A pinned, consistent view of the store at one generation.

use std::path::Path;

use bytes::Bytes;

use crate::backend::{Order, Pin, Scan};
use crate::store::let_others_run;
use crate::{Changes, Generation, Key, Range, Result, Rev, Store, Timestamp, Version, snapshot};

/// The store at one generation. What is read through a view never changes, while writers continue. Drop a view that is
/// not needed: the store keeps everything that it can read.
#[derive(Debug)]
pub struct View {
    store: Store,
    pin: Pin,
}

/// A value with its rev, generation and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// How often the key has been written.
    pub rev: Rev,
    /// The generation of the last write.
    pub generation: Generation,
    /// The time of that write, by the store's clock.
    pub time: Timestamp,
    /// The value.
    pub value: Bytes,
}

impl Item {
    pub(crate) fn of(version: Version) -> Option<Item> {
        let Version { rev, generation, time, value } = version;
        value.map(|value| Item { rev, generation, time, value })
    }
}

impl View {
    pub(crate) fn new(store: Store, pin: Pin) -> View {
        View { store, pin }
    }

    /// The generation this is a view of.
    ///
    /// ```
    /// # use latchwork_store::{Result, Space, View};
    /// # async fn example(view: View, accounts: Space) -> Result<()> {
    /// println!("as of generation {}", view.generation());
    /// # Ok(()) }
    /// ```
    pub fn generation(&self) -> Generation {
        self.pin.generation()
    }

    /// Returns the value of a key.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, Rev, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// let item = store.view().await?.get(&alice).await?.unwrap();
    /// assert_eq!(item.rev, Rev(1));
    /// assert_eq!(item.value, "100");
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, key: &Key) -> Result<Option<Item>> {
        let_others_run().await;
        self.store.check_key(key).await?;
        let version = self.store.backend().get(key, self.generation()).await?;
        Ok(version.and_then(Item::of))
    }

    /// Returns up to `limit` keys of a range with their values. To continue, scan [`Range::after`] (or
    /// [`Range::before`]) the last key.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, Order, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// let found = store.view().await?.scan(&accounts.all(), Order::Ascending, 100).await?;
    /// assert_eq!(found[0].0, alice);
    /// # Ok(()) }
    /// ```
    pub async fn scan(&self, range: &Range, order: Order, limit: usize) -> Result<Vec<(Key, Item)>> {
        let_others_run().await;
        self.store.check_space(range.space()).await?;
        let scan = Scan { range: range.clone(), order, limit, bytes: usize::MAX, with_deleted: false };
        let found = self.store.backend().scan(scan, self.generation()).await?;
        Ok(found.into_iter().filter_map(|(key, version)| Item::of(version).map(|item| (key, item))).collect())
    }

    /// Returns the versions of a key up to this view that are still kept, newest first, tombstones included.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// store.commit(Commit::new().delete(&alice)).await?.applied()?;
    /// let versions = store.view().await?.history(&alice, 10).await?;
    /// assert_eq!(versions[0].value, None);
    /// assert_eq!(versions[1].value.as_deref(), Some(&b"100"[..]));
    /// # Ok(()) }
    /// ```
    pub async fn history(&self, key: &Key, limit: usize) -> Result<Vec<Version>> {
        let_others_run().await;
        self.store.check_key(key).await?;
        self.store.backend().versions(key, self.generation(), limit).await
    }

    /// Returns the commits after `older` and up to this view that touched `range`, at most about `limit` of them. They
    /// are complete up to the generation `through`; the next call continues from there.
    ///
    /// ```
    /// # use latchwork_store::{Generation, Result, Space, View};
    /// # async fn example(view: View, accounts: Space) -> Result<()> {
    /// let changes = view.changes_since(&accounts.all(), Generation(7), 100).await?;
    /// println!("{} commits up to generation {}", changes.commits.len(), changes.through);
    /// # Ok(()) }
    /// ```
    pub async fn changes_since(&self, range: &Range, older: Generation, limit: usize) -> Result<Changes> {
        let_others_run().await;
        self.store.check_space(range.space()).await?;
        let mut changes = self.store.backend().changes(range.clone(), older, limit).await?;
        changes.commits.retain(|commit| commit.generation <= self.generation());
        changes.through = changes.through.min(self.generation());
        Ok(changes)
    }

    /// Writes this view as a snapshot into an empty or missing directory. The store continues to work meanwhile.
    ///
    /// ```
    /// # use latchwork_store::{Result, Space, View};
    /// # async fn example(view: View, accounts: Space) -> Result<()> {
    /// view.persist("./backup").await?;
    /// # Ok(()) }
    /// ```
    pub async fn persist(&self, directory: impl AsRef<Path>) -> Result<()> {
        snapshot::write(&self.store, self.generation(), directory.as_ref()).await
    }

    /// Ends the view. Dropping it does the same.
    ///
    /// ```
    /// # use latchwork_store::{Result, Space, View};
    /// # async fn example(view: View, accounts: Space) -> Result<()> {
    /// view.release();
    /// # Ok(()) }
    /// ```
    pub fn release(self) {}
}
