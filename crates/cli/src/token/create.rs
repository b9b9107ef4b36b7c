//! `latch token create`: makes a token of random bits, and prints it once.

use anyhow::Result;
use clap::Args;
use latchwork::store::Env;
use latchwork_server::{NewToken, Token};

use crate::output::Output;
use crate::token::{Made, Terms, usage};

#[derive(Args)]
pub(crate) struct Create {
    #[command(flatten)]
    terms: Terms,
}

pub(crate) fn run(Create { terms }: Create, output: &mut Output<'_>) -> Result<()> {
    let new = NewToken::generate(&terms.name, terms.role.role(), &Env::system()).namespaces(terms.namespaces);
    // The name is checked before anything is printed.
    Token::new(&terms.name, new.token().hash(), terms.role.role()).map_err(usage)?;
    let made = Made { token: Some(new.secret().into()), stored: new.token() };
    output.one(&made, |text| {
        text.line("# The token, which is not shown again:");
        text.line(format!("# {}", new.secret()));
        text.line("# For latchwork.toml, or the token file of the server:");
        made.lines(text);
    })
}
