//! Who owns what: joining, dying, leaving, draining.

use super::*;
use latchwork::node::{MoveReason, NodesError};

#[tokio::test(flavor = "multi_thread")]
async fn a_new_node_gets_its_share_and_a_dead_node_loses_its_own() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let first = named(&store, "a").register(&waits).start().await.unwrap();
    assert_eq!(shares(&Nodes::on(&store).list().await.unwrap()), [64], "a node alone owns everything at once");
    let second = doomed(named(&store, "b").register(&waits)).await;
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let third = named(&store, "c").register(&waits).start().await.unwrap();
    until(&store, "three shares", |nodes| {
        let mut shares = shares(nodes);
        shares.sort_unstable();
        shares == [21, 21, 22]
    })
    .await;
    second.kill();
    let left = until(&store, "b is gone", |nodes| shares(nodes) == [32, 32]).await;
    assert_eq!(left.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["a", "c"]);
    third.shutdown().await.unwrap();
    assert_eq!(shares(&Nodes::on(&store).list().await.unwrap()), [64], "a node that stops in order gives at once");
    first.shutdown().await.unwrap();
    assert!(Nodes::on(&store).list().await.unwrap().is_empty());
    let moves = Nodes::on(&store).moves(1000).await.unwrap();
    for why in [MoveReason::Free, MoveReason::Balanced, MoveReason::Dead, MoveReason::Left] {
        assert!(moves.iter().any(|moved| moved.why == why), "{why:?} in {moves:?}");
    }
    let dead: usize = moves.iter().filter(|it| it.why == MoveReason::Dead).map(|it| it.shards.len()).sum();
    assert!((20..=22).contains(&dead), "{dead} shards of b were taken over, each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_workflows_owns_nothing_beside_others() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let client = named(&store, "client").start().await.unwrap();
    assert_eq!(shares(&Nodes::on(&store).list().await.unwrap()), [64], "alone it does, so that nothing is left undone");
    let worker = named(&store, "worker").register(&waits).start().await.unwrap();
    until(&store, "the worker owns all", |nodes| shares(nodes) == [0, 64]).await;
    let handle = client.start(&waits, 1).await.unwrap();
    client.signal(handle.id().clone(), "go", &2_u64).await.unwrap();
    assert_eq!(in_time(handle.result()).await.unwrap(), 3);
    drop((client, worker));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_node_gives_everything_away_and_continues_to_serve_its_callers() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let (a, b) = (
        named(&store, "a").register(&waits).start().await.unwrap(),
        named(&store, "b").register(&waits).start().await.unwrap(),
    );
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let mut handles = Vec::new();
    for number in 0..50 {
        handles.push(a.start(&waits, number).id(format!("e{number}")).await.unwrap());
    }
    let nodes = Nodes::on(&store);
    nodes.drain("a", true).await.unwrap();
    until(&store, "a is drained", |nodes| shares(nodes) == [0, 64]).await;
    assert!(matches!(nodes.drain("b", true).await, Err(NodesError::LastNode { .. })));
    assert!(matches!(nodes.drain("c", true).await, Err(NodesError::NotFound { .. })));
    for (number, handle) in handles.iter().enumerate() {
        a.signal(handle.id().clone(), "go", &1000_u64).await.unwrap();
        assert_eq!(in_time(handle.result()).await.unwrap(), 1000 + number as u64);
    }
    nodes.drain("a", false).await.unwrap();
    until(&store, "a serves again", |nodes| shares(nodes) == [32, 32]).await;
    drop((a, b));
}

#[tokio::test(flavor = "multi_thread")]
async fn executions_move_to_the_nodes_that_are_left() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let a = named(&store, "a").register(&waits).start().await.unwrap();
    let b = doomed(named(&store, "b").register(&waits)).await;
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let mut ids = Vec::new();
    for number in 0..100_u64 {
        let starter = if number % 2 == 0 { &a } else { &b.engine };
        ids.push(starter.start(&waits, number).id(format!("e{number}")).await.unwrap().id().clone());
    }
    b.kill();
    until(&store, "b is gone", |nodes| shares(nodes) == [64]).await;
    for (number, id) in ids.iter().enumerate() {
        a.signal(id.clone(), "go", &7_u64).await.unwrap();
        let result = in_time(a.handle(&waits, id.clone()).result()).await.unwrap();
        assert_eq!(result, 7 + number as u64);
    }
}
