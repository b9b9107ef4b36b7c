//! The command that runs under a lock: it is started in a process group of its own, gets the signals that this process
//! gets, and is terminated if the lock is lost.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result};
use latchwork::store::Env;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::lock::fields::NameFields;
use crate::lock::run::barrier::Barrier;
use crate::lock::run::guard::{Guard, exists};
use crate::lock::run::held::Held;
use crate::lock::run::terminal::Terminal;
use crate::lock::run::{OnLost, Run, program};
use crate::output::{Format, note};
use crate::signals::Signals;
use crate::time;

/// The signals that are forwarded beside those that ask a process to end.
const FORWARDED: [Signal; 3] = [Signal::SIGQUIT, Signal::SIGUSR1, Signal::SIGUSR2];
/// How often to look whether the children of the command have ended, too.
const LOOK: Duration = Duration::from_millis(20);

/// What became of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It ended with this exit code.
    Done(u8),
    /// The lock was lost, and the command was terminated.
    Lost(u8),
    /// This process stood still for so long that the lock could be lost, and the command was terminated.
    Stalled(u8),
}

impl Outcome {
    /// True if the command was terminated for the sake of the lock.
    pub(crate) fn is_terminated(&self) -> bool {
        !matches!(self, Outcome::Done(_))
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Outcome::Done(code) | Outcome::Lost(code) | Outcome::Stalled(code) => code,
        }
    }
}

/// A command that runs.
pub(crate) struct Job {
    child: Child,
    group: Pid,
    guard: Option<Guard>,
    terminal: Option<Terminal>,
}

/// How far the end of a command is whose lock was lost.
enum Loss {
    Not,
    /// The command goes on, as its user has asked for.
    Told,
    /// It gets a signal that it cannot ignore at the end of this time.
    Terminating,
    Killed,
}

impl Job {
    /// Starts the command.
    pub(crate) fn start(run: &Run, held: &Held, format: Format) -> Result<Job> {
        // Half a lease: the last renewal may be a third of a lease old when this process begins to stand still.
        let silence = held.is_shared().then_some(run.lease / 2);
        let guard = match run.on_lost {
            OnLost::Terminate => Some(Guard::start(silence, run.kill_after, format)?),
            OnLost::Warn => None,
        };
        let terminal = Terminal::of_this_process();
        // A command that is guarded begins when its guard knows it.
        let barrier = guard.is_some().then(Barrier::closed).transpose()?;
        let mut command = match &barrier {
            Some(barrier) => Command::from(barrier.before(&run.command, format)?),
            None => Command::from(program::command(&run.command)),
        };
        command.process_group(0);
        command.env("LATCH_LOCK", &held.name().name).env("LATCH_FENCE", held.token().to_string());
        let child = command.spawn().map_err(|error| program::not_started(&run.command[0], &error))?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).context("the command has no process id")?;
        let mut job = Job { child, group: Pid::from_raw(group), guard, terminal };
        job.guard.iter_mut().for_each(|guard| guard.watch(job.group));
        job.terminal.iter().for_each(|terminal| terminal.give(job.group));
        barrier.into_iter().for_each(Barrier::open);
        Ok(job)
    }

    /// Waits for the command, forwards signals, and terminates it if the lock is lost.
    pub(crate) async fn supervise(&mut self, run: &Run, held: &Held, mut ends: Signals) -> Result<Outcome> {
        let env = Env::system();
        let mut others = Signals::listen(&FORWARDED)?;
        let mut changes = signal(SignalKind::child()).context("cannot listen to signals")?;
        let (mut loss, mut kill) = (Loss::Not, env.sleep(Duration::MAX));
        let pause = run.lease / 8;
        let mut beat = env.sleep(pause);
        let status = loop {
            tokio::select! {
                status = self.child.wait() => break status.context("cannot wait for the command")?,
                () = held.lost(), if matches!(loss, Loss::Not) => {
                    loss = self.lost(run, held);
                    kill = env.sleep(run.kill_after);
                }
                () = &mut kill, if matches!(loss, Loss::Terminating) => {
                    loss = Loss::Killed;
                    let _ = killpg(self.group, Signal::SIGKILL);
                }
                signal = ends.next() => self.forward(signal),
                signal = others.next() => self.forward(signal),
                _ = changes.recv() => self.follow_stop(run, held).await,
                () = &mut beat => {
                    self.guard.iter_mut().for_each(Guard::alive);
                    beat = env.sleep(pause);
                }
            }
        };
        self.terminal.iter().for_each(Terminal::take_back);
        let is_guarded = self.guard.take().is_some_and(Guard::done);
        let is_terminated = matches!(loss, Loss::Terminating | Loss::Killed);
        if is_terminated {
            self.end_children(kill, &env).await;
        }
        let code = code(status);
        Ok(match (is_terminated, is_guarded) {
            // The guard was first, whatever this process has noticed since.
            (_, true) => Outcome::Stalled(code),
            (true, false) => Outcome::Lost(code),
            (false, false) => Outcome::Done(code),
        })
    }

    fn forward(&self, signal: Signal) {
        // The command may have ended just now.
        let _ = killpg(self.group, signal);
    }

    fn lost(&self, run: &Run, held: &Held) -> Loss {
        let lock = NameFields::of(held.name()).words();
        if run.on_lost == OnLost::Warn {
            note(&format!("latch: {lock} was lost; the command goes on beside the next holder"));
            return Loss::Told;
        }
        self.forward(Signal::SIGTERM);
        // A process that is stopped does not see other signals.
        self.forward(Signal::SIGCONT);
        Loss::Terminating
    }

    /// If the terminal has stopped the command, this process stops, too, so that the shell gets the terminal.
    async fn follow_stop(&mut self, run: &Run, held: &Held) {
        let Some(terminal) = &self.terminal else { return };
        if !has_stopped(self.group) {
            return;
        }
        if held.is_shared() {
            let lease = time::exact(run.lease);
            note(&format!("latch: stopped; the lock is lost if you do not continue within {lease}"));
        }
        terminal.stop_too();
        // This process was continued. If the lock is lost meanwhile, the command is not continued.
        if held.check().await {
            self.guard.iter_mut().for_each(Guard::alive);
            terminal.give(self.group);
        }
    }

    /// The command has ended after the loss of its lock. Its children have the rest of the time.
    async fn end_children(&self, mut kill: latchwork::store::Sleep, env: &Env) {
        while exists(self.group) {
            tokio::select! {
                () = &mut kill => {
                    let _ = killpg(self.group, Signal::SIGKILL);
                    return;
                }
                () = env.sleep(LOOK) => {}
            }
        }
    }
}

/// True if the process has been stopped since this was asked last. The exit of a process stays to be waited for.
#[cfg(any(target_os = "android", target_os = "freebsd", target_os = "haiku", target_os = "linux"))]
fn has_stopped(process: Pid) -> bool {
    use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};

    let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
    matches!(waitid(Id::Pid(process), flags), Ok(WaitStatus::Stopped(..)))
}

/// Where this cannot be asked, a command that is stopped from its terminal keeps the terminal.
#[cfg(not(any(target_os = "android", target_os = "freebsd", target_os = "haiku", target_os = "linux")))]
fn has_stopped(_process: Pid) -> bool {
    false
}

/// The exit code as shells have it.
fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128_u8.wrapping_add(signal as u8),
        (None, None) => u8::MAX,
    }
}
