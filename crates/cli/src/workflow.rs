//! `latch workflow`: looks at the executions in a data directory that no process has open.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use latchwork::store::Store;
use latchwork::workflow::{ExecutionId, History, WorkflowError};

#[derive(Subcommand)]
pub(crate) enum Workflow {
    /// Writes the histories of executions, to files or one a line to the output, for `latchwork::testing::replay` to
    /// check new code against.
    History {
        /// The data directory.
        #[arg(long, default_value = "./latchwork-data")]
        store: PathBuf,
        /// A folder for one file an execution. Without it, histories are printed, one a line.
        #[arg(long)]
        out: Option<PathBuf>,
        /// Only executions of this workflow.
        #[arg(long)]
        workflow: Option<String>,
        /// The executions' ids; without any, all executions.
        ids: Vec<String>,
    },
}

pub(crate) async fn run(command: Workflow, output: &mut impl Write) -> Result<()> {
    let Workflow::History { store, out, workflow, ids } = command;
    if !store.is_dir() {
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(missing).with_context(|| format!("there is no data directory {}", store.display()));
    }
    let store = Store::open(&store).await?;
    let done = histories(&store, out.as_deref(), workflow.as_deref(), ids, output).await;
    store.close().await?;
    done
}

async fn histories(
    store: &Store,
    out: Option<&Path>,
    workflow: Option<&str>,
    ids: Vec<String>,
    output: &mut impl Write,
) -> Result<()> {
    let ids: Vec<ExecutionId> = match ids.is_empty() {
        true => History::ids(store).await?.into_iter().map(|(id, _)| id).collect(),
        false => ids.into_iter().map(Into::into).collect(),
    };
    if let Some(out) = out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    }
    let mut written = 0;
    for id in ids {
        let history = History::of(store, &id).await?.ok_or(WorkflowError::NotFound { id })?;
        if workflow.is_some_and(|workflow| workflow != history.workflow) {
            continue;
        }
        written += 1;
        match out {
            None => writeln!(output, "{}", serde_json::to_string(&history)?)?,
            Some(out) => {
                let path = out.join(format!("{}.json", file_name(&history.id)));
                let text = serde_json::to_string_pretty(&history)?;
                std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
    }
    if let Some(out) = out {
        writeln!(output, "{written} histories in {}", out.display())?;
    }
    Ok(())
}

/// A name that any file system takes, and no two ids share.
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
    // Names have at most 255 bytes.
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
