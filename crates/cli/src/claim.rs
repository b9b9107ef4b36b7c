//! `latch claim`: looks at configurations of claim workflows. No data directory is needed.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use latchwork::claim::{self, Checked, Finding};
use serde::Serialize;

use crate::output::{Cell, Output, Table, Tone};

#[derive(Subcommand)]
pub(crate) enum Claim {
    /// Tells everything that is wrong with configurations.
    Validate(Validate),
    /// Prints the statuses and steps of a claim workflow as a Mermaid diagram, with claiming statuses dashed.
    Diagram(Diagram),
    /// Prints the JSON schema of configurations, for editors.
    Schema,
}

#[derive(Args)]
pub(crate) struct Validate {
    /// The files.
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

#[derive(Args)]
pub(crate) struct Diagram {
    /// The file.
    file: PathBuf,
    /// The workflow, if the file has several.
    #[arg(long)]
    workflow: Option<String>,
}

pub(crate) fn run(command: Claim, output: &mut Output<'_>) -> Result<()> {
    match command {
        Claim::Validate(validate) => run_validate(&validate, output),
        Claim::Diagram(diagram) => run_diagram(&diagram, output),
        Claim::Schema => {
            let schema = claim::json_schema();
            output.one(&schema, |text| format!("{schema:#}").lines().for_each(|line| text.line(line)))
        }
    }
}

/// A finding and the file it is in.
#[derive(Serialize)]
struct Found {
    file: String,
    severity: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

fn read(file: &PathBuf) -> Result<Checked> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok(claim::check_json(&text))
}

fn run_validate(validate: &Validate, output: &mut Output<'_>) -> Result<()> {
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

fn run_diagram(diagram: &Diagram, output: &mut Output<'_>) -> Result<()> {
    let file = diagram.file.display();
    let checked = read(&diagram.file)?;
    if let Some(finding) = checked.findings.iter().find(|finding| !finding.rule.is_warning()) {
        bail!("{file}:{finding}\nlatch claim validate {file} tells everything that is wrong");
    }
    let is_asked = |name: &str| diagram.workflow.as_deref().is_none_or(|asked| asked == name);
    let mut asked = checked.workflows.iter().filter(|workflow| is_asked(&workflow.name));
    let (Some(workflow), None) = (asked.next(), asked.next()) else {
        let names: Vec<&str> = checked.workflows.iter().map(|workflow| workflow.name.as_str()).collect();
        bail!("say which workflow with --workflow; {file} has {}", names.join(", "));
    };
    let drawn = workflow.diagram();
    output.one(&drawn, |text| drawn.lines().for_each(|line| text.line(line)))
}
