//! Workflows that communicate: signals, updates, published values, children, branches, cancellation, tokens. Each under
//! a crash at every commit, and on its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{
    Close, Ctx, Engine, ExecutionState, Failure, First2, Retry, WaitsFor, Workflow, WorkflowError, workflow,
};

const HOUR: Duration = Duration::from_secs(3600);

/// A crash counts as an attempt, and there may be many.
fn often() -> Retry {
    Retry::exponential().max_attempts(100)
}

fn collects() -> Workflow<u32, Vec<u32>> {
    workflow("collects").run(async |ctx: Ctx, count: u32| {
        let mut received = Vec::new();
        for _ in 0..count {
            received.push(ctx.receive::<u32>("number").await?);
        }
        Ok(received)
    })
}

#[tokio::test]
async fn signals_are_received_once_and_in_order() {
    let collects = collects();
    let test = TestEngine::new(&collects, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&collects, 3).id("c").await.unwrap();
    handle.signal("other", &"not for it").await.unwrap();
    for number in 1..=2 {
        handle.signal("number", &number).id(format!("s{number}")).await.unwrap();
    }
    // A sender that got no answer sends the signal again.
    handle.signal("number", &1).id("s1").await.unwrap();
    let reused = handle.signal("number", &7).id("s1").await;
    assert!(matches!(reused, Err(WorkflowError::MessageReused { .. })), "{reused:?}");
    // The execution is out of memory by then.
    test.run(test.env().sleep(HOUR)).await;
    assert_eq!(engine.residents(), 0);
    let why = engine.why("c").await.unwrap();
    assert_eq!(why.waits[0].what, WaitsFor::Signal("number".into()));
    handle.signal("number", &3).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), [1, 2, 3]);
    let ended = handle.signal("number", &4).await;
    assert!(matches!(ended, Err(WorkflowError::Ended { .. })), "{ended:?}");
    let missing = engine.signal("missing", "number", &4).await;
    assert!(matches!(missing, Err(WorkflowError::NotFound { .. })), "{missing:?}");
}

#[tokio::test]
async fn signals_survive_a_crash_at_every_commit() {
    let collects = collects();
    let crashes = Crashes::of(|| collects.clone(), 4).outside(async |engine: Engine| {
        for number in 0..4u32 {
            let _ = engine.signal("execution", "number", &number).id(format!("s{number}")).await;
            engine.store().env().sleep(Duration::from_millis(700)).await;
        }
    });
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &[0, 1, 2, 3], "{:?}", outcome.crash);
    });
    assert!(crashes.await >= 10);
}

#[tokio::test]
async fn a_signal_or_a_time() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let first = ctx.receive::<u32>("go").timeout(HOUR).await?;
        let second = ctx.receive::<u32>("go").timeout(HOUR).await?;
        Ok((first, second))
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let handle = test.engine().start(&waits, ()).id("w").await.unwrap();
    test.run(test.env().sleep(HOUR + Duration::from_secs(1))).await;
    handle.signal("go", &2).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), (None, Some(2)));
    let crashes = Crashes::of(|| waits.clone(), ()).run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &(None, None), "{:?}", outcome.crash);
    });
    crashes.await;
}

/// A payload that does not fit is an error of the receiver; nothing hangs or is parked.
#[tokio::test]
async fn a_payload_of_another_type_is_a_failure() {
    let collects = collects();
    let test = TestEngine::new(&collects, 1).await.unwrap();
    let handle = test.engine().start(&collects, 1).id("c").await.unwrap();
    handle.signal("number", &"seven").await.unwrap();
    let result = test.run(handle.result()).await;
    assert!(result.unwrap_err().to_string().contains("does not fit"));
}

fn account() -> Workflow<u64, u64> {
    let account = workflow("account").validate("add", |published, amount: &i64| match amount {
        0 => Err(Failure::new("nothing is no amount")),
        amount if published.get::<u64>("sum").unwrap_or(0).checked_add_signed(*amount).is_none() => {
            Err(Failure::new("there is not so much"))
        }
        _ => Ok(()),
    });
    account.run(async |ctx: Ctx, until: u64| {
        let mut sum = 0u64;
        ctx.publish("sum", &sum).await?;
        while sum < until {
            let request = ctx.receive_update::<i64, u64>("add").await?;
            sum = sum.saturating_add_signed(request.value);
            ctx.publish("sum", &sum).await?;
            request.answer(&sum).await?;
        }
        Ok(sum)
    })
}

#[tokio::test]
async fn updates_are_validated_answered_once_and_asked_for_again() {
    let account = account();
    let test = TestEngine::new(&account, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&account, 10).id("a").await.unwrap();
    assert_eq!(test.run(handle.update::<u64>("add", &4).id("u1").into_future()).await.unwrap(), 4);
    assert_eq!(test.run(handle.update::<u64>("add", &4).id("u1").into_future()).await.unwrap(), 4, "the same answer");
    let refused = handle.update::<u64>("add", &-5).await;
    assert!(refused.unwrap_err().to_string().contains("not so much"));
    let refused = handle.update::<u64>("add", &0).id("u2").await;
    assert!(matches!(refused, Err(WorkflowError::UpdateRefused { .. })), "{refused:?}");
    test.run(test.env().sleep(HOUR)).await;
    assert_eq!(engine.residents(), 0);
    assert_eq!(handle.query::<u64>("sum").await.unwrap(), Some(4));
    // Nothing was recorded under the id of the refused update.
    let sent = handle.update::<u64>("add", &6).id("u2").send().await.unwrap();
    assert_eq!(test.run(sent.answer()).await.unwrap(), 10);
    assert_eq!(test.run(handle.result()).await.unwrap(), 10);
    assert_eq!(handle.query::<u64>("sum").await.unwrap(), Some(10), "it has ended");
    assert_eq!(test.run(handle.update::<u64>("add", &6).id("u2").into_future()).await.unwrap(), 10);
    let late = handle.update::<u64>("add", &1).await;
    assert!(matches!(late, Err(WorkflowError::Ended { .. })), "{late:?}");
    let seen = handle.wait_until("sum", |sum: &u64| *sum == 10).await.unwrap();
    assert_eq!(seen, 10);
    assert!(handle.wait_until("sum", |sum: &u64| *sum > 10).await.is_err(), "the sum is never above 10");
}

use std::future::IntoFuture;

#[tokio::test]
async fn updates_survive_a_crash_at_every_commit() {
    let account = account();
    let crashes = Crashes::of(|| account.clone(), 6).outside(async |engine: Engine| {
        for number in 1..=3i64 {
            let update = engine.update::<u64>("execution", "add", &number).id(format!("u{number}"));
            if let Ok(answer) = update.await {
                assert_eq!(answer, [0, 1, 3, 6][number as usize]);
            }
        }
    });
    let crashes = crashes.run(async |outcome| assert_eq!(*outcome.result.as_ref().unwrap(), 6, "{:?}", outcome.crash));
    assert!(crashes.await >= 10);
}

fn doubles() -> Workflow<u32, u32> {
    workflow("doubles").run(async |ctx: Ctx, number: u32| {
        if number == 13 {
            return Err(Failure::new("thirteen"));
        }
        ctx.sleep(Duration::from_secs(u64::from(number))).await?;
        ctx.run("double", async || Ok(2 * number)).retry(often()).await
    })
}

fn parent() -> Workflow<u32, (u32, Vec<u32>, String)> {
    let child = doubles();
    workflow("parent").run(move |ctx: Ctx, number: u32| {
        let child = child.clone();
        async move {
            let one = ctx.child(&child, number).await?;
            let numbers = [3, 1, 2];
            let child = &child;
            let all = ctx.try_map(numbers, 2, async |ctx: Ctx, number| ctx.child(child, number).await).await?;
            let failed = ctx.child(child, 13).id("unlucky").await.unwrap_err();
            Ok((one, all, failed.message().to_string()))
        }
    })
}

#[tokio::test]
async fn children_survive_a_crash_at_every_commit() {
    let crashes = Crashes::of(parent, 5).register(doubles).run(async |outcome| {
        let expected = (10, vec![6, 2, 4], "thirteen".to_string());
        assert_eq!(outcome.result.as_ref().unwrap(), &expected, "{:?}", outcome.crash);
        let doubled = outcome.bodies.iter().filter(|body| *body == "double").count();
        assert!((4..=6).contains(&doubled), "two run at a time: {doubled}");
    });
    assert!(crashes.await >= 20);
}

#[tokio::test]
async fn the_end_of_a_parent_is_what_the_policy_says_for_its_children() {
    let child = workflow("child").run(async |ctx: Ctx, ()| ctx.receive::<u32>("go").await);
    let parent = {
        let child = child.clone();
        workflow("parent").run(move |ctx: Ctx, close: Close| {
            let child = child.clone();
            async move {
                let child = ctx.child(&child, ()).id("c").close(close).start().await?;
                ctx.sleep(HOUR).await?;
                Ok(child.id().to_string())
            }
        })
    };
    for close in [Close::Cancel, Close::Abandon, Close::Await] {
        let test = TestEngine::build(1).register(&parent).register(&child).start().await.unwrap();
        let engine = test.engine();
        let handle = engine.start(&parent, close).id("p").await.unwrap();
        if close == Close::Await {
            test.run(test.env().sleep(3 * HOUR)).await;
            assert_eq!(engine.why("p").await.unwrap().waits[0].what, WaitsFor::Child("c".into()));
            engine.signal("c", "go", &1).await.unwrap();
        }
        assert_eq!(test.run(handle.result()).await.unwrap(), "c");
        test.run(test.env().sleep(HOUR)).await;
        let state = engine.history("c").await.unwrap().state;
        match close {
            Close::Cancel => assert!(matches!(state, ExecutionState::Cancelled(_)), "{state:?}"),
            Close::Abandon => assert_eq!(state, ExecutionState::Waiting),
            _ => assert_eq!(state, ExecutionState::Completed(1.into())),
        }
    }
}

#[tokio::test]
async fn branches_survive_a_crash_at_every_commit() {
    let forks = workflow("forks").run(async |ctx: Ctx, number: u32| {
        let step = async |ctx: &Ctx, name: &str, number: u32| ctx.run(name, async || Ok(number)).retry(often()).await;
        let (a, b) = ctx
            .join((
                async |ctx: Ctx| {
                    let first = step(&ctx, "a1", number).await?;
                    ctx.sleep(Duration::from_secs(5)).await?;
                    let counted = ctx.state().global::<u32>("count").increment(1).await?.value;
                    Ok::<_, Failure>(first + counted + step(&ctx, "a2", 1).await?)
                },
                async |ctx: Ctx| {
                    ctx.state().global::<u32>("count").increment(1).await?;
                    let inner =
                        ctx.map([1u32, 2, 3], 2, async |ctx: Ctx, n| step(&ctx, "inner", n).await.unwrap()).await;
                    Ok::<_, Failure>(inner.into_iter().sum::<u32>())
                },
            ))
            .await;
        let race = ctx
            .select((
                async |ctx: Ctx| ctx.sleep(Duration::from_secs(10)).await,
                async |ctx: Ctx| ctx.receive::<u32>("never").await,
            ))
            .await;
        assert!(matches!(race, First2::First(Ok(()))));
        let (first, _) = ctx.race([30u64, 2, 20], async |ctx: Ctx, n| ctx.sleep(Duration::from_secs(n)).await).await;
        let failed = ctx
            .try_join((
                async |ctx: Ctx| {
                    ctx.sleep(HOUR).await?;
                    Ok(())
                },
                async |ctx: Ctx| ctx.run("fails", async || Err::<(), _>(Failure::new("no").not_retryable())).await,
            ))
            .await;
        Ok((a?, b?, first, failed.is_err()))
    });
    let crashes = Crashes::of(|| forks.clone(), 7).run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &(10, 6, 1, true), "{:?} {:?}", outcome.crash, outcome.bodies);
    });
    assert!(crashes.await >= 20);
}

/// A signal for a branch that has lost stays for the next receive.
#[tokio::test]
async fn a_signal_that_a_lost_branch_did_not_receive_stays() {
    let loses = workflow("loses").run(async |ctx: Ctx, ()| {
        let lost = ctx
            .select((
                async |ctx: Ctx| ctx.sleep(Duration::from_secs(60)).await,
                async |ctx: Ctx| ctx.receive::<u32>("go").await,
            ))
            .await;
        assert!(matches!(lost, First2::First(_)));
        ctx.sleep(HOUR).await?;
        ctx.receive::<u32>("go").await
    });
    let test = TestEngine::new(&loses, 1).await.unwrap();
    let handle = test.engine().start(&loses, ()).id("l").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(100))).await;
    handle.signal("go", &5).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 5);
}

fn cleans_up() -> Workflow<(), String> {
    workflow("cleans_up").run(async |ctx: Ctx, ()| {
        ctx.run("begin", async || Ok(())).retry(often()).await?;
        let waited = ctx.receive::<u32>("go").await;
        let Err(failure) = waited else { return Ok("it went".to_string()) };
        assert!(failure.is_cancelled(), "{failure}");
        let after = ctx.run("not any more", async || Ok(())).await;
        assert!(after.unwrap_err().is_cancelled());
        let ctx = ctx.shielded();
        ctx.sleep(Duration::from_secs(30)).await?;
        ctx.run("clean up", async || Ok(())).retry(often()).await?;
        Err(failure)
    })
}

#[tokio::test]
async fn cancellation_lets_clean_up_and_survives_a_crash_at_every_commit() {
    let crashes = Crashes::of(cleans_up, ()).outside(async |engine: Engine| {
        engine.store().env().sleep(Duration::from_secs(20)).await;
        let _ = engine.cancel("execution", "enough").await;
    });
    let crashes = crashes.run(async |outcome| {
        let result = outcome.result.as_ref();
        assert!(matches!(result, Err(WorkflowError::Cancelled { reason, .. }) if reason == "enough"), "{result:?}");
        let count = |name: &str| outcome.bodies.iter().filter(|body| *body == name).count();
        assert!((1..=2).contains(&count("clean up")) && count("not any more") == 0, "{:?}", outcome.bodies);
    });
    assert!(crashes.await >= 8);
}

#[tokio::test]
async fn a_step_under_way_is_cancelled_and_terminate_runs_nothing_more() {
    let stuck = workflow("stuck").run(async |ctx: Ctx, ()| {
        let stuck = ctx.run("stuck", async || std::future::pending::<Result<(), Failure>>().await).await;
        ctx.shielded().run("clean up", async || Ok(())).await?;
        stuck
    });
    let test = TestEngine::new(&stuck, 1).await.unwrap();
    let engine = test.engine();
    let cancelled = engine.start(&stuck, ()).id("a").await.unwrap();
    let terminated = engine.start(&stuck, ()).id("b").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    assert_eq!(engine.why("a").await.unwrap().waits[0].what, WaitsFor::Step("stuck".into()));
    engine.cancel("a", "enough").await.unwrap();
    engine.cancel("a", "again").await.unwrap_or_else(|error| assert!(matches!(error, WorkflowError::Ended { .. })));
    let result = test.run(cancelled.result()).await;
    assert!(matches!(result, Err(WorkflowError::Cancelled { ref reason, .. }) if reason == "enough"), "{result:?}");
    engine.terminate("b", "enough").await.unwrap();
    assert!(matches!(test.run(terminated.result()).await, Err(WorkflowError::Failed { .. })));
    assert_eq!(test.bodies().iter().filter(|body| *body == "clean up").count(), 1);
    assert!(matches!(engine.terminate("b", "again").await, Err(WorkflowError::Ended { .. })));
    assert!(matches!(engine.cancel("b", "again").await, Err(WorkflowError::Ended { .. })));
}

/// The second cancel writes nothing and interrupts nothing.
#[tokio::test]
async fn a_second_cancel_during_cleanup_changes_nothing() {
    let slow = workflow("slow").run(async |ctx: Ctx, ()| {
        let waited = ctx.receive::<u32>("go").await;
        let body = async || std::future::pending::<Result<(), Failure>>().await;
        let _ = ctx.shielded().run("clean up", body).timeout(HOUR).retry(Retry::exponential().max_attempts(1)).await;
        waited
    });
    let test = TestEngine::new(&slow, 1).await.unwrap();
    let handle = test.engine().start(&slow, ()).id("s").await.unwrap();
    test.engine().cancel("s", "enough").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    test.engine().cancel("s", "again").await.unwrap();
    let result = test.run(handle.result()).await;
    assert!(matches!(result, Err(WorkflowError::Cancelled { ref reason, .. }) if reason == "enough"), "{result:?}");
}

#[tokio::test]
async fn a_saga_is_undone_in_reverse_order_under_a_crash_at_every_commit() {
    let books = workflow("books").run(async |ctx: Ctx, ()| {
        let booked = ctx.saga(async |saga| {
            for name in ["flight", "hotel", "car"] {
                saga.compensate(&format!("cancel {name}"), async || Ok(()));
                if name == "car" {
                    return Err(Failure::new("no car"));
                }
                ctx.run(&format!("book {name}"), async || Ok(())).retry(often()).await?;
            }
            Ok(())
        });
        Ok(booked.await.unwrap_err().message().to_string())
    });
    let crashes = Crashes::of(|| books.clone(), ()).run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), "no car");
        let mut bodies = outcome.bodies.clone();
        bodies.dedup();
        let expected = ["book flight", "book hotel", "cancel car", "cancel hotel", "cancel flight"];
        let mut order = bodies.iter().map(|body| expected.iter().position(|name| name == body).unwrap());
        assert!(order.clone().is_sorted() && order.any(|place| place == 4), "{bodies:?}");
    });
    assert!(crashes.await >= 10);
}

#[tokio::test]
async fn progress_is_kept_for_the_next_attempt() {
    let begun = Arc::new(AtomicU32::new(0));
    let counted = begun.clone();
    let imports = workflow("imports").run(move |ctx: Ctx, ()| {
        let begun = counted.clone();
        async move {
            let import = ctx.run_with("import", async |attempt| {
                let from = attempt.progress::<u32>().unwrap_or(0);
                for line in from..10 {
                    begun.fetch_add(1, Ordering::SeqCst);
                    attempt.heartbeat(&(line + 1)).await?;
                    if line == 4 && attempt.number == 1 {
                        return Err(Failure::new("the connection broke"));
                    }
                }
                Ok(from)
            });
            import.heartbeat_timeout(Duration::from_secs(60)).retry(often()).await
        }
    });
    let test = TestEngine::new(&imports, 1).await.unwrap();
    assert_eq!(test.complete(&imports, ()).await.unwrap(), 5);
    assert_eq!(begun.load(Ordering::SeqCst), 10);
    let crashes = Crashes::of(|| imports.clone(), ()).run(async |outcome| assert!(outcome.result.is_ok()));
    assert!(crashes.await >= 20);
}

#[tokio::test]
async fn an_attempt_without_a_sign_of_life_is_given_up() {
    let silent = workflow("silent").run(async |ctx: Ctx, ()| {
        let step = ctx.run_with("silent", async |attempt| {
            if attempt.number > 1 {
                return Ok(attempt.number);
            }
            std::future::pending::<Result<u32, Failure>>().await
        });
        step.heartbeat_timeout(Duration::from_secs(10)).await
    });
    let test = TestEngine::new(&silent, 1).await.unwrap();
    assert_eq!(test.complete(&silent, ()).await.unwrap(), 2);
}

#[tokio::test]
async fn a_token_completes_once() {
    let asks = workflow("asks").run(async |ctx: Ctx, ()| {
        let answer = ctx.completion::<u32>("answer").await;
        ctx.publish("token", &answer.token()).await?;
        answer.wait().await
    });
    let test = TestEngine::new(&asks, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&asks, ()).id("a/b").await.unwrap();
    let token = test.run(handle.wait_until("token", |_: &String| true)).await.unwrap();
    test.run(test.env().sleep(HOUR)).await;
    engine.complete(&token, &42).await.unwrap();
    assert!(matches!(engine.complete(&token, &43).await, Err(WorkflowError::TokenUsed { .. })));
    assert_eq!(test.run(handle.result()).await.unwrap(), 42);
    assert!(matches!(engine.fail("nonsense", Failure::new("no")).await, Err(WorkflowError::UnknownToken { .. })));
    let crashes = Crashes::of(|| asks.clone(), ()).outside(async |engine: Engine| {
        let handle = engine.handle(&workflow("asks").run(async |_: Ctx, ()| Ok(0u32)), "execution");
        let Ok(token) = handle.wait_until("token", |_: &String| true).await else { return };
        let _ = engine.complete(&token, &42).await;
    });
    let crashes = crashes.run(async |outcome| assert_eq!(*outcome.result.as_ref().unwrap(), 42));
    assert!(crashes.await >= 4);
}

#[tokio::test]
async fn starts_can_be_delayed_joined_signalled_and_restarted() {
    let collects = collects();
    let test = TestEngine::new(&collects, 1).await.unwrap();
    let engine = test.engine();
    let delayed = engine.start(&collects, 0).id("d").delay(HOUR).await.unwrap();
    assert_eq!(engine.residents(), 0);
    let before = test.env().now();
    // A wake is no reason to begin.
    engine.wake("d").await.unwrap();
    test.run(delayed.result()).await.unwrap();
    assert!(test.env().now() >= before.plus(HOUR));
    let first = engine.start(&collects, 2).id("s").signal("number", &1).await.unwrap();
    let second = engine.start(&collects, 2).id("s").signal("number", &2).await.unwrap();
    assert_eq!(test.run(first.result()).await.unwrap(), [1, 2]);
    assert_eq!(test.run(second.result()).await.unwrap(), [1, 2]);
    let ended = engine.start(&collects, 2).id("s").signal("number", &3).await;
    assert!(matches!(ended, Err(WorkflowError::Ended { .. })), "{ended:?}");
    let anew = engine.start(&collects, 1).id("s").signal("number", &4).or_restart().await.unwrap();
    assert_eq!(test.run(anew.result()).await.unwrap(), [4]);
    let refused = engine.start(&collects, 1).id("s").await;
    assert!(matches!(refused, Err(WorkflowError::AlreadyStarted { .. })));
    engine.start(&collects, 0).id("s").or_restart().await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(8 * 86_400))).await;
    assert!(matches!(engine.why("s").await, Err(WorkflowError::NotFound { .. })));
}

#[tokio::test]
async fn messages_that_were_not_received_move_to_the_new_run() {
    let carries = workflow("carries").run(async |ctx: Ctx, received: Vec<u32>| {
        if received.len() == 3 {
            return Ok(received);
        }
        let next = ctx.receive::<u32>("number").await?;
        ctx.continue_as_new(received.into_iter().chain([next]).collect::<Vec<u32>>()).await
    });
    let crashes = Crashes::of(|| carries.clone(), Vec::new()).outside(async |engine: Engine| {
        for number in 0..3u32 {
            let _ = engine.signal("execution", "number", &number).id(format!("s{number}")).await;
        }
    });
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &[0, 1, 2], "{:?}", outcome.crash);
    });
    assert!(crashes.await >= 8);
}

#[tokio::test]
async fn retry_now_does_not_wait_for_the_pause() {
    let fails = workflow("fails").run(async |ctx: Ctx, ()| {
        let step = ctx.run_with("fails", async |attempt| match attempt.number {
            1 => Err(Failure::new("not yet")),
            number => Ok(number),
        });
        step.retry(Retry::exponential().first_pause(HOUR).longest_pause(HOUR)).await
    });
    let test = TestEngine::new(&fails, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&fails, ()).id("f").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    assert_eq!(engine.why("f").await.unwrap().waits[0].what, WaitsFor::Retry("fails".into()));
    let before = test.env().now();
    engine.retry_now("f").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 2);
    assert!(test.env().now() < before.plus(Duration::from_secs(60)));
}

#[tokio::test]
async fn a_branch_waits_for_what_another_publishes() {
    let counts = workflow("counts").run(async |ctx: Ctx, ()| {
        let (seen, _) = ctx
            .join((
                async |ctx: Ctx| ctx.wait_until("count", |count: &u32| *count >= 3).await,
                async |ctx: Ctx| {
                    for count in 1..=3u32 {
                        ctx.sleep(Duration::from_secs(10)).await?;
                        ctx.publish("count", &count).await?;
                    }
                    Ok::<_, Failure>(())
                },
            ))
            .await;
        seen
    });
    let crashes = Crashes::of(|| counts.clone(), ());
    let crashes = crashes.run(async |outcome| assert_eq!(*outcome.result.as_ref().unwrap(), 3));
    assert!(crashes.await >= 8);
}

/// Deep and broad: ten levels, and a thousand children of one parent, on a file store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deep_and_broad_trees_end() {
    let leaf = workflow("leaf").run(async |_: Ctx, number: u32| Ok(number));
    let broad = {
        let leaf = leaf.clone();
        workflow("broad").run(move |ctx: Ctx, count: u32| {
            let leaf = leaf.clone();
            async move {
                let leaf = &leaf;
                let all = ctx.try_map(0..count, 100, async |ctx: Ctx, number| ctx.child(leaf, number).await).await?;
                Ok(all.into_iter().map(u64::from).sum::<u64>())
            }
        })
    };
    let deep = workflow("deep").run(async |ctx: Ctx, depth: u32| {
        if depth == 0 {
            return Ok(0u32);
        }
        // A workflow starts itself by another definition of the same name.
        let itself = workflow("deep").run(async |_: Ctx, _: u32| Ok(0u32));
        let (a, b) = ctx
            .try_join((
                async |ctx: Ctx| ctx.child(&itself, depth - 1).await,
                async |ctx: Ctx| {
                    if depth > 4 { ctx.child(&itself, 0).await } else { ctx.child(&itself, depth - 1).await }
                },
            ))
            .await?;
        Ok(a.max(b) + 1)
    });
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).await.unwrap();
    let engine = Engine::on(&store).register(&leaf).register(&broad).register(&deep).start().await.unwrap();
    let broad = engine.start(&broad, 1000).await.unwrap();
    assert_eq!(broad.result().await.unwrap(), 499_500);
    let deep = engine.start(&deep, 10).await.unwrap();
    assert_eq!(deep.result().await.unwrap(), 10);
}
