//! `latch claim retry`: makes the next program that has the action run it again, for a claim that needs review.

use anyhow::Result;

use crate::claim::change::{Change, operate};
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, _) = change.look(store, "Run the action again for").await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.retry(entity, actor, reason).await).await?;
    let (status, action) = (claim.claim_into.clone(), claim.action.clone().unwrap_or_default());
    let line = format!("The next program that has action {action:?} runs it again for entity {entity:?}.");
    change.tell(claim, status, &[line], output)
}
