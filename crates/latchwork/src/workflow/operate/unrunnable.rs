//! Executions that have to run and that no live node can run: their workflow or their version is missing everywhere.

use serde::Serialize;

use crate::damage::scan_around;
use crate::node::{Nodes, NodesError};
use crate::store::Timestamp;
use crate::workflow::stored::listed::{read_by_status, read_end};
use crate::workflow::stored::record::fetch_execution;
use crate::workflow::{ExecutionId, Executions, Result, WorkflowError};

/// How many executions are read at once.
const PAGE: usize = 1000;

/// An execution that no live node can run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unrunnable {
    /// The execution.
    pub id: ExecutionId,
    /// Its workflow.
    pub workflow: String,
    /// The version of the definition that it was started under.
    pub version: u32,
    /// When it was started.
    #[serde(rename = "started_us")]
    pub started: Timestamp,
}

impl Executions {
    /// Executions that have to run now and that no live node can run, at most `limit` of them. They wait for a node
    /// that registers their workflow in their version, or in one that [continues] it. Executions that wait for
    /// something else are not looked at. On a store that is not shared there are no nodes, and the list is empty.
    ///
    /// [continues]: crate::workflow::WorkflowBuilder::continues
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// for left in executions.unrunnable(100).await? {
    ///     println!("{} needs {} in version {}", left.id, left.workflow, left.version);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn unrunnable(&self, limit: usize) -> Result<Vec<Unrunnable>> {
        let nodes = Nodes::on(&self.store).list().await.map_err(|error| match error {
            NodesError::Store(error) => error.into(),
            error => WorkflowError::Node { reason: error.to_string() },
        })?;
        let (Some(spaces), false) = (&self.spaces, nodes.is_empty()) else { return Ok(Vec::new()) };
        let can_run = |workflow: &str, version: u32| {
            nodes.iter().any(|node| node.workflows.get(workflow).is_some_and(|its| its.contains(&version)))
        };
        let (running, mut found) = (&spaces.lists.running, Vec::new());
        let mut rest = running.all();
        while found.len() < limit {
            let view = self.store.view().await?;
            let page = scan_around(&view, running, &rest, PAGE).await?.found;
            let Some((last, _)) = page.last() else { break };
            rest = rest.after(last);
            for (key, _) in &page {
                let Some((_, end)) = read_by_status(key.bytes()) else { continue };
                let Some((_, id)) = read_end(end) else { continue };
                let Some((execution, _)) = fetch_execution(&view, &spaces.executions, &id).await? else { continue };
                if !can_run(&execution.workflow, execution.version) {
                    let (version, started) = (execution.version, Timestamp(execution.started_us));
                    found.push(Unrunnable { id, workflow: execution.workflow, version, started });
                }
            }
        }
        found.truncate(limit);
        Ok(found)
    }
}
