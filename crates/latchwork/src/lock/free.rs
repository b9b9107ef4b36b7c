//! Releases everything that an owner holds or waits for. An execution does this in the commit that ends it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::damage::{Scanned, scan_around};
use crate::lane::{Lanes, Part, Tag, Turn};
use crate::lock::error::{LockError, Result};
use crate::lock::lane::Ask;
use crate::lock::name::LockSpaces;
use crate::lock::owners::Notices;
use crate::lock::service::Service;
use crate::lock::stored::{Ticket, UnreleasedRequests};
use crate::lock::table::{Closed, Planned, Table};
use crate::lock::{LockName, Owner};
use crate::record::Record;
use crate::store::{Check, Commit, Key, StoreError};

/// The owner's requests have not changed since they were read.
const OWNED: Tag = Tag("owned");

/// The releases of an owner's requests as parts of a commit, and the notices to executions. No other commit changes
/// these locks as long as the turns are held.
#[derive(Default)]
pub(crate) struct Freed {
    pub(crate) parts: Vec<Part>,
    pub(crate) notices: Vec<Notices>,
    pub(crate) turns: Vec<Turn>,
}

impl Service {
    /// Releases everything that an owner holds or waits for, as parts of a commit. With `from_store`, executions are
    /// read from the store, because what is in memory was out of date.
    pub(crate) async fn freed(self: &Arc<Service>, owner: &Owner, from_store: bool) -> Result<Freed> {
        let mut locks = self.requests_of(owner).await?;
        loop {
            let mut freed = Freed::default();
            for lock in locks.keys() {
                freed.turns.push(Lanes::turn(self, lock).await.ok_or(LockError::Stopped)?);
            }
            // Requests may have been granted or released before all turns were held.
            let now = self.requests_of(owner).await?;
            if !now.keys().eq(locks.keys()) {
                locks = now;
                continue;
            }
            for (lock, requests) in now {
                let tickets: Vec<u64> = requests.iter().map(|(ticket, _)| *ticket).collect();
                match self.released(&lock, &tickets, from_store).await {
                    Ok((part, notices)) => {
                        freed.parts.push(part);
                        freed.notices.push(notices);
                    }
                    // A lock with damaged records must not keep an execution from ending.
                    damaged => self.unless_damaged(damaged)?,
                }
            }
            return Ok(freed);
        }
    }

    /// Releases tickets of one lock, as a part of a commit, with the notices to executions.
    async fn released(
        self: &Arc<Service>,
        lock: &LockName,
        tickets: &[u64],
        from_store: bool,
    ) -> Result<(Part, Notices)> {
        let mut table = Table::read(self, lock).await?;
        let mut plan = Planned::new(self, lock, &mut table, from_store);
        plan.release_all(tickets).await?;
        let Closed { part, notices, told, is_unfinished } = plan.close();
        let (service, lock) = (self.clone(), lock.clone());
        let part = part.then(move |_| {
            service.tell_requests(&lock, told);
            if is_unfinished {
                service.grant_on(&lock);
            }
        });
        Ok((part, notices))
    }

    /// As `freed`, for more requests than a commit can release: the commit only notes them, and they are released after
    /// it.
    pub(crate) async fn freed_later(self: &Arc<Service>, owner: &Owner) -> Result<Freed> {
        let store = &self.node.store;
        let (key, generation) = (self.spaces.left(owner, store.env().uuid()), store.generation().await?);
        let owned = self.requests_of(owner).await?.into_iter();
        let requests = owned.flat_map(|(lock, its)| its.into_iter().map(move |(ticket, _)| (lock.clone(), ticket)));
        let left = UnreleasedRequests { requests: requests.collect() };
        let unchanged = Check::Unchanged(self.spaces.owned_by(owner), generation);
        let part = Part::default().check(OWNED, unchanged).put(&key, left.encode());
        let service = self.clone();
        Ok(Freed { parts: vec![part.then(move |_| service.free_left(key))], ..Freed::default() })
    }

    /// Releases the requests that an ended execution has left, in a task of its own. Retries until the store takes it.
    pub(crate) fn free_left(self: &Arc<Service>, key: Key) {
        let service = self.clone();
        self.node.runtime.spawn(async move {
            let what = "the locks of an ended execution could not be released";
            service.node.at_last(what, LockError::kind, || service.release_left(&key)).await;
        });
    }

    async fn release_left(self: &Arc<Service>, key: &Key) -> Result<()> {
        let Some(item) = self.node.store.get(key).await? else { return Ok(()) };
        let left =
            UnreleasedRequests::decode(&item.value).map_err(|why| why.at("the list of locks of an ended execution"))?;
        for (lock, ticket) in left.requests {
            self.unless_damaged(self.ask(&lock, Ask::Release { ticket, id: None }, None).await)?;
        }
        let _ = self.node.store.commit(Commit::new().delete(key)).await?;
        Ok(())
    }

    /// Everything that an owner holds or waits for: tickets, and the owner's ids of the requests.
    pub(crate) async fn requests_of(&self, owner: &Owner) -> Result<OwnedTickets, StoreError> {
        let (space, range) = (&self.spaces.owned, self.spaces.owned_by(owner));
        let view = self.node.store.view().await?;
        let Scanned { found, damaged } = scan_around(&view, space, &range, usize::MAX).await?;
        let mut owned = OwnedTickets::new();
        let passed_over = |key: &Key| tracing::error!(%key, ?owner, "a request of this owner is damaged and left");
        damaged.iter().for_each(passed_over);
        for (key, item) in found {
            match (LockSpaces::read_owned(owner, &key), Ticket::decode(&item.value)) {
                (Some((lock, id)), Ok(Ticket(ticket))) => owned.entry(lock).or_default().push((ticket, id)),
                _ => passed_over(&key),
            }
        }
        Ok(owned)
    }
}

/// An owner's tickets by lock, with the ids of the requests.
pub(crate) type OwnedTickets = BTreeMap<LockName, Vec<(u64, Vec<u8>)>>;
