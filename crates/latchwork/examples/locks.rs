//! The guide of docs/locks.md as one program: `cargo run -p latchwork --example locks`.

use std::time::Duration;

use latchwork::lock::{LockName, LockRefused};
use latchwork::store::{Commit, SpaceSpec, Store};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Charges a card: only one charge of a customer at a time, and at most three calls of the vendor at once.
fn charge() -> Workflow<(String, u32), u64> {
    workflow("charge").run(async |ctx: Ctx, (customer, cents): (String, u32)| {
        let card = ctx.mutex(format!("card of {customer}")).acquire().await?;
        let vendor = ctx.semaphore("vendor", 3).acquire().await?;
        let token = card.token().number();
        ctx.run("charge", async || vendor_charges(&customer, cents, token).await).await?;
        vendor.release().await?;
        ctx.sleep(Duration::from_millis(20)).await?;
        card.release().await?;
        Ok(token)
    })
}

async fn vendor_charges(customer: &str, cents: u32, token: u64) -> std::result::Result<(), Failure> {
    println!("{customer} pays {cents} (token {token})");
    Ok(())
}

/// Acquires two mutexes, in an order that may cause a deadlock.
fn both() -> Workflow<(String, String), bool> {
    workflow("both").run(async |ctx: Ctx, (one, other): (String, String)| {
        let first = ctx.mutex(one).acquire().await?;
        ctx.sleep(Duration::from_millis(50)).await?;
        let second = ctx.mutex(other).acquire().await;
        match second.as_ref().err().and_then(|failure| failure.get::<LockRefused>()) {
            Some(LockRefused::Deadlock { cycle, .. }) => {
                println!("a cycle of {} was found", cycle.len());
                first.release().await?;
                Ok(false)
            }
            _ => second.map(|_| true),
        }
    })
}

async fn within(engine: &Engine) -> Result {
    let charge = charge();
    let mut handles = Vec::new();
    for cents in [100, 200, 300] {
        handles.push(engine.start(&charge, ("Ada".to_string(), cents)).await?);
    }
    let mut last = 0;
    for handle in handles {
        let token = handle.result().await?;
        assert!(token > last);
        last = token;
    }
    let both = both();
    let one = engine.start(&both, ("a".to_string(), "b".to_string())).await?;
    let other = engine.start(&both, ("b".to_string(), "a".to_string())).await?;
    let got = [one.result().await?, other.result().await?];
    assert_eq!(got.iter().filter(|got| **got).count(), 1);
    Ok(())
}

async fn outside(engine: &Engine) -> Result {
    let guard = engine.mutex("nightly").acquire().await?;
    assert!(engine.mutex("nightly").try_acquire().await?.is_none());
    let soon = engine.mutex("nightly").acquire_within(Duration::from_millis(10)).await?;
    assert!(soon.is_none());
    tokio::select! {
        () = work() => println!("the work is done"),
        () = guard.lost() => println!("another holder may do the work: stop"),
    }
    // The store refuses a write under a lock that is no longer held.
    let reports = engine.store().space(SpaceSpec::new("reports")).await?;
    let token = guard.token().clone();
    let write = |text: &'static str| Commit::new().guard(&token).put(&reports.key("today"), text);
    assert!(engine.store().commit(write("done")).await?.is_applied());
    guard.release().await?;
    assert!(!engine.store().commit(write("too late")).await?.is_applied());

    let config = engine.rw_lock("config");
    let (one, two) = (config.read().await?, config.read().await?);
    assert!(config.try_write().await?.is_none());
    one.release().await?;
    two.release().await?;
    config.write().await?.release().await?;
    Ok(())
}

async fn work() {
    tokio::task::yield_now().await;
}

async fn operate(engine: &Engine) -> Result {
    let session = engine.locks().session().lease(Duration::from_secs(10)).label("importer").await?;
    let held = engine.mutex(LockName::of_workflow("import", "files")).by(&session).acquire().await?;
    let state = engine.locks().inspect(held.name()).await?;
    let holder = &state.holders[0];
    println!("{} is held by {} ({})", state.name, holder.owner, holder.label.as_deref().unwrap_or("no label"));
    engine.locks().force_release(held.name(), holder.token, "the importer hangs").await?;
    held.lost().await;
    assert_eq!(engine.locks().inspect(held.name()).await?.forced[0].reason, "the importer hangs");
    for lock in engine.locks().list().limit(100).await? {
        println!("{}: {}, {} taken, {} wait", lock.name, lock.kind, lock.used, lock.waiting);
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result {
    let store = Store::memory().await?; // or Engine::open("./data")
    let engine = Engine::on(&store).register(&charge()).register(&both()).start().await?;
    within(&engine).await?;
    outside(&engine).await?;
    operate(&engine).await
}
