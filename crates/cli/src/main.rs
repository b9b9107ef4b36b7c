//! `latch`, the Latchwork command. One file for each subcommand; this file only reads the command line. `output.rs`
//! owns the format of answers, errors and exit codes.

mod claim;
mod dev;
mod lock;
mod node;
mod output;
mod paging;
mod review;
mod schedule;
mod store;
mod time;
mod workflow;

use std::io::{BufWriter, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::output::{EXIT_CODES, Exit, Format, Output, Problem};
use crate::store::StoreArgument;

/// Durable work that happens once.
#[derive(Parser)]
#[command(name = "latch", version, after_help = EXIT_CODES)]
struct Latch {
    /// The data directory, or a PostgreSQL database: postgres://user@host/database. PGPASSWORD is the password.
    #[arg(long, global = true, default_value = "./latchwork-data", value_name = "DIRECTORY|URL")]
    store: std::ffi::OsString,
    /// The schema of the database that holds the store; latchwork by default.
    #[arg(long, global = true, value_name = "NAME")]
    schema: Option<String>,
    /// The format of the answer. With JSON, errors are JSON, too.
    #[arg(short, long, global = true, value_enum, default_value = "table", value_name = "FORMAT")]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A demonstration to kill: transfers and invoices that continue where they were, no matter how often that happens.
    #[command(after_help = EXIT_CODES)]
    Dev(dev::Dev),
    /// Looks at configurations of claim workflows, and at the claims in a data directory that no process has open. Can
    /// end claims there. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Claim {
        #[command(subcommand)]
        command: claim::Claim,
    },
    /// Looks at the locks in a data directory that no process has open, or forces a release. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Lock {
        #[command(subcommand)]
        command: lock::Lock,
    },
    /// Looks at the nodes that share a database, or drains one. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Node {
        #[command(subcommand)]
        command: node::Node,
    },
    /// Looks at the reviews in a data directory that no process has open, or decides one. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Review {
        #[command(subcommand)]
        command: review::Review,
    },
    /// Looks at the schedules in a data directory that no process has open, or changes them. Starts nothing.
    #[command(after_help = EXIT_CODES)]
    Schedule {
        #[command(subcommand)]
        command: schedule::Schedule,
    },
    /// Looks at the workflows in a data directory that no process has open. Runs and changes nothing.
    #[command(after_help = EXIT_CODES)]
    Workflow {
        #[command(subcommand)]
        command: workflow::Workflow,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let latch = match Latch::try_parse() {
        Ok(latch) => latch,
        Err(error) => return usage(&error),
    };
    let format = latch.output;
    match run(latch).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match Problem::of(error) {
            // The reader of the output has closed it.
            None => ExitCode::SUCCESS,
            Some(problem) => {
                problem.tell(format);
                ExitCode::from(problem.exit as u8)
            }
        },
    }
}

async fn run(latch: Latch) -> Result<()> {
    let Latch { store, schema, output, command } = latch;
    let store = StoreArgument::new(store, schema).map_err(|wrong| Problem::new(Exit::Usage, wrong))?;
    let mut out = BufWriter::new(std::io::stdout());
    let done = match command {
        Command::Dev(dev) => dev::run(dev, &store, &mut Output::new(output, &mut out)).await,
        Command::Claim { command } => claim::run(command, &store, &mut Output::new(output, &mut out)).await,
        Command::Lock { command } => lock::run(command, &store, &mut Output::new(output, &mut out)).await,
        Command::Node { command } => node::run(command, &store, &mut Output::new(output, &mut out)).await,
        Command::Review { command } => review::run(command, &store, &mut Output::new(output, &mut out)).await,
        Command::Schedule { command } => schedule::run(command, &store, &mut Output::new(output, &mut out)).await,
        Command::Workflow { command } => workflow::run(command, &store, &mut Output::new(output, &mut out)).await,
    };
    // What was found before an error is printed, too.
    let flushed = out.flush();
    done?;
    Ok(flushed?)
}

/// Reports a wrong command line, or prints the help.
fn usage(error: &clap::Error) -> ExitCode {
    let arguments: Vec<String> = std::env::args_os().map(|text| text.to_string_lossy().into_owned()).collect();
    let is_json = |two: &[String]| matches!(two[0].as_str(), "-o" | "--output") && two[1].starts_with("json");
    let joined = ["-ojson", "-o=json", "--output=json"];
    let asks = arguments.windows(2).any(is_json)
        || arguments.iter().any(|argument| joined.iter().any(|start| argument.starts_with(start)));
    let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asks && !is_help {
        let message = error.to_string();
        Problem::new(Exit::Usage, message.trim().trim_start_matches("error: ")).tell(Format::Json);
    } else {
        let _ = error.print();
    }
    ExitCode::from(error.exit_code() as u8)
}
