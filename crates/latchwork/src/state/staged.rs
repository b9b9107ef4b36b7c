//! Slots as a transaction will leave them: read from one view, changed in memory, written by the commit of the
//! transaction. Does not know which layer makes that commit.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lane::as_found;
use crate::record::Record as _;
use crate::state::container::{ContainerPlace, Steward};
use crate::state::{ContainerEvents, HeldContainers, KnownState, Result, StateBatch, StateError, StateJob};
use crate::store::{Check, Commit, Key, View};

/// The future of a steward.
type StewardFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The slots of a transaction as they will be.
pub(crate) struct StagedSlots {
    /// The limit of a value's size, in bytes.
    limit: usize,
    view: Arc<View>,
    slots: tokio::sync::Mutex<BTreeMap<Key, StateBatch>>,
    /// The checks that must pass when the changes land.
    guards: Mutex<Vec<Check>>,
}

impl Steward for StagedSlots {
    fn read<'a>(&'a self, place: &'a ContainerPlace) -> StewardFuture<'a, Result<KnownState>> {
        Box::pin(async move {
            let mut slots = self.slots.lock().await;
            Ok(self.batch(&mut slots, place).await?.now())
        })
    }

    fn change<'a>(&'a self, place: &'a ContainerPlace, job: StateJob) -> StewardFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut slots = self.slots.lock().await;
            self.guards.lock().extend(job.guard.clone().map(|(check, _)| check));
            let batch = self.batch(&mut slots, place).await?;
            if let Some(done) = batch.run_alone(job, HeldContainers::default()).await {
                done.within(self.limit, batch).settle(batch.rev());
            }
            Ok(())
        })
    }

    fn failed(&self, error: StateError) -> StewardFuture<'_, StateError> {
        Box::pin(ready(error))
    }
}

impl StagedSlots {
    pub(crate) fn new(view: Arc<View>, limit: usize) -> StagedSlots {
        StagedSlots { limit, view, slots: Default::default(), guards: Mutex::default() }
    }

    async fn batch<'a>(
        &self,
        slots: &'a mut BTreeMap<Key, StateBatch>,
        place: &ContainerPlace,
    ) -> Result<&'a mut StateBatch> {
        if !slots.contains_key(&place.key) {
            let known = KnownState::at(&self.view, &place.key, &place.name).await?;
            slots.insert(place.key.clone(), StateBatch::new(known, place.name.clone()));
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
        if told.is_empty() { commit } else { commit.meta(ContainerEvents::encode(told)) }
    }
}
