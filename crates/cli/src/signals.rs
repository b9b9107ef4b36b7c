//! The signals that this process gets, one after the other.

use std::future::poll_fn;
use std::task::Poll;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use tokio::signal::unix::{self, SignalKind};

/// The signals that ask a process to end.
pub(crate) const ENDS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// Signals that no longer do what they do by default, for the rest of the process.
pub(crate) struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    pub(crate) fn listen(signals: &[Signal]) -> Result<Signals> {
        let listen = |signal: &Signal| anyhow::Ok((*signal, unix::signal(SignalKind::from_raw(*signal as i32))?));
        let listening: Result<Vec<_>> = signals.iter().map(listen).collect();
        Ok(Signals(listening.context("cannot listen to signals")?))
    }

    /// Returns the next signal. Nothing is lost if this is dropped before.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, listening) in &mut self.0 {
                if listening.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The exit code of a process that a signal has ended, as shells have it.
pub(crate) fn exit_code(signal: Signal) -> u8 {
    128 + signal as u8
}
