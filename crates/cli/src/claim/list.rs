//! `latch claim list`: open claims by their entities.

use anyhow::Result;
use clap::Args;
use latchwork::claim::StoredClaims;
use latchwork::store::Timestamp;

use crate::claim::fields::ClaimFields;
use crate::client::Client;
use crate::output::{Cell, Output, Table, Tone, shortened};
use crate::paging::Paging;

#[derive(Args)]
pub(crate) struct List {
    /// Only claims that need review.
    #[arg(long)]
    needs_review: bool,
    #[command(flatten)]
    paging: Paging,
}

pub(crate) async fn run(list: &List, claims: &StoredClaims, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let claims = if list.needs_review { claims.list().needs_review() } else { claims.list() };
    list.paging
        .write(
            "claims",
            output,
            |found| table(found, now),
            async |limit, after| Ok(claims.clone().limit(limit).after(after).await?.map(ClaimFields::of)),
        )
        .await
}

/// The same from a server.
pub(crate) async fn ask(list: &List, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let query: Vec<_> = list.needs_review.then(|| ("needs_review", "true".to_string())).into_iter().collect();
    list.paging
        .write(
            "claims",
            output,
            |found| table(found, now),
            async |limit, after| client.page::<ClaimFields>("/claims", &query, limit, after).await,
        )
        .await
}

fn table(found: &[ClaimFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["ENTITY", "WORKFLOW", "STEP", "STATUS", "SINCE", "HELD BY", "LEASE"]);
    for claim in found {
        let tone = if claim.needs_review.is_some() { Tone::Attention } else { Tone::Plain };
        table.row([
            claim.entity.to_string().into(),
            claim.workflow.clone().into(),
            claim.step.clone().into(),
            claim.claim_into.clone().into(),
            claim.since.relative_to(now).into(),
            Cell::new(shortened(&claim.holder(), 60), tone),
            Cell::new(claim.lease(now), Tone::Dim),
        ]);
    }
    table
}
