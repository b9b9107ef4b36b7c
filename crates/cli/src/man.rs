//! `latch man`: manual pages of this command and all its subcommands.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_mangen::Man;

use crate::output::{Exit, Problem};

#[derive(Args)]
pub(crate) struct Manual {
    /// Writes the page of every command into this folder, for example ~/.local/share/man/man1.
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    out: Option<PathBuf>,
    /// The command whose page is printed, for example: lock run.
    command: Vec<String>,
}

pub(crate) fn run(manual: &Manual, mut command: Command, out: &mut dyn Write) -> Result<()> {
    command.build();
    if let Some(folder) = &manual.out {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        return write_all(&command, folder);
    }
    let mut found = &command;
    for word in &manual.command {
        let next = found.get_subcommands().find(|inner| inner.get_name() == word && !inner.is_hide_set());
        let missing = || Problem::new(Exit::NotFound, format!("there is no command {:?}", manual.command.join(" ")));
        found = next.ok_or_else(missing)?;
    }
    let mut page = Vec::new();
    page_of(found).render(&mut page)?;
    Ok(out.write_all(&page)?)
}

fn page_of(command: &Command) -> Man {
    let command = command.clone().override_usage(synopsis(command));
    Man::new(command).manual("Latchwork").source(concat!("latch ", env!("CARGO_PKG_VERSION")))
}

/// A line for the command, or for each command below it. The options of all commands would hide its own.
fn synopsis(command: &Command) -> String {
    let inner: Vec<&Command> = command.get_subcommands().filter(is_shown).collect();
    match inner.is_empty() {
        true => command.clone().render_usage().to_string().trim_start_matches("Usage:").trim().to_string(),
        false => inner.into_iter().map(synopsis).collect::<Vec<_>>().join("\n"),
    }
}

fn is_shown(command: &&Command) -> bool {
    !command.is_hide_set() && command.get_name() != "help"
}

/// Writes the page of a command and of those below it.
fn write_all(command: &Command, folder: &Path) -> Result<()> {
    let page = page_of(command);
    let name = page.get_filename();
    let mut text = Vec::new();
    page.render(&mut text)?;
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    command.get_subcommands().filter(is_shown).try_for_each(|inner| write_all(inner, folder))
}
