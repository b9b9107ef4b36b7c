//! The guard of a command: a small process beside it that holds one end of a pipe. If the process that holds the lock
//! is killed, or stands still for so long that the lock may be lost, the guard terminates the command and its children.
//! It knows no lock.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::output::{Exit, Format, Problem};

/// The first argument of the process.
const WORD: &str = "__guard";
/// Its exit code if it has terminated the command.
const TERMINATED: u8 = 3;
/// How often to look whether the command and its children have ended.
const LOOK: Duration = Duration::from_millis(20);

/// What the holder sends.
const ALIVE: u8 = b'.';
const DONE: u8 = b'd';

/// The guard, as its holder sees it.
pub(crate) struct Guard {
    process: Child,
}

impl Guard {
    /// Starts the guard. If `silence` passes without a sign of life, the command is terminated; without it, the guard
    /// waits for the end of this process alone.
    pub(crate) fn start(silence: Option<Duration>, kill_after: Duration, format: Format) -> Result<Guard> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let format = format.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
        let micros = |time: Duration| time.as_micros().to_string();
        let mut command = Command::new(program);
        command.args([WORD, &micros(silence.unwrap_or_default()), &micros(kill_after), &format]);
        // A group of its own: what is sent to the group of the holder does not reach it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let process = command.spawn().context("cannot start the guard of the command")?;
        Ok(Guard { process })
    }

    /// Tells which process group to terminate.
    pub(crate) fn watch(&mut self, group: Pid) {
        self.send(format!("{group}\n").as_bytes());
    }

    /// A sign of life.
    pub(crate) fn alive(&mut self) {
        self.send(&[ALIVE]);
    }

    /// The command has ended. Returns true if the guard had terminated it.
    pub(crate) fn done(mut self) -> bool {
        self.send(&[DONE]);
        drop(self.process.stdin.take());
        self.process.wait().is_ok_and(|status| status.code() == Some(i32::from(TERMINATED)))
    }

    /// The pipe takes more than a command ever sends, unless the guard is gone.
    fn send(&mut self, bytes: &[u8]) {
        if let Some(pipe) = &mut self.process.stdin {
            let _ = pipe.write_all(bytes);
        }
    }
}

/// The guard, as it runs.
pub(crate) struct Arguments {
    silence: Option<Duration>,
    kill_after: Duration,
    format: Format,
}

/// The arguments, if this process is a guard.
pub(crate) fn arguments() -> Option<Arguments> {
    let mut given = std::env::args_os().skip(1);
    given.next().filter(|first| first == WORD)?;
    let mut next = || given.next().and_then(|text: OsString| text.into_string().ok());
    let silence = Duration::from_micros(next()?.parse().ok()?);
    let kill_after = Duration::from_micros(next()?.parse().ok()?);
    let format = Format::from_str(&next()?, false).ok()?;
    Some(Arguments { silence: Some(silence).filter(|silence| !silence.is_zero()), kill_after, format })
}

/// Why the command is to be terminated.
enum Cause {
    HolderGone,
    HolderSilent,
}

impl Arguments {
    pub(crate) fn watch(self) -> ExitCode {
        let received = listen();
        let mut group = String::new();
        while let Ok(byte) = received.recv() {
            match byte {
                b'\n' => break,
                byte => group.push(char::from(byte)),
            }
        }
        // The command was not started.
        let Ok(group) = group.parse().map(Pid::from_raw) else { return ExitCode::SUCCESS };
        loop {
            let received = match self.silence {
                Some(silence) => received.recv_timeout(silence),
                None => received.recv().map_err(RecvTimeoutError::from),
            };
            let cause = match received {
                Ok(DONE) => return ExitCode::SUCCESS,
                Ok(_) => continue,
                Err(RecvTimeoutError::Disconnected) => Cause::HolderGone,
                Err(RecvTimeoutError::Timeout) => Cause::HolderSilent,
            };
            break self.terminate(group, &cause);
        }
    }

    fn terminate(&self, group: Pid, cause: &Cause) -> ExitCode {
        let why = match cause {
            Cause::HolderGone => "latch lock run was killed; its command is terminated".into(),
            Cause::HolderSilent => {
                let silence = crate::time::exact(self.silence.unwrap_or_default());
                format!("latch lock run stood still for {silence}, and may lose the lock; its command is terminated")
            }
        };
        Problem::new(Exit::Lost, why).tell(self.format);
        let _ = killpg(group, Signal::SIGTERM);
        let _ = killpg(group, Signal::SIGCONT);
        let (_keep, never) = channel::<()>();
        let mut waited = Duration::ZERO;
        while waited < self.kill_after && exists(group) {
            let _ = never.recv_timeout(LOOK);
            waited += LOOK;
        }
        let _ = killpg(group, Signal::SIGKILL);
        ExitCode::from(TERMINATED)
    }
}

/// Reads what the holder sends, until its end of the pipe is closed.
fn listen() -> Receiver<u8> {
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for byte in std::io::stdin().lock().bytes() {
            if byte.map(|byte| sender.send(byte).is_err()).unwrap_or(true) {
                break;
            }
        }
    });
    received
}

/// True if the group has a process.
pub(crate) fn exists(group: Pid) -> bool {
    killpg(group, None) != Err(Errno::ESRCH)
}
