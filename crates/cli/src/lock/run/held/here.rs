//! A lock in a store that this process has open: the library renews it.

use std::time::Duration;

use anyhow::Result;
use latchwork::lock::{Lock, LockError, LockGuard, LockName, Locks, ReadWriteLock, Session};
use latchwork::store::{Env, Store};

use crate::lock::fields::RequestFields;
use crate::lock::run::held::{Waited, lost_in_the_queue, soon};
use crate::lock::run::{Run, Share};
use crate::signals::Signals;

/// The store of the lock.
pub(super) struct Opened {
    store: Store,
    locks: Locks,
}

/// A lock that is held in it.
pub(super) struct Here {
    opened: Opened,
    session: Session,
    guard: LockGuard,
}

/// Either kind of lock by name.
enum Named {
    Plain(Lock),
    ReadWrite(ReadWriteLock, Share),
}

pub(super) async fn acquire(
    run: &Run,
    opened: Opened,
    until: Option<Duration>,
    env: &Env,
    ends: &mut Signals,
) -> Result<Waited<Here>> {
    let session = match opened.locks.session().lease(run.lease).label(run.label()).await {
        Ok(session) => session,
        Err(error) => {
            soon(env, opened.close()).await;
            return Err(error.into());
        }
    };
    let wait = until.map(|until| until.saturating_sub(env.monotonic()));
    let asked = tokio::select! {
        asked = Named::of(run, &opened.locks, &session).take(wait) => asked,
        signal = ends.next() => {
            leave(opened, session, env).await;
            return Ok(Waited::Ended(signal));
        }
    };
    match asked {
        Ok(Some(guard)) => Ok(Waited::Granted(Here { opened, session, guard })),
        Ok(None) => {
            let holders = holders(&opened.locks, run.lock()).await;
            leave(opened, session, env).await;
            Ok(Waited::Busy(holders))
        }
        Err(error) => {
            leave(opened, session, env).await;
            match error {
                LockError::SessionLost { .. } => Err(lost_in_the_queue(run).into()),
                error => Err(error.into()),
            }
        }
    }
}

async fn holders(locks: &Locks, name: LockName) -> Vec<RequestFields> {
    match locks.inspect(name).await {
        Ok(state) => state.holders.iter().map(|holder| RequestFields::of(holder, state.kind)).collect(),
        Err(_) => Vec::new(),
    }
}

/// Withdraws the request, so that no request waits for a process that is gone.
async fn leave(opened: Opened, session: Session, env: &Env) {
    let left = async {
        let _ = session.end().await;
        let _ = opened.close().await;
    };
    soon(env, left).await;
}

impl Opened {
    pub(super) async fn on(store: Store) -> Result<Opened> {
        let locks = Locks::on(&store).await?;
        Ok(Opened { store, locks })
    }

    async fn close(self) -> Result<()> {
        let ended = self.locks.shutdown().await;
        self.store.close().await?;
        Ok(ended?)
    }
}

impl Named {
    fn of(run: &Run, locks: &Locks, session: &Session) -> Named {
        let name = run.lock();
        match run.share() {
            Share::Alone => Named::Plain(locks.mutex(name).by(session)),
            Share::Slot(slots) => Named::Plain(locks.semaphore(name, slots).by(session)),
            share => Named::ReadWrite(locks.rw_lock(name).by(session), share),
        }
    }

    async fn take(self, wait: Option<Duration>) -> latchwork::lock::Result<Option<LockGuard>> {
        match (self, wait) {
            (Named::Plain(lock), None) => lock.try_acquire().await,
            (Named::Plain(lock), Some(wait)) => lock.acquire_within(wait).await,
            (Named::ReadWrite(lock, Share::Read), None) => lock.try_read().await,
            (Named::ReadWrite(lock, Share::Read), Some(wait)) => lock.read_within(wait).await,
            (Named::ReadWrite(lock, _), None) => lock.try_write().await,
            (Named::ReadWrite(lock, _), Some(wait)) => lock.write_within(wait).await,
        }
    }
}

impl Here {
    pub(super) fn token(&self) -> u64 {
        self.guard.token().number()
    }

    /// No other process can open a directory that this process has open.
    pub(super) fn is_shared(&self) -> bool {
        self.opened.store.is_shared()
    }

    pub(super) async fn lost(&self) {
        self.guard.lost().await;
    }

    pub(super) async fn check(&self) -> bool {
        self.session.renew().await.unwrap_or(false) && !self.guard.is_lost()
    }

    /// The reason why an operator has released it.
    pub(super) async fn forced(&self, name: &LockName) -> Option<String> {
        let asked = self.opened.locks.inspect(name.clone());
        let state = soon(self.opened.store.env(), asked).await?.ok()?;
        state.forced.into_iter().find(|forced| forced.token == self.token()).map(|forced| forced.reason)
    }

    pub(super) async fn release(self) -> Result<bool> {
        let Here { opened, session, guard } = self;
        let was_held = guard.release().await?;
        session.end().await?;
        opened.close().await?;
        Ok(was_held)
    }
}
