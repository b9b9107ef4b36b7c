//! Executions that wait for each other in a circle, for locks or for the ends of children. Whenever one that holds
//! locks begins to wait, or one whose parent may, it is looked whether that can ever end; if not, a request is taken
//! back and whoever made it is told of the circle.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};

use tokio::sync::mpsc::UnboundedReceiver;

use crate::lock::error::{DeadlockLink, LockRefused, Result};
use crate::lock::lane::Ask;
use crate::lock::name::read_ticket;
use crate::lock::service::AGAIN;
use crate::lock::stored::{Head, Request};
use crate::lock::{LockName, Owner};
use crate::record::Record;
use crate::store::{ErrorKind, Key, Order, View};
use crate::workflow::ExecutionId;
use crate::workflow::engine::Inner;
use crate::workflow::record::{Execution, Status, Wait, WaitsFor, read_text};

/// Of locks that more hold than this, or more wait for before, it is supposed that somebody will let go.
const MOST_HOLDERS: usize = 1000;
const MOST_BEFORE: usize = 64;

/// One that has begun to wait.
pub(crate) struct Suspect {
    pub(crate) id: ExecutionId,
    /// Whether it has nothing that others could wait for, but may have a parent who waits for it.
    pub(crate) is_child: bool,
}

/// A wait that others have to end.
enum Waiting {
    Lock(LockWait),
    /// For the end of a child.
    Child(ExecutionId),
}

struct LockWait {
    lock: LockName,
    ticket: u64,
    permits: u32,
    free: u32,
    holders: Vec<(Owner, u32)>,
    /// Those who wait for the same and are before, in the order of tickets.
    before: Vec<(Owner, u32)>,
}

/// Executions that may never go on, with everything they wait for.
type Stuck = BTreeMap<ExecutionId, Vec<Waiting>>;

impl Waiting {
    fn others(&self) -> Vec<Owner> {
        match self {
            Waiting::Lock(wait) => wait.holders.iter().chain(&wait.before).map(|(owner, _)| owner.clone()).collect(),
            Waiting::Child(child) => vec![Owner::Execution(child.clone())],
        }
    }

    /// The executions among them.
    fn executions(&self) -> impl Iterator<Item = ExecutionId> {
        self.others().into_iter().filter_map(|owner| match owner {
            Owner::Execution(id) => Some(id),
            Owner::Session(_) => None,
        })
    }

    fn lock(&self) -> Option<&LockWait> {
        match self {
            Waiting::Lock(wait) => Some(wait),
            Waiting::Child(_) => None,
        }
    }

    /// Whether it never ends if none of these goes on.
    fn never_ends(&self, stuck: &Stuck) -> bool {
        let wait = match self {
            Waiting::Lock(wait) => wait,
            Waiting::Child(child) => return stuck.contains_key(child),
        };
        let is_stuck = |owner: &Owner| matches!(owner, Owner::Execution(id) if stuck.contains_key(id));
        let given = wait.holders.iter().filter(|(owner, _)| !is_stuck(owner));
        let given = given.fold(wait.free, |given, (_, permits)| given.saturating_add(*permits));
        // Nobody is overtaken. Of sessions it is known only what they want here.
        let blocks = |(owner, permits): &(Owner, u32)| match owner {
            Owner::Execution(_) => is_stuck(owner),
            Owner::Session(_) => given < *permits,
        };
        given < wait.permits || wait.before.iter().any(blocks)
    }
}

/// Looks at those that have begun to wait, one after the other.
pub(crate) async fn watch(engine: Weak<Inner>, mut suspects: UnboundedReceiver<Suspect>) {
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
        while let Err(error) = engine.untangle(&suspect).await {
            if engine.is_stopped() {
                return;
            }
            if error.kind() != ErrorKind::Unavailable {
                tracing::error!(id = %suspect.id, %error, "it cannot be told whether it waits in a circle");
                break;
            }
            engine.store.env().sleep(AGAIN).await;
        }
    }
}

impl Inner {
    /// Suspects all that have several requests, or one and a parent: an earlier process may have ended before it has
    /// looked at them.
    async fn suspect_all(&self) -> Result<()> {
        let range = self.locks.spaces.owned.prefix([0]);
        let owned = self.store.view().await?.scan(&range, Order::Ascending, usize::MAX).await?;
        let mut counts: BTreeMap<ExecutionId, usize> = BTreeMap::new();
        for (key, _) in owned {
            let id = key.bytes().get(1..).and_then(read_text).map(|(id, _)| ExecutionId::from(id));
            id.into_iter().for_each(|id| *counts.entry(id).or_default() += 1);
        }
        let mut suspects = Vec::new();
        for (id, count) in counts {
            let is_child = count == 1;
            if !is_child || self.parent_of(&id).await?.is_some() {
                suspects.push(Suspect { id, is_child });
            }
        }
        suspects.into_iter().for_each(|suspect| drop(self.locks.suspects.send(suspect)));
        Ok(())
    }

    /// The newest record of an execution. Of one that is damaged nothing is known, and it stands in nobody's way; a
    /// store that does not answer is an error.
    async fn recorded(&self, id: &ExecutionId) -> Result<Option<Execution>> {
        let item = self.store.view().await?.get(&self.spaces.executions.key(id.as_bytes())).await?;
        Ok(item.and_then(|item| Execution::decode(&item.value).ok()))
    }

    async fn parent_of(&self, id: &ExecutionId) -> Result<Option<ExecutionId>> {
        Ok(self.recorded(id).await?.and_then(|execution| execution.parent).map(|parent| parent.id))
    }

    /// Whether one that may wait for an execution's end has to do with locks.
    async fn has_locks_above(&self, id: &ExecutionId) -> Result<bool> {
        let mut next = self.parent_of(id).await?;
        while let Some(id) = next {
            match self.recorded(&id).await? {
                Some(execution) if execution.has_locks => return Ok(true),
                Some(execution) => next = execution.parent.map(|parent| parent.id),
                None => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Ends the wait of an execution if it would never end.
    async fn untangle(self: &Arc<Inner>, Suspect { id, is_child }: &Suspect) -> Result<()> {
        if *is_child && !self.has_locks_above(id).await? {
            return Ok(());
        }
        // Who waits is known of a later time than who holds what: what is no circle is none when it is looked at again.
        if self.tangle(id).await?.is_none() {
            return Ok(());
        }
        let Some((lock, ticket, why)) = self.tangle(id).await? else { return Ok(()) };
        tracing::warn!(%id, %why, "a deadlock");
        self.ask(&lock, Ask::Refuse { ticket, why }, None).await.map(drop)
    }

    /// The request that keeps an execution waiting for itself, if there is one, and how it does.
    async fn tangle(&self, id: &ExecutionId) -> Result<Option<(LockName, u64, LockRefused)>> {
        let view = self.store.view().await?;
        let mut stuck = Stuck::new();
        let mut seen = BTreeSet::new();
        let mut next = vec![id.clone()];
        while let Some(id) = next.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            let waits = self.waits_of(&view, &id).await?;
            next.extend(waits.iter().flat_map(Waiting::executions));
            if !waits.is_empty() {
                stuck.insert(id, waits);
            }
        }
        drop(view);
        // Whoever can be given something goes on, and so, in time, do those who wait for it.
        loop {
            let goes_on = |waits: &[Waiting]| !waits.iter().all(|wait| wait.never_ends(&stuck));
            let goes_on: Vec<ExecutionId> =
                stuck.iter().filter(|(_, waits)| goes_on(waits)).map(|(id, _)| id.clone()).collect();
            if goes_on.is_empty() {
                break;
            }
            goes_on.iter().for_each(|id| drop(stuck.remove(id)));
        }
        let Some(circle) = circle(id, &stuck) else { return Ok(None) };
        // It is told itself, unless it waits for children alone; then the last who has asked for a lock.
        let own = stuck.get(id).into_iter().flatten().filter_map(Waiting::lock);
        let others = || circle.iter().filter_map(|(_, wait)| wait.lock());
        let last = own.max_by_key(|wait| wait.ticket).or_else(|| others().max_by_key(|wait| wait.ticket));
        let Some(last) = last else { return Ok(None) };
        let link = |(at, wait): &(&ExecutionId, &Waiting)| {
            let lock = wait.lock().map(|wait| wait.lock.to_string());
            DeadlockLink { waiter: Owner::Execution((*at).clone()), lock, holders: wait.others() }
        };
        let why = LockRefused::Deadlock { lock: last.lock.to_string(), cycle: circle.iter().map(link).collect() };
        Ok(Some((last.lock.clone(), last.ticket, why)))
    }

    /// What an execution waits for, if that is nothing but locks and ends of children, and for as long as it takes.
    async fn waits_of(&self, view: &View, id: &ExecutionId) -> Result<Vec<Waiting>> {
        let waits = match self.resident(id) {
            Some(run) => run.with(|state| if state.only_waits() { state.doing() } else { Vec::new() }),
            None => match self.recorded(id).await? {
                Some(execution) if execution.status == Status::Waiting => execution.waits,
                _ => Vec::new(),
            },
        };
        if !waits.iter().all(Wait::is_for_others) || waits.len() > MOST_BEFORE {
            return Ok(Vec::new());
        }
        let children = waits.iter().filter_map(|wait| match &wait.what {
            WaitsFor::Child(child) => Some(Waiting::Child(child.as_str().into())),
            _ => None,
        });
        let mut waiting: Vec<Waiting> = children.collect();
        if waiting.len() == waits.len() {
            return Ok(waiting);
        }
        let spaces = &self.locks.spaces;
        for (lock, requests) in self.requests_of(&Owner::Execution(id.clone())).await? {
            for (ticket, _) in requests {
                let item = view.get(&spaces.request(&lock, ticket)).await?;
                let request = item.and_then(|item| Request::decode(&item.value).ok());
                let Some(request) = request.filter(|request| request.granted_us.is_none()) else { continue };
                let head = view.get(&spaces.head(&lock)).await?.and_then(|item| Head::decode(&item.value).ok());
                let Some(head) = head else { continue };
                let free = head.kind.map_or(0, |kind| kind.capacity()).saturating_sub(head.used);
                // All that hold it were granted it before all that wait.
                let held = spaces.requests_until(&lock, head.granted);
                let held = view.scan(&held, Order::Ascending, MOST_HOLDERS + 1).await?;
                if held.len() > MOST_HOLDERS {
                    return Ok(Vec::new());
                }
                let holders = held.into_iter().filter_map(|(_, item)| Request::decode(&item.value).ok());
                let holders = holders.map(|held| (held.owner, held.permits)).collect();
                let before = spaces.requests_from(&lock, head.granted + 1);
                let before = view.scan(&before, Order::Ascending, MOST_BEFORE + 1).await?;
                let is_before = |key: &Key| read_ticket(key).is_some_and(|(_, other)| other < ticket);
                let before: Vec<_> = before.into_iter().take_while(|(key, _)| is_before(key)).collect();
                if before.len() > MOST_BEFORE {
                    return Ok(Vec::new());
                }
                let before = before.into_iter().filter_map(|(_, item)| Request::decode(&item.value).ok());
                let before = before.map(|request| (request.owner, request.permits)).collect();
                let (lock, permits) = (lock.clone(), request.permits);
                waiting.push(Waiting::Lock(LockWait { lock, ticket, permits, free, holders, before }));
            }
        }
        // It may have been granted one of them, and not know yet.
        Ok(if waiting.len() < waits.len() { Vec::new() } else { waiting })
    }
}

/// The shortest way from an execution back to itself, along those who wait. None if it only waits for others who do so
/// in a circle: one of them is told.
fn circle<'a>(id: &'a ExecutionId, stuck: &'a Stuck) -> Option<Vec<(&'a ExecutionId, &'a Waiting)>> {
    let mut came_from: BTreeMap<&ExecutionId, (&ExecutionId, &Waiting)> = BTreeMap::new();
    let mut next = VecDeque::from([id]);
    while let Some(at) = next.pop_front().filter(|_| !came_from.contains_key(id)) {
        for wait in stuck.get(at).into_iter().flatten() {
            for (other, _) in wait.executions().filter_map(|other| stuck.get_key_value(&other)) {
                came_from.entry(other).or_insert_with(|| {
                    next.push_back(other);
                    (at, wait)
                });
            }
        }
    }
    let mut links = vec![*came_from.get(id)?];
    while let Some((at, _)) = links.last().filter(|(at, _)| *at != id) {
        links.push(came_from[at]);
    }
    links.reverse();
    Some(links)
}
