//! `latch lock run`: runs a command while it holds a lock. This file owns the order of things: the command is looked
//! for, the lock is acquired, the command runs, the lock is released.

pub(crate) mod barrier;
pub(crate) mod guard;
mod held;
mod job;
mod program;
mod terminal;

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use latchwork::lock::LockName;
use latchwork::store::ErrorKind;

use crate::lock::Scope;
use crate::lock::fields::NameFields;
use crate::lock::run::job::{Job, Outcome};
use crate::output::{Ended, Exit, Output, Problem, kind_of, note};
use crate::signals::{ENDS, Signals, exit_code};
use crate::target::Target;
use crate::time;

/// The last lines of the help text.
pub(crate) const EXIT_CODES: &str = "Exit codes: that of the command, or 128 and the number of the signal that ended \
    it. Of latch itself: 75 the lock is busy, 76 the lock was lost, 69 the store cannot be reached, 126 the command \
    cannot be executed, 127 there is no such command, 2 usage";

#[derive(Args)]
pub(crate) struct Run {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// How long to wait for the lock.
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = time::duration)]
    wait: Duration,
    /// Does not wait: if the lock is held, the command is not run.
    #[arg(long = "try", conflicts_with = "wait")]
    no_wait: bool,
    /// How long the lock stays held if this process dies. It is renewed before.
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = time::duration)]
    lease: Duration,
    /// The lock has this many slots: up to N commands run at once. All users of the lock must say the same number.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,
    /// Shares the lock with others that also say --shared, and excludes those that say --exclusive.
    #[arg(long, conflicts_with_all = ["slots", "exclusive"])]
    shared: bool,
    /// Excludes those that say --shared, too.
    #[arg(long, conflicts_with = "slots")]
    exclusive: bool,
    /// What to do if the lock is lost while the command runs.
    #[arg(long, value_enum, default_value = "terminate", value_name = "ACTION")]
    on_lost: OnLost,
    /// How long a command that is terminated has until it is killed.
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = time::duration)]
    kill_after: Duration,
    /// How the holder is shown to others; by default the command and the number of this process.
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
    /// The command and its arguments, after --.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// What to do if the lock is lost while the command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OnLost {
    /// Terminates the command and its children, and kills them if they do not end.
    Terminate,
    /// Tells it on the standard error. The command goes on beside the next holder.
    Warn,
}

/// How a lock is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Share {
    Alone,
    Slot(u32),
    Read,
    Write,
}

impl Run {
    fn share(&self) -> Share {
        match self.slots {
            Some(slots) => Share::Slot(slots),
            None if self.shared => Share::Read,
            None if self.exclusive => Share::Write,
            None => Share::Alone,
        }
    }

    /// How long to wait for the lock; `None` if the caller does not wait.
    fn patience(&self) -> Option<Duration> {
        (!self.no_wait).then_some(self.wait)
    }

    fn label(&self) -> String {
        let command = self.command.first().map_or_else(String::new, |command| command.to_string_lossy().into_owned());
        let name = command.rsplit('/').next().unwrap_or_default();
        self.label.clone().unwrap_or_else(|| format!("latch lock run {name} ({})", std::process::id()))
    }

    fn lock(&self) -> LockName {
        self.scope.name(&self.name)
    }
}

pub(crate) async fn run(run: Run, target: &Target, output: &mut Output<'_>) -> Result<()> {
    if let Target::Store { is_named: false, .. } = target {
        let why = "name the store of the lock, with --store, --server or a variable: a lock in the current directory \
            excludes no process that runs elsewhere";
        return Err(Problem::new(Exit::Usage, why).into());
    }
    // Before the lock: a misspelled command is reported without a wait.
    program::find(&run.command[0])?;
    let mut ends = Signals::listen(&ENDS)?;
    let held = match held::acquire(&run, target, &mut ends).await {
        Ok(Ok(held)) => held,
        Ok(Err(signal)) => return Err(Ended(exit_code(signal)).into()),
        Err(error) => return Err(unreachable(error)),
    };
    let mut job = match Job::start(&run, &held, output.format()) {
        Ok(job) => job,
        Err(error) => {
            held.release().await?;
            return Err(error);
        }
    };
    let outcome = job.supervise(&run, &held, ends).await;
    // The lock is given back whatever became of the command.
    let why_lost = match &outcome {
        Ok(Outcome::Lost(_)) => held.why_lost().await,
        _ => None,
    };
    let released = held.release().await;
    told(&run, outcome?, released, why_lost)
}

/// The exit code, or what is to be told.
fn told(run: &Run, outcome: Outcome, released: Result<bool>, why_lost: Option<String>) -> Result<()> {
    let lock = NameFields::of(&run.lock()).words();
    let was_held = match released {
        Ok(was_held) => was_held,
        // Of a lock that is lost, nothing else is to be expected. Another one ends with its lease.
        Err(error) => {
            if !outcome.is_terminated() {
                note(&format!("latch: {lock} was not released, and ends with its lease: {error:#}"));
            }
            !outcome.is_terminated()
        }
    };
    let why = why_lost.map_or(String::new(), |why| format!(", because {why}"));
    let message = match outcome {
        Outcome::Lost(_) => format!("{lock} was lost{why}; the command was terminated"),
        Outcome::Stalled(_) if was_held => {
            format!("{lock} could have been lost while this process stood still; the command was terminated")
        }
        Outcome::Stalled(_) => format!("{lock} was lost while this process stood still; the command was terminated"),
        Outcome::Done(_) if !was_held && run.on_lost == OnLost::Terminate => {
            format!("{lock} was lost; the command ended before that was known")
        }
        Outcome::Done(0) => return Ok(()),
        Outcome::Done(code) => return Err(Ended(code).into()),
    };
    let problem = Problem::new(Exit::Lost, message).with("lock", run.name.as_str());
    Err(problem.with("exit_code", outcome.code()).into())
}

/// An error of a store that cannot be reached has an exit code of its own, so that scripts can tell it from the
/// command's.
fn unreachable(error: anyhow::Error) -> anyhow::Error {
    match kind_of(&error) {
        Some(ErrorKind::Unavailable) => Problem::new(Exit::Unreachable, format!("{error:#}")).into(),
        _ => error,
    }
}
