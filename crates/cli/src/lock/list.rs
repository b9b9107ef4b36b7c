//! `latch lock list`: locks by their names.

use anyhow::Result;
use clap::Args;
use latchwork::lock::StoredLocks;

use crate::client::Client;
use crate::lock::Scope;
use crate::lock::fields::LockFields;
use crate::output::{Cell, Output, Table, Tone};
use crate::paging::Paging;

#[derive(Args)]
pub(crate) struct List {
    #[command(flatten)]
    scope: Scope,
    /// Only locks that are held.
    #[arg(long)]
    held: bool,
    #[command(flatten)]
    paging: Paging,
}

pub(crate) async fn run(list: &List, locks: &StoredLocks, output: &mut Output<'_>) -> Result<()> {
    let locks = if list.held { locks.list().held() } else { locks.list() };
    let locks = locks.scope(list.scope.scope());
    list.paging
        .write("locks", output, table, async |limit, after| {
            let page = locks.clone().limit(limit).after(after).await?;
            Ok(page.map(|lock| LockFields::of(&lock)))
        })
        .await
}

/// The same from a server.
pub(crate) async fn ask(list: List, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let mut query = list.scope.query();
    if list.held {
        query.push(("held", "true".into()));
    }
    list.paging
        .write("locks", output, table, async |limit, after| {
            client.page::<LockFields>("/locks", &query, limit, after).await
        })
        .await
}

fn table(found: &[LockFields]) -> Table {
    let mut table = Table::new(&["NAME", "SHARED BY", "KIND", "HELD", "WAITING"]);
    for lock in found {
        let held = lock.held();
        let tone = if held == "free" { Tone::Dim } else { Tone::Plain };
        let waiting = if lock.waiting > 0 { Tone::Attention } else { Tone::Dim };
        table.row([
            lock.name.name.clone().into(),
            lock.name.scope().into(),
            lock.kind().into(),
            Cell::new(held, tone),
            Cell::new(lock.waiting.to_string(), waiting),
        ]);
    }
    table
}
