//! Following a range, commit by commit. A watch pulls: it reads history until it has caught up and then waits, so a
//! slow one costs writers nothing.

use std::collections::VecDeque;

use crate::store::let_others_run;
use crate::{Committed, Generation, Range, Result, Store};

/// How many commits are read ahead.
const READ_AHEAD: usize = 256;

/// The commits that touch a range, each once, in order.
#[derive(Debug)]
pub struct Watch {
    store: Store,
    range: Range,
    read: VecDeque<Committed>,
    /// Up to where history was read.
    through: Generation,
    position: Generation,
}

impl Watch {
    pub(crate) fn new(store: Store, range: Range, after: Generation) -> Watch {
        Watch { store, range, read: VecDeque::new(), through: after, position: after }
    }

    /// The next commit, with those of its changes that lie in the range. Fails with
    /// [`crate::StoreError::HistoryDropped`] if it fell behind what is kept. May be dropped and called again without
    /// losing a commit.
    pub async fn next(&mut self) -> Result<Committed> {
        let_others_run().await;
        loop {
            if let Some(commit) = self.read.pop_front() {
                self.position = commit.generation;
                return Ok(commit);
            }
            self.position = self.through;
            let backend = self.store.backend();
            let latest = backend.latest().await?;
            if latest <= self.through {
                backend.newer(self.through).await?;
            }
            let changes = backend.changes(self.range.clone(), self.through, READ_AHEAD).await?;
            self.through = changes.through;
            self.read = changes.commits.into();
        }
    }

    /// Everything up to here was delivered: where another watch can go on.
    pub fn position(&self) -> Generation {
        self.position
    }
}
