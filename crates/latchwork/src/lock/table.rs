//! A lock in memory while operations change it: its head, the first waiters, and the changes of each operation. If the
//! head's rev has changed, the lock is read again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::lane::{OnceCall, Part, Tag, as_found};
use crate::lock::error::{LockError, LockRefused, Result};
use crate::lock::lane::{Ask, Ear, Gone, LockAnswer, Want};
use crate::lock::name::read_ticket;
use crate::lock::owners::{Notice, Notices};
use crate::lock::service::Service;
use crate::lock::stored::{Forced, Head, LockRequest, Ticket};
use crate::lock::{LockKind, LockName, Owner};
use crate::node::{ExecutionId, NodeNotice, shard_of};
use crate::record::{Record, Unreadable};
use crate::store::{Check, ErrorKind, Key, Order, Rev, Uuid, View, Write};

/// The number of waiters that are read at once, and the most that are kept in memory.
const PAGE: usize = 64;
const MOST_KEPT: usize = 1024;

/// The most requests that one commit grants.
pub(super) const MOST_GRANTS: usize = 256;

/// The number of tickets that one rev of the head makes.
pub(crate) const TICKETS: u64 = 256;

/// A lock in memory.
pub(crate) struct Table {
    pub(crate) head: Head,
    /// The rev of the head, if it exists.
    rev: Option<Rev>,
    /// The rev that the head has after the next write.
    next: u64,
    /// The first waiters; all of them if `whole`.
    page: VecDeque<(u64, LockRequest)>,
    whole: bool,
}

/// Operations on a lock that share one commit.
pub(crate) struct Planned<'a> {
    service: &'a Service,
    lock: &'a LockName,
    table: &'a mut Table,
    /// Opened when something is read.
    view: Option<View>,
    /// Requests as these operations leave them.
    touched: BTreeMap<u64, Option<LockRequest>>,
    /// The owners' ids of requests, as these operations leave them.
    names: BTreeMap<Key, Option<u64>>,
    issued: u64,
    grants: usize,
    /// The most grants.
    pub(super) most_grants: usize,
    pub(crate) is_changed: bool,
    /// Whether there is more to grant than one commit can hold, and whether this commit continues such grants.
    is_unfinished: bool,
    is_resumed: bool,
    /// True if the next waiter is an execution and there is no engine.
    is_left: bool,
    /// True if executions are read from the store, because what is in memory was out of date.
    from_store: bool,
    checks: Vec<Check>,
    writes: Vec<Write>,
    told: Vec<CallerNotice>,
    notices: Vec<(ExecutionId, Notice)>,
    /// The kept answers of operations under idempotency keys.
    once: Part,
    /// The sessions that are told of something.
    sessions: BTreeSet<Uuid>,
    /// The callers of requests that these operations make or repeat.
    joined: Vec<(u64, Ear)>,
}

/// The result of a plan.
pub(crate) struct Closed {
    pub(crate) part: Part,
    pub(crate) notices: Notices,
    pub(crate) told: Vec<CallerNotice>,
    /// True if there is more to grant than one commit can hold.
    pub(crate) is_unfinished: bool,
}

/// The lock has not changed.
const HEAD: Tag = Tag("head");
/// A session that is granted a lock has not ended.
pub(crate) const SESSION: Tag = Tag("session");

/// A notification for a caller in this process, when the commit has landed.
#[derive(Debug, Clone)]
pub(crate) enum CallerNotice {
    /// A session's request was granted.
    Granted(u64),
    /// A session's request no longer exists.
    Gone(u64, Gone),
}

impl Table {
    pub(crate) async fn read(service: &Service, lock: &LockName) -> Result<Table> {
        let key = service.spaces.head(lock);
        // The rev of a deleted head counts, too.
        let newest = service.node.store.newest(&key).await?;
        let next = newest.as_ref().map_or(0, |newest| newest.rev.0) + 1;
        let rev = newest.as_ref().filter(|newest| newest.value.is_some()).map(|newest| newest.rev);
        let head = match newest.and_then(|newest| newest.value) {
            Some(value) => Head::decode(&value).map_err(|why| why.at(format!("lock {:?}", lock.to_string())))?,
            None => Head::default(),
        };
        let whole = head.waiting == 0;
        Ok(Table { head, rev, next, page: VecDeque::new(), whole })
    }

    /// The planned commit has landed.
    pub(crate) fn landed(&mut self) {
        (self.rev, self.next) = (Some(Rev(self.next)), self.next + 1);
    }

    /// True if a request would have to wait.
    pub(crate) fn is_busy(&self, permits: u32) -> bool {
        let Some(kind) = self.head.kind else { return false };
        self.head.waiting > 0 || self.head.used.checked_add(permits).is_none_or(|used| used > kind.capacity())
    }
}

impl<'a> Planned<'a> {
    pub(crate) fn new(service: &'a Service, lock: &'a LockName, table: &'a mut Table, from_store: bool) -> Planned<'a> {
        Planned {
            service,
            lock,
            table,
            view: None,
            touched: BTreeMap::new(),
            names: BTreeMap::new(),
            issued: 0,
            grants: 0,
            most_grants: MOST_GRANTS,
            is_changed: false,
            is_unfinished: false,
            is_resumed: false,
            is_left: false,
            from_store,
            checks: Vec::new(),
            writes: Vec::new(),
            told: Vec::new(),
            once: Part::default(),
            sessions: BTreeSet::new(),
            notices: Vec::new(),
            joined: Vec::new(),
        }
    }

    /// Does an operation. The answer is valid once the plan has landed.
    pub(crate) async fn ask(&mut self, ask: &Ask) -> Result<LockAnswer> {
        let answer = match ask {
            Ask::Acquire(want) => {
                let answer = self.acquire(want).await?;
                if let (LockAnswer::Granted(ticket) | LockAnswer::Queued(ticket), Some(ear)) = (&answer, &want.ear) {
                    self.joined.push((*ticket, ear.clone()));
                }
                return Ok(answer);
            }
            Ask::Release { ticket, id: None } => self.release(*ticket, false).await?,
            Ask::Release { ticket, id: Some(id) } => self.leave(*ticket, id, false).await?,
            Ask::LetGo { owner, ticket } => match self.request(*ticket).await? {
                Some(request) if request.owner == *owner => self.release(*ticket, false).await?,
                _ => return Ok(LockAnswer::Gone),
            },
            Ask::Abandon { owner, id, ear } => match self.owned(owner, id).await? {
                Some((ticket, _)) if self.is_left_to_others(ticket, ear) => return Ok(LockAnswer::Gone),
                Some((ticket, _)) => self.leave(ticket, id, true).await?,
                None => return Ok(LockAnswer::Gone),
            },
            Ask::Withdraw { ticket } => match self.request(*ticket).await? {
                Some(request) if request.granted_us.is_some() => return Ok(LockAnswer::Granted(*ticket)),
                Some(request) => {
                    self.drop_request(*ticket, &request);
                    LockAnswer::Withdrawn
                }
                None => return Ok(LockAnswer::Gone),
            },
            Ask::Force { ticket, reason } => self.force(*ticket, reason).await?,
            Ask::Refuse { ticket, why } => match self.request(*ticket).await? {
                Some(request) if request.granted_us.is_none() => {
                    self.tell_gone(*ticket, &request, Gone::Refused(why.clone()));
                    self.drop_request(*ticket, &request);
                    LockAnswer::Withdrawn
                }
                _ => return Ok(LockAnswer::Gone),
            },
            Ask::Remove(call) => self.remove(call)?,
            Ask::Grant => {
                self.is_resumed = true;
                LockAnswer::Gone
            }
        };
        self.grant().await?;
        Ok(answer)
    }

    /// True if a request has another caller: one that listens to it already, or one in the same commit.
    fn is_left_to_others(&self, ticket: u64, ear: &Option<Ear>) -> bool {
        let Some(ear) = ear else { return false };
        let joins = |(joined, other): &(u64, Ear)| *joined == ticket && !Arc::ptr_eq(other, ear);
        self.service.is_left_to_others(self.lock, ticket, ear) || self.joined.iter().any(joins)
    }

    async fn acquire(&mut self, want: &Want) -> Result<LockAnswer> {
        let lock = self.lock.to_string();
        // The first granted or waiting request sets the kind.
        let kind = self.table.head.kind.unwrap_or(want.kind);
        if kind != want.kind {
            return Err(LockRefused::Capacity { lock, stored: kind, asked: want.kind }.into());
        }
        let (capacity, permits) = (kind.capacity(), want.permits);
        if permits == 0 || permits > capacity {
            return Err(LockRefused::TooMany { lock, asked: permits, capacity }.into());
        }
        let known = if want.is_known { self.owned(&want.owner, &want.id).await? } else { None };
        if let Some((ticket, _)) = known.as_ref().filter(|(ticket, _)| self.service.is_leaving(self.lock, *ticket)) {
            // Its guard was dropped, and the release is on its way. It is done here, and this is a new request.
            self.release(*ticket, true).await?;
            self.grant().await?;
        } else if let Some((ticket, request)) = known {
            if request.permits != permits {
                return Err(LockRefused::Reused { lock, before: request.permits, asked: permits }.into());
            }
            let is_granted = request.granted_us.is_some();
            return Ok(if is_granted { LockAnswer::Granted(ticket) } else { LockAnswer::Queued(ticket) });
        }
        let head = &self.table.head;
        // One request has all permits, and it was the last to be granted.
        if head.used == capacity
            && matches!(kind, LockKind::Mutex | LockKind::ReadWrite)
            && matches!(want.owner, Owner::Execution(_))
        {
            let token = head.granted;
            let held = self.request(token).await?;
            if let Some(held) = held.filter(|held| held.permits == capacity && held.owner == want.owner) {
                if want.is_reentrant {
                    self.enter_again(token, held, &want.id);
                    return Ok(LockAnswer::Granted(token));
                }
                return Err(LockRefused::AlreadyHeld { lock, token }.into());
            }
        }
        let is_busy = self.table.is_busy(permits);
        if is_busy && !want.waits {
            return Ok(LockAnswer::Busy);
        }
        let ticket = self.table.next * TICKETS + self.issued;
        self.issued += 1;
        let now = self.service.node.store.env().now().0;
        let granted_us = (!is_busy).then_some(now);
        let Want { owner, id, .. } = want.clone();
        let request = LockRequest { owner, permits, id, again: Vec::new(), since_us: now, granted_us };
        self.name(&request.owner, &request.id, Some(ticket));
        if let Owner::Session(session) = &request.owner {
            self.checks.push(Check::Present(self.service.spaces.session(*session)));
        }
        self.is_changed = true;
        self.touched.insert(ticket, Some(request.clone()));
        let head = &mut self.table.head;
        if head.kind.is_none() {
            (head.kind, head.since_us) = (Some(kind), now);
        }
        if is_busy {
            head.waiting += 1;
            if self.table.whole && self.table.page.len() < MOST_KEPT {
                self.table.page.push_back((ticket, request));
            } else {
                self.table.whole = false;
            }
            return Ok(LockAnswer::Queued(ticket));
        }
        (head.used, head.granted) = (head.used + permits, ticket);
        Ok(LockAnswer::Granted(ticket))
    }

    /// Records which request an owner's id stands for.
    fn name(&mut self, owner: &Owner, id: &[u8], ticket: Option<u64>) {
        self.names.insert(self.service.spaces.owned(owner, self.lock, id), ticket);
    }

    /// Records the id under which the owner of a lock has entered it again.
    fn enter_again(&mut self, ticket: u64, mut held: LockRequest, id: &[u8]) {
        self.name(&held.owner, id, Some(ticket));
        held.again.push(id.to_vec());
        self.touched.insert(ticket, Some(held));
        self.is_changed = true;
    }

    /// The request that was made or entered again under this id.
    async fn owned(&mut self, owner: &Owner, id: &[u8]) -> Result<Option<(u64, LockRequest)>> {
        let is_it = |request: &LockRequest| request.owner == *owner && request.names().any(|name| name == id);
        let made = self.touched.iter().filter_map(|(ticket, request)| Some((*ticket, request.as_ref()?)));
        if let Some((ticket, request)) = made.into_iter().find(|(_, request)| is_it(request)) {
            return Ok(Some((ticket, request.clone())));
        }
        let key = self.service.spaces.owned(owner, self.lock, id);
        if self.names.contains_key(&key) {
            // These operations have removed that request.
            return Ok(None);
        }
        let Some(item) = self.view().await?.get(&key).await? else { return Ok(None) };
        let ticket = match Ticket::decode(&item.value) {
            Ok(Ticket(ticket)) => ticket,
            Err(Unreadable::Damaged) => return Ok(None),
            Err(why) => return Err(why.at(format!("an entry of {owner} for lock {:?}", self.lock.to_string())).into()),
        };
        Ok(self.request(ticket).await?.map(|request| (ticket, request)))
    }

    /// Releases requests of an owner, and grants what becomes free.
    pub(crate) async fn release_all(&mut self, tickets: &[u64]) -> Result<()> {
        for ticket in tickets {
            self.release(*ticket, true).await?;
        }
        self.grant().await
    }

    /// Releases a lock or removes a waiting request. With `forget`, its message to the execution is removed, too.
    async fn release(&mut self, ticket: u64, forget: bool) -> Result<LockAnswer> {
        let Some(request) = self.request(ticket).await? else { return Ok(LockAnswer::Released(false)) };
        self.drop_request(ticket, &request);
        if let (true, Owner::Execution(id)) = (forget, &request.owner) {
            self.forget(id, ticket);
        }
        Ok(LockAnswer::Released(true))
    }

    /// The same for one id: the lock is held until the other ids of its owner are released.
    async fn leave(&mut self, ticket: u64, id: &[u8], forget: bool) -> Result<LockAnswer> {
        let request = self.request(ticket).await?.filter(|request| request.names().any(|name| name == id));
        let Some(mut request) = request else { return Ok(LockAnswer::Released(false)) };
        if request.again.is_empty() {
            return self.release(ticket, forget).await;
        }
        self.name(&request.owner, id, None);
        if request.id == id {
            // The message of the grant belongs to this id.
            if let (true, Owner::Execution(owner)) = (forget, &request.owner) {
                self.forget(owner, ticket);
            }
            request.id = request.again.remove(0);
        } else {
            request.again.retain(|name| name != id);
        }
        self.touched.insert(ticket, Some(request));
        self.is_changed = true;
        Ok(LockAnswer::Released(true))
    }

    async fn force(&mut self, ticket: u64, reason: &str) -> Result<LockAnswer> {
        let Some(request) = self.request(ticket).await? else {
            return Err(LockError::NoSuchToken { lock: self.lock.to_string(), token: ticket });
        };
        let at_us = self.service.node.store.env().now().0;
        let forced = Forced { request: request.clone(), at_us, reason: reason.into() };
        self.writes.push(Write::Put(self.service.spaces.forced(self.lock, ticket), forced.encode()));
        let why = LockRefused::Forced { lock: self.lock.to_string(), reason: reason.into() };
        self.tell_gone(ticket, &request, Gone::Refused(why));
        self.drop_request(ticket, &request);
        Ok(LockAnswer::Released(true))
    }

    fn remove(&mut self, call: &OnceCall) -> Result<LockAnswer> {
        let (lock, head) = (self.lock.to_string(), &mut self.table.head);
        if head.kind.is_none() {
            return Err(LockError::NotFound { lock });
        }
        if head.used > 0 || head.waiting > 0 {
            return Err(LockError::InUse { lock, owners: u64::from(head.used).saturating_add(head.waiting) });
        }
        (head.kind, head.since_us) = (None, self.service.node.store.env().now().0);
        self.once = std::mem::take(&mut self.once).and(call.answered(&()));
        self.is_changed = true;
        Ok(LockAnswer::Released(true))
    }

    /// Notifies the owner that its request no longer exists. An execution that held the lock notices with its next
    /// commit.
    fn tell_gone(&mut self, ticket: u64, request: &LockRequest, gone: Gone) {
        match (&request.owner, &gone) {
            (Owner::Session(session), _) => {
                self.sessions.insert(*session);
                self.told.push(CallerNotice::Gone(ticket, gone));
            }
            (Owner::Execution(id), Gone::Refused(why)) if request.granted_us.is_none() => {
                self.notices.push((id.clone(), Notice::Refused(ticket, why.clone())));
            }
            (Owner::Execution(id), _) => self.notices.push((id.clone(), Notice::TakenAway)),
        }
    }

    /// Removes a request, held or waiting. Callers that were not notified of another reason are notified of the
    /// release.
    fn drop_request(&mut self, ticket: u64, request: &LockRequest) {
        let head = &mut self.table.head;
        if request.granted_us.is_some() {
            head.used -= request.permits.min(head.used);
        } else {
            head.waiting -= 1.min(head.waiting);
            self.table.page.retain(|(waits, _)| *waits != ticket);
        }
        request.names().for_each(|name| self.name(&request.owner, name, None));
        if let Owner::Session(session) = request.owner {
            self.sessions.insert(session);
            self.told.push(CallerNotice::Gone(ticket, Gone::LetGo));
        }
        self.touched.insert(ticket, None);
        self.is_changed = true;
    }

    /// Grants free permits to waiters, in their order. Waiters that are no longer alive are dropped.
    async fn grant(&mut self) -> Result<()> {
        let capacity = self.table.head.kind.map_or(0, |kind| kind.capacity());
        while self.table.head.waiting > 0 {
            let Some((ticket, request)) = self.first().await? else { break };
            let used = self.table.head.used.checked_add(request.permits).filter(|used| *used <= capacity);
            let Some(used) = used else { break };
            if matches!(request.owner, Owner::Execution(_)) && self.service.executions().is_none() {
                // It is granted when an engine starts.
                self.is_left = true;
                break;
            }
            if self.grants >= self.most_grants {
                self.is_unfinished = true;
                break;
            }
            if !self.is_alive(&request.owner).await? {
                self.drop_request(ticket, &request);
                continue;
            }
            self.grants += 1;
            self.is_changed = true;
            self.table.page.pop_front();
            let head = &mut self.table.head;
            (head.used, head.granted, head.waiting) = (used, ticket, head.waiting - 1);
            let granted_us = Some(self.service.node.store.env().now().0);
            match &request.owner {
                Owner::Execution(id) => self.notices.push((id.clone(), Notice::Granted(ticket))),
                Owner::Session(session) => {
                    self.checks.push(Check::Present(self.service.spaces.session(*session)));
                    self.sessions.insert(*session);
                    self.told.push(CallerNotice::Granted(ticket));
                }
            }
            self.touched.insert(ticket, Some(LockRequest { granted_us, ..request }));
        }
        Ok(())
    }

    /// True if an owner can still be granted a lock.
    async fn is_alive(&mut self, owner: &Owner) -> Result<bool> {
        match owner {
            Owner::Session(session) => {
                let key = self.service.spaces.session(*session);
                match self.view().await?.get(&key).await {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(%session, %error, "a damaged session is passed over");
                        Ok(false)
                    }
                    found => Ok(found?.is_some()),
                }
            }
            Owner::Execution(id) => match self.service.executions() {
                Some(executions) => executions.is_alive(id, self.from_store).await,
                None => Ok(true),
            },
        }
    }

    /// Removes the message of a grant to an execution.
    fn forget(&mut self, id: &ExecutionId, ticket: u64) {
        if let Some(executions) = self.service.executions() {
            self.writes.push(executions.untold(id, self.lock, ticket));
        }
    }

    /// The first waiter.
    async fn first(&mut self) -> Result<Option<(u64, LockRequest)>> {
        if self.table.page.is_empty() && !self.table.whole {
            let range = self.service.spaces.requests_from(self.lock, self.table.head.granted + 1);
            // Some of the requests found may be removed by this very commit.
            let limit = PAGE + self.touched.len();
            let found = self.view().await?.scan(&range, Order::Ascending, limit).await?;
            self.table.whole = found.len() < limit;
            let mut page = BTreeMap::new();
            for (key, item) in found {
                match (read_ticket(&key), LockRequest::decode(&item.value)) {
                    (Some((_, ticket)), Ok(request)) => drop(page.insert(ticket, request)),
                    // It is not passed over: `granted` would rise above its ticket, and it would count as granted.
                    (_, Err(why)) if why.is_version() => return Err(why.at(format!("request {key}")).into()),
                    _ => tracing::error!(%key, "a damaged request is passed over"),
                }
            }
            let last = page.last_key_value().map_or(0, |(ticket, _)| *ticket);
            for (ticket, request) in &self.touched {
                match request {
                    Some(request) if request.granted_us.is_none() && (self.table.whole || *ticket < last) => {
                        page.insert(*ticket, request.clone());
                    }
                    _ => drop(page.remove(ticket)),
                }
            }
            self.table.page = page.into_iter().collect();
        }
        Ok(self.table.page.front().cloned())
    }

    async fn request(&mut self, ticket: u64) -> Result<Option<LockRequest>> {
        if let Some(request) = self.touched.get(&ticket) {
            return Ok(request.clone());
        }
        let key = self.service.spaces.request(self.lock, ticket);
        let item = self.view().await?.get(&key).await?;
        let place = || format!("request {ticket} for lock {:?}", self.lock.to_string());
        Ok(item.map(|item| LockRequest::decode(&item.value).map_err(|why| why.at(place()))).transpose()?)
    }

    async fn view(&mut self) -> Result<&View> {
        if self.view.is_none() {
            self.view = Some(self.service.node.store.view().await?);
        }
        Ok(self.view.as_ref().expect("the view was opened above"))
    }

    /// Closes the plan: its checks and writes, and the notifications.
    pub(crate) fn close(mut self) -> Closed {
        let spaces = &self.service.spaces;
        let key = spaces.head(self.lock);
        let mut part = Part::default().check(HEAD, as_found(key.clone(), self.table.rev));
        part = self.checks.into_iter().fold(part, |part, check| part.check(SESSION, check));
        if self.is_changed {
            part = part.put(&key, self.table.head.encode());
        }
        part = self.writes.into_iter().fold(part, Part::write);
        let unfinished = spaces.unfinished(self.lock);
        let node = &self.service.node;
        for session in self.sessions.iter().filter(|session| !self.service.sessions.has_begun(**session)) {
            part = node.noticed(part, || NodeNotice::Session(*session));
        }
        part = match (self.is_unfinished || self.is_left, self.is_resumed) {
            (true, _) => {
                let part = part.put(&unfinished, Vec::new());
                node.noticed(part, || NodeNotice::Locks(shard_of(&self.lock.bytes())))
            }
            (false, true) => part.delete(&unfinished),
            (false, false) => part,
        };
        for (key, ticket) in std::mem::take(&mut self.names) {
            part = match ticket {
                Some(ticket) => part.put(&key, Ticket(ticket).encode()),
                None => part.delete(&key),
            };
        }
        for (ticket, request) in std::mem::take(&mut self.touched) {
            let key = spaces.request(self.lock, ticket);
            part = match request {
                Some(request) => part.put(&key, request.encode()),
                None => part.delete(&key),
            };
        }
        let notices = Notices { lock: self.lock.clone(), to: self.notices };
        part = part.and(self.once);
        Closed { part, notices, told: self.told, is_unfinished: self.is_unfinished }
    }
}
