//! The barrier before a command: a process of this program that waits until the guard knows it, and then becomes the
//! command. If the holder of the lock dies before, the command is never run. It knows no lock and no guard.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::ValueEnum;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::unistd::close;

use crate::lock::run::program;
use crate::output::{Exit, Format, Problem};

/// The first argument of the process.
const WORD: &str = "__begin";

/// A barrier that is closed, as the holder sees it.
pub(crate) struct Barrier {
    /// The process that waits has this end. Its end of the wait, without a byte, means that the holder is gone.
    waits: PipeReader,
    opens: PipeWriter,
}

impl Barrier {
    pub(crate) fn closed() -> Result<Barrier> {
        let (waits, opens) = std::io::pipe().context("cannot create a pipe")?;
        // The process that waits inherits its end.
        fcntl(&waits, FcntlArg::F_SETFD(FdFlag::empty())).context("cannot hand over a pipe")?;
        Ok(Barrier { waits, opens })
    }

    /// A process that waits at this barrier, and then becomes the command.
    pub(crate) fn before(&self, command: &[OsString], format: Format) -> Result<Command> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let format = format.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
        let mut process = Command::new(program);
        process.args([WORD, &self.waits.as_raw_fd().to_string(), &format]).args(command);
        Ok(process)
    }

    /// Lets the command begin.
    pub(crate) fn open(mut self) {
        // The process that waits may have been ended by a signal.
        let _ = self.opens.write_all(b"b");
    }
}

/// The process that waits, as it runs.
pub(crate) struct Arguments {
    waits: RawFd,
    format: Format,
    command: Vec<OsString>,
}

/// The arguments, if this process waits at a barrier.
pub(crate) fn arguments() -> Option<Arguments> {
    let mut given = std::env::args_os().skip(1);
    given.next().filter(|first| first == WORD)?;
    let waits = given.next()?.to_str()?.parse().ok()?;
    let format = Format::from_str(given.next()?.to_str()?, false).ok()?;
    Some(Arguments { waits, format, command: given.collect() }).filter(|barrier| !barrier.command.is_empty())
}

impl Arguments {
    /// Waits, and becomes the command. Returns only if that is not possible.
    pub(crate) fn pass(self) -> ExitCode {
        let Err(problem) = self.become_command();
        problem.tell(self.format);
        ExitCode::from(problem.exit as u8)
    }

    fn become_command(&self) -> Result<Infallible, Problem> {
        let name = self.command[0].to_string_lossy();
        let failed = |why: String| Problem::new(Exit::Failed, format!("{name:?} was not run: {why}"));
        let pipe = format!("/dev/fd/{}", self.waits);
        let mut barrier = File::open(&pipe).map_err(|error| failed(format!("cannot open {pipe}: {error}")))?;
        // The command does not inherit it.
        close(self.waits).map_err(|error| failed(format!("cannot close {pipe}: {error}")))?;
        let open = barrier.read_exact(&mut [0]);
        open.map_err(|_| Problem::new(Exit::Lost, format!("latch lock run was killed; {name:?} was not run")))?;
        let error = program::command(&self.command).exec();
        Err(program::not_started(&self.command[0], &error))
    }
}
