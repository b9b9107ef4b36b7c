//! `latch lock release`: forces the release of a lock, through an engine that runs nothing. The next request is granted
//! in the store, and its execution continues when an engine starts that has the workflow.

use anyhow::Result;
use clap::Args;
use latchwork::lock::{LockError, LockState, StoredLocks};
use latchwork::store::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ask::confirm;
use crate::client::{Client, encoded};
use crate::lock::Scope;
use crate::lock::fields::{NameFields, RequestFields};
use crate::lock::show::Shown;
use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Args)]
pub(crate) struct Release {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// The token of the holder or the waiter.
    #[arg(long, value_name = "N")]
    token: u64,
    /// The reason, which stays in the lock's history.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

#[derive(Serialize, Deserialize)]
struct Released {
    #[serde(flatten)]
    lock: NameFields,
    /// The request before the release.
    released: RequestFields,
    reason: String,
    /// The requests that the release granted.
    granted: Vec<RequestFields>,
    /// How many wait now.
    waiting: u64,
}

impl Release {
    /// Asks for confirmation at a terminal, unless `--yes` is given.
    fn confirm(&self, request: &RequestFields, now: Timestamp) -> Result<()> {
        let lock = NameFields::of(&self.scope.name(&self.name)).words();
        let does = if request.granted_at.is_some() { "holds" } else { "waits for" };
        let question = format!("{} {does} {lock}. Force the release?", request.words(now));
        confirm(&question, self.yes, "nothing was released")
    }
}

/// Returns the request as it is now, if it shall be released.
pub(crate) async fn look(release: &Release, locks: &StoredLocks, now: Timestamp) -> Result<RequestFields> {
    let name = release.scope.name(&release.name);
    let state = locks.inspect(&name).await?;
    let request = request(&state, release.token);
    let missing = || LockError::NoSuchToken { lock: name.to_string(), token: release.token };
    let request = request.ok_or_else(missing)?;
    release.confirm(&request, now)?;
    Ok(request)
}

fn request(state: &LockState, token: u64) -> Option<RequestFields> {
    let found = state.holders.iter().chain(&state.waiters).find(|request| request.token == token);
    found.map(|request| RequestFields::of(request, state.kind))
}

/// What a server is asked to release.
#[derive(Serialize)]
struct Asked<'a> {
    token: u64,
    reason: &'a str,
}

/// The same through a server.
pub(crate) async fn ask(release: Release, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let (path, query) = (format!("/locks/{}", encoded(&release.name)), release.scope.query());
    if !release.yes {
        let shown: Shown = client.get(&path, &query).await?;
        let found = shown.holders.iter().chain(&shown.waiters).find(|request| request.token == release.token);
        let lock = release.scope.name(&release.name).to_string();
        release.confirm(found.ok_or(LockError::NoSuchToken { lock, token: release.token })?, now)?;
    }
    let asked = Asked { token: release.token, reason: &release.reason };
    let released: Released = client.post(&format!("{path}/force-release"), &query, &asked).await?;
    tell(&released, now, output)
}

pub(crate) async fn run(
    release: Release,
    released: RequestFields,
    store: &StoreArgument,
    output: &mut Output<'_>,
) -> Result<()> {
    let name = release.scope.name(&release.name);
    let engine = store.operate().await?;
    let locks = engine.locks();
    let before = locks.inspect(&name).await?;
    locks.force_release(&name, release.token, &release.reason).await?;
    let after = locks.inspect(&name).await?;
    let now = engine.store().env().now();
    engine.stop();
    engine.store().close().await?;
    let is_new = |token: u64| before.holders.iter().all(|holder| holder.token != token);
    let granted = after.holders.iter().filter(|holder| is_new(holder.token));
    let released = Released {
        lock: NameFields::of(&name),
        released,
        reason: release.reason,
        granted: granted.map(|holder| RequestFields::of(holder, after.kind)).collect(),
        waiting: after.waiting,
    };
    tell(&released, now, output)
}

fn tell(done: &Released, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    output.one(done, |text| {
        let Released { lock, released, granted, waiting, .. } = done;
        let held = if released.granted_at.is_some() { "holds" } else { "waits for" };
        let mut who = released.words(now);
        who[..1].make_ascii_uppercase();
        text.line(format!("{who} no longer {held} {}.", lock.words()));
        for next in granted {
            text.line(format!("Now {} holds it.", next.words(now)));
        }
        match (granted.len(), waiting) {
            (0, 0) => text.line("No request waits for it."),
            (0, waiting) => text.line(format!("Requests that wait for it: {waiting}.")),
            (_, waiting) => text.line(format!("Requests that still wait: {waiting}.")),
        }
    })
}
