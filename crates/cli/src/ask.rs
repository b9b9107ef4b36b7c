//! Questions to the person at the terminal, before something is done that cannot be undone.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Result;

use crate::output::{Exit, Problem, plain};

/// Asks for confirmation, unless it was given on the command line. `refusal` says what has not happened.
pub(crate) fn confirm(question: &str, yes: bool, refusal: &str) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(Problem::new(Exit::Usage, "no terminal to ask for confirmation: use --yes").into());
    }
    let mut err = std::io::stderr();
    write!(err, "{}", plain(&format!("{question} [y/N] ")))?;
    err.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Problem::new(Exit::Failed, refusal).into()),
    }
}
