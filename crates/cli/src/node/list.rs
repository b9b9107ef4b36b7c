//! `latch node list`: the nodes by their names.

use anyhow::Result;
use clap::Args;
use latchwork::Page;
use latchwork::node::Nodes;
use latchwork::store::Timestamp;

use crate::client::Client;
use crate::node::NodeFields;
use crate::output::{Cell, Output, Table, Tone};

#[derive(Args)]
pub(crate) struct List {}

pub(crate) async fn run(nodes: &Nodes, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let listed: Vec<NodeFields> = nodes.list().await?.into_iter().map(NodeFields::of).collect();
    output.many("nodes", &listed, None, |listed| table(listed, now))
}

/// The same from a server.
pub(crate) async fn ask(client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let page: Page<NodeFields> = client.get("/nodes", &[]).await?;
    output.many("nodes", &page.items, None, |listed| table(listed, now))
}

fn table(listed: &[NodeFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["NAME", "STATE", "SHARDS", "IN MEMORY", "REFUSED", "RENEWED", "SINCE"]);
    for node in listed {
        let state = node.state(now);
        let tone = match state {
            "serving" => Tone::Good,
            "overdue" => Tone::Bad,
            "draining" => Tone::Attention,
            _ => Tone::Dim,
        };
        table.row([
            node.name.clone().into(),
            Cell::new(state, tone),
            node.shards.len().to_string().into(),
            node.residents.to_string().into(),
            Cell::new(node.refused.to_string(), if node.refused > 0 { Tone::Attention } else { Tone::Dim }),
            node.renewed_at.relative_to(now).into(),
            node.since.relative_to(now).into(),
        ]);
    }
    table
}
