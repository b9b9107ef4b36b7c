//! Locks from within a workflow. A request and its record in the journal are one commit. A release, its record and the
//! grant to the next request are one commit, too. An execution that waits leaves memory; the commit that grants it the
//! lock also makes the engine load it.

mod passenger;

use std::sync::Arc;
use std::time::Duration;

use crate::lock::lane::{Ask, LockAnswer, Want};
use crate::lock::stored::Forced;
use crate::lock::{
    FencingToken, Lock, LockError, LockKind, LockName, LockRefused, LockScope, Locks, Owner, Patience, ReadWriteLock,
};
use crate::record::Record;
use crate::store::{StoreError, Timestamp};
use crate::workflow::Failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::engine::Engine;
use crate::workflow::engine::deadlock::Suspect;
use crate::workflow::journal::place::Place;
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{OpEffect, OpInProgress, Received, Run, RunState, WaitEnd};
use crate::workflow::stored::kept::MessageBody;
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor, failure_text};

pub(crate) use passenger::Dropped;
use passenger::{Passenger, request_id};

type LockResult<T> = Result<T, Failure>;

/// A mutex or a semaphore, from within a workflow.
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct CtxLock {
    ctx: Ctx,
    name: LockName,
    kind: LockKind,
    is_reentrant: bool,
}

/// A read-write lock, from within a workflow.
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct CtxReadWriteLock(CtxLock);

impl Engine {
    /// The locks of this engine: for operators, and for explicit sessions.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let state = engine.locks().inspect("nightly").await?;
    /// # Ok(()) }
    /// ```
    pub fn locks(&self) -> Locks {
        Locks::served_by(&self.inner.locks)
    }

    /// A mutex, for code outside of workflows. It is held by this process, whose lease is renewed automatically.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let guard = engine.mutex("nightly").acquire().await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn mutex(&self, name: impl Into<LockName>) -> Lock {
        self.locks().mutex(name)
    }

    /// A semaphore with this number of permits, for code outside of workflows.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let guard = engine.semaphore("vendor", 3).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> Lock {
        self.locks().semaphore(name, permits)
    }

    /// A read-write lock, for code outside of workflows.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let guard = engine.rw_lock("catalog").read().await?;
    /// # Ok(()) }
    /// ```
    pub fn rw_lock(&self, name: impl Into<LockName>) -> ReadWriteLock {
        self.locks().rw_lock(name)
    }
}

impl Ctx {
    fn lock(&self, name: impl Into<LockName>, kind: LockKind) -> CtxLock {
        CtxLock { ctx: self.clone(), name: name.into(), kind, is_reentrant: false }
    }

    /// A mutex. It is held until it is released or the execution ends, through crashes, restarts and long waits.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").acquire().await?;
    /// ctx.run("print", async || Ok(())).await?;
    /// printer.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn mutex(&self, name: impl Into<LockName>) -> CtxLock {
        self.lock(name, LockKind::Mutex)
    }

    /// A semaphore with this number of permits.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let vendor = ctx.semaphore("vendor", 3).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> CtxLock {
        self.lock(name, LockKind::Semaphore { permits })
    }

    /// A read-write lock: any number of readers or one writer, granted in the order of the requests.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let catalog = ctx.rw_lock("catalog").read().await?;
    /// # Ok(()) }
    /// ```
    pub fn rw_lock(&self, name: impl Into<LockName>) -> CtxReadWriteLock {
        CtxReadWriteLock(self.lock(name, LockKind::ReadWrite))
    }
}

impl CtxLock {
    /// Shares the lock only with executions of this workflow.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").of_workflow().acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_workflow(mut self) -> CtxLock {
        self.name.scope = LockScope::Workflow(self.ctx.run.definition.name.to_string());
        self
    }

    /// Shares the lock only within this execution's tree: the root, which was not started as a child, and all its
    /// descendants.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").of_tree().acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_tree(mut self) -> CtxLock {
        self.name.scope = LockScope::Tree(self.ctx.run.root());
        self
    }

    /// Allows an execution that holds the mutex to acquire it again. It then holds it until its last guard is gone.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").reentrant();
    /// let outer = printer.acquire().await?;
    /// let inner = printer.acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn reentrant(mut self) -> CtxLock {
        self.is_reentrant = true;
        self
    }

    /// Acquires the lock, or one permit. Waits until the request is granted. Requests are granted in the order in which
    /// they were made.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire(&self) -> impl Future<Output = LockResult<CtxGuard>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires several permits at once.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let permits = ctx.semaphore("vendor", 3).acquire_many(2).await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = LockResult<CtxGuard>> + Send + use<> {
        let lock = self.clone();
        async move { lock.take(permits, Patience::Endless).await?.ok_or_else(Failure::time) }
    }

    /// Acquires the lock, or one permit, if that takes no longer than `limit`. Otherwise the request is withdrawn, and
    /// this returns `None`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.mutex("printer").acquire_within(Duration::from_secs(60)).await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn acquire_within(&self, limit: Duration) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.acquire_many_within(1, limit)
    }

    /// Acquires several permits at once, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.semaphore("vendor", 3).acquire_many_within(2, Duration::from_secs(60)).await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn acquire_many_within(
        &self,
        permits: u32,
        limit: Duration,
    ) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::Within(limit))
    }

    /// Acquires the lock, or one permit, if that is possible at once. Otherwise returns `None`.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.mutex("printer").try_acquire().await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires several permits at once, if that is possible without waiting.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.semaphore("vendor", 3).try_acquire_many(2).await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn try_acquire_many(&self, permits: u32) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::None)
    }

    async fn taken(self, permits: u32, patience: Patience) -> LockResult<Option<CtxGuard>> {
        self.take(permits, patience).await
    }

    async fn take(&self, permits: u32, patience: Patience) -> LockResult<Option<CtxGuard>> {
        self.name.check().map_err(refused)?;
        let (ctx, label) = (&self.ctx, label(&self.ctx.run, &self.name));
        let (waits, limit) = (patience.waits(), patience.limit());
        let limit_us = limit.map(|limit| limit.as_micros() as u64);
        let argument = hash(&(self.kind, permits, waits, limit_us, self.is_reentrant));
        let call = OpCall { kind: Kind::Lock, name: &label, argument };
        let again = |operation: &Journaled<'_>, text: &str| Ok((operation.place.clone(), serde_json::from_str(text)?));
        let taken = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            // A fork waits for a lock that its source held, however long that takes.
            let is_anew = operation.entry.state == EntryState::Anew;
            let (waits, limit) = if is_anew { (true, None) } else { (waits, limit) };
            let place = operation.place.clone();
            Ok((place, self.ask(operation, permits, waits, limit).await?))
        });
        let (place, ticket) = match taken.await {
            Ok((place, Some(ticket))) => (place, ticket),
            Ok((_, None)) => return Ok(None),
            Err(failure) if failure.is_time() => return Ok(None),
            Err(failure) => return Err(failure),
        };
        let grant = ctx.run.grant(&self.name, ticket).await;
        Ok(Some(CtxGuard::new(ctx, &self.name, ticket, &place, grant)))
    }

    /// Makes the request, unless the journal has it already, and waits for the grant. Returns `None` if `waits` is
    /// false and the lock is not free.
    async fn ask(
        &self,
        operation: Journaled<'_>,
        permits: u32,
        waits: bool,
        limit: Option<Duration>,
    ) -> LockResult<Option<u64>> {
        let run = &self.ctx.run;
        let mut asking =
            Asking { run: run.clone(), lock: self.name.clone(), place: operation.place.clone(), is_over: true };
        let (ticket, until) = match operation.entry.state {
            EntryState::Queued { ticket, until_us } => (ticket, until_us.map(Timestamp)),
            _ => {
                operation.unless_cancelled()?;
                let now = run.env().now();
                run.effect().await;
                run.ensure_inbox().await;
                run.until_left(&self.name).await;
                run.with(|state| state.known.ask_for_lock());
                let until = limit.map(|limit| now.plus(limit));
                let (owner, id) = (Owner::Execution(run.id.clone()), request_id(run, &operation.place));
                let (kind, is_reentrant) = (self.kind, self.is_reentrant);
                let want = Want { owner, kind, permits, id, is_known: false, waits, is_reentrant, ear: None };
                let entry = (operation.place.clone(), operation.entry.clone(), until);
                asking.is_over = false;
                let asked = Passenger::new(run, Some(entry), None).ask(&self.name, Ask::Acquire(want)).await;
                match asked {
                    Ok(LockAnswer::Queued(ticket)) => (ticket, until),
                    asked => {
                        asking.is_over = true;
                        return match asked {
                            Ok(LockAnswer::Granted(ticket)) => Ok(Some(ticket)),
                            Ok(_) => Ok(None),
                            Err(why) => Err(refused(why.into())),
                        };
                    }
                }
            }
        };
        run.effect().await;
        run.ensure_inbox().await;
        asking.is_over = false;
        let waited = Waits { lock: self, operation, ticket, until }.wait().await;
        asking.is_over = true;
        waited
    }
}

/// The state of a grant that the code has a guard of.
pub(crate) enum Grant {
    /// The grant exists, and every commit checks that.
    Held,
    /// It was released before the replay came to the guard, or it belongs to the source of a fork.
    Past,
    /// An operator has released it. Until the last guard is gone, every operation fails because of that.
    Lost(LockRefused),
}

impl Run {
    /// The state of a grant. It is read only after a commit was refused because a grant did not exist.
    async fn grant(&self, lock: &LockName, ticket: u64) -> Grant {
        if !self.engine.forced.lock().contains(&self.id) {
            return Grant::Held;
        }
        self.or_stop(self.read_grant(lock, ticket).await).await
    }

    async fn read_grant(&self, lock: &LockName, ticket: u64) -> Result<Grant, StoreError> {
        let (spaces, view) = (&self.engine.locks.spaces, self.engine.store.view().await?);
        if view.get(&spaces.request(lock, ticket)).await?.is_some() {
            return Ok(Grant::Held);
        }
        let Some(item) = view.get(&spaces.forced(lock, ticket)).await? else { return Ok(Grant::Past) };
        let reason = Forced::decode(&item.value).map_or_else(|_| "the reason cannot be read".into(), |it| it.reason);
        Ok(Grant::Lost(LockRefused::Forced { lock: lock.to_string(), reason }))
    }
}

/// The name of a lock in the journal. A lock of the tree has the same name in a fork, which is the root of another
/// tree.
fn label(run: &Run, lock: &LockName) -> String {
    match &lock.scope {
        LockScope::Tree(root) if *root == run.root() => format!("{} of this tree", lock.name),
        _ => lock.to_string(),
    }
}

/// The failure for an error of a lock.
fn refused(error: LockError) -> Failure {
    match error {
        LockError::Refused(why) => Failure::typed(why).not_retryable(),
        error => Failure::new(error.to_string()).with_code("latchwork.lock").not_retryable(),
    }
}

/// A request on its way, or one that waits. If the branch is given up before there is a result, the request is
/// abandoned.
struct Asking {
    run: Arc<Run>,
    lock: LockName,
    place: Place,
    is_over: bool,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if !self.is_over {
            self.run.let_go(&self.lock, request_id(&self.run, &self.place));
        }
    }
}

/// A wait for a lock.
struct Waits<'a> {
    lock: &'a CtxLock,
    operation: Journaled<'a>,
    ticket: u64,
    until: Option<Timestamp>,
}

impl Waits<'_> {
    fn is_it(&self) -> impl Fn(&MessageBody) -> bool + use<'_> {
        let (name, own) = (&self.lock.name, self.ticket);
        move |body| matches!(body, MessageBody::Lock { lock, ticket, .. } if *ticket == own && lock == name)
    }

    fn what(&self) -> WaitsFor {
        WaitsFor::Lock(self.lock.name.to_string())
    }

    /// A passenger that records this failure of the wait together with an operation on the lock.
    fn failing(&self, failure: &Failure) -> Passenger {
        let entry = Entry { state: EntryState::Gave(failure_text(failure)), ..self.operation.entry.clone() };
        Passenger::new(&self.lock.ctx.run, Some((self.operation.place.clone(), entry, None)), None)
    }

    async fn wait(&self) -> LockResult<Option<u64>> {
        let (run, operation) = (&self.lock.ctx.run, &self.operation);
        let is_child = run.with(|state| state.guards.is_empty());
        let mut is_told = is_child && run.with(|state| state.known.stored().parent.is_none());
        let is_it = self.is_it();
        let look = |state: &mut RunState| {
            // The deadlock search starts only when other executions can see that this one waits.
            if !std::mem::replace(&mut is_told, true) {
                let _ = run.engine.suspects.send(Suspect { id: run.id.clone(), is_child });
            }
            state.inbox.take(&is_it)
        };
        let failure = match operation.doing.wait(self.what(), operation.since(), self.until, look).await {
            WaitEnd::Got(received) => return self.received(received),
            WaitEnd::TimedOut => Failure::time(),
            WaitEnd::Cancelled => run.why_cancelled(&operation.place),
        };
        let withdrawal = Ask::Withdraw { ticket: self.ticket };
        if let Ok(LockAnswer::Withdrawn) = self.failing(&failure).ask(&self.lock.name, withdrawal).await {
            return Err(failure);
        }
        // The request was granted or removed at the same time: there is a message about it.
        let doing = OpInProgress::begin(run, self.what());
        let found = doing.wait(self.what(), run.env().now(), None, |state| state.inbox.take(&is_it)).await;
        let WaitEnd::Got(received) = found else { return std::future::pending().await };
        let is_granted = matches!(received.message.body, MessageBody::Lock { refused: None, .. });
        if failure.is_time() || !is_granted {
            return self.received(received);
        }
        // The execution is cancelled, but was granted the lock. One commit records the failure and releases the lock.
        let ask = Ask::Release { ticket: self.ticket, id: Some(request_id(run, &operation.place)) };
        let _ = self.failing(&failure).receiving(received.address).ask(&self.lock.name, ask).await;
        Err(failure)
    }

    /// Records the receipt of the message about the request.
    fn received(&self, received: Received) -> LockResult<Option<u64>> {
        let Received { address, message } = received;
        let result = match message.body {
            MessageBody::Lock { refused: Some(why), .. } => Err(refused(why.into())),
            _ => Ok(Some(self.ticket)),
        };
        let state = match &result {
            Ok(_) => EntryState::Done(self.ticket.to_string()),
            Err(failure) => EntryState::Gave(failure_text(failure)),
        };
        self.operation.ends(state, Some(OpEffect::receipt(address)));
        result
    }
}

impl CtxReadWriteLock {
    /// Shares the lock only with executions of this workflow.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let catalog = ctx.rw_lock("catalog").of_workflow().read().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_workflow(self) -> CtxReadWriteLock {
        CtxReadWriteLock(self.0.of_workflow())
    }

    /// Shares the lock only within this execution's tree.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let catalog = ctx.rw_lock("catalog").of_tree().read().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_tree(self) -> CtxReadWriteLock {
        CtxReadWriteLock(self.0.of_tree())
    }

    /// Acquires the lock for reading, shared with other readers.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let catalog = ctx.rw_lock("catalog").read().await?;
    /// # Ok(()) }
    /// ```
    pub fn read(&self) -> impl Future<Output = LockResult<CtxGuard>> + Send + use<> {
        self.0.acquire_many(1)
    }

    /// Acquires the lock for writing, alone.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let catalog = ctx.rw_lock("catalog").write().await?;
    /// # Ok(()) }
    /// ```
    pub fn write(&self) -> impl Future<Output = LockResult<CtxGuard>> + Send + use<> {
        self.0.acquire_many(self.0.kind.capacity())
    }

    /// Acquires the lock for reading, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.rw_lock("catalog").read_within(Duration::from_secs(60)).await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn read_within(&self, limit: Duration) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.0.acquire_many_within(1, limit)
    }

    /// Acquires the lock for writing, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.rw_lock("catalog").write_within(Duration::from_secs(60)).await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn write_within(&self, limit: Duration) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.0.acquire_many_within(self.0.kind.capacity(), limit)
    }

    /// Acquires the lock for reading, if that is possible at once.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.rw_lock("catalog").try_read().await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn try_read(&self) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.0.try_acquire_many(1)
    }

    /// Acquires the lock for writing, if that is possible at once.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Some(guard) = ctx.rw_lock("catalog").try_write().await? {
    ///     guard.release().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn try_write(&self) -> impl Future<Output = LockResult<Option<CtxGuard>>> + Send + use<> {
        self.0.try_acquire_many(self.0.kind.capacity())
    }
}

/// A lock that an execution holds. Dropping the guard releases the lock with one of the next commits;
/// [`CtxGuard::release`] returns when it is released. The commit that ends the execution releases all locks that it
/// still holds.
#[must_use = "a lock is released when its guard is dropped"]
pub struct CtxGuard {
    ctx: Ctx,
    lock: LockName,
    token: FencingToken,
    /// Where it was acquired.
    place: Place,
    is_left: bool,
    is_released: bool,
}

shown!(CtxGuard, it => lock: it.lock, token: it.token.number);

impl CtxGuard {
    fn new(ctx: &Ctx, lock: &LockName, ticket: u64, place: &Place, grant: Grant) -> CtxGuard {
        let token = FencingToken { number: ticket, key: ctx.run.engine.locks.spaces.request(lock, ticket) };
        ctx.run.with(|state| state.hold(&token.key, grant));
        CtxGuard {
            ctx: ctx.clone(),
            lock: lock.clone(),
            token,
            place: place.clone(),
            is_left: false,
            is_released: false,
        }
    }

    /// The token of this grant, larger than that of every earlier grant. Guard commits with it, or pass its number on.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").acquire().await?;
    /// let number = printer.token().number();
    /// # Ok(()) }
    /// ```
    pub fn token(&self) -> &FencingToken {
        &self.token
    }

    /// The lock's name.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").acquire().await?;
    /// println!("holds {}", printer.name());
    /// # Ok(()) }
    /// ```
    pub fn name(&self) -> &LockName {
        &self.lock
    }

    /// The code no longer needs the lock: commits no longer check the grant.
    fn leave(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            self.ctx.run.with(|state| state.leave(&self.token.key));
        }
    }

    /// Releases the lock: when this returns, the next waiter holds it, unless this execution has entered it again.
    /// Returns true if it was still held. Works also in a cancelled execution.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let printer = ctx.mutex("printer").acquire().await?;
    /// let was_held = printer.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn release(mut self) -> LockResult<bool> {
        self.leave();
        let (ctx, ticket) = (self.ctx.clone(), self.token.number);
        let label = label(&ctx.run, &self.lock);
        let (ctx, lock, acquired) = (&ctx, &self.lock, &self.place);
        let call = OpCall { kind: Kind::Unlock, name: &label, argument: 0 };
        let again =
            |_: &Journaled<'_>, text: &str| serde_json::from_str(text).map(|(_, was_held, _): Unlocked| was_held);
        let released = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            let run = &ctx.run;
            run.effect().await;
            let entry = Some((operation.place, operation.entry, None));
            let passenger = Passenger::new(run, entry, Some((ticket, acquired.to_string())));
            let ask = Ask::Release { ticket, id: Some(request_id(run, acquired)) };
            match passenger.ask(lock, ask).await {
                Ok(answer) => Ok(matches!(answer, LockAnswer::Released(true))),
                Err(why) => Err(refused(why.into())),
            }
        });
        let released = released.await;
        // If this future is dropped before this line, the drop of the guard releases the lock.
        self.is_released = true;
        released
    }
}

/// The record of a release: the token, whether it was held, and the place where it was acquired.
pub(crate) type Unlocked = (u64, bool, String);

impl Drop for CtxGuard {
    fn drop(&mut self) {
        self.leave();
        if !self.is_released {
            self.ctx.run.release_soon(&self.lock, self.token.number, &self.place);
        }
    }
}
