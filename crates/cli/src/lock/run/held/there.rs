//! A lock that is held through a server: a session that this process renews by its own clock. If the server cannot be
//! reached for a whole lease, the lock counts as lost.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use latchwork::store::{Env, Uuid};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::client::{Client, encoded, is_unreachable};
use crate::lock::fields::RequestFields;
use crate::lock::run::held::{Waited, lost_in_the_queue, soon};
use crate::lock::run::{Run, Share};
use crate::lock::show::Shown;
use crate::output::{Exit, Problem};
use crate::signals::Signals;
use crate::time::exact;

/// How long one request waits in the queue. The next one goes on at the same place.
const ONE_WAIT: Duration = Duration::from_secs(5);
/// The longest pause between two renewals: after it, a forced release is noticed.
const LONGEST: Duration = Duration::from_secs(5);
/// The pause before a server that cannot be reached is tried again.
const AGAIN: Duration = Duration::from_millis(200);

#[derive(Serialize)]
struct NewSession {
    lease: String,
    label: String,
}

/// A session, with what it holds.
#[derive(Deserialize)]
struct SessionFields {
    id: Uuid,
    #[serde(default)]
    locks: Vec<HeldFields>,
}

#[derive(Deserialize)]
struct HeldFields {
    token: u64,
}

#[derive(Serialize)]
struct Acquire {
    session: Uuid,
    request: String,
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity: Option<u32>,
}

/// What has become of a request.
#[derive(Deserialize)]
struct StandingFields {
    granted: bool,
    token: u64,
    holder: Option<RequestFields>,
}

#[derive(Serialize)]
struct Release {
    session: Uuid,
    token: u64,
}

#[derive(Deserialize)]
struct Released {
    released: bool,
}

/// A session at a server.
#[derive(Clone)]
struct Remote {
    client: Client,
    session: Uuid,
    /// The path and the parameters of the lock.
    path: Arc<str>,
    scope: Vec<(&'static str, String)>,
    env: Env,
    lease: Duration,
}

/// A lock that is held through it.
pub(super) struct There {
    remote: Remote,
    token: u64,
    lost: watch::Receiver<bool>,
    renewal: JoinHandle<()>,
}

pub(super) async fn acquire(
    run: &Run,
    client: Client,
    until: Option<Duration>,
    env: &Env,
    ends: &mut Signals,
) -> Result<Waited<There>> {
    let new = NewSession { lease: exact(run.lease), label: run.label() };
    let session: SessionFields = tokio::select! {
        begun = patiently(until, env, async || client.post("/sessions", &[], &new).await) => begun?,
        // A session that has begun without an answer ends with its lease.
        signal = ends.next() => return Ok(Waited::Ended(signal)),
    };
    let path = format!("/locks/{}", encoded(&run.name)).into();
    let (scope, env, lease) = (run.scope.query(), env.clone(), run.lease);
    let remote = Remote { client, session: session.id, path, scope, env, lease };
    let asked = tokio::select! {
        asked = remote.wait(run, until) => asked,
        signal = ends.next() => Ok(Waited::Ended(signal)),
    };
    match asked {
        Ok(Waited::Granted((token, began))) => Ok(Waited::Granted(There::begin(remote, token, began))),
        other => {
            soon(&remote.env, remote.end()).await;
            other.map(|waited| waited.map(|(token, began)| There::begin(remote.clone(), token, began)))
        }
    }
}

/// Tries again as long as there is time and the server cannot be reached: it may start again.
async fn patiently<T>(until: Option<Duration>, env: &Env, mut work: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    loop {
        match work().await {
            Err(error) if is_unreachable(&error) && until.is_some_and(|until| env.monotonic() < until) => {
                env.sleep(AGAIN).await;
            }
            done => return done,
        }
    }
}

/// The exit of an error, if it is one of the server or the way to it.
fn exit(error: &anyhow::Error) -> Option<Exit> {
    error.downcast_ref::<Problem>().map(|problem| problem.exit)
}

impl Remote {
    /// Waits in the queue. Returns the token, and when the request was sent that was granted.
    async fn wait(&self, run: &Run, until: Option<Duration>) -> Result<Waited<(u64, Duration)>> {
        let (mode, capacity) = match run.share() {
            Share::Alone => ("mutex", None),
            Share::Slot(slots) => ("semaphore", Some(slots)),
            Share::Read => ("read", None),
            Share::Write => ("write", None),
        };
        let request = self.env.uuid().to_string();
        let wanted = Acquire { session: self.session, request, mode, capacity };
        loop {
            let began = self.env.monotonic();
            let mut query = self.scope.clone();
            let left = until.map(|until| until.saturating_sub(began));
            query.extend(left.map(|left| ("wait", exact(whole(left.min(ONE_WAIT))))));
            let path = format!("{}/acquire", self.path);
            let asked = patiently(until, &self.env, async || {
                self.client.post_named::<StandingFields>(&path, &query, &wanted).await
            });
            match asked.await {
                Ok(StandingFields { granted: true, token, .. }) => return Ok(Waited::Granted((token, began))),
                Ok(StandingFields { holder, .. }) if left.is_none_or(|left| left <= ONE_WAIT) => {
                    return Ok(Waited::Busy(holder.into_iter().collect()));
                }
                Ok(_) => {}
                Err(error) => return self.refused(run, error),
            }
        }
    }

    fn refused(&self, run: &Run, error: anyhow::Error) -> Result<Waited<(u64, Duration)>> {
        let Some(problem) = error.downcast_ref::<Problem>() else { return Err(error) };
        match problem.fields.get("problem").and_then(|code| code.as_str()) {
            Some("lock-held") => {
                let holder = problem.fields.get("holder").cloned().unwrap_or_default();
                let holder: Option<RequestFields> = serde_json::from_value(holder).unwrap_or_default();
                Ok(Waited::Busy(holder.into_iter().collect()))
            }
            Some("session-lost") => Err(lost_in_the_queue(run).into()),
            _ => Err(error),
        }
    }

    /// Renews the session. Returns false if it has ended, or does not hold the lock any more.
    async fn renew(&self, token: u64) -> Result<bool> {
        let path = format!("/sessions/{}", self.session);
        // A repeated renewal is one more renewal.
        let renewed = self.client.post_named::<SessionFields>(&format!("{path}/renew"), &[], &()).await;
        let shown = match renewed {
            Ok(_) => self.client.get::<SessionFields>(&path, &[]).await,
            Err(error) => Err(error),
        };
        match shown {
            Ok(session) => Ok(session.locks.iter().any(|held| held.token == token)),
            Err(error) if exit(&error) == Some(Exit::NotFound) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Renews as long as the lock is held. `renewed` is when the last renewal was begun.
    async fn keep(self, token: u64, mut renewed: Duration, lost: watch::Sender<bool>) {
        let mut pause = (self.lease / 3).min(LONGEST);
        loop {
            self.env.sleep(pause).await;
            let began = self.env.monotonic();
            let left = self.lease.saturating_sub(began.saturating_sub(renewed));
            let answer = tokio::select! {
                answer = self.renew(token) => answer.ok(),
                // Others may hold the lock from then on.
                () = self.env.sleep(left) => None,
            };
            match answer {
                Some(true) => {
                    renewed = began;
                    pause = (self.lease / 3).min(LONGEST);
                }
                Some(false) => break,
                None if self.env.monotonic().saturating_sub(renewed) >= self.lease => break,
                None => pause = AGAIN.min(self.lease / 10),
            }
        }
        lost.send_replace(true);
    }

    async fn end(&self) -> Result<()> {
        self.client.delete::<()>(&format!("/sessions/{}", self.session)).await
    }
}

/// Without the fractions of a millisecond, which no wait needs.
fn whole(time: Duration) -> Duration {
    Duration::from_millis(time.as_millis() as u64)
}

impl There {
    fn begin(remote: Remote, token: u64, renewed: Duration) -> There {
        let (sender, lost) = watch::channel(false);
        let renewal = tokio::spawn(remote.clone().keep(token, renewed, sender));
        There { remote, token, lost, renewal }
    }

    pub(super) fn token(&self) -> u64 {
        self.token
    }

    pub(super) async fn lost(&self) {
        let mut lost = self.lost.clone();
        let _ = lost.wait_for(|is_lost| *is_lost).await;
    }

    pub(super) async fn check(&self) -> bool {
        !*self.lost.borrow() && self.remote.renew(self.token).await.unwrap_or(false)
    }

    /// The reason why an operator has released it.
    pub(super) async fn forced(&self) -> Option<String> {
        let Remote { client, path, scope, env, .. } = &self.remote;
        let shown: Shown = soon(env, client.get(path, scope)).await?.ok()?;
        shown.forced.into_iter().find(|forced| forced.token == self.token).map(|forced| forced.reason)
    }

    pub(super) async fn release(self) -> Result<bool> {
        let There { remote, token, renewal, .. } = self;
        renewal.abort();
        let release = Release { session: remote.session, token };
        let path = format!("{}/release", remote.path);
        let released = remote.client.post::<Released>(&path, &remote.scope, &release).await;
        let was_held = match released {
            Ok(released) => released.released,
            Err(error) if exit(&error) == Some(Exit::NotFound) => false,
            Err(error) => return Err(error),
        };
        remote.end().await?;
        Ok(was_held)
    }
}
