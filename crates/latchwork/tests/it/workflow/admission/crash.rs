//! A crash right before and right after every commit of executions under limits.

use std::time::Duration;

use latchwork::testing::Crashes;
use latchwork::workflow::{Batch, Ctx, Queue, Retry, Workflow, workflow};

fn often() -> Retry {
    Retry::exponential().max_attempts(100)
}

/// The last start is admitted after all earlier executions have ended, in whichever process: no permit is lost or left
/// over.
#[tokio::test]
async fn permits_and_positions_in_the_queue_survive_a_crash_at_any_commit() {
    let limited: Workflow<u32, u32> =
        workflow("limited").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u32| {
            ctx.run("one", async || Ok(())).retry(often()).await?;
            ctx.sleep(Duration::from_secs(5)).await?;
            ctx.run("two", async || Ok(n)).retry(often()).await
        });
    let others = limited.clone();
    let crashes = Crashes::of(|| limited.clone(), 1).outside(move |engine| {
        let limited = others.clone();
        async move {
            for n in 2..=3 {
                if engine.start(&limited, n).id(format!("e{n}")).or_join().await.is_err() {
                    return;
                }
            }
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&1), "{:?}", outcome.crash);
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 10, "{ended}");
}

/// The callers of a batch send their starts again after a crash. Each accepted input is used once.
#[tokio::test]
async fn batches_survive_a_crash_at_any_commit() {
    let summed: Workflow<u32, u32> =
        workflow("summed").batch(Batch::new(3, Duration::from_secs(1))).run(async |ctx: Ctx, inputs: Vec<u32>| {
            ctx.run("sum", async || Ok(inputs.iter().map(|n| n * 10).collect())).retry(often()).await
        });
    let gathers = summed.clone();
    let drives = workflow("drives").run(async |ctx: Ctx, (): ()| {
        let sums: Vec<u32> = ctx.receive("sums").await?;
        ctx.run("end", async || Ok(sums.clone())).retry(often()).await
    });
    let crashes = Crashes::of(|| drives.clone(), ()).register(|| summed.clone()).outside(move |engine| {
        let summed = gathers.clone();
        async move {
            let mut handles = Vec::new();
            for n in 1..=5 {
                match engine.start(&summed, n).await {
                    Ok(handle) => handles.push(handle),
                    Err(_) => return,
                }
            }
            let mut sums = Vec::new();
            for handle in handles {
                match handle.result().await {
                    Ok(sum) => sums.push(sum),
                    Err(_) => return,
                }
            }
            let _ = engine.signal("execution", "sums", &sums).id("sums").await;
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&vec![10, 20, 30, 40, 50]), "{:?}", outcome.crash);
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 10, "{ended}");
}
