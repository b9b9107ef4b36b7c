//! `latch node drain`: makes a node give its shards away. The node itself does it; this command only asks for it.

use anyhow::Result;
use clap::Args;
use latchwork::node::Nodes;

use crate::client::{Client, encoded};
use crate::node::NodeFields;
use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Args)]
pub(crate) struct Drain {
    /// The node's name.
    name: String,
    /// The node takes its share again.
    #[arg(long)]
    undo: bool,
}

pub(crate) async fn run(drain: Drain, argument: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let engine = argument.operate().await?;
    let nodes = Nodes::on(engine.store());
    let drained = nodes.drain(&drain.name, !drain.undo).await;
    let found = nodes.get(&drain.name).await;
    engine.stop();
    engine.store().close().await?;
    drained?;
    drain.tell(&NodeFields::of(found?), output)
}

/// The same through a server.
pub(crate) async fn ask(drain: &Drain, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/nodes/{}/drain", encoded(&drain.name));
    let node = match drain.undo {
        true => client.delete(&path).await?,
        false => client.put(&path, &()).await?,
    };
    drain.tell(&node, output)
}

impl Drain {
    fn tell(&self, node: &NodeFields, output: &mut Output<'_>) -> Result<()> {
        output.one(node, |text| match self.undo {
            true => text.line(format!("Node {:?} takes its share of the shards again.", node.name)),
            false => text.line(format!(
                "Node {:?} gives its {} shards to the others; latch node list shows how far it is.",
                node.name,
                node.shards.len()
            )),
        })
    }
}
