//! `latch schedule backfill`: starts the occurrences of a past range.

use anyhow::Result;
use clap::Args;
use latchwork::json;
use latchwork::store::Timestamp;

use crate::client::{ApiCall, Client, encoded};
use crate::output::Output;
use crate::time::{Time, absolute};

#[derive(Args)]
pub(crate) struct Backfill {
    /// The schedule's name.
    name: String,
    /// The begin of the range.
    #[arg(long, value_name = "TIME", value_parser = absolute)]
    from: Timestamp,
    /// The end of the range, which is in the past.
    #[arg(long, value_name = "TIME", value_parser = absolute)]
    to: Timestamp,
}

pub(super) async fn run(backfill: Backfill, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Backfill { name, from, to } = backfill;
    let body = json!({"from": Time(from), "to": Time(to)});
    let call = ApiCall::post(format!("/schedules/{}/backfill", encoded(&name))).body(body);
    let done = client.call(call).await?;
    output.one(&done, |text| {
        let when = if client.is_here() { "when an engine starts" } else { "now, one after the other" };
        text.line(format!("{} occurrences of schedule {name:?} are started {when}.", done["occurrences"]));
    })
}
