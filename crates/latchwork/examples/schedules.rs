//! The guide of docs/workflows/schedules.md as one program: `cargo run -p latchwork --example schedules`.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Overlap, Schedule, Workflow, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn report() -> Workflow<String, String> {
    workflow("report").run(async |ctx: Ctx, region: String| {
        let rows = ctx.run("collect", async || Ok(7)).await?;
        Ok(format!("{rows} rows of {region}"))
    })
}

#[tokio::main]
async fn main() -> Result {
    let report = report();
    let store = Store::memory().await?;
    let engine = Engine::on(&store).register(&report).start().await?;
    let schedules = engine.schedules();

    let nightly = Schedule::cron("nightly", "0 2 * * *").zone("Europe/Berlin").jitter(Duration::from_secs(60));
    let nightly = nightly.overlap(Overlap::QueueOne).catch_up(Duration::from_secs(6 * 3600));
    schedules.put(nightly.workflow(&report, "eu".to_string())).await?;
    for time in schedules.next("nightly", 3).await? {
        println!("the nightly report is due {} s after 1970", time.0 / 1_000_000);
    }

    // Triggers the schedule now, instead of waiting for the night.
    let id = schedules.trigger("nightly").await?;
    while engine.describe(&id).await.is_err() {
        store.env().sleep(Duration::from_millis(5)).await;
    }
    println!("{id}: {}", engine.handle(&report, &id).result().await?);

    schedules.put(Schedule::every("often", Duration::from_secs(1)).workflow(&report, "us".to_string())).await?;
    store.env().sleep(Duration::from_millis(2500)).await;
    schedules.pause("often", "no longer needed").await?;
    for run in schedules.runs("often").limit(10).await? {
        println!("{}: {:?}", run.id, run.outcome);
    }
    schedules.delete("often").await?;
    match schedules.put(Schedule::cron("never", "0 0 31 2 *").workflow(&report, String::new())).await {
        Err(error) => println!("{error}"),
        Ok(_) => unreachable!("there is no 31 February"),
    }
    Ok(())
}
