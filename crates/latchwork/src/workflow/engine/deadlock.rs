//! Deadlocks: executions that wait for each other in a cycle, for locks or for the ends of children. Whenever an
//! execution that holds locks begins to wait, or one whose parent may hold some, the engine checks whether the wait can
//! ever end. If not, it refuses one request and reports the cycle to the execution that made it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::damage::{Scanned, scan_around};
use crate::lock::lane::Ask;
use crate::lock::stored::{Head, LockRequest};
use crate::lock::{DeadlockLink, LockError, LockName, LockRefused, Owner, Result};
use crate::node::{AGAIN, read_text};
use crate::record::{Record, Unreadable};
use crate::store::{ErrorKind, Item, Key, Order, View};
use crate::workflow::engine::EngineInner;
use crate::workflow::stored::record::{Execution, StoredStatus, Wait, WaitsFor, next_page};
use crate::workflow::{ExecutionId, WorkflowError};

/// How many holders of a lock, waiters before a request and waits of an execution are followed. If there are more, the
/// suspect is checked again after a while.
const MOST: usize = 1000;
const LATER: Duration = Duration::from_secs(60);

/// An execution that has begun to wait.
#[derive(Debug, Clone)]
pub(crate) struct Suspect {
    pub(crate) id: ExecutionId,
    /// True if other executions cannot wait for it, except a parent that waits for its end.
    pub(crate) is_child: bool,
}

/// A wait that only other executions can end.
enum BlockingWait {
    Lock(LockWait),
    /// Waits for the end of a child.
    Child(ExecutionId),
}

struct LockWait {
    lock: LockName,
    ticket: u64,
    permits: u32,
    free: u32,
    holders: Vec<(Owner, u32)>,
    /// The waiters before it, in the order of tickets, that want more permits. Other waiters make no difference: the
    /// first waiter that never gets the lock wants more than will ever be free. If it wants no more than this request,
    /// this request does not get the lock either.
    before: Vec<(Owner, u32)>,
}

/// Executions that may be stuck, with everything they wait for.
type Stuck = BTreeMap<ExecutionId, Vec<BlockingWait>>;

/// The result for a suspect.
enum SuspectOutcome {
    /// It will continue at some time.
    Nothing,
    /// The request in a cycle that is refused, and the reason.
    Circle(LockName, u64, LockRefused),
    /// More is involved than is followed: the suspect is assumed to continue, and checked again.
    TooMany,
}

/// What was followed: everything, unless there is too much.
enum Followed<T> {
    All(T),
    TooMany,
}

impl BlockingWait {
    fn others(&self) -> Vec<Owner> {
        match self {
            BlockingWait::Lock(wait) => {
                wait.holders.iter().chain(&wait.before).map(|(owner, _)| owner.clone()).collect()
            }
            BlockingWait::Child(child) => vec![Owner::Execution(child.clone())],
        }
    }

    /// The executions among the others.
    fn executions(&self) -> impl Iterator<Item = ExecutionId> {
        self.others().into_iter().filter_map(|owner| match owner {
            Owner::Execution(id) => Some(id),
            Owner::Session(_) => None,
        })
    }

    fn lock(&self) -> Option<&LockWait> {
        match self {
            BlockingWait::Lock(wait) => Some(wait),
            BlockingWait::Child(_) => None,
        }
    }

    /// True if this wait never ends as long as all these executions are stuck.
    fn never_ends(&self, stuck: &Stuck) -> bool {
        let wait = match self {
            BlockingWait::Lock(wait) => wait,
            BlockingWait::Child(child) => return stuck.contains_key(child),
        };
        let is_stuck = |owner: &Owner| matches!(owner, Owner::Execution(id) if stuck.contains_key(id));
        let given = wait.holders.iter().filter(|(owner, _)| !is_stuck(owner));
        let given = given.fold(wait.free, |given, (_, permits)| given.saturating_add(*permits));
        // No waiter is overtaken. Of sessions, only their requests for this lock are known.
        let blocks = |(owner, permits): &(Owner, u32)| match owner {
            Owner::Execution(_) => is_stuck(owner),
            Owner::Session(_) => given < *permits,
        };
        given < wait.permits || wait.before.iter().any(blocks)
    }
}

/// Checks executions that have begun to wait, one after the other.
pub(crate) async fn watch(engine: Weak<EngineInner>, mut suspects: UnboundedReceiver<Suspect>) {
    let Some(env) = engine.upgrade().map(|engine| engine.store.env().clone()) else { return };
    loop {
        let Some(engine) = engine.upgrade() else { return };
        match engine.suspect_all().await {
            Ok(()) => break,
            Err(_) if engine.is_stopped() => return,
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            Err(error) => {
                tracing::error!(%error, "deadlocks from before the start are not detected");
                break;
            }
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
                tracing::error!(id = %suspect.id, %error, "cannot check whether the execution is in a deadlock");
                break;
            }
            engine.store.env().sleep(AGAIN).await;
        }
    }
}

impl EngineInner {
    /// Suspects all executions that have several requests, or one request and a parent: an earlier process may have
    /// ended before it checked them.
    pub(super) async fn suspect_all(&self) -> Result<()> {
        let (space, range) = (&self.locks.spaces.owned, self.locks.spaces.owned.prefix([0]));
        let Scanned { found: owned, damaged } =
            scan_around(&self.store.view().await?, space, &range, usize::MAX).await?;
        damaged.iter().for_each(|key| tracing::error!(%key, "the record of a request is damaged"));
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
        suspects.into_iter().for_each(|suspect| drop(self.suspects.send(suspect)));
        Ok(())
    }

    /// The newest record of an execution. A damaged one counts as absent and blocks no other; a store error is an
    /// error.
    async fn recorded(&self, id: &ExecutionId) -> Result<Option<Execution>> {
        match self.read(id).await {
            Err(WorkflowError::Store(error)) if error.kind() != ErrorKind::Corrupt => Err(error.into()),
            Err(error) => {
                tracing::error!(%id, %error, "the execution is damaged: what it waits for is unknown");
                Ok(None)
            }
            Ok(found) => Ok(found.map(|(execution, _)| execution)),
        }
    }

    async fn parent_of(&self, id: &ExecutionId) -> Result<Option<ExecutionId>> {
        Ok(self.recorded(id).await?.and_then(|execution| execution.parent).map(|parent| parent.id))
    }

    /// True if an ancestor, which may wait for the execution's end, has requested locks.
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

    /// Refuses a request of the execution if its wait would never end.
    async fn untangle(self: &Arc<EngineInner>, Suspect { id, is_child }: &Suspect) -> Result<()> {
        if *is_child && !self.has_locks_above(id).await? {
            return Ok(());
        }
        // Waiters are read later than holders: a cycle is reported only if a second look finds it again.
        let found = match self.tangle(id).await? {
            SuspectOutcome::Circle(..) => self.tangle(id).await?,
            found => found,
        };
        match found {
            SuspectOutcome::Nothing => Ok(()),
            SuspectOutcome::Circle(lock, ticket, why) => {
                tracing::warn!(%id, %why, "a deadlock");
                self.locks.ask(&lock, Ask::Refuse { ticket, why }, None).await.map(drop)
            }
            SuspectOutcome::TooMany => {
                let (sleep, suspects) = (self.store.env().sleep(LATER), self.suspects.clone());
                let suspect = Suspect { id: id.clone(), is_child: *is_child };
                self.node.runtime.spawn(async move {
                    sleep.await;
                    let _ = suspects.send(suspect);
                });
                Ok(())
            }
        }
    }

    /// Follows the waits of an execution and of all executions involved.
    async fn tangle(&self, id: &ExecutionId) -> Result<SuspectOutcome> {
        let view = self.store.view().await?;
        let (mut stuck, mut is_whole) = (Stuck::new(), true);
        let mut seen = BTreeSet::new();
        let mut next = vec![id.clone()];
        while let Some(id) = next.pop() {
            if !seen.insert(id.clone()) {
                continue;
            }
            match self.waits_of(&view, &id).await? {
                Followed::All(waits) if waits.is_empty() => {}
                Followed::All(waits) => {
                    next.extend(waits.iter().flat_map(BlockingWait::executions));
                    stuck.insert(id, waits);
                }
                Followed::TooMany => is_whole = false,
            }
        }
        drop(view);
        // An execution that can get a lock continues, and so, in time, do the executions that wait for it.
        loop {
            let goes_on = |waits: &[BlockingWait]| !waits.iter().all(|wait| wait.never_ends(&stuck));
            let goes_on: Vec<ExecutionId> =
                stuck.iter().filter(|(_, waits)| goes_on(waits)).map(|(id, _)| id.clone()).collect();
            if goes_on.is_empty() {
                break;
            }
            goes_on.iter().for_each(|id| drop(stuck.remove(id)));
        }
        let none = || if is_whole { SuspectOutcome::Nothing } else { SuspectOutcome::TooMany };
        let Some(circle) = circle(id, &stuck) else { return Ok(none()) };
        // Its own latest request is refused. If it waits for children only, the latest request in the cycle is refused.
        let own = stuck.get(id).into_iter().flatten().filter_map(BlockingWait::lock);
        let others = || circle.iter().filter_map(|(_, wait)| wait.lock());
        let last = own.max_by_key(|wait| wait.ticket).or_else(|| others().max_by_key(|wait| wait.ticket));
        let Some(last) = last else { return Ok(none()) };
        let link = |(at, wait): &(&ExecutionId, &BlockingWait)| {
            let lock = wait.lock().map(|wait| wait.lock.to_string());
            DeadlockLink { waiter: Owner::Execution((*at).clone()), lock, holders: wait.others() }
        };
        let why = LockRefused::Deadlock { lock: last.lock.to_string(), cycle: circle.iter().map(link).collect() };
        Ok(SuspectOutcome::Circle(last.lock.clone(), last.ticket, why))
    }

    /// What an execution waits for, if it waits only for locks and ends of children, without a time limit.
    async fn waits_of(&self, view: &View, id: &ExecutionId) -> Result<Followed<Vec<BlockingWait>>> {
        let waits = match self.resident(id) {
            Some(run) => run.with(|state| if state.ops.only_wait() { state.ops.doing() } else { Vec::new() }),
            None => match self.recorded(id).await? {
                Some(execution) if execution.status == StoredStatus::Waiting => execution.waits,
                _ => Vec::new(),
            },
        };
        if !waits.iter().all(Wait::is_for_others) {
            return Ok(Followed::All(Vec::new()));
        }
        if waits.len() > MOST {
            return Ok(Followed::TooMany);
        }
        let children = waits.iter().filter_map(|wait| match &wait.what {
            WaitsFor::Child(child) => Some(BlockingWait::Child(child.as_str().into())),
            _ => None,
        });
        let mut waiting: Vec<BlockingWait> = children.collect();
        if waiting.len() == waits.len() {
            return Ok(Followed::All(waiting));
        }
        for (lock, requests) in self.locks.requests_of(&Owner::Execution(id.clone())).await? {
            for (ticket, _) in requests {
                match self.wait_for(view, &lock, ticket).await {
                    Ok(Followed::All(wait)) => waiting.extend(wait.map(BlockingWait::Lock)),
                    Ok(Followed::TooMany) => return Ok(Followed::TooMany),
                    // The holders are unknown, so the lock may be released.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(%id, %lock, %error, "the lock is damaged: its holders are unknown");
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        // One of the requests may have been granted without the execution knowing yet.
        Ok(Followed::All(if waiting.len() < waits.len() { Vec::new() } else { waiting }))
    }

    /// The wait of a request, if it waits.
    async fn wait_for(&self, view: &View, lock: &LockName, ticket: u64) -> Result<Followed<Option<LockWait>>> {
        let spaces = &self.locks.spaces;
        let at = |why: Unreadable, what: &str| LockError::from(why.at(format!("{what} lock {:?}", lock.to_string())));
        let read = |item: &Item| LockRequest::decode(&item.value).map_err(|why| at(why, "a request for"));
        let request = view.get(&spaces.request(lock, ticket)).await?.as_ref().map(read).transpose()?;
        let Some(LockRequest { permits, .. }) = request.filter(|request| request.granted_us.is_none()) else {
            return Ok(Followed::All(None));
        };
        let Some(head) = view.get(&spaces.head(lock)).await? else { return Ok(Followed::All(None)) };
        let head = Head::decode(&head.value).map_err(|why| at(why, "the head of"))?;
        let capacity = head.kind.map_or(0, |kind| kind.capacity());
        let owner = |(_, item): &(Key, Item)| read(item).map(|request| (request.owner, request.permits));
        // All holders were granted before all waiters.
        let held = spaces.requests_until(lock, head.granted);
        let held = view.scan(&held, Order::Ascending, MOST + 1).await?;
        let mut before = Vec::new();
        let mut rest = spaces.requests_from(lock, head.granted + 1).before(&spaces.request(lock, ticket));
        // If a request wants the whole capacity, as for a mutex, no waiter wants more.
        while permits < capacity && before.len() <= MOST {
            let Some(page) = next_page(view, &mut rest, MOST).await? else { break };
            let page = page.iter().map(owner).collect::<Result<Vec<_>>>()?;
            before.extend(page.into_iter().filter(|(_, wanted)| *wanted > permits));
        }
        if held.len() > MOST || before.len() > MOST {
            return Ok(Followed::TooMany);
        }
        let holders = held.iter().map(owner).collect::<Result<Vec<_>>>()?;
        let free = capacity.saturating_sub(head.used);
        let wait = LockWait { lock: lock.clone(), ticket, permits, free, holders, before };
        Ok(Followed::All(Some(wait)))
    }
}

/// The shortest cycle from an execution back to itself. None if it only waits for other executions that form a cycle:
/// then one of those is reported.
fn circle<'a>(id: &'a ExecutionId, stuck: &'a Stuck) -> Option<Vec<(&'a ExecutionId, &'a BlockingWait)>> {
    let mut came_from: BTreeMap<&ExecutionId, (&ExecutionId, &BlockingWait)> = BTreeMap::new();
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
