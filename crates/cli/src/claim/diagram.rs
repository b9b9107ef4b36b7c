//! `latch claim diagram`: prints a claim workflow as a Mermaid diagram. It needs no data directory.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;

use crate::claim::read;
use crate::output::Output;

#[derive(Args)]
pub(crate) struct Diagram {
    /// The configuration file.
    file: PathBuf,
    /// The workflow, if the file has several.
    #[arg(long)]
    workflow: Option<String>,
}

pub(crate) fn run(diagram: &Diagram, output: &mut Output<'_>) -> Result<()> {
    let file = diagram.file.display();
    let checked = read(&diagram.file)?;
    if let Some(finding) = checked.findings.iter().find(|finding| !finding.rule.is_warning()) {
        bail!("{file}:{finding}\nrun latch claim validate {file} to see everything that is wrong");
    }
    let is_asked = |name: &str| diagram.workflow.as_deref().is_none_or(|asked| asked == name);
    let mut asked = checked.workflows.iter().filter(|workflow| is_asked(&workflow.name));
    let (Some(workflow), None) = (asked.next(), asked.next()) else {
        let names: Vec<&str> = checked.workflows.iter().map(|workflow| workflow.name.as_str()).collect();
        bail!("choose a workflow with --workflow; {file} has {}", names.join(", "));
    };
    let drawn = workflow.diagram();
    output.one(&drawn, |text| drawn.lines().for_each(|line| text.line(line)))
}
