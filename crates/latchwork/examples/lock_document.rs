//! A lock that is a document. The worker that changes it from "free" to "mine" at the rev that it has read holds the
//! lock, until it releases the lock or its time is up. It needs no other service: the check of the rev is the lock.
//!
//! `cargo run -p latchwork --example lock_document -- ./data` keeps it in a directory; without one it is in memory.

use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Update};
use latchwork::store::{Rev, Store};
use serde::{Deserialize, Serialize};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const LOCK: &str = "lock:nightly-report";

/// The contents of the lock document.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Lock {
    owner: Option<String>,
    /// Microseconds since 1970, by the store's clock.
    expires_at_us: u64,
}

/// Creates the lock document unless it exists. Every worker may do this at any time; it overwrites nothing.
pub async fn bootstrap(entities: &Entities) -> Result<bool> {
    let lock = Add::new("lock").id(LOCK).data(Lock::default()).if_absent(true);
    Ok(entities.add(lock).await?.was_added())
}

/// Acquires the lock if it is free or its time is up. The returned rev rises with every holder. Pass it to the service
/// that the lock protects, so that the service can refuse a holder whose time was up.
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
        // Another worker acquired it between our read and our write.
        Err(EntityError::RevisionConflict { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Releases the lock, if this worker still holds it.
pub async fn release(entities: &Entities, held: Rev) -> Result<bool> {
    match entities.update(Update::new(LOCK).data(Lock::default()).if_rev(held)).await {
        Ok(_) => Ok(true),
        // Our time was up, and another worker holds it.
        Err(EntityError::RevisionConflict { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Several workers acquire the lock `times` times each.
pub async fn run(entities: &Entities, workers: u32, times: u32) -> Result<()> {
    if bootstrap(entities).await? {
        println!("the lock document was created");
    } else {
        let found = entities.get(LOCK).await?.ok_or("the lock document is missing")?;
        println!("the lock document exists from an earlier run, at rev {}: {}", found.rev, found.data);
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
                        // … the work that only one worker may do at a time …
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
    let lock = entities.get(LOCK).await?.ok_or("the lock document is missing")?;
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
