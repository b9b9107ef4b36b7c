//! `latch claim complete`: makes the transition of a claim that needs review, without its action.

use anyhow::Result;
use latchwork::store::Timestamp;

use crate::claim::change::{Change, Verb, operate};
use crate::claim::fields::ClaimFields;
use crate::output::Output;
use crate::store::StoreArgument;

pub(crate) const VERB: Verb = Verb { question: "Without running its action, complete", path: "complete" };

pub(crate) async fn run(change: Change, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let (claim, now) = change.look(store, VERB).await?;
    let (entity, actor, reason) = (change.entity.as_str(), change.actor.as_str(), change.reason.as_str());
    operate(store, async |operator| operator.complete(entity, actor, reason).await).await?;
    let (status, lines) = (claim.successful_state.clone(), lines(&claim, now));
    change.tell(claim, status, &lines, output)
}

pub(crate) fn lines(claim: &ClaimFields, _now: Timestamp) -> Vec<String> {
    let (entity, status) = (&*claim.entity, &claim.successful_state);
    vec![
        format!("Entity {entity:?} is at {status:?}. Its action was not run."),
        "The next program that has the after-effects delivers them.".into(),
    ]
}
