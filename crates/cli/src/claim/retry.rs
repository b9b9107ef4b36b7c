//! `latch claim retry`: makes the next program that has the action run it again, for a claim that needs review.

use anyhow::Result;
use latchwork::store::Timestamp;

use crate::claim::change::{Change, Verb, operate};
use crate::claim::fields::ClaimFields;
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) const VERB: Verb = Verb { question: "Run the action again for", path: "retry" };

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, now) = change.look(store, VERB).await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.retry(entity, actor, reason).await).await?;
    let (status, lines) = (claim.claim_into.clone(), lines(&claim, now));
    change.tell(claim, status, &lines, output)
}

pub(crate) fn lines(claim: &ClaimFields, _now: Timestamp) -> Vec<String> {
    let (action, entity) = (claim.action.as_deref().unwrap_or_default(), &*claim.entity);
    vec![format!("The next program that has action {action:?} runs it again for entity {entity:?}.")]
}
