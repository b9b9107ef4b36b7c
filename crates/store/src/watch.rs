//! Follows a range, commit by commit. A watch reads history until it has caught up and then waits. Writers never wait
//! for a watch, so a slow one costs them nothing.

use std::collections::VecDeque;

use crate::store::let_others_run;
use crate::{Committed, Generation, Range, Result, Store};

/// How many commits a watch reads ahead.
const READ_AHEAD: usize = 256;

/// The commits that touch a range, each once, in order.
#[derive(Debug)]
pub struct Watch {
    store: Store,
    range: Range,
    read: VecDeque<Committed>,
    /// History was read up to this generation.
    through: Generation,
    position: Generation,
    /// The storage was asked for its newest generation. It tells of later ones itself.
    has_asked: bool,
}

impl Watch {
    pub(crate) fn new(store: Store, range: Range, after: Generation) -> Watch {
        Watch { store, range, read: VecDeque::new(), through: after, position: after, has_asked: false }
    }

    /// Returns the next commit with its changes in the range. Fails with [`crate::StoreError::HistoryDropped`] if the
    /// watch is so far behind that the history is no longer kept. The future may be dropped and the call repeated
    /// without losing a commit.
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
    pub async fn next(&mut self) -> Result<Committed> {
        let_others_run().await;
        loop {
            if let Some(commit) = self.read.pop_front() {
                self.position = commit.generation;
                return Ok(commit);
            }
            self.position = self.through;
            let backend = self.store.backend();
            // This process may not have heard of the newest generation yet.
            if self.has_asked || backend.latest().await? <= self.through {
                self.has_asked = true;
                backend.newer(self.through, self.range.space()).await?;
            }
            let changes = backend.changes(self.range.clone(), self.through, READ_AHEAD).await?;
            self.through = changes.through;
            self.read = changes.commits.into();
        }
    }

    /// The generation up to which every commit was returned. Another watch can continue after it.
    ///
    /// ```
    /// # use latchwork_store::{Range, Result, Store, Watch};
    /// # async fn example(store: Store, range: Range, watch: Watch) -> Result<()> {
    /// let later = store.watch(range, watch.position()).await?;
    /// # Ok(()) }
    /// ```
    pub fn position(&self) -> Generation {
        self.position
    }
}
