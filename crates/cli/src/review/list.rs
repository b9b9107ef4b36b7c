//! `latch review list`: the open reviews.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::{Cursor, Executions};

use crate::output::{Cell, Format, Output, Table, Tone, shortened};
use crate::review::fields::ReviewFields;

/// The page size of reads.
const PAGE: u64 = 1000;

#[derive(Args)]
pub(crate) struct List {
    /// Only reviews of this workflow.
    #[arg(long, value_name = "WORKFLOW")]
    workflow: Option<String>,
    /// Only reviews of this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list: its `next`.
    #[arg(long, value_name = "CURSOR")]
    after: Option<Cursor>,
}

pub(crate) async fn run(list: List, executions: &Executions, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let reviews = list.workflow.into_iter().fold(executions.reviews(), |reviews, it| reviews.workflow(it));
    let reviews = list.name.into_iter().fold(reviews, |reviews, it| reviews.name(it));
    let (mut found, mut next) = (Vec::new(), list.after);
    let mut left = if list.all { u64::MAX } else { list.limit };
    loop {
        let limit = usize::try_from(left.min(PAGE)).unwrap_or(usize::MAX);
        let page = reviews.clone().limit(limit).after(next.take()).await?;
        left -= page.reviews.len() as u64;
        found.extend(page.reviews.into_iter().map(ReviewFields::of));
        next = page.next;
        if next.is_none() || left == 0 {
            break;
        }
        if output.format() == Format::Jsonl {
            // Each page is written at once, so that a long list does not fill memory.
            found.drain(..).try_for_each(|review| output.line(&review))?;
        }
    }
    let next = next.map(|next| next.to_string());
    output.many("reviews", &found, next.as_deref(), |found| table(found, now))
}

fn table(found: &[ReviewFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["REVIEW", "WORKFLOW", "NAME", "OPENED", "UNTIL", "OPTIONS", "QUESTION"]);
    for review in found {
        let until = review.until.map_or(String::new(), |until| until.relative_to(now));
        table.row([
            review.id.clone().into(),
            review.workflow.clone().into(),
            review.name.clone().into(),
            Cell::new(review.opened_at.relative_to(now), Tone::Dim),
            until.into(),
            shortened(&review.options.join(", "), 40).into(),
            shortened(&review.asked(), 60).into(),
        ]);
    }
    table
}
