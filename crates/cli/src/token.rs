//! `latch token`: makes tokens for a server, and hashes of tokens. The configuration of a server holds hashes alone.

mod create;
mod hash;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use latchwork_server::{Role, Token};
use serde::Serialize;

use crate::output::{Exit, Output, Problem, Text};

#[derive(Subcommand)]
pub(crate) enum TokenCommand {
    /// Makes a token. It is printed once; what a server stores of it is printed, too.
    Create(create::Create),
    /// Reads a token from the standard input and prints what a server stores of it.
    Hash(hash::Hash),
}

/// What a token is called and allows.
#[derive(Args)]
pub(crate) struct Terms {
    /// The name of the token, which stands in logs and in the history of entities.
    #[arg(long)]
    name: String,
    /// What the token allows. Each role includes those before it.
    #[arg(long, value_enum, default_value = "operate")]
    role: RoleWord,
    /// A namespace in which the token is valid; without any, it is valid in all.
    #[arg(long = "in", value_name = "NAMESPACE")]
    namespaces: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RoleWord {
    /// Sees everything, and changes nothing.
    Read,
    /// Does what programs do.
    Operate,
    /// Does what operators do, too: forced releases, removal, backup, declarations.
    Admin,
}

impl RoleWord {
    fn role(self) -> Role {
        match self {
            RoleWord::Read => Role::Read,
            RoleWord::Operate => Role::Operate,
            RoleWord::Admin => Role::Admin,
        }
    }
}

/// A token, as it is printed.
#[derive(Serialize)]
struct Made {
    /// The text that clients send, if it was made just now.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(flatten)]
    stored: Token,
}

pub(crate) fn run(command: TokenCommand, output: &mut Output<'_>) -> Result<()> {
    match command {
        TokenCommand::Create(create) => create::run(create, output),
        TokenCommand::Hash(hash) => hash::run(hash, output),
    }
}

fn usage(error: latchwork_server::AccessError) -> Problem {
    Problem::new(Exit::Usage, error.to_string())
}

impl Made {
    /// The lines of a configuration file.
    fn lines(&self, text: &mut Text) {
        let quoted = |value: &str| serde_json::Value::from(value).to_string();
        let role = serde_json::json!(self.stored.role());
        text.line("[[tokens]]");
        text.line(format!("name = {}", quoted(self.stored.name())));
        text.line(format!("hash = {}", quoted(self.stored.hash())));
        text.line(format!("role = {role}"));
        if !self.stored.valid_in().is_empty() {
            text.line(format!("namespaces = {}", serde_json::json!(self.stored.valid_in())));
        }
    }
}
