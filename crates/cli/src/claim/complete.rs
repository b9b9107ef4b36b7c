//! `latch claim complete`: makes the transition of a claim that needs review, without its action.

use anyhow::Result;

use crate::claim::change::{Change, operate};
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, _) = change.look(store, "Without running its action, complete").await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.complete(entity, actor, reason).await).await?;
    let status = claim.successful_state.clone();
    let lines = [
        format!("Entity {entity:?} is at {status:?}. Its action was not run."),
        "The next program that has the after-effects delivers them.".into(),
    ];
    change.tell(claim, status, &lines, output)
}
