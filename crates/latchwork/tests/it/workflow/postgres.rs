//! Workflows on a store in PostgreSQL: the same engine, the same promises.

use std::time::Duration;

use latchwork::store::{PostgresOptions, Store};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

use crate::server::Server;

/// Charges under a lock, counts in a slot, waits for a signal, and counts again.
fn order() -> Workflow<u64, u64> {
    async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
        let guard = ctx.mutex("till").acquire().await?;
        let paid = ctx.run("charge", async || Ok(price)).await?;
        let income = ctx.state().global::<u64>("income");
        income.increment(paid).await?;
        guard.release().await?;
        let tip: u64 = ctx.receive("tip").await?;
        income.increment(tip).await?;
        Ok(paid + tip)
    }
    workflow("order").run(place)
}

async fn connect(server: &Server) -> Store {
    let schema = format!("t_{}_workflows", std::process::id());
    PostgresOptions::new().schema(schema).lease(Duration::from_secs(2)).connect(&server.url).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_continue_on_a_store_in_postgres_after_a_restart() {
    let (server, order) = (Server::start(), order());
    let store = connect(&server).await;
    let engine = Engine::on(&store).register(&order).start().await.unwrap();
    for number in 0..20_u64 {
        engine.start(&order, number).id(format!("order-{number}")).await.unwrap();
    }
    for number in 0..10 {
        engine.signal(format!("order-{number}"), "tip", &100_u64).await.unwrap();
        let result = engine.handle(&order, format!("order-{number}")).result().await.unwrap();
        assert_eq!(result, number + 100);
    }
    engine.shutdown().await.unwrap();
    store.close().await.unwrap();
    let store = connect(&server).await;
    let engine = Engine::on(&store).register(&order).start().await.unwrap();
    for number in 0..20 {
        if number >= 10 {
            engine.signal(format!("order-{number}"), "tip", &100_u64).await.unwrap();
        }
        let result = engine.handle(&order, format!("order-{number}")).result().await.unwrap();
        assert_eq!(result, number + 100);
    }
    let income = engine.states().global().slot::<u64>("income").get().await.unwrap();
    assert_eq!(income, Some((0..20).map(|number| number + 100).sum()), "each charge and each tip counts once");
    assert_eq!(store.verify().await.unwrap(), []);
}
