//! `latch claim show`: the claim on an entity, and the changes that claim workflows made to the entity.

use anyhow::Result;
use clap::Args;
use latchwork::claim::StoredClaims;
use latchwork::store::Timestamp;
use serde::{Deserialize, Serialize};

use crate::claim::fields::{ClaimFields, TransitionFields};
use crate::client::{Client, encoded};
use crate::output::{Exit, Output, Problem, Table, Text};
use crate::paging::first;

/// The most changes that a server shows.
const MOST: u32 = 1000;

#[derive(Args)]
pub(crate) struct Show {
    /// The entity's id.
    entity: String,
    /// Shows this many of the last changes in the history.
    #[arg(long, default_value_t = 10, value_name = "N")]
    events: u32,
}

/// The claim on an entity, and its history.
#[derive(Serialize, Deserialize)]
pub(super) struct Shown {
    entity: String,
    pub(super) claim: Option<ClaimFields>,
    history: Vec<TransitionFields>,
}

pub(crate) async fn run(show: &Show, claims: &StoredClaims, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let entity = show.entity.clone();
    let claim = claims.get(entity.as_str()).await?.map(ClaimFields::of);
    // At least one is read, because an entity without a claim and a history is not found.
    let history = first(show.events.max(1) as usize, async |limit, after| {
        Ok(claims.history(entity.as_str()).limit(limit).after(after).await?)
    })
    .await?;
    if claim.is_none() && history.is_empty() {
        let message = format!("entity {entity:?} has no claim, and no claim workflow has changed it");
        return Err(Problem::new(Exit::NotFound, message).into());
    }
    let history = history.into_iter().take(show.events as usize).map(TransitionFields::of).collect();
    let shown = Shown { entity, claim, history };
    output.one(&shown, |text| tell(&shown, now, text))
}

/// The same from a server.
pub(crate) async fn ask(show: &Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/claims/{}", encoded(&show.entity));
    let shown: Shown = client.get(&path, &[("events", show.events.min(MOST).to_string())]).await?;
    output.one(&shown, |text| tell(&shown, now, text))
}

fn tell(shown: &Shown, now: Timestamp, text: &mut Text) {
    match &shown.claim {
        None => text.line(format!("No claim is on entity {:?}.", shown.entity)),
        Some(claim) => tell_claim(claim, now, text),
    }
    if shown.history.is_empty() {
        return;
    }
    text.line("");
    let mut table = Table::new(&["WHEN", "WHAT", "STEP", "FROM", "TO", "REQUESTER", "ACTOR", "REASON"]);
    for transition in &shown.history {
        table.row([
            transition.at.relative_to(now).into(),
            transition.kind().into(),
            transition.step.clone().into(),
            transition.from.clone().into(),
            transition.to.clone().into(),
            transition.requester.clone().into(),
            transition.actor.clone().unwrap_or_default().into(),
            transition.reason.clone().into(),
        ]);
    }
    text.table(table);
}

fn tell_claim(claim: &ClaimFields, now: Timestamp, text: &mut Text) {
    let ClaimFields { entity, workflow, step, claim_into, revert_to, successful_state, .. } = claim;
    text.line(format!("Entity {:?} is claimed by step {step:?} of workflow {workflow:?}.", &**entity));
    text.line(format!("It is at {claim_into:?}, came from {revert_to:?}, and goes to {successful_state:?}."));
    let action = claim.action.as_deref().unwrap_or_default();
    let actor = claim.actor.as_ref().map_or(String::new(), |actor| format!(" ({actor})"));
    let (since, times) = (claim.since.relative_to(now), if claim.attempts == 1 { "time" } else { "times" });
    text.line(format!(
        "Action {action:?} has begun {} {times} for {}{actor}, {since}; the token is {}.",
        claim.attempts, claim.requester, claim.token
    ));
    match &claim.needs_review {
        Some(reason) => text.line(format!("It needs review: {reason}.")),
        None => {
            let lease = claim.lease(now);
            let lease =
                if lease.is_empty() { lease } else { format!("; its lease {}", lease.replace("over", "is over")) };
            text.line(format!("It is held by {}{lease}.", claim.owner));
        }
    }
}
