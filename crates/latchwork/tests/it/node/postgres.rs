//! Several nodes on PostgreSQL: what the user's own transactions request, and programs without an engine.

use latchwork::lock::Locks;
use latchwork::store::{Commit, Order};
use latchwork::workflow::{Failure, Queue, WorkflowError};

use super::held::space;
use super::*;
use crate::server::Server;
use crate::workflow::own::kit::{Place, connect, number};

const LONG: Duration = Duration::from_secs(30);

/// A workflow with rules for its starts: only a node that has it can start it.
fn adder() -> Workflow<u64, u64> {
    workflow("adder").concurrency(100).when_full(Queue::new()).run(async |ctx: Ctx, first: u64| {
        let mut sum = first;
        while let more @ 1.. = ctx.receive::<u64>("more").await? {
            sum = sum * 10 + more;
        }
        Ok::<u64, Failure>(sum)
    })
}

async fn node(place: &Place, name: &str) -> EngineBuilder {
    Engine::on(&place.store().await).node(NodeOptions::new().name(name).lease(LONG))
}

/// The requests that are not done, and those that have failed.
async fn left(place: &Place) -> (i64, i64) {
    let client = connect(&place.url).await;
    let count = async |what: &str| {
        number(&client, &format!("SELECT count(*) FROM {}.outbox WHERE failed IS {what}", place.schema)).await
    };
    (count("NULL").await, count("NOT NULL").await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_left_to_a_node_that_has_its_workflow() {
    let server = Server::start();
    let (place, adder, waits) = (Place::new(&server, "left"), adder(), waits());
    let old = node(&place, "old").await.register(&waits).start().await.unwrap();
    let other = node(&place, "other").await.register(&waits).start().await.unwrap();
    let mut client = connect(&place.url).await;
    let tx = client.transaction().await.unwrap();
    for n in 0..20_u64 {
        let id = format!("a{n}");
        old.in_transaction(&tx).start_by_name("adder", n).id(id.clone()).await.unwrap();
        for more in [1_u64, 2, 0] {
            old.in_transaction(&tx).signal(id.clone(), "more", &more).await.unwrap();
        }
        old.in_transaction(&tx).start(&waits, n).id(format!("w{n}")).await.unwrap();
    }
    tx.commit().await.unwrap();
    // No node has it: its requests wait, in order, and stop no others.
    in_time(async {
        while left(&place).await.0 > 80 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    for n in 0..20 {
        assert!(old.describe(format!("w{n}")).await.is_ok(), "other requests are done");
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(left(&place).await, (80, 0));
    // A node that has it comes: it does them, also those in the shards of others.
    let new = node(&place, "new").await.register(&adder).start().await.unwrap();
    let nodes = Nodes::on(new.store());
    nodes.drain("new", true).await.unwrap();
    until(new.store(), "the others own all", |nodes| {
        nodes.iter().all(|it| (it.name == "new") == it.shards.is_empty()) && nodes.len() == 3
    })
    .await;
    for n in 0..20 {
        let result = async {
            loop {
                match new.handle(&adder, format!("a{n}")).result_through_parks().await {
                    Err(WorkflowError::NotFound { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
                    result => return result,
                }
            }
        };
        assert_eq!(in_time(result).await.unwrap(), n * 100 + 12, "the signals came in order");
    }
    assert_eq!(left(&place).await, (0, 0));
    // A node alone knows that no other one has it: the request fails.
    for engine in [new, other] {
        engine.shutdown().await.unwrap();
    }
    until(old.store(), "old is alone", |nodes| nodes.len() == 1).await;
    let tx = client.transaction().await.unwrap();
    old.in_transaction(&tx).start_by_name("adder", 1).id("last").await.unwrap();
    tx.commit().await.unwrap();
    in_time(async {
        while left(&place).await != (0, 1) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    old.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_outbox_goes_on_after_its_shard_was_lost() {
    let server = Server::start();
    let (place, waits) = (Place::new(&server, "lost"), waits());
    let a = node(&place, "a").await.register(&waits).start().await.unwrap();
    let mut client = connect(&place.url).await;
    let shards = space(a.store(), "node.shards").await;
    for round in 0..3 {
        // As if each shard had moved away and back: the next commit of the node is refused.
        let found = a.store().view().await.unwrap().scan(&shards.all(), Order::Ascending, 100).await.unwrap();
        let touch = found.into_iter().fold(Commit::new(), |commit, (key, item)| commit.put(&key, item.value));
        assert!(a.store().commit(touch).await.unwrap().is_applied());
        let tx = client.transaction().await.unwrap();
        for n in 0..4_u64 {
            let id = format!("e{round}-{n}");
            a.in_transaction(&tx).start(&waits, n).id(id.clone()).await.unwrap();
            a.in_transaction(&tx).signal(id, "go", &100_u64).await.unwrap();
        }
        tx.commit().await.unwrap();
        in_time(async {
            while left(&place).await != (0, 0) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        for n in 0..4 {
            let result = a.handle(&waits, format!("e{round}-{n}")).result();
            assert_eq!(in_time(result).await.unwrap(), 100 + n);
        }
    }
    a.shutdown().await.unwrap();
}

/// A program that uses only locks may be the first on a database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_without_an_engine_hear_of_grants_also_if_they_came_before_the_first_engine() {
    let server = Server::start();
    let place = Place::new(&server, "before");
    let locks = Locks::on(&place.store().await).await.unwrap();
    let engine = node(&place, "a").await.register(&waits()).start().await.unwrap();
    for _ in 0..3 {
        let guard = engine.mutex("printer").acquire().await.unwrap();
        let asked = tokio::spawn(locks.mutex("printer").acquire());
        in_time(async {
            while engine.locks().inspect("printer").await.unwrap().waiters.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        guard.release().await.unwrap();
        let granted = tokio::time::timeout(Duration::from_secs(4), asked).await.expect("the grant is not heard");
        granted.unwrap().unwrap().release().await.unwrap();
    }
    engine.shutdown().await.unwrap();
}
