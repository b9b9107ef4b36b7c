//! `latch claim dead`: lists after-effects that could not be delivered, and delivers them again.

use std::path::Path;

use anyhow::Result;
use clap::{Args, Subcommand};
use latchwork::claim::StoredClaims;
use latchwork::store::Timestamp;
use serde_json::json;

use crate::claim::change::operate;
use crate::claim::fields::DeadFields;
use crate::output::{Output, Table, shortened};

/// The page size of reads.
const PAGE: usize = 1000;

#[derive(Subcommand)]
pub(crate) enum Dead {
    /// Lists after-effects that could not be delivered.
    List(List),
    /// Delivers an after-effect again, with its attempts reset. The next program that has its handler does it.
    Retry(Retry),
}

#[derive(Args)]
pub(crate) struct List {
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list: its `next`, which is a key.
    #[arg(long, value_name = "KEY")]
    after: Option<String>,
}

#[derive(Args)]
pub(crate) struct Retry {
    /// The key, as `dead list` shows it.
    key: String,
}

pub(crate) async fn list(list: List, claims: &StoredClaims, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let most = if list.all { usize::MAX } else { usize::try_from(list.limit).unwrap_or(usize::MAX) };
    let (mut after, mut found) = (list.after, Vec::new());
    loop {
        let page = claims.dead_letters(after.as_deref(), PAGE).await?;
        let is_last = page.len() < PAGE;
        found.extend(page.into_iter().map(DeadFields::of));
        after = found.last().map(|last| last.key.clone());
        if is_last || found.len() > most {
            break;
        }
    }
    let has_more = found.len() > most;
    found.truncate(most);
    let next = found.last().filter(|_| has_more).map(|last| last.key.clone());
    output.many("dead_letters", &found, next.as_deref(), |found| table(found, now))
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

pub(crate) async fn retry(retry: Retry, directory: &Path, output: &mut Output<'_>) -> Result<()> {
    let key = retry.key.as_str();
    operate(directory, async |operator| operator.redeliver(key).await).await?;
    output.one(&json!({"key": key}), |text| {
        text.line(format!("After-effect {key} is delivered again by the next program that has its handler."));
    })
}
