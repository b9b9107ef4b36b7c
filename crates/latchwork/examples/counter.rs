//! A counter that many tasks increment at once, without a lost increment. A task reads, changes, and writes at the rev
//! that it has read. If another task was faster, it tries again. The number of attempts is limited, because two unlucky
//! writers could continue forever.
//!
//! `cargo run -p latchwork --example counter -- ./data` keeps it in a directory; without one it is in memory.

use latchwork::entity::{Add, Entities, EntityError, Update};
use latchwork::store::Store;
use serde_json::json;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Creates the counter unless it exists. Returns its value.
pub async fn bootstrap(entities: &Entities, id: &str) -> Result<i64> {
    entities.add(Add::new("counter").id(id).data(json!({"value": 0})).if_absent(true)).await?;
    value(entities, id).await
}

/// Returns the present value.
pub async fn value(entities: &Entities, id: &str) -> Result<i64> {
    let counter = entities.get(id).await?.ok_or("the counter does not exist")?;
    Ok(counter.data["value"].as_i64().ok_or("the counter holds no number")?)
}

/// Increments by hand, to show how it works. Returns the number of attempts.
pub async fn increment_by_hand(entities: &Entities, id: &str, by: i64, attempts: u32) -> Result<u32> {
    for attempt in 1..=attempts {
        let counter = entities.get(id).await?.ok_or("the counter does not exist")?;
        let current = counter.data["value"].as_i64().ok_or("the counter holds no number")?;
        let update = Update::new(id).data(json!({"value": current + by})).if_rev(counter.rev);
        match entities.update(update).await {
            Ok(_) => return Ok(attempt),
            // The error has the counter's rev, but the value must be read again.
            Err(EntityError::RevisionConflict { .. }) => continue,
            Err(error) => return Err(error.into()),
        }
    }
    Err(format!("another caller changed the counter in each of {attempts} attempts").into())
}

/// The same with the library's help. Callers of one process queue for the entity instead of racing for it, so only
/// other processes can cause a retry.
pub async fn increment(entities: &Entities, id: &str, by: i64, retries: u32) -> Result<()> {
    let add = |draft: &mut latchwork::entity::Draft| {
        let value = draft.data["value"].as_i64().ok_or("the counter holds no number")?;
        draft.data["value"] = json!(value + by);
        Ok::<(), &str>(())
    };
    entities.try_update_with(id, retries, add).await.map_err(|error| error.to_string())?;
    Ok(())
}

/// Each of `tasks` tasks increments once by hand, and once with the library's help.
pub async fn run(entities: &Entities, tasks: u32) -> Result<()> {
    let found = bootstrap(entities, "visits").await?;
    println!("the counter is at {found}{}", if found == 0 { "" } else { ", from earlier runs" });

    let by_hand = |_| {
        let entities = entities.clone();
        tokio::spawn(async move { increment_by_hand(&entities, "visits", 1, 5).await })
    };
    let (mut landed, mut most, mut gave_up) = (0, 0, None);
    for task in (0..tasks).map(by_hand).collect::<Vec<_>>() {
        match task.await? {
            Ok(attempts) => (landed, most) = (landed + 1, most.max(attempts)),
            Err(error) => gave_up = Some(error),
        }
    }
    println!("by hand: {landed} of {tasks} landed, after up to {most} attempts");
    if let Some(error) = gave_up {
        println!("the others gave up: {error}");
    }

    let helped = |_| {
        let entities = entities.clone();
        tokio::spawn(async move { increment(&entities, "visits", 1, 5).await })
    };
    for task in (0..tasks).map(helped).collect::<Vec<_>>() {
        task.await??;
    }
    println!("with update_with: all {tasks} landed");

    let (now, expected) = (value(entities, "visits").await?, found + i64::from(landed) + i64::from(tasks));
    println!("the counter is at {now}: {found} + {landed} + {tasks}");
    if now == expected { Ok(()) } else { Err(format!("it should be at {expected}").into()) }
}

#[tokio::main]
async fn main() -> Result<()> {
    let entities = match std::env::args().nth(1) {
        Some(directory) => Entities::open(directory).await?,
        None => Entities::on(&Store::memory().await?).await?,
    };
    run(&entities, 20).await
}
