//! `latch claim dead`: lists after-effects that could not be delivered, and delivers them again.

use anyhow::Result;
use clap::{Args, Subcommand};
use latchwork::claim::StoredClaims;
use latchwork::store::Timestamp;
use serde::de::IgnoredAny;
use serde_json::json;

use crate::claim::change::operate;
use crate::claim::fields::DeadFields;
use crate::client::{Client, encoded};
use crate::output::{Output, Table, shortened};
use crate::paging::Paging;
use crate::store::StoreArgument;

#[derive(Subcommand)]
pub(crate) enum Dead {
    /// Lists after-effects that could not be delivered.
    List(List),
    /// Delivers an after-effect again, with its attempts reset. The next program that has its handler does it.
    Retry(Retry),
}

#[derive(Args)]
pub(crate) struct List {
    #[command(flatten)]
    paging: Paging,
}

#[derive(Args)]
pub(crate) struct Retry {
    /// The key, as `dead list` shows it.
    key: String,
}

pub(crate) async fn list(list: &List, claims: &StoredClaims, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    list.paging
        .write(
            "dead_letters",
            output,
            |found| table(found, now),
            async |limit, after| Ok(claims.dead_letters().limit(limit).after(after).await?.map(DeadFields::of)),
        )
        .await
}

/// The same from a server.
pub(crate) async fn ask(list: &List, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    list.paging
        .write(
            "dead_letters",
            output,
            |found| table(found, now),
            async |limit, after| client.page::<DeadFields>("/claim-outbox/dead", &[], limit, after).await,
        )
        .await
}

fn table(found: &[DeadFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["KEY", "AFTER-EFFECT", "ENTITY", "ATTEMPTS", "LAST TRIED", "ERROR"]);
    for letter in found {
        table.row([
            letter.key.clone().into(),
            letter.name.clone().into(),
            letter.entity.to_string().into(),
            letter.attempts.to_string().into(),
            letter.at.relative_to(now).into(),
            shortened(&letter.error, 60).into(),
        ]);
    }
    table
}

pub(crate) async fn retry(retry: Retry, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let key = retry.key.as_str();
    operate(store, async |operator| operator.redeliver(key).await).await?;
    tell(key, output)
}

/// The same through a server.
pub(crate) async fn ask_retry(retry: &Retry, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/claim-outbox/dead/{}/retry", encoded(&retry.key));
    client.post::<IgnoredAny>(&path, &[], &()).await?;
    tell(&retry.key, output)
}

fn tell(key: &str, output: &mut Output<'_>) -> Result<()> {
    output.one(&json!({"key": key}), |text| {
        text.line(format!("After-effect {key} is delivered again by the next program that has its handler."));
    })
}
