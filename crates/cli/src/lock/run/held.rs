//! The lock that is held while a command runs: how it is acquired, and what is known of it, in a store or through a
//! server. It knows nothing of the command.

mod here;
mod there;

use std::time::Duration;

use anyhow::Result;
use latchwork::lock::LockName;
use latchwork::store::{Env, StoreError, Timestamp};
use nix::sys::signal::Signal;

use crate::client::Client;
use crate::lock::fields::{NameFields, RequestFields};
use crate::lock::run::Run;
use crate::lock::run::held::here::{Here, Opened};
use crate::lock::run::held::there::There;
use crate::output::{Exit, Problem};
use crate::signals::Signals;
use crate::target::{Target, live};
use crate::time::exact;

/// How often to try again to open a directory that another process has open.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a store or a server may take when the lock is given back, or asked about at the end.
const LEAVING: Duration = Duration::from_secs(5);

/// A lock that this process holds.
pub(crate) struct Held {
    name: LockName,
    holder: Holder,
}

enum Holder {
    /// In a store that this process has open.
    Here(Here),
    /// Through a server.
    There(There),
}

/// What a wait for the lock has led to.
enum Waited<T> {
    Granted(T),
    /// It was not free in time. These hold it.
    Busy(Vec<RequestFields>),
    /// A signal has ended the wait.
    Ended(Signal),
}

/// Where the lock is.
enum Found {
    Store(Opened),
    Server(Client),
}

/// Acquires the lock. A signal ends the wait, and leaves nothing behind.
pub(crate) async fn acquire(run: &Run, target: &Target, ends: &mut Signals) -> Result<Result<Held, Signal>> {
    let env = Env::system();
    let until = run.patience().map(|patience| env.monotonic().saturating_add(patience));
    let found = tokio::select! {
        found = find(target, until, &env) => found?,
        signal = ends.next() => return Ok(Err(signal)),
    };
    let waited = match found {
        Found::Store(opened) => here::acquire(run, opened, until, &env, ends).await?.map(Holder::Here),
        Found::Server(client) => there::acquire(run, client, until, &env, ends).await?.map(Holder::There),
    };
    match waited {
        Waited::Granted(holder) => Ok(Ok(Held { name: run.lock(), holder })),
        Waited::Busy(holders) => Err(busy(run, &holders, env.now()).into()),
        Waited::Ended(signal) => Ok(Err(signal)),
    }
}

/// Opens the store, or finds its server. Another process may have a directory open for a while.
async fn find(target: &Target, until: Option<Duration>, env: &Env) -> Result<Found> {
    let argument = match target {
        Target::Server(client) => return Ok(Found::Server(client.clone())),
        Target::Store { argument, .. } => argument,
    };
    loop {
        let error = match argument.open().await {
            Ok(store) => return Ok(Found::Store(Opened::on(store).await?)),
            Err(error) => error,
        };
        if let Some(client) = live(argument, &error).await {
            return Ok(Found::Server(client));
        }
        match error.downcast_ref::<StoreError>() {
            Some(StoreError::Locked { .. }) if until.is_some_and(|until| env.monotonic() < until) => {
                env.sleep(AGAIN).await;
            }
            _ => return Err(error),
        }
    }
}

impl<T> Waited<T> {
    fn map<U>(self, change: impl FnOnce(T) -> U) -> Waited<U> {
        match self {
            Waited::Granted(granted) => Waited::Granted(change(granted)),
            Waited::Busy(holders) => Waited::Busy(holders),
            Waited::Ended(signal) => Waited::Ended(signal),
        }
    }
}

/// The lock was not free in time.
fn busy(run: &Run, holders: &[RequestFields], now: Timestamp) -> Problem {
    let held = match holders {
        [] => "it has become free since".into(),
        [holder] => format!("it is held by {}", holder.words(now)),
        [holder, others @ ..] => format!("it is held by {} and {} more", holder.words(now), others.len()),
    };
    let when = run.patience().map_or("now".into(), |wait| format!("within {}", exact(wait)));
    let lock = NameFields::of(&run.lock()).words();
    let problem = Problem::new(Exit::Busy, format!("{lock} was not free {when}: {held}")).with("lock", &*run.name);
    problem.with("holders", serde_json::to_value(holders).unwrap_or_default())
}

/// The session ended while its request was in the queue.
fn lost_in_the_queue(run: &Run) -> Problem {
    let lock = NameFields::of(&run.lock()).words();
    let why = format!("the request for {lock} was lost: its lease could not be renewed in time");
    Problem::new(Exit::Lost, why).with("lock", &*run.name)
}

/// Does what is good to do at the end, if it can be done soon. What is left undone ends with the lease.
async fn soon<T>(env: &Env, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        () = env.sleep(LEAVING) => None,
    }
}

impl Held {
    pub(crate) fn name(&self) -> &LockName {
        &self.name
    }

    /// The number of the fencing token.
    pub(crate) fn token(&self) -> u64 {
        match &self.holder {
            Holder::Here(here) => here.token(),
            Holder::There(there) => there.token(),
        }
    }

    /// True if another process may be granted the lock while this one stands still.
    pub(crate) fn is_shared(&self) -> bool {
        match &self.holder {
            Holder::Here(here) => here.is_shared(),
            Holder::There(_) => true,
        }
    }

    /// Returns when the lock is lost.
    pub(crate) async fn lost(&self) {
        match &self.holder {
            Holder::Here(here) => here.lost().await,
            Holder::There(there) => there.lost().await,
        }
    }

    /// Looks whether the lease still holds, after this process has stood still.
    pub(crate) async fn check(&self) -> bool {
        match &self.holder {
            Holder::Here(here) => here.check().await,
            Holder::There(there) => there.check().await,
        }
    }

    /// The reason why the lock was lost, if it is known.
    pub(crate) async fn why_lost(&self) -> Option<String> {
        let forced = match &self.holder {
            Holder::Here(here) => here.forced(&self.name).await,
            Holder::There(there) => there.forced().await,
        };
        forced.map(|reason| format!("an operator released it: {reason}"))
    }

    /// Gives the lock back. Returns false if it was not held any more.
    pub(crate) async fn release(self) -> Result<bool> {
        let env = Env::system();
        let released = match self.holder {
            Holder::Here(here) => soon(&env, here.release()).await,
            Holder::There(there) => soon(&env, there.release()).await,
        };
        released.unwrap_or_else(|| Err(anyhow::anyhow!("no answer within {}", exact(LEAVING))))
    }
}
