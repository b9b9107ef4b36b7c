//! `latch lock release`: has somebody let go of a lock, by an engine that runs nothing. Who is next is recorded so, and
//! goes on when an engine starts that runs it.

use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;

use anyhow::Result;
use clap::Args;
use latchwork::lock::{LockError, LockState, StoredLocks};
use latchwork::store::Timestamp;
use latchwork::workflow::Engine;
use serde::Serialize;

use crate::lock::Scope;
use crate::lock::fields::{NameFields, RequestFields};
use crate::output::{Exit, Output, Problem, plain};

#[derive(Args)]
pub(crate) struct Release {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// The token under which it is held, or waited for.
    #[arg(long, value_name = "N")]
    token: u64,
    /// Why: it stays in the lock's history.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
    /// Does not ask.
    #[arg(long)]
    yes: bool,
}

#[derive(Serialize)]
struct Released {
    #[serde(flatten)]
    lock: NameFields,
    /// Whose request it was, as it was before.
    released: RequestFields,
    reason: String,
    /// Who was given the lock by that.
    granted: Vec<RequestFields>,
    /// How many wait now.
    waiting: u64,
}

/// Who is to let go, as the lock is now.
pub(crate) async fn look(release: &Release, locks: &StoredLocks, now: Timestamp) -> Result<RequestFields> {
    let name = release.scope.name(&release.name);
    let state = locks.inspect(&name).await?;
    let request = request(&state, release.token);
    let missing = || LockError::NoSuchToken { lock: name.to_string(), token: release.token };
    let request = request.ok_or_else(missing)?;
    if release.yes {
        return Ok(request);
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(Problem::new(Exit::Usage, "nobody is there to be asked: say --yes").into());
    }
    let lock = NameFields::of(&name).words();
    let does = if request.granted_at.is_some() { "which it holds" } else { "for which it waits" };
    let question = format!("Have {} let go of {lock}, {does}? [y/N] ", request.words(now));
    let mut err = std::io::stderr();
    write!(err, "{}", plain(&question))?;
    err.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(request),
        _ => Err(Problem::new(Exit::Failed, "nothing was released").into()),
    }
}

fn request(state: &LockState, token: u64) -> Option<RequestFields> {
    let found = state.holders.iter().chain(&state.waiters).find(|request| request.token == token);
    found.map(|request| RequestFields::of(request, state.kind))
}

pub(crate) async fn run(
    release: Release,
    released: RequestFields,
    directory: &Path,
    output: &mut Output<'_>,
) -> Result<()> {
    let name = release.scope.name(&release.name);
    let engine = Engine::open(directory).idle().start().await?;
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
    output.one(&released, |text| {
        let Released { lock, released, granted, waiting, .. } = &released;
        let held = if released.granted_at.is_some() { "holds" } else { "waits for" };
        let mut who = released.words(now);
        who[..1].make_ascii_uppercase();
        text.line(format!("{who} no longer {held} {}.", lock.words()));
        for next in granted {
            text.line(format!("Next was {}: it holds it now.", next.words(now)));
        }
        match (granted.len(), waiting) {
            (0, 0) => text.line("Nobody waits for it."),
            (0, waiting) => text.line(format!("{waiting} wait for it.")),
            (_, waiting) => text.line(format!("{waiting} still wait.")),
        }
    })
}
