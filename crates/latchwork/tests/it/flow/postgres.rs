//! A flow on a store in PostgreSQL: the same engine, the same promises.

use std::time::Duration;

use latchwork::flow::{AnswerKind, Flow, flow, handler, sequencer};
use latchwork::store::{PostgresOptions, Store};
use latchwork::workflow::Engine;

use super::{Log, Tally, add};
use crate::server::Server;

fn orders(log: &Log) -> Flow {
    let approval = handler("approval").run(async |ctx, value: i64| {
        let answer = ctx.suspend("ship").message("Ship it?").data(value).await?;
        Ok(value + 10 * i64::from(answer.is_approved()))
    });
    let order = sequencer("order").state::<Tally>().step(&add("charge", log)).step(&approval).step(&add("ship", log));
    flow("orders").action("place", order.build().unwrap()).build().unwrap()
}

async fn connect(server: &Server) -> Store {
    let schema = format!("t_{}_flow", std::process::id());
    PostgresOptions::new().schema(schema).lease(Duration::from_secs(2)).connect(&server.url).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_continues_after_its_question_on_a_store_in_postgres() {
    let (server, log) = (Server::start(), Log::default());
    let flow = orders(&log);
    let store = connect(&server).await;
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).run("place", 1).idempotency_key("order-1").await.unwrap();
    while request.suspensions().await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    engine.shutdown().await.unwrap();
    store.close().await.unwrap();
    let store = connect(&server).await;
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let flows = engine.flow(&flow);
    let request = flows.run("place", 1).idempotency_key("order-1").await.unwrap();
    let question = request.suspensions().await.unwrap().pop().expect("it is open");
    flows.answer(&question.id, AnswerKind::Approve, (), "ada").await.unwrap();
    assert_eq!(request.result::<i64>().await.unwrap(), 13);
    assert_eq!(request.checkpoints().await.unwrap()["order"]["total"], 2, "each change of the state once");
    assert_eq!((log.count("charge"), log.count("ship")), (1, 1));
    assert_eq!(store.verify().await.unwrap(), []);
}
