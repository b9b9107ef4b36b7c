//! The progress of the demonstration: redrawn in place on a terminal, and otherwise one line a second.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;

use crate::dev::bank::{Demo, VENDOR};
use crate::dev::invoices::CLIENTS;
use crate::dev::{Tally, hint};
use crate::output::plain;
use crate::store::StoreArgument;

/// The state of the demonstration at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Frame {
    pub(crate) at: Duration,
    pub(crate) transfers: u32,
    pub(crate) running: u32,
    pub(crate) locked: u32,
    pub(crate) asleep: u32,
    pub(crate) parked: u32,
    pub(crate) done: u32,
    pub(crate) accounts: u32,
    pub(crate) sum: u64,
    pub(crate) expected: u64,
    pub(crate) invoices: u32,
    pub(crate) paid: u32,
    /// In this process: bodies of payments that have begun, and clients that were refused.
    pub(crate) bodies: u32,
    pub(crate) refused: u32,
    /// How many commits were applied since the store was opened.
    pub(crate) commits: u64,
}

impl Frame {
    /// The progress of the invoices, if there are any.
    fn paid(&self) -> String {
        let Frame { invoices, paid, bodies, refused, .. } = self;
        match invoices {
            0 => String::new(),
            _ => {
                let bodies = if *bodies == 1 { "1 body".into() } else { format!("{bodies} bodies") };
                format!("{paid} of {invoices} invoices paid, {bodies} run, {refused} clients refused")
            }
        }
    }
}

pub(crate) struct Display {
    /// False if only JSON is printed.
    is_shown: bool,
    terminal: bool,
    /// How many lines the next frame overwrites.
    lines: usize,
    last: Option<(Duration, u64)>,
}

impl Display {
    pub(crate) fn new(is_shown: bool) -> Display {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let terminal = std::io::stdout().is_terminal() && !is_dumb;
        Display { is_shown, terminal, lines: 0, last: None }
    }

    /// How long until the next frame.
    pub(crate) fn pause(&self, transfers: u32) -> Duration {
        match self.terminal && transfers <= 1000 {
            true => Duration::from_millis(200),
            false => Duration::from_secs(1),
        }
    }

    fn write(&mut self, text: &str) -> Result<()> {
        if self.is_shown {
            let mut out = std::io::stdout().lock();
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }

    /// Prints a line that stays.
    pub(crate) fn say(&mut self, line: &str) -> Result<()> {
        self.lines = 0;
        self.write(&format!("{}\n", plain(line)))
    }

    /// Prints the introduction, in lines of at most 80 columns. With a store, it also says how to kill this process and
    /// how to look at its data.
    pub(crate) fn begin(&mut self, demo: &Demo, tally: &Tally, store: Option<&StoreArgument>) -> Result<()> {
        if demo.starts == 1 {
            let Demo { transfers, accounts, .. } = demo;
            self.say(&format!("{transfers} transfers between {accounts} accounts, each under the locks of both;"))?;
            self.say(&format!("at most {VENDOR} of them call the vendor at once."))?;
            if demo.invoices > 0 {
                self.say(&format!("{} invoices, and {CLIENTS} clients that race to pay each of them.", demo.invoices))?;
            }
        } else {
            let Tally { resumed, done_before, .. } = tally;
            let fresh = demo.transfers - resumed - done_before;
            let fresh = if fresh > 0 { format!(", {fresh} had not been started") } else { String::new() };
            let resumed = format!("resumed {resumed} transfers, {done_before} were done before{fresh}");
            self.say(&format!("Start {}: {resumed}.", demo.starts))?;
            if demo.invoices > 0 {
                self.say(&format!("{} of {} invoices were paid before.", tally.paid_before, demo.invoices))?;
            }
        }
        let Some(store) = store else { return Ok(()) };
        let pid = std::process::id();
        self.say(&format!("Kill it at any time (kill -9 {pid}), and start it again:"))?;
        self.say("it continues where it was. While it is dead, look at its data:")?;
        for look in ["lock list --held", "claim list", "workflow list"] {
            self.say(&format!("  {}", hint(store, look)))?;
        }
        self.say("")
    }

    /// Draws a frame.
    pub(crate) fn frame(&mut self, frame: &Frame) -> Result<()> {
        let rate = self.last.replace((frame.at, frame.commits)).map(|(at, commits)| {
            let seconds = frame.at.saturating_sub(at).as_secs_f64().max(0.001);
            (frame.commits.saturating_sub(commits) as f64 / seconds).round() as u64
        });
        let rate = rate.map_or("counting".into(), |rate| format!("{rate} commits/s"));
        let Frame { running, locked, asleep, parked, done, transfers, accounts, sum, expected, .. } = frame;
        let parked = if *parked > 0 { format!(", {parked} parked") } else { String::new() };
        let states =
            format!("{running} running, {locked} waiting for a lock, {asleep} asleep, {done} of {transfers} done");
        let held = match sum == expected {
            true => format!("{accounts} accounts hold {sum}, as always"),
            false => format!("{accounts} accounts hold {sum}, AND SHOULD HOLD {expected}"),
        };
        let paid = frame.paid();
        if !self.terminal {
            let paid = if paid.is_empty() { paid } else { format!("; {paid}") };
            return self.write(&format!("{states}{parked}; {rate}; {held}{paid}\n"));
        }
        let over = if self.lines > 0 { format!("\x1b[{}A\x1b[J", self.lines) } else { String::new() };
        let paid = if paid.is_empty() { paid } else { format!("{paid}\n") };
        self.lines = 3 + usize::from(!paid.is_empty());
        let width = 60;
        let filled = (u64::from(*done) * width / u64::from(*transfers).max(1)) as usize;
        let bar = format!("{}{}", "█".repeat(filled), "░".repeat(width as usize - filled));
        self.write(&format!("{over}{bar} {}%\n{states}{parked}\n{rate}, {held}\n{paid}", done * 100 / transfers))
    }

    /// Keeps the last frame on the screen.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.lines = 0;
        self.write("\n")
    }
}
