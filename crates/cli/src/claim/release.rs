//! `latch claim release`: ends a claim; the entity goes back to the status that it came from.

use anyhow::Result;
use latchwork::store::Timestamp;

use crate::claim::change::{Change, Verb, operate};
use crate::claim::fields::ClaimFields;
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) const VERB: Verb = Verb { question: "Release", path: "release" };

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, now) = change.look(store, VERB).await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.release(entity, actor, reason).await).await?;
    let (status, lines) = (claim.revert_to.clone(), lines(&claim, now));
    change.tell(claim, status, &lines, output)
}

pub(crate) fn lines(claim: &ClaimFields, now: Timestamp) -> Vec<String> {
    let mut first = format!("{} was released.", claim.words(now));
    first[..1].make_ascii_uppercase();
    vec![first, format!("The entity is at {:?} again.", claim.revert_to)]
}
