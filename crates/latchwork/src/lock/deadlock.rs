//! Executions that wait for each other in a circle. Whenever one that holds locks begins to wait for another, it is
//! looked whether that can ever end; if not, its request is taken back and it is told of the circle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::lock::error::{DeadlockLink, LockRefused, Result};
use crate::lock::lane::Ask;
use crate::lock::name::read_ticket;
use crate::lock::service::AGAIN;
use crate::lock::stored::{Head, Request};
use crate::lock::{LockName, Owner};
use crate::store::{Key, Order, View};
use crate::workflow::ExecutionId;
use crate::workflow::engine::Inner;
use crate::workflow::record::{Status, Wait, read_text};

/// Of locks that more hold than this, or more wait for before, it is supposed that somebody will let go.
const MOST_HOLDERS: usize = 1000;
const MOST_BEFORE: usize = 64;

/// A wait for a lock.
struct Waiting {
    lock: LockName,
    ticket: u64,
    permits: u32,
    free: u32,
    holders: Vec<(Owner, u32)>,
    /// Those who wait for the same and are before, in the order of tickets.
    before: Vec<(Owner, u32)>,
}

impl Waiting {
    fn others(&self) -> impl Iterator<Item = &Owner> {
        self.holders.iter().chain(&self.before).map(|(owner, _)| owner)
    }
}

/// Looks at those that have begun to wait, one after the other.
pub(crate) async fn watch(engine: Weak<Inner>, mut suspects: UnboundedReceiver<ExecutionId>) {
    let Some(env) = engine.upgrade().map(|engine| engine.store.env().clone()) else { return };
    loop {
        let Some(engine) = engine.upgrade() else { return };
        match engine.suspect_all().await {
            Ok(()) => break,
            Err(_) if engine.is_stopped() => return,
            Err(_) => {}
        }
        drop(engine);
        env.sleep(AGAIN).await;
    }
    while let Some(suspect) = suspects.recv().await {
        let Some(engine) = engine.upgrade() else { return };
        while engine.untangle(&suspect).await.is_err() {
            if engine.is_stopped() {
                return;
            }
            engine.store.env().sleep(AGAIN).await;
        }
    }
}

impl Inner {
    /// Suspects all that have several requests: an earlier process may have ended before it has looked at them.
    async fn suspect_all(&self) -> Result<()> {
        let range = self.locks.spaces.owned.prefix([0]);
        let owned = self.store.view().await?.scan(&range, Order::Ascending, usize::MAX).await?;
        let mut last = None;
        for (key, _) in owned {
            let id = key.bytes().get(1..).and_then(read_text).map(|(id, _)| ExecutionId::from(id));
            if id.is_some() && id == last {
                id.iter().for_each(|id| drop(self.locks.suspects.send(id.clone())));
            }
            last = id;
        }
        Ok(())
    }

    /// Ends the wait of an execution if it would never end.
    async fn untangle(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        let view = self.store.view().await?;
        let mut stuck: BTreeMap<ExecutionId, Vec<Waiting>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut next = vec![id.clone()];
        while let Some(id) = next.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            let waits = self.waits_for_locks(&view, &id).await?;
            next.extend(waits.iter().flat_map(Waiting::others).filter_map(|owner| match owner {
                Owner::Execution(id) => Some(id.clone()),
                Owner::Session(_) => None,
            }));
            if !waits.is_empty() {
                stuck.insert(id, waits);
            }
        }
        drop(view);
        // Whoever can be given something goes on, and so, in time, do those who wait for it.
        loop {
            let is_stuck = |owner: &Owner| matches!(owner, Owner::Execution(id) if stuck.contains_key(id));
            let never = |wait: &Waiting| {
                let given = wait.holders.iter().filter(|(owner, _)| !is_stuck(owner));
                let given = given.fold(wait.free, |given, (_, permits)| given.saturating_add(*permits));
                // Nobody is overtaken. Of sessions it is known only what they want here.
                let blocks = |(owner, permits): &(Owner, u32)| match owner {
                    Owner::Execution(_) => is_stuck(owner),
                    Owner::Session(_) => given < *permits,
                };
                given < wait.permits || wait.before.iter().any(blocks)
            };
            let goes_on: Vec<ExecutionId> =
                stuck.iter().filter(|(_, waits)| !waits.iter().all(never)).map(|(id, _)| id.clone()).collect();
            if goes_on.is_empty() {
                break;
            }
            goes_on.iter().for_each(|id| drop(stuck.remove(id)));
        }
        let Some(last) = stuck.get(id).and_then(|waits| waits.iter().max_by_key(|wait| wait.ticket)) else {
            return Ok(());
        };
        let Some(cycle) = cycle(id, &stuck) else { return Ok(()) };
        let why = LockRefused::Deadlock { lock: last.lock.to_string(), cycle };
        tracing::warn!(%id, %why, "a deadlock");
        self.ask(&last.lock, Ask::Refuse { ticket: last.ticket, why }, None).await.map(drop)
    }

    /// What an execution waits for, if that is nothing but locks, and for as long as it takes.
    async fn waits_for_locks(&self, view: &View, id: &ExecutionId) -> Result<Vec<Waiting>> {
        let is_blocked = match self.resident(id) {
            Some(run) => run.with(|state| state.only_waits() && state.doing().iter().all(Wait::is_for_lock)),
            None => match self.read(id).await {
                Ok(Some((execution, _))) => {
                    execution.status == Status::Waiting && execution.waits.iter().all(Wait::is_for_lock)
                }
                _ => false,
            },
        };
        let mut waits = Vec::new();
        if !is_blocked {
            return Ok(waits);
        }
        let spaces = &self.locks.spaces;
        for (lock, requests) in self.requests_of(&Owner::Execution(id.clone())).await? {
            for (ticket, _) in requests {
                let item = view.get(&spaces.request(&lock, ticket)).await?;
                let request = item.and_then(|item| Request::decode(&item.value));
                let Some(request) = request.filter(|request| request.granted_us.is_none()) else { continue };
                let head = view.get(&spaces.head(&lock)).await?.and_then(|item| Head::decode(&item.value));
                let Some(head) = head else { continue };
                let free = head.kind.map_or(0, |kind| kind.capacity()).saturating_sub(head.used);
                // All that hold it were granted it before all that wait.
                let held = spaces.requests_until(&lock, head.granted);
                let held = view.scan(&held, Order::Ascending, MOST_HOLDERS + 1).await?;
                if held.len() > MOST_HOLDERS {
                    return Ok(Vec::new());
                }
                let holders = held.into_iter().filter_map(|(_, item)| Request::decode(&item.value));
                let holders = holders.map(|held| (held.owner, held.permits)).collect();
                let before = spaces.requests_from(&lock, head.granted + 1);
                let before = view.scan(&before, Order::Ascending, MOST_BEFORE + 1).await?;
                let is_before = |key: &Key| read_ticket(key).is_some_and(|(_, other)| other < ticket);
                let before: Vec<_> = before.into_iter().take_while(|(key, _)| is_before(key)).collect();
                if before.len() > MOST_BEFORE {
                    return Ok(Vec::new());
                }
                let before = before.into_iter().filter_map(|(_, item)| Request::decode(&item.value));
                let before = before.map(|request| (request.owner, request.permits)).collect();
                waits.push(Waiting { lock: lock.clone(), ticket, permits: request.permits, free, holders, before });
            }
        }
        Ok(waits)
    }
}

/// The shortest way from an execution back to itself, along those who wait. None if it only waits for others who do so
/// in a circle: one of them is told.
fn cycle(id: &ExecutionId, stuck: &BTreeMap<ExecutionId, Vec<Waiting>>) -> Option<Vec<DeadlockLink>> {
    let mut came_from: BTreeMap<&ExecutionId, (&ExecutionId, &Waiting)> = BTreeMap::new();
    let mut next = VecDeque::from([id]);
    while let Some(at) = next.pop_front().filter(|_| !came_from.contains_key(id)) {
        for wait in stuck.get(at).into_iter().flatten() {
            let others = wait.others().filter_map(|owner| match owner {
                Owner::Execution(other) => stuck.get_key_value(other),
                Owner::Session(_) => None,
            });
            for (other, _) in others {
                came_from.entry(other).or_insert_with(|| {
                    next.push_back(other);
                    (at, wait)
                });
            }
        }
    }
    let mut links = Vec::new();
    let (mut at, mut wait) = *came_from.get(id)?;
    loop {
        let holders = wait.others().cloned().collect();
        links.push(DeadlockLink { waiter: Owner::Execution(at.clone()), lock: wait.lock.to_string(), holders });
        if at == id {
            links.reverse();
            return Some(links);
        }
        (at, wait) = came_from[at];
    }
}
