//! `latch claim release`: ends a claim; the entity goes back to the status that it came from.

use anyhow::Result;

use crate::claim::change::{Change, operate};
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, now) = change.look(store, "Release").await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.release(entity, actor, reason).await).await?;
    let status = claim.revert_to.clone();
    let mut first = format!("{} was released.", claim.words(now));
    first[..1].make_ascii_uppercase();
    let lines = [first, format!("The entity is at {status:?} again.")];
    change.tell(claim, status, &lines, output)
}
