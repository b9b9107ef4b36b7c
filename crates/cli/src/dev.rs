//! `latch dev`: a demonstration that invites you to kill it. Transfers between accounts, under locks, continue where
//! they were, no matter how often the process is killed, and clients race to pay invoices. At the end it counts that no
//! transfer and no payment was lost or done twice.

mod bank;
mod crash;
mod display;
mod invoices;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchwork::node::NodeOptions;
use latchwork::workflow::{Engine, ExecutionFilter, ExecutionState, Handle, Status, WaitsFor, WorkflowError};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::dev::bank::{Bank, Demo, Verdict, transfer};
use crate::dev::display::{Display, Frame};
use crate::dev::invoices::{Counts, Invoices, Paid};
use crate::output::{Exit, Format, Output, Problem};
use crate::store::{StoreArgument, quoted};
use crate::time;

/// The page size of reads.
const PAGE: usize = 1000;

#[derive(Args)]
pub(crate) struct Dev {
    /// The number of transfers.
    #[arg(long, default_value_t = 300, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    transfers: u32,
    /// The number of accounts.
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1000))]
    accounts: u32,
    /// The number of invoices; one for ten transfers by default.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    invoices: Option<u32>,
    /// Kills itself about that often, for example 2s or 500ms, and starts again until everything is done.
    #[arg(long, value_name = "TIME", value_parser = time::duration)]
    crash_every: Option<Duration>,
    /// Starts a new demonstration if the last one in this directory is complete.
    #[arg(long)]
    fresh: bool,
    /// The id of the parent process's run. The parent kills this process. This process ends when its standard input
    /// closes.
    #[arg(long, hide = true, value_name = "ID")]
    worker: Option<String>,
}

/// The result, as it is printed.
#[derive(Serialize)]
struct Summary {
    directory: String,
    round: u32,
    transfers: u32,
    accounts: u32,
    /// What this process found: transfers that were done, and transfers that it resumed.
    done_before: u32,
    resumed: u32,
    /// How often the demonstration was started, and how often it was killed before it was done.
    starts: u32,
    killed: u32,
    #[serde(flatten)]
    verdict: Verdict,
    failed: u32,
    #[serde(flatten)]
    paid: Paid,
    /// In this process: bodies of payments that have begun, and clients that were refused.
    bodies: u32,
    refused: u32,
    ok: bool,
}

/// What this process found and did.
#[derive(Default)]
struct Tally {
    done_before: u32,
    resumed: u32,
    done: u32,
    failed: u32,
    /// Invoices that were paid before.
    paid_before: u32,
    counts: Arc<Counts>,
}

/// The lease of the demonstration on a database.
const LEASE: Duration = Duration::from_millis(500);

pub(crate) async fn run(dev: Dev, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    if let Some(every) = dev.crash_every {
        return crash::run(&dev, every, store, output.format()).await;
    }
    if dev.worker.is_some() {
        crash::end_with_parent();
    }
    let workflow = transfer();
    // The kills are intended, so they must not park an execution.
    let opened = store.open().await?;
    let mut engine = Engine::on(&opened).register(&workflow).most_crashes(1_000_000);
    if opened.is_shared() {
        // The next process takes over from one that was killed when the lease is over.
        engine = engine.node(NodeOptions::new().name("latch-dev").lease(LEASE));
    }
    let engine = engine.start().await?;
    let mut display = Display::new(output.format() == Format::Table);
    let (demo, is_complete) = Demo::begin(&engine, &dev).await?;
    let mut tally = Tally { done_before: demo.transfers, ..Tally::default() };
    if is_complete {
        display.say(&format!("The demonstration in {store} is complete."))?;
    } else {
        tally = work(&engine, &demo, store, dev.worker.is_some(), &mut display).await?;
        demo.end(&engine).await?;
    }
    let mut verdict = Bank::new(&demo, engine.entities()).verdict().await?;
    // An operator may have made a transfer fail, for example by a forced release of a lock. Such a transfer is not
    // lost.
    let ends = known(&engine, &demo).await?;
    let has_failed = |state: &&ExecutionState| !matches!(state, ExecutionState::Completed(_));
    let failed = ends.values().filter(has_failed).count() as u32;
    verdict.lost = verdict.lost.saturating_sub(failed);
    let paid = invoices::verdict(&demo, &engine).await?;
    engine.stop();
    engine.store().close().await?;
    let ok = verdict.is_right() && paid.is_right() && failed == 0;
    let summary = Summary {
        directory: store.to_string(),
        round: demo.round,
        transfers: demo.transfers,
        accounts: demo.accounts,
        done_before: tally.done_before,
        resumed: tally.resumed,
        starts: demo.starts,
        killed: demo.starts - 1,
        verdict,
        failed,
        paid,
        bodies: tally.counts.bodies(),
        refused: tally.counts.refused(),
        ok,
    };
    let again = is_complete.then(|| hint(store, "dev --fresh"));
    output.one(&summary, |text| summary.lines(again.as_deref()).iter().for_each(|line| text.line(line)))?;
    let wrong = match summary.verdict.is_right() && summary.paid.is_right() {
        _ if ok => return Ok(()),
        true => format!("transfers have failed: {}", hint(store, "workflow list --status failed")),
        false => "the demonstration has failed: the counts above are wrong".into(),
    };
    Err(Problem::new(Exit::Failed, wrong).into())
}

/// A command of this program on the same store, as a user types it. This program may not be on the PATH.
fn hint(store: &StoreArgument, arguments: &str) -> String {
    let program = std::env::args_os().next().map_or("latch".into(), |program| program.display().to_string());
    format!("{} {arguments} {}", quoted(program), store.typed())
}

/// Runs all transfers and payments, and draws the progress.
async fn work(
    engine: &Engine,
    demo: &Demo,
    store: &StoreArgument,
    is_worker: bool,
    display: &mut Display,
) -> Result<Tally> {
    let bank = Bank::new(demo, engine.entities());
    bank.open().await?;
    let (mut tally, mut running, mut paying) = (Tally::default(), JoinSet::new(), JoinSet::new());
    let (known, booked) = (known(engine, demo).await?, bank.booked().await?);
    for number in 1..=demo.transfers {
        let (id, workflow) = (demo.id(number), transfer());
        let handle: Handle<u64> = engine.handle(&workflow, id.as_str());
        match known.get(&id) {
            Some(ExecutionState::Completed(_)) => tally.done_before += 1,
            Some(_) => {
                tally.resumed += 1;
                running.spawn(async move { handle.result().await });
            }
            // An ended execution is removed after some days.
            None if booked.contains(&number) => tally.done_before += 1,
            None => {
                let start = engine.start(&workflow, demo.transfer(number)).id(id.as_str()).tag(demo.tag());
                running.spawn(async move { start.await?.result().await });
            }
        }
    }
    let invoices = Invoices::open(demo, engine).await?;
    let unpaid = invoices.unpaid().await?;
    (tally.paid_before, tally.counts) = (demo.invoices - unpaid.len() as u32, invoices.counts().clone());
    for (place, number) in (0..).zip(unpaid) {
        paying.spawn(invoices.clone().race(number, place));
    }
    display.begin(demo, &tally, (!is_worker).then_some(store))?;
    let env = engine.store().env().clone();
    let mut tick = env.sleep(Duration::ZERO);
    while !running.is_empty() || !paying.is_empty() {
        tokio::select! {
            Some(paid) = paying.join_next() => paid??,
            Some(ended) = running.join_next() => match ended? {
                Ok(_) => tally.done += 1,
                Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => return Err(error.into()),
                Err(error) => {
                    tally.failed += 1;
                    display.say(&error.to_string())?;
                }
            },
            () = &mut tick => {
                let frame = frame(engine, &bank, demo, &tally).await?;
                display.frame(&frame)?;
                if frame.parked > 0 && frame.running + frame.asleep == 0 {
                    let list = hint(store, "workflow list --status parked");
                    let stuck = format!("{} transfers are parked, and the others wait for them: {list}", frame.parked);
                    return Err(Problem::new(Exit::Failed, stuck).into());
                }
                tick = env.sleep(display.pause(demo.transfers));
            }
        }
    }
    display.frame(&frame(engine, &bank, demo, &tally).await?)?;
    display.end()?;
    Ok(tally)
}

/// The transfers that were started before, and their states.
async fn known(engine: &Engine, demo: &Demo) -> Result<std::collections::HashMap<String, ExecutionState>> {
    let filter = ExecutionFilter::new().workflow(bank::WORKFLOW).tag(demo.tag());
    let (mut known, mut next) = (std::collections::HashMap::new(), None);
    loop {
        let page = engine.list(filter.clone()).limit(PAGE).after(next).await?;
        known.extend(page.items.into_iter().map(|listed| (listed.id.to_string(), listed.state)));
        next = page.next;
        if next.is_none() {
            return Ok(known);
        }
    }
}

/// The state of the demonstration now. It reads only waiting and parked executions, and the accounts.
async fn frame(engine: &Engine, bank: &Bank<'_>, demo: &Demo, tally: &Tally) -> Result<Frame> {
    let mut frame = Frame { transfers: demo.transfers, done: tally.done_before + tally.done, ..Frame::default() };
    let filter = ExecutionFilter::new().workflow(bank::WORKFLOW).is(Status::Waiting);
    let mut next = None;
    loop {
        let page = engine.list(filter.clone()).limit(PAGE).after(next).await?;
        for listed in &page {
            match listed.waits.iter().any(|wait| matches!(wait.what, WaitsFor::Lock(_))) {
                true => frame.locked += 1,
                false => frame.asleep += 1,
            }
        }
        next = page.next;
        if next.is_none() {
            break;
        }
    }
    let parked = engine.list(ExecutionFilter::new().workflow(bank::WORKFLOW).is(Status::Parked)).limit(PAGE).await?;
    frame.parked = parked.items.len() as u32;
    // The counts are read one after the other while executions run, so they may not add up.
    let rest = frame.locked + frame.asleep + frame.parked + frame.done + tally.failed;
    frame.running = demo.transfers.saturating_sub(rest);
    frame.commits = engine.store().stats().await?.applied;
    frame.at = engine.store().env().monotonic();
    (frame.accounts, frame.sum, frame.expected) = (demo.accounts, bank.sum().await?, demo.sum());
    (frame.invoices, frame.paid) = (demo.invoices, tally.paid_before + tally.counts.paid());
    (frame.bodies, frame.refused) = (tally.counts.bodies(), tally.counts.refused());
    Ok(frame)
}

impl Summary {
    /// `again` is the command for a new demonstration, if this one was complete before.
    fn lines(&self, again: Option<&str>) -> Vec<String> {
        let Verdict { sum, expected, lost, doubled, wrong_accounts } = &self.verdict;
        let mut lines = vec![format!("{} transfers between {} accounts are done.", self.transfers, self.accounts)];
        lines.push(match self.killed {
            0 => "It was never killed. Try it: start it with --fresh and end it with kill -9, or use \
                  --fresh --crash-every 2s."
                .into(),
            1 => "It was killed once before it was done, and continued where it was.".into(),
            killed => format!("It was killed {killed} times before it was done, and continued where it was each time."),
        });
        match self.verdict.is_right() && self.failed == 0 {
            true => lines.push("No transfer was lost, and none was done twice.".into()),
            false => lines.push(format!(
                "{lost} were lost, {doubled} done twice, {} failed; {wrong_accounts} accounts are wrong.",
                self.failed
            )),
        }
        lines.push(match sum == expected {
            true => format!("All accounts together hold {sum}, as at the beginning."),
            false => format!("All accounts together hold {sum}, but at the beginning they held {expected}."),
        });
        lines.extend(self.invoice_lines());
        if let Some(again) = again {
            lines.push(format!("To start a new one: {again}, or another directory."));
        }
        lines
    }

    fn invoice_lines(&self) -> Vec<String> {
        let Paid { invoices, paid, payments, paid_twice, reverted } = &self.paid;
        if *invoices == 0 {
            return Vec::new();
        }
        if !self.paid.is_right() {
            return vec![format!(
                "{paid} of {invoices} invoices are paid, by {payments} payments; {paid_twice} were paid twice."
            )];
        }
        let mut lines = vec![format!("No invoice was paid twice: {paid} are paid, by {payments} payments.")];
        match reverted {
            0 => {}
            1 => lines
                .push("One payment was cut off by a kill: its invoice went back to sent, and was paid later.".into()),
            cut => lines.push(format!(
                "{cut} payments were cut off by a kill: each invoice went back to sent, and was paid later."
            )),
        }
        lines
    }
}
