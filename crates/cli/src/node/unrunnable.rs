//! `latch node unrunnable`: executions that no live node can run.

use anyhow::Result;
use clap::Args;
use latchwork::Page;
use latchwork::store::{Store, Timestamp};
use latchwork::workflow::{Executions, Unrunnable as Left};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::output::{Output, Table};
use crate::time::Time;

#[derive(Args)]
pub(crate) struct Unrunnable {
    /// The largest number of executions.
    #[arg(long, default_value_t = 100, value_name = "N")]
    limit: usize,
}

/// The fields of an execution in JSON, which are stable.
#[derive(Serialize, Deserialize)]
struct LeftFields {
    id: String,
    workflow: String,
    version: u32,
    started_at: Time,
}

pub(crate) async fn run(asked: &Unrunnable, store: &Store, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let of = |Left { id, workflow, version, started, .. }: Left| LeftFields {
        id: id.to_string(),
        workflow,
        version,
        started_at: Time(started),
    };
    let found = Executions::on(store).await?.unrunnable(asked.limit).await?;
    let found: Vec<LeftFields> = found.into_iter().map(of).collect();
    tell(&found, now, output)
}

/// The same from a server.
pub(crate) async fn ask(asked: &Unrunnable, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let page: Page<LeftFields> = client.get("/nodes:unrunnable", &[("limit", asked.limit.to_string())]).await?;
    tell(&page.items, now, output)
}

fn tell(found: &[LeftFields], now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    output.many("executions", found, None, |found| {
        let mut table = Table::new(&["ID", "WORKFLOW", "VERSION", "STARTED"]);
        for left in found {
            let started = left.started_at.relative_to(now);
            table.row([left.id.clone(), left.workflow.clone(), left.version.to_string(), started].map(Into::into));
        }
        table
    })
}
