//! Transfers from one account, one at a time, and an operator who releases a stuck lock. It is the mutex of
//! docs/locks/slots.md: `cargo run -p latchwork --example lock_mutex_polling`.

use std::time::Duration;

use latchwork::lock::{DurableMutex, LockRecord, initial_lock_record};
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long a transfer waits between two attempts; much less than its lease.
const POLL: Duration = Duration::from_millis(100);

/// Takes money from the account. It reads the balance and writes it a while later: two at once would lose an update.
pub fn transfer(mutex: DurableMutex) -> Workflow<i64, (u64, i64)> {
    workflow("transfer").run(move |ctx: Ctx, amount: i64| async move {
        let slot = ctx.state().workflow::<LockRecord>("account-42:lock").initial(initial_lock_record());
        let done = async {
            let token = acquire(&ctx, &mutex, &slot).await?;
            let account = ctx.state().workflow::<i64>("account-42").initial(100);
            let balance = account.get().await?.unwrap_or(0);
            ctx.run("tell the bank", async || Ok(())).await?;
            ctx.sleep(Duration::from_millis(20)).await?;
            account.set(balance - amount).await?;
            Ok((token, balance - amount))
        };
        let done = done.await;
        // In any case, the permit or the position in the queue is released.
        mutex.release(&slot, ctx.id(), ctx.now().await).await?;
        done
    })
}

/// Tries until it holds the lock. While it waits for a second or more between attempts, it is out of memory.
async fn acquire(
    ctx: &Ctx,
    mutex: &DurableMutex,
    slot: &latchwork::state::Slot<LockRecord>,
) -> std::result::Result<u64, Failure> {
    for _ in 0..1000 {
        let attempt = mutex.try_acquire(slot, ctx.id(), ctx.now().await, None).await?;
        if let Some(token) = attempt.token {
            return Ok(token);
        }
        ctx.sleep(POLL).await?;
    }
    Err(Failure::new("the account was busy all the time"))
}

/// For an operator: releases the lock of the present holder, whether the holder still runs or not.
pub async fn force_release(engine: &Engine) -> Result<Option<String>> {
    let slot = engine.states().workflow("transfer").slot::<LockRecord>("account-42:lock");
    let (mutex, now) = (DurableMutex::default(), engine.states().store().env().now());
    let Some(stuck) = mutex.inspect(&slot).await?.and_then(|record| record.holders.first().cloned()) else {
        return Ok(None);
    };
    mutex.release(&slot, &stuck.holder_id, now).await?;
    Ok(Some(stuck.holder_id))
}

/// A holder takes the lock for an hour and disappears. Transfers wait until the operator releases the lock.
pub async fn run(engine: &Engine, transfer: &Workflow<i64, (u64, i64)>, transfers: i64) -> Result<i64> {
    let slot = engine.states().workflow("transfer").slot::<LockRecord>("account-42:lock");
    let (mutex, env) = (DurableMutex::default(), engine.states().store().env().clone());
    let hour = Duration::from_secs(3600);
    mutex.try_acquire(&slot, "gone", env.now(), Some(hour)).await?;

    let mut handles = Vec::new();
    for amount in 1..=transfers {
        handles.push(engine.start(transfer, amount).await?);
    }
    env.sleep(POLL * 3).await;
    let waiting = mutex.inspect(&slot).await?.map_or(0, |record| record.waiters.len());
    println!("{waiting} transfers wait for {:?}", force_release(engine).await?);

    let mut last = (0, 0);
    for handle in handles {
        let done = handle.result().await?;
        println!("grant {}: the balance is {}", done.0, done.1);
        last = last.max(done);
    }
    Ok(last.1)
}

#[tokio::main]
async fn main() -> Result {
    let transfer = transfer(DurableMutex::new(Duration::from_secs(60))?);
    let engine = Engine::on(&Store::memory().await?).register(&transfer).start().await?;
    let balance = run(&engine, &transfer, 5).await?;
    println!("in the end it is {balance}: 100 - 1 - 2 - 3 - 4 - 5");
    Ok(())
}
