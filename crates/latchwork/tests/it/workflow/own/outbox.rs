//! The outbox: executions, signals and changes of entities in the user's own transaction, with both clients.

use std::time::Duration;

use latchwork::entity::{Add, Remove, Transaction, Update};
use latchwork::json;
use latchwork::store::{Env, Rev, Store, Uuid};
use latchwork::workflow::{Ctx, Engine, FailedRequest, Outbox, OutboxError, Workflow, WorkflowError, workflow};

use super::kit::{Place, connect, number};
use crate::server::Server;

/// Adds the signals that it gets to its input, until one is zero.
fn adder() -> Workflow<u64, Vec<u64>> {
    workflow("adder").run(async |ctx: Ctx, first: u64| {
        let mut all = vec![first];
        loop {
            match ctx.receive("more").await? {
                0 => return Ok(all),
                more => all.push(more),
            }
        }
    })
}

struct Bench {
    _server: Server,
    place: Place,
    engine: Engine,
}

impl Bench {
    async fn new(name: &str) -> Bench {
        let server = Server::start();
        let place = Place::new(&server, name);
        let engine = Engine::on(&place.store().await).register(&adder()).start().await.unwrap();
        Bench { _server: server, place, engine }
    }

    /// Waits until the outbox holds nothing but failed requests.
    async fn settled(&self) -> Vec<FailedRequest> {
        let client = connect(&self.place.url).await;
        let due = format!("SELECT count(*) FROM {}.outbox WHERE failed IS NULL", self.place.schema);
        while number(&client, &due).await > 0 {
            tokio::task::yield_now().await;
        }
        self.engine.outbox().unwrap().failed().await.unwrap().items
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_committed_transaction_are_done_in_order_and_those_of_a_rolled_back_one_never() {
    let bench = Bench::new("committed").await;
    let (engine, mut client) = (&bench.engine, connect(&bench.place.url).await);
    let tx = client.transaction().await.unwrap();
    let id = engine.in_transaction(&tx).start(&adder(), 1).id("a").await.unwrap();
    for more in [2_u64, 3, 4, 0] {
        engine.in_transaction(&tx).signal("a", "more", &more).await.unwrap();
    }
    engine.in_transaction(&tx).add(Add::new("person").id("ada").data(json!({"n": 1}))).await.unwrap();
    engine.in_transaction(&tx).update(Update::new("ada").data(json!({"n": 2}))).await.unwrap();
    assert!(matches!(engine.describe("a").await, Err(WorkflowError::NotFound { .. })));
    tx.commit().await.unwrap();
    let tx = client.transaction().await.unwrap();
    engine.in_transaction(&tx).start_by_name("adder", 9).id("b").await.unwrap();
    engine.in_transaction(&tx).remove("ada").await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(bench.settled().await, []);
    assert_eq!(id, "a".into());
    assert_eq!(engine.handle(&adder(), "a").result().await.unwrap(), [1, 2, 3, 4]);
    assert_eq!(engine.entities().get("ada").await.unwrap().unwrap().data, json!({"n": 2}));
    assert!(matches!(engine.describe("b").await, Err(WorkflowError::NotFound { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_of_sqlx_write_requests_too() {
    use sqlx::Connection;
    let bench = Bench::new("sqlx").await;
    let socket = bench.place.url.split_whitespace().find_map(|word| word.strip_prefix("host=")).unwrap();
    let options = sqlx::postgres::PgConnectOptions::new().socket(socket).username("postgres").database("postgres");
    let mut connection = sqlx::PgConnection::connect_with(&options).await.unwrap();
    for (id, lands) in [("a", true), ("b", false)] {
        let mut tx = connection.begin().await.unwrap();
        sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
        bench.engine.in_transaction(&mut tx).start(&adder(), 1).id(id).await.unwrap();
        bench.engine.in_transaction(&mut *tx).signal(id, "more", &0_u64).await.unwrap();
        if lands { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
    }
    assert_eq!(bench.settled().await, []);
    assert_eq!(bench.engine.handle(&adder(), "a").result().await.unwrap(), [1]);
    assert!(bench.engine.describe("b").await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_cannot_be_done_is_kept_and_does_not_stop_the_others() {
    let bench = Bench::new("failed").await;
    let (engine, mut client) = (&bench.engine, connect(&bench.place.url).await);
    engine.start(&adder(), 5).id("taken").await.unwrap();
    let tx = client.transaction().await.unwrap();
    engine.in_transaction(&tx).start_by_name("unknown", 1).id("u").await.unwrap();
    engine.in_transaction(&tx).start_by_name("adder", "no number").id("n").await.unwrap();
    engine.in_transaction(&tx).start(&adder(), 1).id("taken").await.unwrap();
    engine.in_transaction(&tx).start(&adder(), 1).id("taken").or_join().await.unwrap();
    engine.in_transaction(&tx).signal("missing", "more", &1).await.unwrap();
    let conditional = Update::new("nothing").data(json!(1)).if_rev(Rev(3));
    engine.in_transaction(&tx).update(conditional).await.unwrap();
    let insert = format!(
        "INSERT INTO {}.outbox (id, shard, kind, body) VALUES ('{}', 0, 'sing', '{{}}')",
        bench.place.schema,
        Uuid::from_u128(7)
    );
    tx.execute(&insert, &[]).await.unwrap();
    engine.in_transaction(&tx).start(&adder(), 1).id("fine").await.unwrap();
    tx.commit().await.unwrap();
    let failed = bench.settled().await;
    let said: Vec<&str> = failed.iter().map(|failed| failed.error.as_str()).collect();
    let expected = [
        "execution \"taken\" already exists",
        "\"nothing\"",
        "the input of workflow \"adder\"",
        "there is no execution \"missing\"",
        "this program knows no request \"sing\"",
        "workflow \"unknown\" is not registered",
    ];
    assert_eq!(said.len(), expected.len(), "{said:#?}");
    for expected in expected {
        assert!(said.iter().any(|said| said.contains(expected)), "{said:#?} should contain {expected}");
    }
    assert!(engine.describe("fine").await.is_ok());

    // What was missing comes, and the request is done after all; another one is removed.
    let outbox = engine.outbox().unwrap();
    let to_missing = failed.iter().find(|failed| failed.error.contains("missing")).unwrap();
    engine.start(&adder(), 1).id("missing").await.unwrap();
    outbox.retry(to_missing.id).await.unwrap();
    for failed in failed.iter().filter(|failed| failed.id != to_missing.id) {
        outbox.remove(failed.id).await.unwrap();
    }
    assert_eq!(bench.settled().await, []);
    engine.signal("missing", "more", &0_u64).await.unwrap();
    assert_eq!(engine.handle(&adder(), "missing").result().await.unwrap(), [1, 1]);
    assert!(matches!(outbox.retry(to_missing.id).await, Err(OutboxError::NotFound { .. })));
    assert!(matches!(outbox.remove(Uuid::from_u128(1)).await, Err(OutboxError::NotFound { .. })));
}

/// Two transactions wait for each other on a row: the transaction that is committed last comes last, though it wrote
/// first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_is_that_of_commits() {
    let bench = Bench::new("order").await;
    let engine = &bench.engine;
    engine.start(&adder(), 0).id("a").await.unwrap();
    let (mut first, mut second) = (connect(&bench.place.url).await, connect(&bench.place.url).await);
    let early = first.transaction().await.unwrap();
    engine.in_transaction(&early).signal("a", "more", &2_u64).await.unwrap();
    let late = second.transaction().await.unwrap();
    engine.in_transaction(&late).signal("a", "more", &1_u64).await.unwrap();
    // Both are committed while no engine takes requests.
    engine.stop();
    late.commit().await.unwrap();
    early.commit().await.unwrap();
    let engine = Engine::on(&bench.place.store().await).register(&adder()).start().await.unwrap();
    let tx = first.transaction().await.unwrap();
    engine.in_transaction(&tx).signal("a", "more", &0_u64).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(engine.handle(&adder(), "a").result().await.unwrap(), [0, 1, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_are_refused_before_anything_is_written() {
    let bench = Bench::new("refused").await;
    let (engine, mut client) = (&bench.engine, connect(&bench.place.url).await);
    let tx = client.transaction().await.unwrap();
    let long = "x".repeat(600);
    let within = || engine.in_transaction(&tx);
    let view = engine.entities().now().await.unwrap();
    let refused = [
        within().start(&adder(), 1).id("").await.map(drop),
        within().start(&adder(), 1).id(long.as_str()).await.map(drop),
        within().start_by_name("", 1).await.map(drop),
        within().signal("a", "", &1).await,
        within().signal("a", "more", &f64::NAN).await,
        within().start_by_name("adder", "x".repeat(17 << 20)).await.map(drop),
        within().add(Add::new("")).await,
        within().entities(Transaction::new().remove(Remove::new("a")).if_unchanged(&view)).await,
    ];
    for (index, refused) in refused.iter().enumerate() {
        assert!(refused.is_err(), "{index}");
    }
    assert!(matches!(&refused[7], Err(OutboxError::OnlyNow { what }) if what.contains("view")));
    tx.commit().await.unwrap();
    assert_eq!(bench.settled().await, []);
    // Whatever a text says, it is a value.
    let tx = client.transaction().await.unwrap();
    let evil = "'); DROP SCHEMA public CASCADE; --";
    engine.in_transaction(&tx).start(&adder(), 1).id(evil).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(bench.settled().await, []);
    assert!(engine.describe(evil).await.is_ok());
    let memory = Store::memory().await.unwrap();
    assert!(matches!(Outbox::on(&memory), Err(OutboxError::NotPostgres)));
}

/// An engine ends at random moments while it works the outbox off. No request is lost, and none is done twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_end_in_the_middle_do_every_request_once() {
    let server = Server::start();
    let place = Place::new(&server, "middle");
    let mut client = connect(&place.url).await;
    let random = Env::system();
    let store = place.store().await;
    let engine = Engine::on(&store).register(&adder()).start().await.unwrap();
    engine.start(&adder(), 0).id("a").await.unwrap();
    engine.stop();
    drop(engine);
    const REQUESTS: u64 = 60;
    for more in 1..=REQUESTS {
        let tx = client.transaction().await.unwrap();
        Outbox::on(&store).unwrap().in_transaction(&tx).signal("a", "more", &more).await.unwrap();
        tx.commit().await.unwrap();
    }
    let due = format!("SELECT count(*) FROM {}.outbox", place.schema);
    let mut lives = 0;
    while number(&client, &due).await > 0 {
        let store = place.store().await;
        let engine = Engine::on(&store).register(&adder()).start().await.unwrap();
        random.sleep(Duration::from_millis(random.random() % 400)).await;
        engine.stop();
        lives += 1;
    }
    let engine = Engine::on(&store).register(&adder()).start().await.unwrap();
    engine.signal("a", "more", &0_u64).await.unwrap();
    let result = engine.handle(&adder(), "a").result().await.unwrap();
    assert_eq!(result, (0..=REQUESTS).collect::<Vec<u64>>(), "after {lives} lives");
    println!("{lives} lives");
}
