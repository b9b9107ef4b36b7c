//! `latch completions`: scripts by which shells complete this command.

use std::io::Write;

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

#[derive(Args)]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn run(completions: &Completions, mut command: Command, out: &mut dyn Write) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(completions.shell, &mut command, "latch", &mut script);
    Ok(out.write_all(&script)?)
}
