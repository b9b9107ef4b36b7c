//! `latch lock show`: the holders and the waiters of a lock.

use anyhow::Result;
use clap::Args;
use latchwork::lock::StoredLocks;
use latchwork::store::Timestamp;
use serde::{Deserialize, Serialize};

use crate::client::{Client, encoded};
use crate::lock::Scope;
use crate::lock::fields::{ForcedFields, LockFields, RequestFields};
use crate::output::{Cell, Output, Table, Text, Tone};

#[derive(Args)]
pub(crate) struct Show {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
}

/// A lock with its holders and waiters.
#[derive(Serialize, Deserialize)]
pub(crate) struct Shown {
    #[serde(flatten)]
    lock: LockFields,
    pub(crate) holders: Vec<RequestFields>,
    pub(crate) waiters: Vec<RequestFields>,
    pub(crate) forced: Vec<ForcedFields>,
}

pub(crate) async fn run(show: &Show, locks: &StoredLocks, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let state = locks.inspect(show.scope.name(&show.name)).await?;
    let requests = |found: &[_]| found.iter().map(|request| RequestFields::of(request, state.kind)).collect();
    let shown = Shown {
        lock: LockFields::of_state(&state),
        holders: requests(&state.holders),
        waiters: requests(&state.waiters),
        forced: state.forced.iter().map(ForcedFields::of).collect(),
    };
    output.one(&shown, |text| tell(&shown, now, text))
}

/// The same from a server.
pub(crate) async fn ask(show: Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let shown: Shown = client.get(&format!("/locks/{}", encoded(&show.name)), &show.scope.query()).await?;
    output.one(&shown, |text| tell(&shown, now, text))
}

fn tell(shown: &Shown, now: Timestamp, text: &mut Text) {
    let lock = &shown.lock;
    let mut name = lock.name.words();
    name[..1].make_ascii_uppercase();
    text.line(format!("{name}, a {}: {}, {} waiting.", lock.kind(), lock.held(), lock.waiting));
    if !shown.holders.is_empty() {
        text.line("");
        let mut table = Table::new(&["HELD BY", "TOKEN", "PERMITS", "HELD SINCE", "WAITED SINCE", "LEASE"]);
        for holder in &shown.holders {
            let granted = holder.granted_at.map_or(String::new(), |granted| granted.relative_to(now));
            table.row([
                holder.owner.words().into(),
                holder.token.to_string().into(),
                holder.share(lock).into(),
                granted.into(),
                Cell::new(holder.since.relative_to(now), Tone::Dim),
                Cell::new(holder.lease(now), Tone::Dim),
            ]);
        }
        text.table(table);
    }
    if !shown.waiters.is_empty() {
        text.line("");
        let mut table = Table::new(&["#", "WAITS", "TOKEN", "PERMITS", "SINCE", "LEASE"]);
        for waiter in &shown.waiters {
            table.row([
                waiter.position.map_or(String::new(), |position| (position + 1).to_string()).into(),
                waiter.owner.words().into(),
                waiter.token.to_string().into(),
                waiter.share(lock).into(),
                waiter.since.relative_to(now).into(),
                Cell::new(waiter.lease(now), Tone::Dim),
            ]);
        }
        text.table(table);
        let told = shown.waiters.len() as u64;
        if lock.waiting > told {
            text.line(format!("and {} more", lock.waiting - told));
        }
    }
    if !shown.forced.is_empty() {
        text.line("");
        let mut table = Table::new(&["FORCED RELEASE OF", "TOKEN", "STATE", "WHEN", "REASON"]);
        for forced in &shown.forced {
            table.row([
                forced.owner.words().into(),
                forced.token.to_string().into(),
                if forced.was_held { "held" } else { "waiting" }.into(),
                forced.at.relative_to(now).into(),
                forced.reason.clone().into(),
            ]);
        }
        text.table(table);
    }
}
