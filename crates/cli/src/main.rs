//! `latch`, the Latchwork command. One file for each subcommand; this file only reads the command line. `output.rs`
//! owns the format of answers, errors and exit codes.

mod api;
mod ask;
mod claim;
mod client;
mod completions;
mod config;
mod dev;
mod entity;
mod flow;
mod given;
mod lock;
mod man;
mod node;
mod output;
mod paging;
mod progress;
mod review;
mod schedule;
mod serve;
mod shown;
mod signals;
mod state;
mod store;
mod tail;
mod target;
mod task;
mod time;
mod token;
mod unpack;
mod workflow;

use std::io::{BufWriter, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::output::{EXIT_CODES, Ended, Exit, Format, Output, Problem};
use crate::target::{COMMON, Target, TargetOptions};

/// Durable work that happens once.
#[derive(Parser)]
#[command(name = "latch", version, after_help = EXIT_CODES)]
struct Latch {
    #[command(flatten)]
    target: TargetOptions,
    /// The format of the answer. With JSON, errors are JSON, too.
    #[arg(
        short,
        long,
        global = true,
        help_heading = COMMON,
        value_enum,
        env = "LATCH_OUTPUT",
        hide_env_values = true,
        default_value = "table",
        value_name = "FORMAT"
    )]
    output: Format,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A demonstration to kill: transfers and invoices that continue where they were, no matter how often that happens.
    #[command(after_help = EXIT_CODES)]
    Dev(dev::Dev),
    /// Looks at configurations of claim workflows, and at claims. Can end claims. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Claim {
        #[command(subcommand)]
        command: claim::Claim,
    },
    /// Prints a script by which a shell completes this command.
    #[command(after_help = EXIT_CODES)]
    Completions(completions::Completions),
    /// Prints the configuration of a server that is in force, and where each value comes from.
    #[command(after_help = EXIT_CODES)]
    Config(Box<config::Config>),
    /// Reads, finds and changes entities.
    #[command(after_help = EXIT_CODES)]
    Entity {
        #[command(subcommand)]
        command: entity::Entity,
    },
    /// Makes requests to flows, shows them, and answers their questions.
    #[command(after_help = EXIT_CODES)]
    Flow {
        #[command(subcommand)]
        command: flow::Flow,
    },
    /// Looks at locks, forces a release, or runs a command under a lock.
    #[command(after_help = EXIT_CODES)]
    Lock {
        #[command(subcommand)]
        command: lock::Lock,
    },
    /// Prints a manual page, or writes all of them.
    #[command(after_help = EXIT_CODES)]
    Man(man::Manual),
    /// Looks at the nodes that share a database, or drains one. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Node {
        #[command(subcommand)]
        command: node::Node,
    },
    /// Looks at reviews, or decides one. Runs nothing.
    #[command(after_help = EXIT_CODES)]
    Review {
        #[command(subcommand)]
        command: review::Review,
    },
    /// Looks at schedules, or changes them. Starts nothing.
    #[command(after_help = EXIT_CODES)]
    Schedule {
        #[command(subcommand)]
        command: schedule::Schedule,
    },
    /// Serves stores over HTTP, for programs in any language. Ends gracefully on SIGTERM and SIGINT.
    #[command(after_help = EXIT_CODES)]
    Serve(Box<serve::Serve>),
    /// Reads, watches and changes the state of requests, sessions, users and organisations, and slots.
    #[command(after_help = EXIT_CODES)]
    State {
        #[command(subcommand)]
        command: state::State,
    },
    /// Backs up, restores, checks and measures a whole store.
    #[command(after_help = EXIT_CODES)]
    Store {
        #[command(subcommand)]
        command: store::StoreCommand,
    },
    /// Follows an execution, or the stream of a request of a flow, live until it ends.
    #[command(after_help = EXIT_CODES)]
    Tail(tail::Tail),
    /// Looks at the tasks of workers, puts tasks, and does them.
    #[command(after_help = EXIT_CODES)]
    Task {
        #[command(subcommand)]
        command: task::Task,
    },
    /// Makes tokens for a server, and hashes of tokens.
    #[command(after_help = EXIT_CODES)]
    Token {
        #[command(subcommand)]
        command: token::TokenCommand,
    },
    /// Looks at executions of workflows, starts them, sends them messages, and ends or resumes them. Runs no code.
    #[command(after_help = EXIT_CODES)]
    Workflow {
        #[command(subcommand)]
        command: workflow::Workflow,
    },
}

fn main() -> ExitCode {
    // These processes hold nothing but a pipe, so they start nothing else.
    if let Some(guard) = lock::run::guard::arguments() {
        return guard.watch();
    }
    match lock::run::barrier::arguments() {
        Some(barrier) => barrier.pass(),
        None => command(),
    }
}

#[tokio::main]
async fn command() -> ExitCode {
    let read = Latch::command().try_get_matches().and_then(|matches| {
        let latch = Latch::from_arg_matches(&matches)?;
        Ok((latch, matches))
    });
    let (latch, matches) = match read {
        Ok(read) => read,
        Err(error) => return usage(&error),
    };
    let format = latch.output;
    match run(latch, &matches).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => match error.downcast::<Ended>() {
            Ok(Ended(code)) => ExitCode::from(code),
            Err(error) => failed(error, format),
        },
    }
}

async fn run(latch: Latch, matches: &ArgMatches) -> Result<()> {
    let Latch { target, output, command } = latch;
    // The options of the command itself, which may come from the environment.
    let own = matches.subcommand().map_or(matches, |(_, own)| own);
    let mut out = BufWriter::new(std::io::stdout());
    let done = match command {
        Command::Completions(completions) => completions::run(&completions, Latch::command(), &mut out),
        Command::Man(manual) => man::run(&manual, Latch::command(), &mut out),
        command => {
            let output = &mut Output::new(output, &mut out);
            match command {
                Command::Config(config) => config::run(*config, own, output),
                Command::Serve(serve) => serve::run(*serve, own, output).await,
                Command::Token { command } => token::run(command, output),
                command => work(command, &target.read(matches)?, output).await,
            }
        }
    };
    // What was found before an error is printed, too.
    let flushed = out.flush();
    done?;
    Ok(flushed?)
}

/// The commands that work on a store or a server.
async fn work(command: Command, target: &Target, output: &mut Output<'_>) -> Result<()> {
    match command {
        Command::Claim { command } => claim::run(command, target, output).await,
        Command::Dev(dev) => dev::run(dev, target.store("dev")?, output).await,
        Command::Entity { command } => entity::run(command, target, output).await,
        Command::Flow { command } => flow::run(command, target, output).await,
        Command::Lock { command } => lock::run(command, target, output).await,
        Command::Node { command } => node::run(command, target, output).await,
        Command::Review { command } => review::run(command, target, output).await,
        Command::Schedule { command } => schedule::run(command, target, output).await,
        Command::State { command } => state::run(command, target, output).await,
        Command::Store { command } => store::run(command, target, output).await,
        Command::Tail(tail) => tail::run(tail, target, output).await,
        Command::Task { command } => task::run(command, target, output).await,
        Command::Workflow { command } => workflow::run(command, target, output).await,
        Command::Completions(_) | Command::Config(_) | Command::Man(_) | Command::Serve(_) | Command::Token { .. } => {
            Ok(())
        }
    }
}

/// Reports an error.
fn failed(error: anyhow::Error, format: Format) -> ExitCode {
    match Problem::of(error) {
        // The reader of the output has closed it.
        None => ExitCode::SUCCESS,
        Some(problem) => {
            problem.tell(format);
            ExitCode::from(problem.exit as u8)
        }
    }
}

/// Reports a wrong command line, or prints the help.
fn usage(error: &clap::Error) -> ExitCode {
    let arguments: Vec<String> = std::env::args_os().map(|text| text.to_string_lossy().into_owned()).collect();
    let is_json = |two: &[String]| matches!(two[0].as_str(), "-o" | "--output") && two[1].starts_with("json");
    let joined = ["-ojson", "-o=json", "--output=json"];
    let asks = arguments.windows(2).any(is_json)
        || arguments.iter().any(|argument| joined.iter().any(|start| argument.starts_with(start)));
    let asks = asks || std::env::var("LATCH_OUTPUT").is_ok_and(|format| format.starts_with("json"));
    let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asks && !is_help {
        let message = error.to_string();
        Problem::new(Exit::Usage, message.trim().trim_start_matches("error: ")).tell(Format::Json);
    } else {
        let _ = error.print();
    }
    ExitCode::from(error.exit_code() as u8)
}
