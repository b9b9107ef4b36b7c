//! "Create a person unless the e-mail address exists", by many callers at once, without duplicates. A read and then a
//! write is a race. There are two ways to close it. A commit can check that nothing at all was committed since the
//! read. Or the address is declared unique and `add_if_missing` does it, which conflicts only with callers that add the
//! same address.
//!
//! `cargo run -p latchwork --example add_if_missing -- ./data` keeps the people in a directory; without one, in memory.

use latchwork::entity::{Add, Entities, EntityError, EntityId, Query, Transaction, TypeSpec, field};
use latchwork::store::Store;
use serde_json::json;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn by_email(email: &str) -> Query {
    Query::of("person").filter(field("metadata.email").equals(email)).limit(1)
}

fn person(name: &str, email: &str) -> Add {
    Add::new("person").data(json!({ "name": name })).metadata(json!({ "email": email }))
}

/// With a check on the whole store: any commit since the read refuses it, so the number of attempts must be limited.
pub async fn by_generation(entities: &Entities, name: &str, email: &str, attempts: u32) -> Result<EntityId> {
    for _ in 0..attempts {
        let view = entities.now().await?;
        if let Some(found) = view.find(&by_email(email)).await?.items.pop() {
            return Ok(found.id);
        }
        let add = Transaction::new().add(person(name, email)).if_at_generation(view.generation());
        match entities.transact(add).await {
            Ok(mut receipt) => return Ok(receipt.ops.remove(0).id),
            // Another commit landed: read again. It may have added this very person.
            Err(EntityError::Rejected { failed })
                if matches!(failed[0].error, EntityError::GenerationConflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(format!("another commit landed in each of {attempts} attempts to add {email}").into())
}

/// From now on no two people can have the same address, no matter how they are added.
pub async fn declare(entities: &Entities) -> Result<()> {
    Ok(entities.declare(TypeSpec::new("person").unique(["metadata.email"])).await?)
}

/// With a unique address: returns the id of the existing or the new person, and whether it was added.
pub async fn by_unique_email(entities: &Entities, name: &str, email: &str) -> Result<(EntityId, bool)> {
    let found = entities.add_if_missing(&by_email(email), person(name, email)).await?;
    Ok((found.id.clone(), found.was_added()))
}

/// Two imports of the same list, at the same time, in both ways.
pub async fn run(entities: &Entities, people: u32) -> Result<()> {
    let all_people = Query::of("person");
    println!("{} people exist from earlier runs", entities.find(&all_people).await?.items.len());

    let import = |_| {
        let entities = entities.clone();
        tokio::spawn(async move {
            for number in 0..people {
                // Each commit of the other import can refuse this one once.
                by_generation(&entities, "Ada", &format!("ada{number}@example.org"), 50).await?;
            }
            Result::Ok(())
        })
    };
    for task in (0..2).map(import).collect::<Vec<_>>() {
        task.await??;
    }
    println!("after two imports by generation: {} people", entities.find(&all_people).await?.items.len());

    declare(entities).await?;
    println!("found by: {}", entities.explain(&by_email("ada0@example.org")).await?);
    let import = |_| {
        let entities = entities.clone();
        tokio::spawn(async move {
            let mut added = 0;
            for number in 0..people {
                added += u32::from(by_unique_email(&entities, "Bob", &format!("bob{number}@example.org")).await?.1);
            }
            Result::Ok(added)
        })
    };
    for task in (0..2).map(import).collect::<Vec<_>>() {
        println!("an import by unique address added {} of {people}", task.await??);
    }
    let twice = entities.add(person("Eve", "ada0@example.org")).await;
    println!("an add without the check: {}", twice.map_or_else(|error| error.to_string(), |_| "was added!".into()));
    println!("in the end: {} people", entities.find(&all_people).await?.items.len());
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let entities = match std::env::args().nth(1) {
        Some(directory) => Entities::open(directory).await?,
        None => Entities::on(&Store::memory().await?).await?,
    };
    run(&entities, 10).await
}
