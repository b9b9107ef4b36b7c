//! Many tasks at once: one winner, and every loser gets an error that says exactly why.

use latchwork::entity::{
    Add, Direction, Effect, Entities, EntityError, Query, Remove, Transaction, TypeSpec, Update, field,
};
use latchwork::store::Rev;
use serde_json::json;

use super::{assert_sound, failed, fill, found, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    of_a_hundred_tasks_on_one_rev_one_wins,
    of_a_hundred_removes_of_one_rev_one_wins,
    of_a_hundred_adds_of_one_id_one_wins,
    of_a_hundred_adds_if_absent_one_adds,
    of_a_hundred_takers_of_a_unique_value_one_wins,
    a_loser_is_not_told_that_an_entity_violates_itself,
    transfers_between_entities_keep_the_sum,
    add_if_missing_adds_exactly_one_while_unrelated_writers_run,
    add_if_missing_without_an_index_adds_exactly_one,
    add_if_missing_returns_an_existing_match,
    add_if_missing_refuses_an_entity_that_its_query_would_not_find,
    the_retry_loop_of_whole_store_checks_adds_exactly_one,
);

/// Runs one task for each number, and returns their results in order.
async fn crowd<F, T>(count: u64, entities: &Entities, task: impl Fn(Entities, u64) -> F) -> Vec<T>
where
    F: Future<Output = T> + Send + 'static,
    T: Send + 'static,
{
    let tasks: Vec<_> = (0..count).map(|n| tokio::spawn(task(entities.clone(), n))).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

async fn of_a_hundred_tasks_on_one_rev_one_wins(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(null))]).await;
    for round in 1..=3 {
        let at = generation(&entities).await;
        let results = crowd(100, &entities, move |entities, n| async move {
            entities.update(Update::new("a").data(json!(n)).if_rev(Rev(round))).await
        })
        .await;
        let winner = results.iter().position(Result::is_ok).unwrap();
        for (n, result) in results.into_iter().enumerate() {
            match result {
                Ok(rev) => assert_eq!((n, rev), (winner, Rev(round + 1))),
                Err(EntityError::RevisionConflict { id, expected, actual }) => {
                    assert_eq!((id.as_str(), expected, actual), ("a", Rev(round), Rev(round + 1)));
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!((get(&entities, "a").await.data, generation(&entities).await), (json!(winner), at + 1));
    }
}

async fn of_a_hundred_removes_of_one_rev_one_wins(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(null))]).await;
    let results =
        crowd(100, &entities, |entities, _| async move { entities.remove(Remove::new("a").if_rev(Rev(1))).await })
            .await;
    assert_eq!(results.iter().filter(|result| matches!(result, Ok(Rev(2)))).count(), 1);
    let missing = |result: &&Result<Rev, EntityError>| matches!(result, Err(EntityError::NotFound { .. }));
    assert_eq!(results.iter().filter(missing).count(), 99);
}

async fn of_a_hundred_adds_of_one_id_one_wins(bench: Bench) {
    let entities = bench.entities().await;
    let results =
        crowd(100, &entities, |entities, n| async move { entities.add(Add::new("t").id("a").data(json!(n))).await })
            .await;
    let winner = results.iter().position(Result::is_ok).unwrap();
    let exists = |result: &&Result<_, _>| matches!(result, Err(EntityError::AlreadyExists { rev: Rev(1), .. }));
    assert_eq!(results.iter().filter(exists).count(), 99);
    assert_eq!(get(&entities, "a").await.data, json!(winner));
}

async fn of_a_hundred_adds_if_absent_one_adds(bench: Bench) {
    let entities = bench.entities().await;
    let at = generation(&entities).await;
    let results = crowd(100, &entities, |entities, n| async move {
        let add = Add::new("t").id("a").data(json!(n));
        if n % 2 == 0 {
            entities.add(add.if_absent(true)).await.unwrap()
        } else {
            entities.add_many_if_absent([add]).await.unwrap().ops.remove(0)
        }
    })
    .await;
    assert!(results.iter().all(|op| op.id == "a" && op.rev == Rev(1)));
    let added: Vec<_> = (0..100).filter(|n| results[*n].effect == Effect::Added).collect();
    assert_eq!(added.len(), 1);
    assert_eq!((get(&entities, "a").await.data, generation(&entities).await), (json!(added[0]), at + 1));
}

async fn of_a_hundred_takers_of_a_unique_value_one_wins(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    for n in 0..50 {
        entities.add(Add::new("t").id(format!("{n}"))).await.unwrap();
    }
    let results = crowd(100, &entities, |entities, n| async move {
        let data = json!({"u": "one"});
        match n {
            0..50 if n % 2 == 0 => entities.update(Update::new(format!("{n}")).data(data)).await.map(drop),
            0..50 => entities.update_with(format!("{n}"), 0, |draft| draft.data = data.clone()).await.map(drop),
            _ => entities.add(Add::new("t").id(format!("{n}")).data(data)).await.map(drop),
        }
    })
    .await;
    let winner = results.iter().position(Result::is_ok).unwrap().to_string();
    for (n, result) in results.into_iter().enumerate().filter(|(_, result)| result.is_err()) {
        let EntityError::UniqueViolation { id, owner, .. } = result.unwrap_err() else { panic!("task {n}") };
        assert_eq!((id.to_string(), owner.to_string()), (n.to_string(), winner.clone()));
    }
    assert_eq!(found(&entities, &Query::of("t").filter(field("data.u").equals("one"))).await, [winner]);
    assert_sound(&entities).await;
}

async fn a_loser_is_not_told_that_an_entity_violates_itself(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    fill(&entities, "t", [("old", json!({}))]).await;
    for round in 1..20u64 {
        let results = crowd(30, &entities, move |entities, _| async move {
            let update = Update::new("old").data(json!({"u": round})).if_rev(Rev(round));
            let add = Add::new("t").id(format!("new-{round}")).data(json!({"u": format!("new-{round}")}));
            entities.transact(Transaction::new().update(update).add(add)).await
        })
        .await;
        for result in results.into_iter().filter(Result::is_err) {
            let failed = failed(result);
            let expected = |error: &EntityError| {
                matches!(error, EntityError::RevisionConflict { .. } | EntityError::AlreadyExists { .. })
            };
            assert!(failed.iter().all(|failed| expected(&failed.error)), "{failed:?}");
        }
    }
}

async fn transfers_between_entities_keep_the_sum(bench: Bench) {
    let entities = bench.entities().await;
    for n in 0..5 {
        fill(&entities, "account", [(format!("a{n}").as_str(), json!({"balance": 100}))]).await;
    }
    let landed = crowd(40, &entities, |entities, n| async move {
        let mut landed = 0;
        for round in 0..5 {
            let (from, to) = (format!("a{}", n % 5), format!("a{}", (n + 1 + round % 4) % 5));
            loop {
                let view = entities.now().await.unwrap();
                let balance = |entity: latchwork::entity::Entity| entity.data["balance"].as_i64().unwrap();
                let one = balance(view.get(&from).await.unwrap().unwrap());
                let two = balance(view.get(&to).await.unwrap().unwrap());
                let transfer = Transaction::new()
                    .update(Update::new(&from).data(json!({"balance": one - 1})))
                    .update(Update::new(&to).data(json!({"balance": two + 1})))
                    .if_unchanged(&view);
                match entities.transact(transfer).await {
                    Ok(_) => break landed += 1,
                    Err(EntityError::Rejected { failed }) => {
                        assert!(failed.iter().all(|failed| matches!(failed.error, EntityError::ReadChanged { .. })));
                        tokio::task::yield_now().await;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
        landed
    })
    .await;
    let all = entities.find(&Query::of("account")).await.unwrap().items;
    assert_eq!(all.iter().map(|entity| entity.data["balance"].as_i64().unwrap()).sum::<i64>(), 500);
    let revs: u64 = all.iter().map(|entity| entity.rev.0 - 1).sum();
    assert_eq!(revs, 2 * landed.iter().sum::<u64>());
}

fn by_email(email: &str) -> Query {
    Query::of("person").filter(field("data.email").equals(email))
}

async fn race_to_add(entities: Entities) {
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let unrelated = {
        let (entities, stop) = (entities.clone(), stop.clone());
        tokio::spawn(async move {
            let mut written = 0;
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                written += 1;
                let email = format!("unrelated-{written}@x");
                entities.add(Add::new("person").data(json!({"email": email}))).await.unwrap();
                entities.add(Add::new("other").data(json!({"email": "new-0@x"}))).await.unwrap();
                tokio::task::yield_now().await;
            }
        })
    };
    for round in 0..5 {
        let email = format!("new-{round}@x");
        let results = crowd(50, &entities, |entities, n| {
            let (query, data) = (by_email(&email), json!({"email": email.as_str(), "by": n}));
            async move { entities.add_if_missing(&query, Add::new("person").data(data)).await.unwrap() }
        })
        .await;
        let winners: Vec<_> = (0..50).filter(|n| results[*n].was_added()).collect();
        assert_eq!(winners.len(), 1);
        assert!(results.iter().all(|op| op.id == results[winners[0]].id && op.rev == Rev(1)));
        let found = entities.find(&by_email(&email)).await.unwrap().items;
        assert_eq!((found.len(), &found[0].data["by"]), (1, &json!(winners[0])));
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    unrelated.await.unwrap();
    assert_sound(&entities).await;
}

async fn add_if_missing_adds_exactly_one_while_unrelated_writers_run(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("person").unique(["data.email"])).await.unwrap();
    race_to_add(entities).await;
}

async fn add_if_missing_without_an_index_adds_exactly_one(bench: Bench) {
    race_to_add(bench.entities().await).await;
}

async fn add_if_missing_returns_an_existing_match(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "person", [("b", json!({"email": "x", "age": 5})), ("a", json!({"email": "x", "age": 9}))]).await;
    let at = generation(&entities).await;
    let add = || Add::new("person").id("c").data(json!({"email": "x"}));
    let first = entities.add_if_missing(&by_email("x"), add()).await.unwrap();
    assert_eq!((first.id.as_str(), first.rev, first.effect), ("a", Rev(1), Effect::Existing));
    let youngest = by_email("x").order_by("data.age", Direction::Ascending);
    assert_eq!(entities.add_if_missing(&youngest, add()).await.unwrap().id, "b");
    assert_eq!(generation(&entities).await, at);
    // If another entity has the id, the add is refused like any add.
    let taken = entities.add_if_missing(&by_email("y"), add().id("a").data(json!({"email": "y"}))).await;
    assert!(matches!(taken, Err(EntityError::AlreadyExists { rev: Rev(1), .. })), "{taken:?}");
    assert_eq!(generation(&entities).await, at);
}

async fn add_if_missing_refuses_an_entity_that_its_query_would_not_find(bench: Bench) {
    let entities = bench.entities().await;
    let at = generation(&entities).await;
    let adds = [
        Add::new("person").data(json!({"email": "y"})),
        Add::new("animal").data(json!({"email": "x"})),
        Add::new("person").metadata(json!({"email": "x"})),
        Add::new("person"),
    ];
    for add in adds {
        let refused = entities.add_if_missing(&by_email("x"), add).await;
        assert!(matches!(refused, Err(EntityError::AddDoesNotMatch)), "{refused:?}");
    }
    assert_eq!(generation(&entities).await, at);
}

/// The retry loop without unique values: read at a pinned generation, and commit only if nothing has changed since.
async fn the_retry_loop_of_whole_store_checks_adds_exactly_one(bench: Bench) {
    let entities = bench.entities().await;
    let results = crowd(20, &entities, |entities, _| async move {
        loop {
            let view = entities.now().await.unwrap();
            if let Some(found) = view.find(&by_email("x")).await.unwrap().items.pop() {
                return (found.id, false);
            }
            let add = Add::new("person").data(json!({"email": "x"}));
            let transaction = Transaction::new().add(add).if_at_generation(view.generation());
            match entities.transact(transaction).await {
                Ok(mut receipt) => return (receipt.ops.remove(0).id, true),
                Err(error) => {
                    let failed = failed::<()>(Err(error));
                    assert!(matches!(failed[0].error, EntityError::GenerationConflict { .. }));
                }
            }
        }
    })
    .await;
    assert_eq!(results.iter().filter(|(_, added)| *added).count(), 1);
    assert!(results.iter().all(|(id, _)| *id == results[0].0));
}
