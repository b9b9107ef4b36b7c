//! `latch workflow history`: writes histories, as files that code can be checked against.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use latchwork::store::Store;
use latchwork::workflow::{self, ExecutionId, WorkflowError};
use serde::Serialize;

use crate::client::{Client, encoded};
use crate::output::{Format, Output};
use crate::paging::first;
use crate::workflow::fields::ListedFields;

#[derive(Args)]
pub(crate) struct History {
    /// A directory for one file for each execution. Without it, histories are printed, one a line.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only executions of this workflow.
    #[arg(long = "type", visible_alias = "workflow", value_name = "WORKFLOW")]
    workflow: Option<String>,
    /// The executions' ids; without any, all executions.
    ids: Vec<String>,
}

/// What was written to files.
#[derive(Serialize)]
struct Written {
    histories: usize,
    directory: String,
}

/// Where histories are read from.
enum Source<'a> {
    Store(&'a Store),
    Server(&'a Client),
}

impl Source<'_> {
    async fn ids(&self) -> Result<Vec<ExecutionId>> {
        match self {
            Source::Store(store) => Ok(workflow::History::ids(store).await?.into_iter().map(|(id, _)| id).collect()),
            Source::Server(client) => {
                let listed = first(usize::MAX, async |limit, after| {
                    client.page::<ListedFields>("/workflows", &[], limit, after).await
                });
                let mut ids: Vec<ExecutionId> = listed.await?.into_iter().map(|listed| listed.id).collect();
                // In the order of the store.
                ids.sort();
                Ok(ids)
            }
        }
    }

    async fn history(&self, id: ExecutionId) -> Result<workflow::History> {
        match self {
            Source::Store(store) => {
                Ok(workflow::History::of(store, &id).await?.ok_or(WorkflowError::NotFound { id })?)
            }
            Source::Server(client) => client.get(&format!("/workflows/{}/history/export", encoded(&id)), &[]).await,
        }
    }
}

pub(crate) async fn run(asked: History, store: &Store, output: &mut Output<'_>) -> Result<()> {
    write_all(asked, &Source::Store(store), output).await
}

/// The same from a server.
pub(crate) async fn ask(asked: History, client: &Client, output: &mut Output<'_>) -> Result<()> {
    write_all(asked, &Source::Server(client), output).await
}

async fn write_all(asked: History, source: &Source<'_>, output: &mut Output<'_>) -> Result<()> {
    let ids: Vec<ExecutionId> = match asked.ids.is_empty() {
        true => source.ids().await?,
        false => asked.ids.into_iter().map(Into::into).collect(),
    };
    if let Some(out) = &asked.out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    }
    let (mut count, mut kept) = (0, Vec::new());
    for id in ids {
        let history = source.history(id).await?;
        if asked.workflow.as_ref().is_some_and(|workflow| *workflow != history.workflow) {
            continue;
        }
        count += 1;
        match &asked.out {
            Some(out) => write(out, &history)?,
            // JSON is one value, so all histories are collected first.
            None if output.format() == Format::Json => kept.push(history),
            None => output.line(&history)?,
        }
    }
    match asked.out {
        Some(out) => {
            let written = Written { histories: count, directory: out.display().to_string() };
            output.one(&written, |text| text.line(format!("{count} histories in {}", out.display())))
        }
        None if output.format() == Format::Json => output.one(&serde_json::json!({ "histories": kept }), |_| {}),
        None => Ok(()),
    }
}

fn write(out: &Path, history: &workflow::History) -> Result<()> {
    let path = out.join(format!("{}.json", file_name(&history.id)));
    let text = serde_json::to_string_pretty(history)?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A name that every file system accepts and that no two ids share.
fn file_name(id: &str) -> String {
    let mut name = String::new();
    for byte in id.bytes() {
        match byte {
            b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => name.push(char::from(byte)),
            _ => name.push_str(&format!("%{byte:02x}")),
        }
    }
    if name.len() <= 200 {
        return name;
    }
    // A file name has at most 255 bytes.
    format!("{}~{:016x}", &name[..200], xxhash_rust::xxh3::xxh3_64(id.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_names_of_files() {
        assert_eq!(file_name("transfer-42"), "transfer-42");
        assert_eq!(file_name("../A b"), "%2e%2e%2f%41%20b");
        let long = file_name(&"ü".repeat(256));
        assert!(long.len() < 250 && long != file_name(&"ü".repeat(255)), "{long}");
    }
}
