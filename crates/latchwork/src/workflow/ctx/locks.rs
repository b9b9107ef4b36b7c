//! Locks from within a workflow. The request for a lock and the record of it are one commit; so are the release, the
//! record of that, and the grant to the next request. An execution that waits leaves memory, and is set running by the
//! commit that grants it the lock.

mod passenger;

use std::sync::Arc;
use std::time::Duration;

use crate::lock::lane::{Answer, Ask, Want};
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
use crate::workflow::journal::replay::{Call, Journaled};
use crate::workflow::run::{Effect, Listed, Received, Run, State, Waited};
use crate::workflow::stored::kept::Letter;
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor, failure_text};

pub(crate) use passenger::Dropped;
use passenger::{Passenger, request_id};

type Outcome<T> = Result<T, Failure>;

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
    /// The locks of this engine: for operators, and for sessions of one's own.
    pub fn locks(&self) -> Locks {
        Locks::of(&self.inner.locks)
    }

    /// A mutex, for code outside of workflows. It is held by this process, whose lease is renewed by itself.
    pub fn mutex(&self, name: impl Into<LockName>) -> Lock {
        self.locks().mutex(name)
    }

    /// A semaphore of so many permits, for code outside of workflows.
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> Lock {
        self.locks().semaphore(name, permits)
    }

    /// A read-write lock, for code outside of workflows.
    pub fn rw_lock(&self, name: impl Into<LockName>) -> ReadWriteLock {
        self.locks().rw_lock(name)
    }
}

impl Ctx {
    fn lock(&self, name: impl Into<LockName>, kind: LockKind) -> CtxLock {
        CtxLock { ctx: self.clone(), name: name.into(), kind, is_reentrant: false }
    }

    /// A mutex. It is held until it is released or the execution ends, through crashes, restarts and long waits.
    pub fn mutex(&self, name: impl Into<LockName>) -> CtxLock {
        self.lock(name, LockKind::Mutex)
    }

    /// A semaphore of so many permits.
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> CtxLock {
        self.lock(name, LockKind::Semaphore { permits })
    }

    /// A read-write lock: any number of readers or one writer, in the order in which they came.
    pub fn rw_lock(&self, name: impl Into<LockName>) -> CtxReadWriteLock {
        CtxReadWriteLock(self.lock(name, LockKind::ReadWrite))
    }
}

impl CtxLock {
    /// Shared with executions of this workflow only.
    pub fn of_workflow(mut self) -> CtxLock {
        self.name.scope = LockScope::Workflow(self.ctx.run.definition.name.to_string());
        self
    }

    /// Shared within this execution's family only: the one that nobody has started as a child, its children and theirs.
    pub fn of_tree(mut self) -> CtxLock {
        self.name.scope = LockScope::Tree(self.ctx.run.root());
        self
    }

    /// An execution that holds the mutex may acquire it again: it then has it until the last guard is gone.
    pub fn reentrant(mut self) -> CtxLock {
        self.is_reentrant = true;
        self
    }

    /// Acquires the lock, or one permit, and waits for it as long as that takes. Requests are granted in the order in
    /// which they were made.
    pub fn acquire(&self) -> impl Future<Output = Outcome<CtxGuard>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires several permits at once.
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = Outcome<CtxGuard>> + Send + use<> {
        let lock = self.clone();
        async move { lock.take(permits, Patience::Endless).await?.ok_or_else(Failure::time) }
    }

    /// Acquires the lock, or one permit, if that takes no longer than `limit`. Otherwise the request is withdrawn, and
    /// the answer is `None`.
    pub fn acquire_within(&self, limit: Duration) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.acquire_many_within(1, limit)
    }

    /// Acquires several permits at once, if that takes no longer than `limit`.
    pub fn acquire_many_within(
        &self,
        permits: u32,
        limit: Duration,
    ) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::Within(limit))
    }

    /// Acquires the lock, or one permit, if that is possible at once. Otherwise the answer is `None`.
    pub fn try_acquire(&self) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires several permits at once, if that is possible without waiting.
    pub fn try_acquire_many(&self, permits: u32) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::None)
    }

    async fn taken(self, permits: u32, patience: Patience) -> Outcome<Option<CtxGuard>> {
        self.take(permits, patience).await
    }

    async fn take(&self, permits: u32, patience: Patience) -> Outcome<Option<CtxGuard>> {
        self.name.check().map_err(refused)?;
        let (ctx, label) = (&self.ctx, label(&self.ctx.run, &self.name));
        let (waits, limit) = (patience.waits(), patience.limit());
        let limit_us = limit.map(|limit| limit.as_micros() as u64);
        let argument = hash(&(self.kind, permits, waits, limit_us, self.is_reentrant));
        let call = Call { kind: Kind::Lock, name: &label, argument };
        let again = |operation: &Journaled<'_>, text: &str| Ok((operation.place.clone(), serde_json::from_str(text)?));
        let taken = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            // What the source of a fork held is waited for, however long that takes.
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

    /// Asks for it, unless that was done before, and waits for it if need be. Nothing if it is not to be had at once.
    async fn ask(
        &self,
        operation: Journaled<'_>,
        permits: u32,
        waits: bool,
        limit: Option<Duration>,
    ) -> Outcome<Option<u64>> {
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
                    Ok(Answer::Queued(ticket)) => (ticket, until),
                    asked => {
                        asking.is_over = true;
                        return match asked {
                            Ok(Answer::Granted(ticket)) => Ok(Some(ticket)),
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

/// What is known of a grant that the code has a guard of.
pub(crate) enum Grant {
    /// Every commit checks that it is there.
    Held,
    /// It was released before the replay came to the guard, or was that of a fork's source.
    Past,
    /// It was taken away. Until the last guard is gone, every operation fails for that.
    Lost(LockRefused),
}

impl Run {
    /// What is known of a grant. It is read only after a commit was refused because one was not there.
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

/// What a lock is called in the journal of an execution, and in that of a fork, which is the root of another tree.
fn label(run: &Run, lock: &LockName) -> String {
    match &lock.scope {
        LockScope::Tree(root) if *root == run.root() => format!("{} of this tree", lock.name),
        _ => lock.to_string(),
    }
}

/// Why a lock is not given, as a failure.
fn refused(error: LockError) -> Failure {
    match error {
        LockError::Refused(why) => Failure::typed(why).not_retryable(),
        error => Failure::new(error.to_string()).with_code("latchwork.lock").not_retryable(),
    }
}

/// A request on its way, or one that waits. If the branch is given up before it has come to something, it is taken
/// back.
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
    fn is_it(&self) -> impl Fn(&Letter) -> bool + use<'_> {
        let (name, own) = (&self.lock.name, self.ticket);
        move |letter| matches!(letter, Letter::Lock { lock, ticket, .. } if *ticket == own && lock == name)
    }

    fn what(&self) -> WaitsFor {
        WaitsFor::Lock(self.lock.name.to_string())
    }

    /// Has something done to the lock that makes the wait fail so.
    fn failing(&self, failure: &Failure) -> Passenger {
        let entry = Entry { state: EntryState::Gave(failure_text(failure)), ..self.operation.entry.clone() };
        Passenger::new(&self.lock.ctx.run, Some((self.operation.place.clone(), entry, None)), None)
    }

    async fn wait(&self) -> Outcome<Option<u64>> {
        let (run, operation) = (&self.lock.ctx.run, &self.operation);
        let is_child = run.with(|state| state.guards.is_empty());
        let mut is_told = is_child && run.with(|state| state.known.stored().parent.is_none());
        let is_it = self.is_it();
        let look = |state: &mut State| {
            // Others are to see that it waits before it is looked whether that will end.
            if !std::mem::replace(&mut is_told, true) {
                let _ = run.engine.suspects.send(Suspect { id: run.id.clone(), is_child });
            }
            state.inbox.take(&is_it)
        };
        let failure = match operation.doing.wait(self.what(), operation.since(), self.until, look).await {
            Waited::Got(received) => return self.received(received),
            Waited::TimedOut => Failure::time(),
            Waited::Cancelled => run.why_cancelled(&operation.place),
        };
        let withdrawal = Ask::Withdraw { ticket: self.ticket };
        if let Ok(Answer::Withdrawn) = self.failing(&failure).ask(&self.lock.name, withdrawal).await {
            return Err(failure);
        }
        // It was granted, or taken away, at the same time: there is a message that says so.
        let doing = Listed::begin(run, self.what());
        let found = doing.wait(self.what(), run.env().now(), None, |state| state.inbox.take(&is_it)).await;
        let Waited::Got(received) = found else { return std::future::pending().await };
        let is_granted = matches!(received.message.body, Letter::Lock { refused: None, .. });
        if failure.is_time() || !is_granted {
            return self.received(received);
        }
        // It is cancelled, and was granted the lock: that it was not given it, and that it lets go, are one commit.
        let ask = Ask::Release { ticket: self.ticket, id: Some(request_id(run, &operation.place)) };
        let _ = self.failing(&failure).receiving(received.address).ask(&self.lock.name, ask).await;
        Err(failure)
    }

    /// Records the receipt of the message that tells what became of the request.
    fn received(&self, received: Received) -> Outcome<Option<u64>> {
        let Received { address, message } = received;
        let result = match message.body {
            Letter::Lock { refused: Some(why), .. } => Err(refused(why.into())),
            _ => Ok(Some(self.ticket)),
        };
        let state = match &result {
            Ok(_) => EntryState::Done(self.ticket.to_string()),
            Err(failure) => EntryState::Gave(failure_text(failure)),
        };
        self.operation.ends(state, Some(Effect::receipt(address)));
        result
    }
}

impl CtxReadWriteLock {
    /// Shared with executions of this workflow only.
    pub fn of_workflow(self) -> CtxReadWriteLock {
        CtxReadWriteLock(self.0.of_workflow())
    }

    /// Shared within this execution's family only.
    pub fn of_tree(self) -> CtxReadWriteLock {
        CtxReadWriteLock(self.0.of_tree())
    }

    /// Acquires it beside other readers.
    pub fn read(&self) -> impl Future<Output = Outcome<CtxGuard>> + Send + use<> {
        self.0.acquire_many(1)
    }

    /// Acquires it alone.
    pub fn write(&self) -> impl Future<Output = Outcome<CtxGuard>> + Send + use<> {
        self.0.acquire_many(self.0.kind.capacity())
    }

    /// Acquires it beside other readers, if that takes no longer than `limit`.
    pub fn read_within(&self, limit: Duration) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.0.acquire_many_within(1, limit)
    }

    /// Acquires it alone, if that takes no longer than `limit`.
    pub fn write_within(&self, limit: Duration) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.0.acquire_many_within(self.0.kind.capacity(), limit)
    }

    /// Acquires it beside other readers, if that is possible at once.
    pub fn try_read(&self) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.0.try_acquire_many(1)
    }

    /// Acquires it alone, if that is possible at once.
    pub fn try_write(&self) -> impl Future<Output = Outcome<Option<CtxGuard>>> + Send + use<> {
        self.0.try_acquire_many(self.0.kind.capacity())
    }
}

/// A lock that an execution holds. Dropping it has it released with one of the next commits; [`CtxGuard::release`]
/// returns when it is released. What is held when the execution ends is released by the commit that ends it.
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

    /// The token of this grant: larger than that of every earlier one. Guard commits with it, or hand its number on.
    pub fn token(&self) -> &FencingToken {
        &self.token
    }

    /// The lock's name.
    pub fn name(&self) -> &LockName {
        &self.lock
    }

    /// The code has left what the lock is for: commits do not go by it any more.
    fn leave(&mut self) {
        if !std::mem::replace(&mut self.is_left, true) {
            self.ctx.run.with(|state| state.leave(&self.token.key));
        }
    }

    /// Releases the lock: whoever is next has it when this returns, unless this execution has entered it again. Gives
    /// whether it was still held. It works also for an execution that is cancelled.
    pub async fn release(mut self) -> Outcome<bool> {
        self.leave();
        let (ctx, ticket) = (self.ctx.clone(), self.token.number);
        let label = label(&ctx.run, &self.lock);
        let (ctx, lock, acquired) = (&ctx, &self.lock, &self.place);
        let call = Call { kind: Kind::Unlock, name: &label, argument: 0 };
        let again =
            |_: &Journaled<'_>, text: &str| serde_json::from_str(text).map(|(_, was_held, _): Unlocked| was_held);
        let released = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            let run = &ctx.run;
            run.effect().await;
            let entry = Some((operation.place, operation.entry, None));
            let passenger = Passenger::new(run, entry, Some((ticket, acquired.to_string())));
            let ask = Ask::Release { ticket, id: Some(request_id(run, acquired)) };
            match passenger.ask(lock, ask).await {
                Ok(answer) => Ok(matches!(answer, Answer::Released(true))),
                Err(why) => Err(refused(why.into())),
            }
        });
        let released = released.await;
        // If this is given up before, it is let go of by the drop.
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
