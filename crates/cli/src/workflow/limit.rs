//! `latch workflow limit`: how much of a limit of a workflow is used.

use anyhow::Result;
use clap::Args;

use crate::client::{ApiCall, Client, encoded};
use crate::output::Output;

#[derive(Args)]
pub(crate) struct Limit {
    /// The name of the workflow.
    workflow: String,
    /// The key of the limit; without it, the limit of the workflow as a whole.
    #[arg(long)]
    key: Option<String>,
}

pub(crate) async fn run(limit: Limit, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/workflow-limits/{}", encoded(&limit.workflow));
    let found = client.call(ApiCall::get(path).maybe("key", limit.key)).await?;
    output.one(&found, |text| {
        text.line(format!("{} executions hold a permit, and {} wait for one.", found["used"], found["waiting"]));
    })
}
