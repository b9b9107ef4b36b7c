//! `latch review list`: the open reviews.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::Executions;

use crate::client::Client;
use crate::output::{Cell, Output, Table, Tone, shortened};
use crate::paging::Paging;
use crate::review::fields::ReviewFields;

#[derive(Args)]
pub(crate) struct List {
    /// Only reviews of this workflow.
    #[arg(long, value_name = "WORKFLOW")]
    workflow: Option<String>,
    /// Only reviews of this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    #[command(flatten)]
    paging: Paging,
}

pub(crate) async fn run(list: &List, executions: &Executions, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let reviews = list.workflow.iter().fold(executions.reviews(), |reviews, it| reviews.workflow(it));
    let reviews = list.name.iter().fold(reviews, |reviews, it| reviews.name(it));
    list.paging
        .write(
            "reviews",
            output,
            |found| table(found, now),
            async |limit, after| Ok(reviews.clone().limit(limit).after(after).await?.map(ReviewFields::of)),
        )
        .await
}

/// The same from a server.
pub(crate) async fn ask(list: &List, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let workflow = list.workflow.iter().map(|workflow| ("workflow", workflow.clone()));
    let query: Vec<_> = workflow.chain(list.name.iter().map(|name| ("name", name.clone()))).collect();
    list.paging
        .write(
            "reviews",
            output,
            |found| table(found, now),
            async |limit, after| client.page::<ReviewFields>("/reviews", &query, limit, after).await,
        )
        .await
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
