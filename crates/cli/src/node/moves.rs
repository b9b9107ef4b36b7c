//! `latch node moves`: the log of moves of shards.

use anyhow::Result;
use clap::Args;
use latchwork::Page;
use latchwork::node::{MoveReason, Nodes, ShardMove};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::node::ranges;
use crate::output::{Output, Table};
use crate::time::Time;

#[derive(Args)]
pub(crate) struct Moves {
    /// The largest number of moves.
    #[arg(long, default_value_t = 50, value_name = "N")]
    limit: usize,
}

/// The fields of a move in JSON, which are stable.
#[derive(Serialize, Deserialize)]
struct MoveFields {
    at: Time,
    from: Option<String>,
    to: Option<String>,
    shards: Vec<u16>,
    why: MoveReason,
}

pub(crate) async fn run(moves: &Moves, nodes: &Nodes, output: &mut Output<'_>) -> Result<()> {
    let of = |it: ShardMove| MoveFields { at: Time(it.at), from: it.from, to: it.to, shards: it.shards, why: it.why };
    let listed: Vec<MoveFields> = nodes.moves(moves.limit).await?.into_iter().map(of).collect();
    output.many("moves", &listed, None, table)
}

/// The same from a server.
pub(crate) async fn ask(moves: &Moves, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let page: Page<MoveFields> = client.get("/nodes:moves", &[("limit", moves.limit.to_string())]).await?;
    output.many("moves", &page.items, None, table)
}

fn table(listed: &[MoveFields]) -> Table {
    let mut table = Table::new(&["WHEN", "FROM", "TO", "WHY", "SHARDS"]);
    for moved in listed {
        let why = match moved.why {
            MoveReason::Free => "had no owner",
            MoveReason::Dead => "its lease was over",
            MoveReason::Left => "it left or is drained",
            MoveReason::Balanced => "balanced",
            _ => "",
        };
        let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".into());
        table.row([
            moved.at.short().into(),
            name(&moved.from).into(),
            name(&moved.to).into(),
            why.into(),
            ranges(&moved.shards).into(),
        ]);
    }
    table
}
