//! The terminal of a command that runs in a process group of its own: the group that reads from it and gets its keys.
//! Without that, a command that reads from the terminal would be stopped.

use std::io::IsTerminal;

use nix::sys::signal::{SigSet, Signal, killpg};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The terminal, of which this process's group has the foreground.
pub(crate) struct Terminal {
    own: Pid,
}

impl Terminal {
    /// The terminal, if this process may hand it over.
    pub(crate) fn of_this_process() -> Option<Terminal> {
        let stdin = std::io::stdin();
        let own = getpgrp();
        (stdin.is_terminal() && tcgetpgrp(&stdin) == Ok(own)).then_some(Terminal { own })
    }

    /// Puts a group into the foreground, and lets it continue if it was stopped because it was not.
    pub(crate) fn give(&self, group: Pid) {
        if tcgetpgrp(std::io::stdin()) == Ok(self.own) {
            foreground(group);
        }
        let _ = killpg(group, Signal::SIGCONT);
    }

    /// Puts this process's group into the foreground again.
    pub(crate) fn take_back(&self) {
        foreground(self.own);
    }

    /// Stops this process's group, as the command has stopped, until the shell lets it continue.
    pub(crate) fn stop_too(&self) {
        self.take_back();
        let _ = killpg(self.own, Signal::SIGTSTP);
    }
}

/// A process in the background may not change the foreground, unless it blocks the signal that would stop it.
fn foreground(group: Pid) {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTTOU);
    if blocked.thread_block().is_ok() {
        // The terminal may be gone.
        let _ = tcsetpgrp(std::io::stdin(), group);
        let _ = blocked.thread_unblock();
    }
}
