//! `latch token hash`: what a server stores of a token that exists. The token comes from the standard input: other
//! users of the machine can read a command line.

use std::io::{IsTerminal, Read};

use anyhow::{Context, Result};
use clap::Args;
use latchwork_server::Token;

use crate::output::{Exit, Output, Problem};
use crate::token::{Made, Terms, usage};

/// A shorter token can be guessed from its hash.
const SHORTEST: usize = 32;
const LONGEST: u64 = 4096;

#[derive(Args)]
pub(crate) struct Hash {
    #[command(flatten)]
    terms: Terms,
}

pub(crate) fn run(Hash { terms }: Hash, output: &mut Output<'_>) -> Result<()> {
    if std::io::stdin().is_terminal() {
        eprintln!("Type the token, and end it with a new line and Ctrl+D.");
    }
    let mut text = String::new();
    std::io::stdin().lock().take(LONGEST).read_to_string(&mut text).context("cannot read the token")?;
    let secret = text.trim();
    if secret.len() < SHORTEST || secret.contains(char::is_whitespace) {
        let why = format!("a token is one word of at least {SHORTEST} random letters: use `latch token create`");
        return Err(Problem::new(Exit::Usage, why).into());
    }
    let stored = Token::of_secret(&terms.name, secret, terms.role.role()).map_err(usage)?;
    let made = Made { token: None, stored: stored.namespaces(terms.namespaces) };
    output.one(&made, |text| made.lines(text))
}
