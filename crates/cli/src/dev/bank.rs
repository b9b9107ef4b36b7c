//! The accounts of the demonstration, the transfers between them, and a ledger that records how often each was done.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use latchwork::entity::{Add, Entities, Entity, EntityView, Query, Update};
use latchwork::store::Env;
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Tx, Workflow, workflow};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::dev::Dev;

pub(crate) const WORKFLOW: &str = "demo-transfer";

/// The balance of each account at the beginning.
const OPENING: u64 = 1000;

/// How many calls of the vendor may run at once.
pub(crate) const VENDOR: u32 = 3;

/// The page size of reads.
const PAGE: usize = 1000;

/// A demonstration, as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Demo {
    /// Its number among the demonstrations in this directory.
    pub(crate) round: u32,
    pub(crate) transfers: u32,
    pub(crate) accounts: u32,
    /// Demonstrations of older versions have no invoices.
    #[serde(default)]
    pub(crate) invoices: u32,
    /// How often it was started.
    pub(crate) starts: u32,
    is_complete: bool,
    /// The id of the parent process's run that began it, if `--crash-every` was used.
    worker: Option<String>,
}

impl Demo {
    /// Returns the demonstration to continue, or a new one, and whether it is complete.
    pub(crate) async fn begin(engine: &Engine, dev: &Dev) -> Result<(Demo, bool)> {
        let slot = engine.states().global().slot::<Demo>("demo");
        let found = slot.get().await?;
        let is_own = |demo: &Demo| dev.worker.is_some() && demo.worker == dev.worker;
        let demo = match found {
            Some(demo) if demo.is_complete && (!dev.fresh || is_own(&demo)) => return Ok((demo, true)),
            Some(demo) if !demo.is_complete => Demo { starts: demo.starts + 1, ..demo },
            complete => Demo {
                round: complete.map_or(1, |demo| demo.round + 1),
                transfers: dev.transfers,
                accounts: dev.accounts,
                invoices: dev.invoices.unwrap_or(dev.transfers.div_ceil(10)),
                starts: 1,
                is_complete: false,
                worker: dev.worker.clone(),
            },
        };
        slot.set(demo.clone()).await?;
        Ok((demo, false))
    }

    /// Records that all transfers have ended.
    pub(crate) async fn end(&self, engine: &Engine) -> Result<()> {
        let complete = Demo { is_complete: true, ..self.clone() };
        engine.states().global().slot("demo").set(complete).await?;
        Ok(())
    }

    /// The tag of the transfers of this round.
    pub(crate) fn tag(&self) -> String {
        format!("round-{}", self.round)
    }

    /// The id of an execution.
    pub(crate) fn id(&self, number: u32) -> String {
        match self.round {
            1 => format!("transfer-{number:04}"),
            round => format!("round-{round}-transfer-{number:04}"),
        }
    }

    /// The sum of all balances.
    pub(crate) fn sum(&self) -> u64 {
        u64::from(self.accounts) * OPENING
    }

    /// The transfer of this number. It is always the same for the same number.
    pub(crate) fn transfer(&self, number: u32) -> Transfer {
        let chance = xxh3_64(&[self.round.to_be_bytes(), number.to_be_bytes()].concat());
        let from = (chance % u64::from(self.accounts)) as u32;
        let further = (chance >> 16) % u64::from(self.accounts - 1) + 1;
        let to = (from + further as u32) % self.accounts;
        Transfer { round: self.round, number, from, to, amount: (chance >> 32) % 50 + 1 }
    }
}

/// The input of an execution.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Transfer {
    round: u32,
    number: u32,
    from: u32,
    to: u32,
    amount: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Account {
    number: u32,
    balance: u64,
}

/// The ledger's entry of a transfer.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    number: u32,
    from: u32,
    to: u32,
    /// The amount that was moved, in total.
    amount: u64,
    /// How often money was moved for it, and how often it was booked.
    moves: u32,
    bookings: u32,
}

fn account(round: u32, number: u32) -> String {
    format!("demo-{round}/account-{number:02}")
}

fn entry(round: u32, number: u32) -> String {
    format!("demo-{round}/transfer-{number:04}")
}

fn accounts(round: u32) -> String {
    format!("demo-{round}-account")
}

fn entries(round: u32) -> String {
    format!("demo-{round}-ledger")
}

/// The workflow: both accounts are locked, in the order of their names, until the money is moved.
pub(crate) fn transfer() -> Workflow<Transfer, u64> {
    workflow(WORKFLOW).run(async |ctx: Ctx, transfer: Transfer| {
        let (first, second) = (transfer.from.min(transfer.to), transfer.from.max(transfer.to));
        let first = ctx.mutex(format!("account-{first:02}")).acquire().await?;
        let second = ctx.mutex(format!("account-{second:02}")).acquire().await?;
        let permit = ctx.semaphore("vendor", VENDOR).acquire().await?;
        // The step has no limit of attempts, so kills do not make it fail.
        ctx.run("ask the vendor", async || vendor().await).retry(Retry::exponential()).await?;
        permit.release().await?;
        let moved = ctx.transaction("move the money", |tx| move_money(tx, transfer.clone())).await?;
        second.release().await?;
        first.release().await?;
        ctx.sleep(Duration::from_millis(1500 + u64::from(transfer.number % 10) * 200)).await?;
        ctx.transaction("book it", |tx| book(tx, transfer.clone())).await?;
        Ok(moved)
    })
}

/// A slow service outside of the process. It fails if too many calls run at once.
async fn vendor() -> Result<u64, Failure> {
    let env = Env::system();
    let took = 50 + env.random() % 101;
    let visit = Visit::begin();
    env.sleep(Duration::from_millis(took)).await;
    match visit.with {
        ..=VENDOR => Ok(took),
        with => Err(Failure::new(format!("{with} calls of the vendor ran at once")).not_retryable()),
    }
}

/// A call of the vendor, and how many calls ran when it began.
struct Visit {
    with: u32,
}

/// How many calls of the vendor run now.
static VISITS: AtomicU32 = AtomicU32::new(0);

impl Visit {
    fn begin() -> Visit {
        Visit { with: VISITS.fetch_add(1, Ordering::SeqCst) + 1 }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        VISITS.fetch_sub(1, Ordering::SeqCst);
    }
}

fn missing(what: &str) -> Failure {
    Failure::new(format!("{what} does not exist")).not_retryable()
}

/// Moves the money, as far as the balance allows, and records it.
async fn move_money(tx: Tx, transfer: Transfer) -> Result<u64, Failure> {
    let Transfer { round, number, from, to, amount } = transfer;
    let (from_id, to_id, id) = (account(round, from), account(round, to), entry(round, number));
    let read = async |id: &str| -> Result<Account, Failure> {
        Ok(tx.get(id).await?.ok_or_else(|| missing(id))?.parse::<Account>()?)
    };
    let (mut giver, mut taker) = (read(&from_id).await?, read(&to_id).await?);
    let amount = amount.min(giver.balance);
    giver.balance -= amount;
    taker.balance += amount;
    tx.update(Update::new(from_id).data(&giver));
    tx.update(Update::new(to_id).data(&taker));
    match tx.get(id.as_str()).await? {
        None => {
            let entry = Entry { number, from, to, amount, moves: 1, bookings: 0 };
            tx.add(Add::new(entries(round)).id(id).data(&entry));
        }
        // This must never happen. If it does, the ledger counts it.
        Some(found) => {
            let mut entry: Entry = found.parse()?;
            (entry.amount, entry.moves) = (entry.amount + amount, entry.moves + 1);
            tx.update(Update::new(id).data(&entry));
        }
    }
    Ok(amount)
}

async fn book(tx: Tx, transfer: Transfer) -> Result<(), Failure> {
    let id = entry(transfer.round, transfer.number);
    let mut entry: Entry = tx.get(id.as_str()).await?.ok_or_else(|| missing(&id))?.parse()?;
    entry.bookings += 1;
    tx.update(Update::new(id).data(&entry));
    Ok(())
}

/// The accounts and the ledger of a demonstration.
pub(crate) struct Bank<'a> {
    demo: &'a Demo,
    entities: &'a Entities,
}

/// The counts at the end.
#[derive(Debug, Serialize)]
pub(crate) struct Verdict {
    pub(crate) sum: u64,
    pub(crate) expected: u64,
    /// Transfers that were done in part or not at all, or more than once.
    pub(crate) lost: u32,
    pub(crate) doubled: u32,
    /// Accounts whose balance does not agree with the ledger.
    pub(crate) wrong_accounts: u32,
}

impl Verdict {
    pub(crate) fn is_right(&self) -> bool {
        self.sum == self.expected && (self.lost, self.doubled, self.wrong_accounts) == (0, 0, 0)
    }
}

impl<'a> Bank<'a> {
    pub(crate) fn new(demo: &'a Demo, entities: &'a Entities) -> Bank<'a> {
        Bank { demo, entities }
    }

    /// Opens all accounts that are not open yet.
    pub(crate) async fn open(&self) -> Result<()> {
        let round = self.demo.round;
        let add = |number| {
            let opened = Account { number, balance: OPENING };
            Add::new(accounts(round)).id(account(round, number)).data(&opened)
        };
        self.entities.add_many_if_absent((0..self.demo.accounts).map(add)).await?;
        Ok(())
    }

    /// The sum of all accounts at one moment.
    pub(crate) async fn sum(&self) -> Result<u64> {
        let view = self.entities.now().await?;
        let found: Vec<Account> = all(&view, &accounts(self.demo.round)).await?;
        Ok(found.iter().map(|account| account.balance).sum())
    }

    /// The transfers that are done according to the ledger.
    pub(crate) async fn booked(&self) -> Result<HashSet<u32>> {
        let view = self.entities.now().await?;
        let entries: Vec<Entry> = all(&view, &entries(self.demo.round)).await?;
        Ok(entries.iter().filter(|entry| entry.bookings > 0).map(|entry| entry.number).collect())
    }

    /// Counts everything.
    pub(crate) async fn verdict(&self) -> Result<Verdict> {
        let view = self.entities.now().await?;
        let found: Vec<Account> = all(&view, &accounts(self.demo.round)).await?;
        let ledger: Vec<Entry> = all(&view, &entries(self.demo.round)).await?;
        let mut expected: BTreeMap<u32, i128> =
            (0..self.demo.accounts).map(|number| (number, i128::from(OPENING))).collect();
        for Entry { from, to, amount, .. } in &ledger {
            *expected.get_mut(from).context("the ledger names an account that does not exist")? -= i128::from(*amount);
            *expected.get_mut(to).context("the ledger names an account that does not exist")? += i128::from(*amount);
        }
        let balances: BTreeMap<u32, i128> =
            found.iter().map(|account| (account.number, i128::from(account.balance))).collect();
        let wrong = expected.iter().filter(|(number, balance)| balances.get(number) != Some(*balance)).count();
        let ended: HashSet<u32> =
            ledger.iter().filter(|entry| entry.moves > 0 && entry.bookings > 0).map(|entry| entry.number).collect();
        let lost = (1..=self.demo.transfers).filter(|number| !ended.contains(number)).count();
        let doubled = ledger.iter().filter(|entry| entry.moves > 1 || entry.bookings > 1).count();
        Ok(Verdict {
            sum: found.iter().map(|account| account.balance).sum(),
            expected: self.demo.sum(),
            lost: lost as u32,
            doubled: doubled as u32,
            wrong_accounts: wrong as u32,
        })
    }
}

/// All entities of a type, at the moment of the view.
pub(crate) async fn all<T: DeserializeOwned>(view: &EntityView, kind: &str) -> Result<Vec<T>> {
    let (mut all, mut query) = (Vec::new(), Query::of(kind).limit(PAGE));
    loop {
        let page = view.find(&query).await?;
        for entity in &page {
            all.push(Entity::parse(entity)?);
        }
        match page.next {
            Some(next) => query = query.after(next),
            None => return Ok(all),
        }
    }
}
