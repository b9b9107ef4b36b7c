//! `latch node`: the engines that share a database, and which of them does what. It runs no workflow.

mod drain;
mod list;
mod moves;
mod show;
mod unrunnable;

use anyhow::Result;
use clap::Subcommand;
use latchwork::node::{NodeInfo, Nodes};
use latchwork::store::{Env, Store, Timestamp};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};
use crate::time::Time;

#[derive(Subcommand)]
pub(crate) enum Node {
    /// Lists the nodes by their names.
    List(list::List),
    /// Shows a node: its lease, its shards, and the workflows that it can run.
    Show(show::Show),
    /// Makes a node give its shards to the others, or take its share again.
    Drain(drain::Drain),
    /// Lists the last moves of shards, newest first.
    Moves(moves::Moves),
    /// Lists the executions that have to run and that no live node can run.
    Unrunnable(unrunnable::Unrunnable),
}

pub(crate) async fn run(command: Node, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let store = match target.look().await? {
        Looked::Server(client) => return ask(command, &client, output).await,
        Looked::Store(store) => store,
    };
    let looked = look(&command, &store, output).await;
    store.close().await?;
    looked?;
    match command {
        Node::Drain(drain) => drain::run(drain, target.store("node drain")?, output).await,
        _ => Ok(()),
    }
}

async fn look(command: &Node, store: &Store, output: &mut Output<'_>) -> Result<()> {
    let (nodes, now) = (Nodes::on(store), store.env().now());
    match command {
        Node::List(_) => list::run(&nodes, now, output).await,
        Node::Show(show) => show::run(show, &nodes, now, output).await,
        Node::Moves(moves) => moves::run(moves, &nodes, output).await,
        Node::Unrunnable(asked) => unrunnable::run(asked, store, now, output).await,
        Node::Drain(_) => Ok(()),
    }
}

/// The same through a server.
async fn ask(command: Node, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Node::List(_) => list::ask(client, now, output).await,
        Node::Show(show) => show::ask(&show, client, now, output).await,
        Node::Moves(moves) => moves::ask(&moves, client, output).await,
        Node::Unrunnable(asked) => unrunnable::ask(&asked, client, now, output).await,
        Node::Drain(drain) => drain::ask(&drain, client, output).await,
    }
}

/// The fields of a node in JSON, which are stable. docs/cli.md lists them.
#[derive(Debug, Serialize, Deserialize)]
struct NodeFields {
    name: String,
    since: Time,
    renewed_at: Time,
    lease_s: f64,
    draining: bool,
    shards: Vec<u16>,
    residents: u64,
    refused: u64,
    workflows: std::collections::BTreeMap<String, Vec<u32>>,
    program: String,
}

impl NodeFields {
    fn of(node: NodeInfo) -> NodeFields {
        NodeFields {
            since: Time(node.since),
            renewed_at: Time(node.renewed),
            lease_s: node.lease.as_secs_f64(),
            draining: node.is_draining,
            shards: node.shards,
            residents: node.residents,
            refused: node.refused,
            workflows: node.workflows,
            program: node.program,
            name: node.name,
        }
    }

    /// What the node does, in one word.
    fn state(&self, now: Timestamp) -> &'static str {
        match () {
            () if now.since(self.renewed_at.0).as_secs_f64() > self.lease_s => "overdue",
            () if self.draining => "draining",
            () if self.workflows.is_empty() => "client",
            () => "serving",
        }
    }
}

/// Numbers as ranges: `0-3, 7`.
fn ranges(shards: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for shard in shards {
        match ranges.last_mut().filter(|(_, last)| last + 1 == *shard) {
            Some((_, last)) => *last = *shard,
            None => ranges.push((*shard, *shard)),
        }
    }
    let words = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn shards_are_shown_as_ranges() {
        for (shards, shown) in
            [(&[][..], ""), (&[3], "3"), (&[0, 1, 2], "0-2"), (&[0, 2, 3, 9], "0, 2-3, 9"), (&[62, 63], "62-63")]
        {
            assert_eq!(ranges(shards), shown);
        }
    }
}
