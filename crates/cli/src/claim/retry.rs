//! `latch claim retry`: has the action of a claim that needs review run again. The next program that has it runs it.

use std::path::Path;

use anyhow::Result;

use crate::claim::change::{Change, operate};
use crate::output::Output;

pub(crate) async fn run(change: Change, directory: &Path, output: &mut Output<'_>) -> Result<()> {
    let (claim, _) = change.look(directory, "Run the action again of").await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(directory, async |operator| operator.retry(entity, actor, reason).await).await?;
    let (status, action) = (claim.claim_into.clone(), claim.action.clone().unwrap_or_default());
    let line = format!("Action {action:?} runs again for entity {entity:?} when a program starts that has it.");
    change.tell(claim, status, &[line], output)
}
