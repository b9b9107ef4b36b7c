//! The guide in docs/store.md as one program. It works in a new directory under the system's temporary directory.

use latchwork_store::{Commit, Confirm, FileOptions, Generation, History, Limits, Order, Outcome, SpaceSpec, Store};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let home = tempfile::tempdir()?;
    let path = |name: &str| home.path().join(name);

    // Opening
    let store = Store::open(path("data")).await?;
    let scratch = Store::memory().await?;
    let large = FileOptions::new().cache_bytes(256 << 20).open(path("large")).await?;
    drop((scratch, large));

    // Spaces and keys
    let users = store.space(SpaceSpec::new("users").history(History::Generations(100_000))).await?;
    let jobs = store.space(SpaceSpec::new("jobs").keys_used_once()).await?;
    let key = users.key("alice");

    // Committing
    let first = store.commit(Commit::new().absent(&key).put(&key, "old")).await?.applied()?;
    let (rev, generation) = (first.revs[0].ok_or("a put has a rev")?, first.generation);
    for _ in 0..2 {
        match store.commit(Commit::new().at_rev(&key, rev).put(&key, "new")).await? {
            Outcome::Applied(receipt) => println!("generation {}, rev {:?}", receipt.generation, receipt.revs[0]),
            Outcome::Refused(refusal) => println!("{refusal}"),
        }
    }
    let read = store.view().await?;
    let jobs_read = read.scan(&jobs.all(), Order::Ascending, 100).await?.len();
    let next = Commit::new().unchanged(&jobs.all(), read.generation()).put(&jobs.key("job 1"), "waits");
    println!("{jobs_read} jobs were read, and are unchanged: {}", store.commit(next).await?.is_applied());
    drop(read);

    // Sending again
    let charge = Commit::new().id(store.commit_id()).put(&key, "charged");
    let first = store.commit(charge.clone()).await?.applied()?;
    let again = store.commit(charge).await?.applied()?;
    assert!(again.repeated && again.generation == first.generation);

    // Reading
    let view = store.view().await?;
    println!("now: {:?}", view.get(&key).await?);
    let past = store.view_at(generation).await?;
    println!("then: {:?}", past.get(&key).await?);
    println!("{} versions", view.history(&key, 10).await?.len());
    let changes = view.changes_since(&users.all(), generation, 1000).await?;
    println!("{} commits since, complete up to {}", changes.commits.len(), changes.through);
    let mut rest = users.prefix("a");
    loop {
        let page = view.scan(&rest, Order::Ascending, 100).await?;
        let Some((last, _)) = page.last() else { break };
        rest = rest.after(last);
    }
    let last_minute = store.env().now().minus(std::time::Duration::from_secs(60));
    println!("a minute ago: generation {}", store.view_at_time(last_minute).await?.generation());

    // Watching
    let mut watch = store.watch(users.all(), Generation(0)).await?;
    let commit = watch.next().await?;
    println!("generation {} changed {} keys; seen up to {}", commit.generation, commit.changes.len(), watch.position());

    // Snapshots
    view.persist(path("backup")).await?;
    drop((view, past));
    store.commit(Commit::new().delete(&key)).await?.applied()?;
    let restored = store.restore(path("backup"), Confirm::ReplaceEverything).await?;
    println!("restored as generation {restored}: {:?}", store.view().await?.get(&key).await?);

    limits(&path("small")).await
}

/// Sets a limit and exceeds it.
async fn limits(directory: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut limits = Limits::default();
    limits.value_bytes = 64 << 10;
    let small = FileOptions::new().limits(limits).open(directory).await?;
    let space = small.space(SpaceSpec::new("small")).await?;
    if let Err(error) = small.commit(Commit::new().put(&space.key("k"), vec![0; 100_000])).await {
        println!("{error}");
    }
    Ok(())
}
