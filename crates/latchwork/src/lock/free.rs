//! What is somebody's: everything that an execution gives back in the commit that ends it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::lock::error::Result;
use crate::lock::lane::{Ask, Held};
use crate::lock::name::Spaces;
use crate::lock::stored::{Left, Ticket};
use crate::lock::table::{Plan, Table};
use crate::lock::{LockName, Owner};
use crate::record::Record;
use crate::store::{Commit, Key, Order, Rev, StoreError};
use crate::workflow::engine::Inner;
use crate::workflow::post::Mail;
use crate::workflow::run::Effect;
use crate::workflow::{ExecutionId, WorkflowError};

/// How an end is made a commit.
#[derive(Clone, Copy, Default)]
pub(crate) struct How {
    /// Whether what is known in memory was out of date.
    pub(crate) from_store: bool,
    /// Whether it was more than a commit can hold: what can be done before or afterwards is.
    pub(crate) is_large: bool,
}

/// What an execution that ends gives back, and the locks that nobody else may change until it has.
#[derive(Default)]
pub(crate) struct Freed {
    pub(crate) effects: Vec<Effect>,
    pub(crate) lanes: Vec<Held>,
}

impl Inner {
    /// The release of everything that an execution holds or waits for, as a part of a commit.
    pub(crate) async fn freed(
        self: &Arc<Inner>,
        id: &ExecutionId,
        has_locks: bool,
        mail: &mut Mail,
        how: How,
    ) -> Result<Freed, WorkflowError> {
        let owner = Owner::Execution(id.clone());
        let mut locks = match has_locks {
            true => self.requests_of(&owner).await?,
            false => return Ok(Freed::default()),
        };
        if how.is_large {
            return self.leaving(&owner).await;
        }
        loop {
            let mut lanes = Vec::new();
            for lock in locks.keys() {
                lanes.push(self.lane(lock).table.clone().lock_owned().await);
            }
            // Something may have been granted or let go of until then.
            let now = self.requests_of(&owner).await?;
            if !now.keys().eq(locks.keys()) {
                locks = now;
                continue;
            }
            let mut effects = Vec::new();
            for ((lock, requests), held) in now.iter().zip(&mut lanes) {
                // It is read again by whoever is next.
                **held = None;
                let mut table = Table::read(self, lock).await?;
                let mut plan = Plan::new(self, lock, &mut table, how.from_store);
                let tickets: Vec<u64> = requests.iter().map(|(ticket, _)| *ticket).collect();
                plan.release_all(&tickets, mail).await?;
                effects.push(freeing(lock.clone(), plan));
            }
            return Ok(Freed { effects, lanes });
        }
    }

    /// The same, for more than a commit can hold: what is to be released is noted in it, and released afterwards.
    async fn leaving(self: &Arc<Inner>, owner: &Owner) -> Result<Freed, WorkflowError> {
        let (key, generation) = (self.locks.spaces.left(self.store.env().uuid()), self.store.generation().await?);
        let owned = self.requests_of(owner).await?.into_iter();
        let requests = owned.flat_map(|(lock, its)| its.into_iter().map(move |(ticket, _)| (lock.clone(), ticket)));
        let left = Left { requests: requests.collect() };
        let commit = Commit::new().unchanged(&self.locks.spaces.owned_by(owner), generation).put(&key, left.encode());
        let landed = move |engine: &Arc<Inner>, _, _: &[Option<Rev>]| engine.free_left(key);
        let effect = Effect { landed: Some(Box::new(landed)), ..Effect::of(commit) };
        Ok(Freed { effects: vec![effect], lanes: Vec::new() })
    }

    /// Releases what an execution has left, in a task of its own, however long the store does not serve.
    pub(crate) fn free_left(self: &Arc<Inner>, key: Key) {
        let engine = self.clone();
        self.runtime.spawn(async move {
            let what = "what an execution has left could not be released";
            engine.at_last(what, || engine.release_left(&key)).await;
        });
    }

    async fn release_left(self: &Arc<Inner>, key: &Key) -> Result<()> {
        let Some(item) = self.store.view().await?.get(key).await? else { return Ok(()) };
        let left = Left::decode(&item.value).map_err(|why| why.at("what an execution has left"))?;
        for (lock, ticket) in left.requests {
            self.unless_damaged(self.ask(&lock, Ask::Release { ticket, id: None }, None).await)?;
        }
        let checked = Commit::new().check(self.shard_of(key.bytes()));
        // If it is refused, another engine has taken over, and releases it again.
        let _ = self.store.commit(checked.delete(key)).await?;
        Ok(())
    }

    /// Everything that somebody holds or waits for: tickets, and the owner's own names for them.
    pub(crate) async fn requests_of(&self, owner: &Owner) -> Result<Owned, StoreError> {
        let range = self.locks.spaces.owned_by(owner);
        let found = self.store.view().await?.scan(&range, Order::Ascending, usize::MAX).await?;
        let mut owned = Owned::new();
        for (key, item) in found {
            let ticket = Ticket::decode(&item.value);
            if let (Some((lock, id)), Ok(Ticket(ticket))) = (Spaces::read_owned(owner, &key), ticket) {
                owned.entry(lock).or_default().push((ticket, id));
            }
        }
        Ok(owned)
    }
}

/// The tickets of somebody by lock, with the names of the requests.
pub(crate) type Owned = BTreeMap<LockName, Vec<(u64, Vec<u8>)>>;

fn freeing(lock: LockName, plan: Plan<'_>) -> Effect {
    let (checks, writes, told, is_unfinished) = plan.close();
    let landed = move |engine: &Arc<Inner>, _, _: &[Option<Rev>]| {
        engine.tell_requests(&lock, told);
        if is_unfinished {
            engine.grant_on(&lock);
        }
    };
    Effect { checks, writes, landed: Some(Box::new(landed)), ..Effect::default() }
}
