//! A crash at every commit: whatever the moment, the outcome is the same and every result is recorded once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::entity::Add;
use latchwork::json;
use latchwork::testing::{Crashes, crash_everywhere};
use latchwork::workflow::{Attempt, Ctx, Engine, Failure, Retry, Tx, Workflow, workflow};

/// Fifty steps with timers between them and failures in them. The outcome contains the result of each step.
#[tokio::test]
async fn a_crash_at_any_commit_of_fifty_steps_changes_nothing() {
    let long = workflow("long").run(async |ctx: Ctx, seed: u64| {
        let mut results = Vec::new();
        let mut chosen = Vec::new();
        for number in 0..50u64 {
            if number % 7 == 3 {
                ctx.sleep(Duration::from_millis(number * 100)).await?;
            }
            if number % 11 == 5 {
                chosen.push(ctx.random().await);
            }
            let step = ctx.run_with("step", async |attempt: Attempt| {
                if number % 13 == 6 && attempt.number <= 2 {
                    return Err(Failure::new("not at first"));
                }
                Ok(seed * number)
            });
            results.push(step.input(&number).retry(Retry::exponential().max_attempts(5)).await?);
        }
        Ok((results, chosen.len()))
    });
    let expected: Vec<u64> = (0..50).map(|number| 3 * number).collect();
    let crashes = crash_everywhere(
        || long.clone(),
        3,
        async |outcome| {
            let (results, chosen) = outcome.result.as_ref().unwrap();
            assert_eq!((results, *chosen), (&expected, 5), "{:?}", outcome.crash);
        },
    );
    let crashes = crashes.await;
    assert!(crashes > 100, "{crashes} crashes");
}

/// At least once, and no more often than needed: a body runs again only if the crash came while it ran or before its
/// result was committed.
#[tokio::test]
async fn bodies_run_again_only_where_their_result_was_lost() {
    let three = workflow("three").run(async |ctx: Ctx, ()| {
        for name in ["a", "b", "c"] {
            ctx.run(name, async || Ok(())).await?;
        }
        Ok(())
    });
    let mut seen = BTreeMap::new();
    let crashes = crash_everywhere(
        || three.clone(),
        (),
        async |outcome| {
            outcome.result.as_ref().unwrap();
            let count = |name: &str| outcome.bodies.iter().filter(|body| *body == name).count();
            seen.insert((outcome.crash.commit, outcome.crash.side), ["a", "b", "c"].map(count));
        },
    )
    .await;
    // Four commits: the start with the intent of a, a's result with the intent of b, b's with c's, c's with the end.
    assert_eq!(crashes, 8);
    let counts: Vec<[usize; 3]> = seen.into_values().collect();
    let expected = [
        [1, 1, 1], // before the start: nothing was stored, and the caller starts it again
        [1, 1, 1], // after the start: a has not begun
        [2, 1, 1], // before a's result is stored
        [1, 1, 1],
        [1, 2, 1],
        [1, 1, 1],
        [1, 1, 2],
        [1, 1, 1], // after the end
    ];
    assert_eq!(counts, expected);
}

/// A client that fails twice and then works, for as long as it lives.
#[derive(Default)]
struct Bank {
    calls: AtomicU32,
}

impl Bank {
    fn charge(&self, price: u64) -> Result<u64, Failure> {
        match self.calls.fetch_add(1, Ordering::SeqCst) {
            0 | 1 => Err(Failure::new("busy")),
            _ => Ok(price),
        }
    }
}

fn order(bank: Arc<Bank>) -> Workflow<u64, u64> {
    workflow("order").run(move |ctx: Ctx, price: u64| {
        let bank = bank.clone();
        async move {
            let charge = ctx.run("charge", async || bank.charge(price)).retry(Retry::exponential().max_attempts(9));
            let paid = charge.await?;
            ctx.run("ship", async || Ok::<_, Failure>(())).await?;
            Ok(paid)
        }
    })
}

/// If runs shared the fake, it would fail in the first run alone: there would be eight crashes.
#[tokio::test]
async fn a_fake_that_fails_twice_fails_twice_in_every_run() {
    let mut made = Vec::new();
    let fresh = || {
        let bank = Arc::new(Bank::default());
        made.push(bank.clone());
        order(bank)
    };
    let crashes = crash_everywhere(fresh, 7, async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &7, "{:?}", outcome.crash);
    });
    let crashes = crashes.await;
    // Start with the first attempt; failed, second attempt, failed, third attempt; result and shipping; end.
    assert_eq!(crashes, 14);
    assert_eq!(made.len(), 15, "one for each crash, and one for the run without");
    // One call is repeated if the crash takes its result. The fake is outside of the process: it does not forget.
    let calls: Vec<u32> = made.iter().map(|bank| bank.calls.load(Ordering::SeqCst)).collect();
    assert!(calls.iter().all(|calls| (3..=4).contains(calls)), "{calls:?}");
}

#[tokio::test]
#[should_panic(expected = "this run took another path than the first run")]
async fn a_fake_that_all_runs_share_is_reported() {
    let order = order(Arc::default());
    crash_everywhere(|| order.clone(), 7, async |_| {}).await;
}

/// The code does the same up to there, and then less.
#[tokio::test]
#[should_panic(expected = "first run: commit 3: step \"step\" done (attempt 1), step \"step\" begun (attempt 1)")]
async fn a_run_of_fewer_commits_is_reported() {
    let runs = Arc::new(AtomicU32::new(0));
    let shrinks = workflow("shrinks").run(move |ctx: Ctx, ()| {
        let run = runs.fetch_add(1, Ordering::SeqCst);
        async move {
            // The last step of the first run is its last commit but one.
            let steps = if run == 0 { 3 } else { 2 };
            for _ in 0..steps {
                ctx.run("step", async || Ok::<_, Failure>(())).await?;
            }
            Ok(())
        }
    });
    crash_everywhere(|| shrinks.clone(), (), async |_| {}).await;
}

#[tokio::test]
async fn different_paths_can_be_allowed() {
    let order = order(Arc::default());
    let crashes = Crashes::of(|| order.clone(), 7).any_path().run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &7);
    });
    assert_eq!(crashes.await, 6, "the fake has failed in the first run");
}

/// What a test needs around the code: data, mocks, and what the run has left.
#[tokio::test]
async fn a_run_can_be_set_up_and_looked_at() {
    let pays = || {
        workflow("pays").run(async |ctx: Ctx, price: i64| {
            let price = ctx.run("price", async || Err::<i64, _>(Failure::new("not in a test"))).input(&price).await?;
            let paid = ctx.transaction("pay", async |tx: Tx| {
                let ada = tx.get("ada").await?.ok_or_else(|| Failure::new("there is no account"))?;
                let balance = ada.data["balance"].as_i64().unwrap_or_default() - price;
                tx.update(latchwork::entity::Update::new("ada").data(json!({"balance": balance})));
                Ok::<_, Failure>(balance)
            });
            let left = paid.await?;
            ctx.state().global::<u64>("payments").increment(1).await?;
            Ok(left)
        })
    };
    let crashes = Crashes::of(pays, 1)
        .mock("price", |attempt| if attempt == 1 { Err(Failure::new("busy")) } else { Ok(30) })
        .set_up(async |engine: Engine| {
            let ada = Add::new("account").id("ada").data(json!({"balance": 100}));
            engine.entities().add(ada).await.unwrap();
        });
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &70, "{}", outcome.crash);
        let ada = outcome.entities().get("ada").await.unwrap().unwrap();
        assert_eq!((&ada.data["balance"], ada.rev.0), (&json!(70), 2), "{}", outcome.crash);
        let payments = outcome.states().global().slot::<u64>("payments").get().await.unwrap();
        assert_eq!(payments, Some(1), "{}", outcome.crash);
        assert_eq!(outcome.store().generation().await.unwrap(), outcome.engine().store().generation().await.unwrap());
        // Time passes for the check, too.
        outcome.engine().store().env().sleep(Duration::from_secs(3600)).await;
    });
    let crashes = crashes.await;
    assert!(crashes >= 10, "{crashes}");
}
