//! `latch dev`: a short demonstration on a store of the user's own, that can be run again and goes on from where the
//! last run ended.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail};
use latchwork::store::{Commit, Generation, History, Key, Outcome, Receipt, Space, SpaceSpec, Store, View};
use serde::Serialize;

use crate::output::{Format, Output};

const TELLERS: usize = 64;
const DEPOSITS_EACH: usize = 25;
const BRANCHES: usize = 16;

/// What is left to tell programs.
#[derive(Serialize)]
struct Summary {
    directory: String,
    generation_before: u64,
    generation: u64,
}

pub(crate) async fn run(directory: &Path, output: &mut Output<'_>) -> Result<()> {
    match output.format() {
        Format::Table => show(directory, &mut std::io::stdout()).await.map(|_| ()),
        Format::Json | Format::Jsonl => output.one(&show(directory, &mut std::io::sink()).await?, |_| {}),
    }
}

async fn show(directory: &Path, out: &mut impl Write) -> Result<Summary> {
    let store = Store::open(directory).await?;
    let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    let before = store.generation().await?;
    writeln!(out, "Opened {} at generation {before}.", directory.display())?;
    if store.view().await?.get(&accounts.key("alice")).await?.is_some() {
        writeln!(out, "It was here before: everything below goes on from what was acknowledged then.")?;
    }
    let opening = commits(&store, &accounts, out).await?;
    conflicts(&store, &accounts, out).await?;
    deposits(&store, &accounts, out).await?;
    time_travel(&store, &accounts, opening, out).await?;
    watch(&store, &accounts, before, out).await?;
    let after = summary(&store, out).await?;
    store.close().await?;
    writeln!(out, "\nRun it again, or end it with kill -9 while it runs: nothing that was acknowledged is lost.")?;
    let directory = directory.display().to_string();
    Ok(Summary { directory, generation_before: before.0, generation: after.0 })
}

async fn balance(view: &View, account: &Key) -> Result<u64> {
    let item = view.get(account).await?.context("the account exists")?;
    Ok(std::str::from_utf8(&item.value)?.parse()?)
}

async fn applied(store: &Store, commit: Commit) -> Result<Receipt> {
    Ok(store.commit(commit).await?.applied()?)
}

/// Two accounts are opened, or set back to where the demonstration starts, in one commit.
async fn commits(store: &Store, accounts: &Space, out: &mut impl Write) -> Result<Generation> {
    writeln!(out, "\nCommits: several writes land together or not at all.")?;
    let (alice, bob) = (accounts.key("alice"), accounts.key("bob"));
    let opening = applied(store, Commit::new().put(&alice, "100").put(&bob, "0").meta("opening balances")).await?;
    writeln!(out, "  alice = 100, bob = 0          generation {}", opening.generation)?;
    let view = store.view().await?;
    let rev = view.get(&alice).await?.context("alice was just written")?.rev;
    let transfer = Commit::new().at_rev(&alice, rev).put(&alice, "70").put(&bob, "30").meta("a transfer");
    let transfer = applied(store, transfer).await?;
    writeln!(
        out,
        "  alice → bob: 30               generation {}, if alice is still at rev {rev}",
        transfer.generation
    )?;
    Ok(opening.generation)
}

/// The same check is made again after it stopped holding.
async fn conflicts(store: &Store, accounts: &Space, out: &mut impl Write) -> Result<()> {
    writeln!(out, "\nConflicts: whoever read too early is refused, and told what it missed.")?;
    let alice = accounts.key("alice");
    let stale = store.view().await?.get(&alice).await?.context("alice exists")?.rev;
    applied(store, Commit::new().put(&alice, "60")).await?;
    let generation = store.generation().await?;
    let late = Commit::new().at_rev(&alice, stale).absent(&accounts.key("bob")).put(&alice, "1000000");
    match store.commit(late).await? {
        Outcome::Applied(_) => bail!("a stale commit was applied"),
        Outcome::Refused(refusal) => writeln!(out, "  {refusal}")?,
    }
    writeln!(out, "  and the store is still at generation {}", store.generation().await?)?;
    assert_eq!(generation, store.generation().await?, "a refused commit takes no generation");
    Ok(())
}

/// Many tasks at once: their commits share syncs, and a lost race is read again and tried again.
async fn deposits(store: &Store, accounts: &Space, out: &mut impl Write) -> Result<()> {
    writeln!(out, "\nMany at once: {TELLERS} tellers make {DEPOSITS_EACH} deposits each, to {BRANCHES} accounts.")?;
    let branches: Vec<Key> = (0..BRANCHES).map(|number| accounts.key(format!("branch-{number:02}"))).collect();
    let opening = branches.iter().fold(Commit::new(), |commit, branch| commit.put(branch, "0"));
    applied(store, opening).await?;
    let (start, stats) = (store.env().monotonic(), store.stats().await?);
    let account = |teller: usize| branches[teller % BRANCHES].clone();
    let tellers: Vec<_> = (0..TELLERS).map(|teller| tokio::spawn(work(store.clone(), account(teller)))).collect();
    for teller in tellers {
        teller.await??;
    }
    let (took, after) = (store.env().monotonic() - start, store.stats().await?);
    let view = store.view().await?;
    let mut sum = 0;
    for branch in &branches {
        sum += balance(&view, branch).await?;
    }
    assert_eq!(sum as usize, TELLERS * DEPOSITS_EACH, "every deposit lands once");
    let (commits, refused) = (after.applied - stats.applied, after.refused - stats.refused);
    let syncs = after.groups - stats.groups;
    writeln!(
        out,
        "  the sum is {sum}, as it should be; {commits} commits shared {syncs} syncs in {} ms,",
        took.as_millis()
    )?;
    writeln!(out, "  {refused} more lost a race and were tried again")?;
    Ok(())
}

async fn work(store: Store, account: Key) -> Result<()> {
    for _ in 0..DEPOSITS_EACH {
        loop {
            let view = store.view().await?;
            let item = view.get(&account).await?.context("the account exists")?;
            let balance: u64 = std::str::from_utf8(&item.value)?.parse()?;
            let deposit = Commit::new().at_rev(&account, item.rev).put(&account, (balance + 1).to_string());
            if store.commit(deposit).await?.is_applied() {
                break;
            }
        }
    }
    Ok(())
}

async fn time_travel(store: &Store, accounts: &Space, opening: Generation, out: &mut impl Write) -> Result<()> {
    writeln!(out, "\nTime travel: every generation that is kept can be read.")?;
    let (past, now) = (store.view_at(opening).await?, store.view().await?);
    for name in ["alice", "bob"] {
        let account = accounts.key(name);
        let (then, today) = (balance(&past, &account).await?, balance(&now, &account).await?);
        writeln!(out, "  {name:<5} {then:>5} at generation {opening}, {today:>5} at {}", now.generation())?;
    }
    Ok(())
}

/// Follows what this run did, from before its first commit.
async fn watch(store: &Store, accounts: &Space, before: Generation, out: &mut impl Write) -> Result<()> {
    writeln!(out, "\nWatch: every commit that touches alice, once and in order, from any generation on.")?;
    let mut watch = store.watch(accounts.prefix("alice"), before).await?;
    for _ in 0..3 {
        let commit = watch.next().await?;
        let change = commit.changes.first().context("a watch delivers changes")?;
        let value = change.value.as_deref().map_or("deleted".into(), String::from_utf8_lossy);
        let meta = String::from_utf8_lossy(&commit.meta);
        let line = format!("  generation {:<6} rev {:<5} alice = {value:<5} {meta}", commit.generation, change.rev);
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

async fn summary(store: &Store, out: &mut impl Write) -> Result<Generation> {
    let damaged = store.verify().await?;
    if let Some(damage) = damaged.first() {
        bail!("{} is damaged: {}", damage.place, damage.detail);
    }
    let stats = store.stats().await?;
    writeln!(
        out,
        "\nThe store is at generation {}; all of it was read back and nothing is damaged.",
        stats.generation
    )?;
    Ok(stats.generation)
}
