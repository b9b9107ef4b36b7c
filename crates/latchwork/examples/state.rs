//! The guide of docs/state.md as one program: `cargo run -p latchwork --example state`.

use std::time::Duration;

use latchwork::json;
use latchwork::state::{MutationError, StateError, States};
use latchwork::store::Store;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    // States::open(directory) keeps it in files.
    let states = States::on(&Store::memory().await?).await?;
    containers(&states).await?;
    slots(&states).await?;
    budgets(&states).await?;
    watching(&states).await
}

async fn containers(states: &States) -> Result {
    let session = states.session("s-1");
    session.patch_state(json!({"findings": {"a": 1}})).await?;
    session.patch_state(json!({"findings": {"b": 2}})).await?;
    session.inc_state("visits", 1).await?;
    session.push_state("pages", "/home").await?;
    session.set_state_record("flags", "beta", true).await?;
    session.delete_state_record("flags", "beta").await?;
    println!("{}", session.get().await?.expect("it was written"));

    let spent = session.atomic_state(|state| async move {
        let mut state = state.unwrap_or_default();
        let balance = state["balance"].as_i64().unwrap_or(0);
        if balance < 10 {
            return Err("not enough");
        }
        state["balance"] = json!(balance - 10);
        Ok(Some(state))
    });
    assert!(matches!(spent.await, Err(MutationError::Refused("not enough"))));

    let error = session.inc_state("pages", 1).await.expect_err("a list is not a number");
    println!("{error}");
    Ok(())
}

async fn slots(states: &States) -> Result {
    let orders = states.global().slot::<u64>("orders").initial(100);
    assert_eq!(orders.increment(1).await?.value, 101);
    assert_eq!(orders.update(|orders| orders.unwrap_or(0) * 2).await?.value, 202);
    // A value that does not fit the type is not written.
    assert!(matches!(orders.increment(-1000).await, Err(StateError::Mismatch { .. })));
    let jobs = states.workflow("import").slot::<Vec<String>>("jobs");
    jobs.append("first".into()).await?;
    assert_eq!(jobs.remove_first().await?.value.as_deref(), Some("first"));
    Ok(())
}

async fn budgets(states: &States) -> Result {
    let session = states.session("s-2").mutation_timeout(Duration::from_millis(20));
    let slow = session.atomic_state(|state| async move {
        std::future::pending::<()>().await;
        Ok::<_, std::convert::Infallible>(state)
    });
    println!("{}", slow.await.expect_err("it never ends"));

    // Sent twice under one name, applied once.
    let user = states.user("ada");
    for _ in 0..2 {
        let counted = user.clone().once("order-7").inc_state("orders", 1).await?;
        println!("orders: {}, repeated: {}", counted.value, counted.repeated);
    }
    Ok(())
}

async fn watching(states: &States) -> Result {
    let org = states.org("acme");
    let mut watch = org.watch(states.store().generation().await?).await?;
    org.inc_state("members", 3).await?;
    let change = watch.next().await?.expect("a stored container");
    println!("rev {}: {:?}", change.rev, change.events);
    Ok(())
}
