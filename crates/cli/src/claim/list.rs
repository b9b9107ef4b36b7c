//! `latch claim list`: open claims by their entities.

use anyhow::Result;
use clap::Args;
use latchwork::claim::StoredClaims;
use latchwork::entity::EntityId;
use latchwork::store::Timestamp;

use crate::claim::fields::ClaimFields;
use crate::output::{Cell, Format, Output, Table, Tone, shortened};

/// The page size of reads.
const PAGE: usize = 1000;

#[derive(Args)]
pub(crate) struct List {
    /// Only claims that need review.
    #[arg(long)]
    needs_review: bool,
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list: its `next`, which is an entity.
    #[arg(long, value_name = "ENTITY")]
    after: Option<String>,
}

pub(crate) async fn run(list: List, claims: &StoredClaims, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let mut after = list.after.map(EntityId::from);
    let most = if list.all { usize::MAX } else { usize::try_from(list.limit).unwrap_or(usize::MAX) };
    let (mut found, mut told, mut last, mut next) = (Vec::new(), 0, None, None);
    'all: loop {
        let page = claims.list(after.as_ref(), PAGE).await?;
        after = page.last().filter(|_| page.len() == PAGE).map(|claim| claim.entity.clone());
        for claim in page.into_iter().filter(|claim| !list.needs_review || claim.holder.needs_review.is_some()) {
            if told == most {
                next = last;
                break 'all;
            }
            (told, last) = (told + 1, Some(claim.entity.clone()));
            found.push(ClaimFields::of(claim));
        }
        if after.is_none() {
            break;
        }
        if output.format() == Format::Jsonl {
            // Each page is written at once, so that a long list does not fill memory.
            found.drain(..).try_for_each(|claim| output.line(&claim))?;
        }
    }
    output.many("claims", &found, next.as_deref(), |found| table(found, now))
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
