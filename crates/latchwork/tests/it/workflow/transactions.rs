//! Transactions: entities and slots change in one commit with the journal entry, so their effects happen exactly once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Query, TypeSpec, Update, field};
use latchwork::json;
use latchwork::store::{Rev, Store};
use latchwork::testing::{TestEngine, crash_everywhere};
use latchwork::workflow::{Ctx, Engine, Failure, Kind, RevisionConflict, Tx, Workflow, WorkflowError, workflow};

async fn balance(tx: &Tx, id: &str) -> Result<i64, EntityError> {
    let account = tx.get(id).await?;
    Ok(account.and_then(|account| account.data["balance"].as_i64()).unwrap_or(0))
}

/// Moves an amount between two accounts and counts that in a slot.
async fn transfer(ctx: &Ctx, from: &str, to: &str, amount: i64) -> Result<u64, Failure> {
    let moved = ctx.transaction("move", async |tx: Tx| {
        let (left, right) = (balance(&tx, from).await?, balance(&tx, to).await?);
        tx.update(Update::new(from).data(json!({"balance": left - amount})));
        tx.update(Update::new(to).data(json!({"balance": right + amount})));
        let count = tx.global::<u64>("transfers");
        count.increment(1).await?;
        let seen = count.get().await?.unwrap_or(0);
        Ok(seen)
    });
    moved.input(&(from, to, amount)).await
}

fn accounts() -> Workflow<i64, Vec<i64>> {
    workflow("accounts").run(async |ctx: Ctx, amount: i64| {
        ctx.transaction("open", async |tx: Tx| {
            for name in ["alice", "bob"] {
                tx.add(Add::new("account").id(name).data(json!({"balance": 100})));
            }
            Ok(())
        })
        .await?;
        let first = transfer(&ctx, "alice", "bob", amount).await?;
        ctx.sleep(Duration::from_secs(60)).await?;
        let second = transfer(&ctx, "alice", "bob", amount).await?;
        let balances =
            ctx.transaction("look", async |tx: Tx| Ok((balance(&tx, "alice").await?, balance(&tx, "bob").await?)));
        let (alice, bob) = balances.await?;
        Ok(vec![first as i64, second as i64, alice, bob])
    })
}

/// A crash on either side of each commit: the balances would show a transfer that was made twice or by half.
#[tokio::test]
async fn a_crash_at_any_commit_moves_the_money_once() {
    let crashes = crash_everywhere(accounts, 10, async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &[1, 2, 80, 120], "{:?}", outcome.crash);
    })
    .await;
    assert!(crashes >= 10, "{crashes}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_that_conflict_are_run_again_until_all_land() {
    let moves = workflow("moves").run(async |ctx: Ctx, (from, to): (String, String)| {
        for _ in 0..5 {
            transfer(&ctx, &from, &to, 1).await?;
        }
        Ok(())
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&moves).start().await.unwrap();
    let names = ["a", "b", "c"];
    for name in names {
        engine.entities().add(Add::new("account").id(name).data(json!({"balance": 0}))).await.unwrap();
    }
    let mut runs = tokio::task::JoinSet::new();
    for number in 0..12 {
        let (engine, moves) = (engine.clone(), moves.clone());
        let pair = (names[number % 3].to_string(), names[(number + 1) % 3].to_string());
        runs.spawn(async move { engine.start(&moves, pair).await.unwrap().result().await.unwrap() });
    }
    runs.join_all().await;
    for name in names {
        let account = engine.entities().get(name).await.unwrap().unwrap();
        assert_eq!(account.data["balance"], 0, "each gave and got as much");
    }
    let transfers = engine.states().global().slot::<u64>("transfers");
    assert_eq!(transfers.get().await.unwrap(), Some(60));
}

/// Another writer changes a value after the transaction has read it: the body runs again on the new value.
#[tokio::test]
async fn a_transaction_depends_on_the_values_at_its_commit() {
    let store = Store::memory().await.unwrap();
    let outside = Entities::on(&store).await.unwrap();
    outside.add(Add::new("n").id("n").data(json!(1))).await.unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let reads = {
        let (outside, runs) = (outside.clone(), runs.clone());
        workflow("reads").run(move |ctx: Ctx, ()| {
            let (outside, runs) = (outside.clone(), runs.clone());
            async move {
                let read = ctx.transaction("read", async |tx: Tx| {
                    let seen = tx.get("n").await?.unwrap().data.as_u64().unwrap();
                    if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                        outside.update(Update::new("n").data(json!(2))).await?;
                    }
                    tx.add(Add::new("copy").data(json!(seen)));
                    Ok(seen)
                });
                read.await
            }
        })
    };
    let engine = Engine::on(&store).register(&reads).start().await.unwrap();
    let handle = engine.start(&reads, ()).await.unwrap();
    assert_eq!(handle.result().await.unwrap(), 2);
    assert_eq!(runs.load(Ordering::SeqCst), 2);
    let copies = outside.find(&Query::of("copy")).await.unwrap().items;
    assert_eq!(copies.len(), 1, "the first run left nothing");
    assert_eq!(engine.history(handle.id()).await.unwrap().find(Kind::Transaction, "read").unwrap().attempts, 2);
}

#[tokio::test]
async fn a_refused_transaction_leaves_nothing_and_stays_refused() {
    let picky = workflow("picky").run(async |ctx: Ctx, how: u32| {
        let tried = ctx.transaction("try", async |tx: Tx| {
            tx.add(Add::new("user").id("new").data(json!({"email": "ada@example.org"})));
            tx.global::<u64>("count").increment(1).await?;
            match how {
                0 => return Err(Failure::new("the body says no")),
                1 => tx.require_absent("ada"),
                2 => tx.require_exists("missing"),
                3 => {}
                _ => panic!("how is {how}"),
            }
            Ok(())
        });
        let tried = tried.await;
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(tried.err().map(|failure| failure.message().to_string()))
    });
    for (how, expected) in [
        (0, "the body says no"),
        (1, "entity \"ada\" exists already"),
        (2, "\"missing\""),
        (3, "\"ada\""),
        (4, "it panicked: how is 4"),
    ] {
        let test = TestEngine::new(&picky, 1).await.unwrap();
        let entities = test.engine().entities();
        entities.declare(TypeSpec::new("user").unique(["data.email"])).await.unwrap();
        entities.add(Add::new("user").id("ada").data(json!({"email": "ada@example.org"}))).await.unwrap();
        let handle = test.engine().start(&picky, how).await.unwrap();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        // The execution sleeps, and the obstacle is removed: the recorded refusal does not change.
        entities.remove("ada").await.unwrap();
        let message = test.run(handle.result()).await.unwrap().expect("it was refused");
        assert!(message.contains(expected), "{how}: {message}");
        assert_eq!(entities.get("new").await.unwrap(), None);
        assert_eq!(test.engine().states().global().slot::<u64>("count").get().await.unwrap(), None);
        let by_email = Query::of("user").filter(field("data.email").equals("ada@example.org"));
        assert_eq!(entities.find(&by_email).await.unwrap().items.len(), 0);
    }
}

#[tokio::test]
async fn a_result_that_cannot_be_stored_is_a_failure() {
    let large = workflow("large").run(async |ctx: Ctx, how: u32| {
        let text = "x".repeat(5 << 20);
        match how {
            0 => ctx.run("step", async || Ok(text.clone())).await,
            1 => ctx.transaction("tx", async |_: Tx| Ok(text.clone())).await,
            2 => {
                let slot = ctx.state().global::<String>("slot");
                slot.set(text).await?;
                Ok(String::new())
            }
            _ => Ok(text),
        }
    });
    for how in 0..4 {
        let test = TestEngine::new(&large, 1).await.unwrap();
        match test.complete(&large, how).await {
            Err(WorkflowError::Failed { failure, .. }) => {
                assert!(failure.message().contains("the limit is"), "{how}: {failure}");
            }
            other => panic!("{how}: {:?}", other.map(|text| text.len())),
        }
    }
}

/// A crash on either side of each commit: a lost guard is a failure of the transaction, the same after every restart,
/// and nothing of the transaction is written. The transaction is not tried again, as it is after a lost race.
#[tokio::test]
async fn a_transaction_can_be_guarded_by_a_token_and_fails_once_that_is_lost() {
    let guarded = workflow("guarded").run(async |ctx: Ctx, ()| {
        let guard = ctx.mutex("m").acquire().await?;
        let token = guard.token().clone();
        let add = async |name: &str| {
            let body = async |tx: Tx| {
                tx.guard(&token);
                tx.add(Add::new("t").id(name));
                let count = tx.global::<u64>("count").increment(1).await?;
                Ok(count.value)
            };
            ctx.transaction(name, body).await
        };
        let held = add("held").await?;
        guard.release().await?;
        let lost = add("lost").await.unwrap_err();
        assert_eq!(lost.code(), "latchwork.entity");
        let end = ctx.transaction("look", async |tx: Tx| {
            let there = [tx.get("held").await?.is_some(), tx.get("lost").await?.is_some()];
            Ok((there, tx.global::<u64>("count").get().await?))
        });
        Ok((held, end.await?, lost.message().contains("lock \"m\" is not held under token")))
    });
    let crashes = crash_everywhere(
        || guarded.clone(),
        (),
        async |outcome| {
            assert_eq!(outcome.result.as_ref().unwrap(), &(1, ([true, false], Some(1)), true), "{:?}", outcome.crash);
        },
    )
    .await;
    assert!(crashes >= 6, "{crashes}");
}

// The entity has moved on since the caller read it. That is recorded with its value, and no attempt would help.
#[tokio::test]
async fn a_failed_if_rev_is_a_typed_failure_that_is_not_retryable() {
    let changes = workflow("changes").run(async |ctx: Ctx, expected: u64| {
        let change = ctx.transaction("change", async |tx: Tx| {
            tx.require_exists("other");
            tx.update(Update::new("room").if_rev(Rev(expected)).data(json!({})));
            Ok(())
        });
        let failure = change.await.unwrap_err();
        ctx.sleep(Duration::from_secs(3600)).await?;
        assert_eq!((failure.code(), failure.is_retryable()), ("latchwork.revision_conflict", false));
        assert_eq!(failure.step(), Some("change"));
        Ok(failure.get::<RevisionConflict>())
    });
    let test = TestEngine::new(&changes, 1).await.unwrap();
    for id in ["room", "other"] {
        test.engine().entities().add(Add::new("room").id(id).data(json!({}))).await.unwrap();
    }
    let conflict = test.complete(&changes, 5).await.unwrap();
    assert_eq!(conflict, Some(RevisionConflict { id: "room".into(), expected: Rev(5), actual: Rev(1) }));
}
