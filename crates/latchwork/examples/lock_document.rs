//! A lock that is a document: whoever changes it from "free" to "mine" at the rev they have read holds it, until they
//! give it back or its time is up. No other service is needed; the check on the rev is the lock.
//!
//! `cargo run -p latchwork --example lock_document -- ./data` keeps it in a directory; without one it is in memory.

use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Update};
use latchwork::store::{Rev, Store};
use serde::{Deserialize, Serialize};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const LOCK: &str = "lock:nightly-report";

/// What the lock document says.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Lock {
    owner: Option<String>,
    /// Microseconds since 1970, by the store's clock.
    expires_at_us: u64,
}

/// Makes the lock document unless it is there. Every worker may do this at any time; nothing is overwritten.
pub async fn bootstrap(entities: &Entities) -> Result<bool> {
    let lock = Add::new("lock").id(LOCK).data(Lock::default()).if_absent(true);
    Ok(entities.add(lock).await?.was_added())
}

/// Takes the lock if it is free or its time is up. The rev it gives is larger with every holder: show it to whatever
/// the lock protects, so that a holder who slept through the end of its time can be told from the present one.
pub async fn try_acquire(entities: &Entities, worker: &str, ttl: Duration) -> Result<Option<Rev>> {
    let document = entities.get(LOCK).await?.ok_or("the lock document is missing: bootstrap it")?;
    let lock: Lock = document.parse()?;
    let now = entities.store().env().now();
    if lock.owner.is_some() && lock.expires_at_us > now.0 {
        return Ok(None);
    }
    let mine = Lock { owner: Some(worker.into()), expires_at_us: now.plus(ttl).0 };
    match entities.update(Update::new(LOCK).data(mine).if_rev(document.rev)).await {
        Ok(rev) => Ok(Some(rev)),
        // Another worker took it between our read and our write.
        Err(EntityError::RevisionConflict { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Gives the lock back, if it is still ours.
pub async fn release(entities: &Entities, held: Rev) -> Result<bool> {
    match entities.update(Update::new(LOCK).data(Lock::default()).if_rev(held)).await {
        Ok(_) => Ok(true),
        // Our time was up, and somebody else has it.
        Err(EntityError::RevisionConflict { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Several workers want to hold the lock so many times each.
pub async fn run(entities: &Entities, workers: u32, times: u32) -> Result<()> {
    if bootstrap(entities).await? {
        println!("there was no lock document; now there is");
    } else {
        let found = entities.get(LOCK).await?.ok_or("it was there just now")?;
        println!("the lock document is there from an earlier run, at rev {}: {}", found.rev, found.data);
    }
    let contend = |worker: u32| {
        let entities = entities.clone();
        async move {
            let name = format!("worker {worker}");
            let (mut held, mut refused) = (0, 0);
            while held < times {
                match try_acquire(&entities, &name, Duration::from_secs(5)).await? {
                    Some(rev) => {
                        held += 1;
                        // … the work that must not be done by two at once …
                        entities.store().env().sleep(Duration::from_millis(1)).await;
                        release(&entities, rev).await?;
                    }
                    None => {
                        refused += 1;
                        entities.store().env().sleep(Duration::from_millis(1)).await;
                    }
                }
            }
            println!("{name} held the lock {held} times and was refused {refused} times");
            Result::Ok(())
        }
    };
    let tasks: Vec<_> = (1..=workers).map(|worker| tokio::spawn(contend(worker))).collect();
    for task in tasks {
        task.await??;
    }
    let lock = entities.get(LOCK).await?.ok_or("nobody removes it")?;
    println!("in the end it is at rev {}: {}", lock.rev, lock.data);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let entities = match std::env::args().nth(1) {
        Some(directory) => Entities::open(directory).await?,
        None => Entities::on(&Store::memory().await?).await?,
    };
    run(&entities, 4, 5).await
}
