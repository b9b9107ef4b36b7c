//! Slots as a transaction will leave them: read from one view, changed in memory, written by the commit of the
//! transaction. Does not know which layer makes that commit.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lane::as_found;
use crate::record::Record as _;
use crate::state::container::{Place, Steward};
use crate::state::{Batch, Held, Job, Known, Result, StateError, Told};
use crate::store::{Check, Commit, Key, View};

/// The future of a steward.
type Boxed<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The slots of a transaction as they will be.
pub(crate) struct Staged {
    /// The limit of a value's size, in bytes.
    limit: usize,
    view: Arc<View>,
    slots: tokio::sync::Mutex<BTreeMap<Key, Batch>>,
    /// The checks that must pass when the changes land.
    guards: Mutex<Vec<Check>>,
}

impl Steward for Staged {
    fn read<'a>(&'a self, place: &'a Place) -> Boxed<'a, Result<Known>> {
        Box::pin(async move {
            let mut slots = self.slots.lock().await;
            Ok(self.batch(&mut slots, place).await?.now())
        })
    }

    fn change<'a>(&'a self, place: &'a Place, job: Job) -> Boxed<'a, Result<()>> {
        Box::pin(async move {
            let mut slots = self.slots.lock().await;
            self.guards.lock().extend(job.guard.clone().map(|(check, _)| check));
            let batch = self.batch(&mut slots, place).await?;
            if let Some(done) = batch.run_alone(job, Held::default()).await {
                done.within(self.limit, batch).settle(batch.rev());
            }
            Ok(())
        })
    }

    fn failed(&self, error: StateError) -> Boxed<'_, StateError> {
        Box::pin(ready(error))
    }
}

impl Staged {
    pub(crate) fn new(view: Arc<View>, limit: usize) -> Staged {
        Staged { limit, view, slots: Default::default(), guards: Mutex::default() }
    }

    async fn batch<'a>(&self, slots: &'a mut BTreeMap<Key, Batch>, place: &Place) -> Result<&'a mut Batch> {
        if !slots.contains_key(&place.key) {
            let known = Known::at(&self.view, &place.key, &place.name).await?;
            slots.insert(place.key.clone(), Batch::new(known, place.name.clone()));
        }
        Ok(slots.get_mut(&place.key).expect("the batch was inserted above"))
    }

    /// Adds the slots to a commit: slots that were read must be unchanged, and changed slots are written.
    pub(crate) async fn board(&self, mut commit: Commit) -> Commit {
        let mut told = Vec::new();
        commit = self.guards.lock().iter().cloned().fold(commit, Commit::check);
        for (key, batch) in self.slots.lock().await.iter() {
            commit = commit.check(as_found(key.clone(), batch.known.rev));
            if batch.changed {
                commit = commit.put(key, batch.record().encode());
                told.push(batch.told());
            }
        }
        if told.is_empty() { commit } else { commit.meta(Told::encode(told)) }
    }
}
