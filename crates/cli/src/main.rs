//! `latch`, the Latchwork command. One file a subcommand; this one only reads the command line and turns errors into
//! exit codes.

mod dev;
mod workflow;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use latchwork::store::{ErrorKind, StoreError};
use latchwork::workflow::WorkflowError;

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 5 conflict, 75 busy (try again later)";

/// Durable work that happens once.
#[derive(Parser)]
#[command(name = "latch", version, after_help = EXIT_CODES)]
struct Latch {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Opens a store and shows what it does: commits, conflicts, time travel and watch.
    Dev {
        /// The data directory. It is created if it is missing.
        #[arg(long, default_value = "./latchwork-data")]
        store: PathBuf,
    },
    /// Looks at the workflows in a data directory that no process has open.
    Workflow {
        #[command(subcommand)]
        command: workflow::Workflow,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let latch = Latch::parse();
    let done = match latch.command {
        Command::Dev { store } => dev::run(&store, &mut std::io::stdout()).await,
        Command::Workflow { command } => workflow::run(command, &mut std::io::stdout()).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read the output has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Files name themselves in their errors; what remains is the output.
            let bare = error.is::<std::io::Error>() && error.chain().count() == 1;
            let output = if bare { "cannot write the output: " } else { "" };
            eprintln!("latch: {output}{error:#}");
            ExitCode::from(code(&error))
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

/// See [`EXIT_CODES`].
fn code(error: &anyhow::Error) -> u8 {
    let kind = match (error.downcast_ref::<StoreError>(), error.downcast_ref::<WorkflowError>()) {
        (Some(StoreError::Locked { .. }), _) | (_, Some(WorkflowError::Store(StoreError::Locked { .. }))) => return 75,
        (Some(error), _) => error.kind(),
        (_, Some(error)) => error.kind(),
        (None, None) => match error.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
            Some(std::io::ErrorKind::NotFound) => ErrorKind::NotFound,
            _ => return 1,
        },
    };
    match kind {
        ErrorKind::Invalid => 2,
        ErrorKind::NotFound => 3,
        ErrorKind::Conflict => 5,
        ErrorKind::Unavailable | ErrorKind::Corrupt => 1,
    }
}
