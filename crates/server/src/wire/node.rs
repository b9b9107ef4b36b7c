//! Nodes on the wire, as `latch node` prints them, and what their errors become.

use std::collections::BTreeMap;

use latchwork::node::{MoveReason, NodeInfo, NodesError, ShardMove};
use latchwork::workflow::Unrunnable;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::page::PageQuery;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::TimeWire;

/// An engine that shares a store with others.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Node)]
pub(crate) struct NodeWire {
    name: String,
    /// When it started.
    since: TimeWire,
    /// When it last renewed its lease, by its own clock.
    renewed_at: TimeWire,
    /// How long the others wait for a sign of life before they take over its work.
    lease_s: f64,
    /// True if it gives its shards to other nodes and gets no more.
    draining: bool,
    shards: Vec<u16>,
    /// How many executions it had in memory when it last renewed its lease.
    residents: u64,
    /// How many of its commits were refused because another node had taken the shard.
    refused: u64,
    /// The workflows that it can run, each with the versions whose executions it continues.
    workflows: BTreeMap<String, Vec<u32>>,
    /// The version of the library that it was built with.
    program: String,
}

impl From<NodeInfo> for NodeWire {
    fn from(node: NodeInfo) -> NodeWire {
        let NodeInfo {
            name, since, renewed, lease, is_draining, shards, residents, refused, workflows, program, ..
        } = node;
        NodeWire {
            name,
            since: since.into(),
            renewed_at: renewed.into(),
            lease_s: lease.as_secs_f64(),
            draining: is_draining,
            shards,
            residents,
            refused,
            workflows,
            program,
        }
    }
}

/// Shards that got another owner together.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ShardMove)]
pub(crate) struct MoveWire {
    at: TimeWire,
    /// The owner before.
    #[schema(required)]
    from: Option<String>,
    /// The owner after it.
    #[schema(required)]
    to: Option<String>,
    shards: Vec<u16>,
    /// `free`: they had no owner. `dead`: their owner did not renew its lease. `left`: it has stopped, or is drained.
    /// `balanced`: another node had less than its share.
    #[schema(value_type = String)]
    why: MoveReason,
}

impl From<ShardMove> for MoveWire {
    fn from(moved: ShardMove) -> MoveWire {
        let ShardMove { at, shards, from, to, why, .. } = moved;
        MoveWire { at: at.into(), from, to, shards, why }
    }
}

/// An execution that has to run and that no live node can run.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Unrunnable)]
pub(crate) struct UnrunnableWire {
    id: String,
    workflow: String,
    /// The version of the definition that it was started under.
    version: u32,
    started_at: TimeWire,
}

impl From<Unrunnable> for UnrunnableWire {
    fn from(left: Unrunnable) -> UnrunnableWire {
        let Unrunnable { id, workflow, version, started, .. } = left;
        UnrunnableWire { id: id.to_string(), workflow, version, started_at: started.into() }
    }
}

/// How many items are listed. The list does not continue after them.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct MostQuery {
    /// The number of items at most: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

impl MostQuery {
    pub(crate) fn limit(&self) -> Result<usize, Problem> {
        PageQuery { after: None, limit: self.limit }.limit()
    }
}

impl From<NodesError> for Problem {
    fn from(error: NodesError) -> Problem {
        let problem = |code| Problem::new(code, error.to_string());
        match &error {
            NodesError::Store(store) => store.clone().into(),
            NodesError::Once(once) => once.clone().into(),
            NodesError::NotFound { name } => problem(ProblemCode::NotFound).with("node", name),
            NodesError::LastNode { name } => problem(ProblemCode::Conflict).with("node", name),
            // The client cannot have caused it: a record of a newer program.
            NodesError::Newer { .. } => Problem::unavailable(&error),
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}
