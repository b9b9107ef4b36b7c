//! `latch node show`: one node.

use anyhow::Result;
use clap::Args;
use latchwork::node::Nodes;
use latchwork::store::Timestamp;

use crate::client::{Client, encoded};
use crate::node::{NodeFields, ranges};
use crate::output::Output;

#[derive(Args)]
pub(crate) struct Show {
    /// The node's name.
    name: String,
}

pub(crate) async fn run(show: &Show, nodes: &Nodes, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    tell(&NodeFields::of(nodes.get(&show.name).await?), now, output)
}

/// The same from a server.
pub(crate) async fn ask(show: &Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    tell(&client.get(&format!("/nodes/{}", encoded(&show.name)), &[]).await?, now, output)
}

fn tell(node: &NodeFields, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    output.one(node, |text| {
        text.line(format!("Node {:?} is {}, since {}.", node.name, node.state(now), node.since.relative_to(now)));
        let renewed = node.renewed_at.relative_to(now);
        text.line(format!("It renewed its lease of {} s {renewed}; Latchwork {}.", node.lease_s, node.program));
        match node.shards.len() {
            0 => text.line("It owns no shards."),
            count => text.line(format!("It owns {count} of 64 shards: {}.", ranges(&node.shards))),
        }
        text.line(format!("It has {} executions in memory.", node.residents));
        if node.refused > 0 {
            let times = node.refused;
            text.line(format!("{times} of its writes were refused because another node had taken the shard."));
        }
        for (workflow, versions) in &node.workflows {
            let versions: Vec<String> = versions.iter().map(u32::to_string).collect();
            text.line(format!("It runs workflow {workflow:?}, version {}.", versions.join(", ")));
        }
    })
}
