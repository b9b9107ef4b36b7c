//! `latch claim validate`: reports everything that is wrong with configurations. It needs no data directory.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use latchwork::claim::Finding;
use serde::Serialize;

use crate::claim::read;
use crate::output::{Cell, Output, Table, Tone};

#[derive(Args)]
pub(crate) struct Validate {
    /// The configuration files.
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// A finding and its file.
#[derive(Serialize)]
struct Found {
    file: String,
    severity: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

pub(crate) fn run(validate: &Validate, output: &mut Output<'_>) -> Result<()> {
    let mut found = Vec::new();
    for file in &validate.files {
        found.extend(read(file)?.findings.into_iter().map(|finding| Found {
            file: file.display().to_string(),
            severity: if finding.rule.is_warning() { "warning" } else { "error" },
            finding,
        }));
    }
    output.many("findings", &found, None, table)?;
    match found.iter().filter(|found| found.severity == "error").count() {
        0 => Ok(()),
        1 => bail!("there is one error"),
        errors => bail!("there are {errors} errors"),
    }
}

fn table(found: &[Found]) -> Table {
    let mut table = Table::new(&["PLACE", "", "WORKFLOW", "STEP", "REQUESTER", "RULE", "WHAT IS WRONG"]);
    for Found { file, severity, finding } in found {
        let place = finding.position.map_or(file.clone(), |at| format!("{file}:{}:{}", at.line, at.column));
        let tone = if *severity == "error" { Tone::Bad } else { Tone::Attention };
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        table.row([
            place.into(),
            Cell::new(*severity, tone),
            name(&finding.workflow).into(),
            name(&finding.step).into(),
            name(&finding.requester).into(),
            finding.rule.to_string().into(),
            finding.message.clone().into(),
        ]);
    }
    table
}
