//! The guide of docs/workflows/cancellation.md as one program: `cargo run -p latchwork --example cancellation`.

use std::time::Duration;

use latchwork::store::{Store, Uuid};
use latchwork::workflow::{
    Attempt, Ctx, Engine, Failure, Finished, FinishedAs, Retry, Workflow, WorkflowError, workflow,
};
use parking_lot::Mutex;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

async fn give_back(room: u32) -> std::result::Result<(), Failure> {
    println!("room {room} is returned");
    Ok(())
}

/// Books a room, waits for a guest, and returns the room if no guest comes. It records the end in any case.
fn booking() -> Workflow<u32, String> {
    let booking = workflow("booking").run(async |ctx: Ctx, room: u32| {
        ctx.run("book", async || Ok(())).await?;
        match ctx.receive::<String>("guest").await {
            Ok(guest) => Ok(format!("{guest} has room {room}")),
            Err(failure) if failure.is_cancelled() => {
                let ctx = ctx.shielded();
                ctx.sleep(Duration::from_millis(10)).await?;
                ctx.run("give back", async || give_back(room).await).await?;
                Err(failure)
            }
            Err(failure) => Err(failure),
        }
    });
    booking.finally(async |ctx: Ctx, finished: Finished<u32>| {
        ctx.run("write down", async || write_down(finished.input, &finished.outcome).await).await
    })
}

async fn write_down(room: u32, outcome: &FinishedAs) -> std::result::Result<(), Failure> {
    println!("room {room}: {outcome:?}");
    Ok(())
}

/// What is booked now.
static BOOKED: Mutex<Vec<String>> = Mutex::new(Vec::new());

async fn book(what: String) -> std::result::Result<(), Failure> {
    if what.starts_with("car") {
        return Err(Failure::new("there is no car").not_retryable());
    }
    BOOKED.lock().push(what);
    Ok(())
}

async fn unbook(what: String) -> std::result::Result<(), Failure> {
    BOOKED.lock().retain(|booked| *booked != what);
    println!("  {what} is cancelled");
    Ok(())
}

/// Books several things, or nothing.
fn journey() -> Workflow<String, ()> {
    workflow("journey").run(async |ctx: Ctx, to: String| {
        let booked = ctx.saga(async |saga| {
            for what in ["flight", "hotel", "car"] {
                let what = format!("{what} to {to}");
                let undo = what.clone();
                saga.compensate(&format!("undo {what}"), move || unbook(undo.clone()));
                ctx.run(&format!("book {what}"), async || book(what.clone()).await).await?;
            }
            Ok(())
        });
        booked.await
    })
}

/// What is charged now, by idempotency key.
static CHARGED: Mutex<Vec<Uuid>> = Mutex::new(Vec::new());

async fn charge(key: Uuid) -> std::io::Result<()> {
    CHARGED.lock().push(key);
    Ok(())
}

async fn refund(key: Uuid) -> std::result::Result<(), Failure> {
    CHARGED.lock().retain(|charged| *charged != key);
    println!("  the charge is refunded");
    Ok(())
}

/// Charges, and refunds under the key of the charge if the rest fails.
async fn pay(ctx: Ctx, has_stock: bool) -> std::result::Result<(), Failure> {
    let paid = ctx.saga(async |saga| {
        let key = ctx.key("charge");
        saga.compensate("refund", move || refund(key));
        ctx.run_with("charge", async |attempt: Attempt| Ok(charge(attempt.idempotency_key).await?)).await?;
        if has_stock { Ok(()) } else { Err("sold out".into()) }
    });
    paid.await
}

/// Copies a hundred lines, and continues where the previous attempt was.
fn copy() -> Workflow<(), String> {
    workflow("copy").run(async |ctx: Ctx, ()| {
        let copied = ctx.run_with("copy", async |attempt: Attempt| {
            let from: u32 = attempt.progress().unwrap_or(0);
            for line in from..100 {
                if line == 40 && attempt.number == 1 {
                    return Err(Failure::new("the connection broke"));
                }
                if line % 10 == 9 {
                    attempt.heartbeat(&(line + 1)).await?;
                }
            }
            Ok(format!("attempt {} began at line {from}", attempt.number))
        });
        let retry = Retry::exponential().max_attempts(3).first_pause(Duration::from_millis(10));
        copied.heartbeat_timeout(Duration::from_secs(30)).retry(retry).await
    })
}

#[tokio::main]
async fn main() -> Result {
    let (booking, journey, copy, pay) = (booking(), journey(), copy(), workflow("pay").run(pay));
    let store = Store::memory().await?;
    let engine = Engine::on(&store).register(&booking).register(&journey).register(&copy).register(&pay);
    let engine = engine.start().await?;

    let handle = engine.start(&booking, 12).id("room-12").await?;
    engine.cancel("room-12", "the guest is ill").await?;
    match handle.result().await {
        Err(WorkflowError::Cancelled { reason, .. }) => println!("cancelled: {reason}"),
        other => drop(other?),
    }
    match engine.cancel("room-12", "again").await {
        Err(WorkflowError::Ended { id }) => println!("{id} has ended"),
        other => other?,
    }

    let handle = engine.start(&booking, 13).id("room-13").await?;
    engine.terminate("room-13", "the house is closed").await?;
    match handle.result().await {
        Err(WorkflowError::Failed { failure, .. }) => println!("failed: {failure}"),
        other => drop(other?),
    }

    let journey = engine.start(&journey, "Rome".to_string()).await?;
    println!("the journey: {}", journey.result().await.err().ok_or("there was a car")?);
    println!("booked: {:?}", BOOKED.lock());
    let paid = engine.start(&pay, false).await?.result().await;
    println!("not paid: {}; charged: {:?}", paid.err().ok_or("it was in stock")?, CHARGED.lock());

    println!("{}", engine.start(&copy, ()).await?.result().await?);
    Ok(())
}
