//! Former bugs of workflows: dropped futures, overlaps, gaps, extremes, and records that did not fit.

// Real time passes here: these stores have no virtual clock.
#![allow(clippy::disallowed_methods)]

use std::future::{Future, IntoFuture, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use latchwork::store::{self, Store, Timestamp};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, ExecutionState, Failure, Retry, Workflow, WorkflowError, workflow};

/// Gives up waiting after a while of real time.
async fn soon<T>(future: impl IntoFuture<Output = T>) -> Option<T> {
    tokio::time::timeout(Duration::from_secs(3), future.into_future()).await.ok()
}

/// Polls a future once and drops it.
async fn once<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = Box::pin(future);
    poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    })
    .await
}

async fn either<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> Result<A, B> {
    let (mut first, mut second) = (Box::pin(first), Box::pin(second));
    poll_fn(|context| {
        if let Poll::Ready(value) = first.as_mut().poll(context) {
            return Poll::Ready(Ok(value));
        }
        second.as_mut().poll(context).map(Err)
    })
    .await
}

async fn both<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> (A, B) {
    let (mut first, mut second) = (Box::pin(first), Box::pin(second));
    let (mut a, mut b) = (None, None);
    poll_fn(|context| {
        if a.is_none()
            && let Poll::Ready(value) = first.as_mut().poll(context)
        {
            a = Some(value);
        }
        if b.is_none()
            && let Poll::Ready(value) = second.as_mut().poll(context)
        {
            b = Some(value);
        }
        if a.is_some() && b.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (a.unwrap(), b.unwrap())
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("a bomb was dropped");
        }
    }
}

/// A workflow that leaves memory drops what it holds. A panic in such a drop harms no other execution, nor this one.
#[tokio::test]
async fn a_panic_in_a_drop_does_not_stop_an_execution() {
    let sleeps = workflow("sleeps").run(async |ctx: Ctx, ()| {
        let bomb = Bomb;
        ctx.sleep(Duration::from_millis(1500)).await?;
        std::mem::forget(bomb);
        Ok(7)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&sleeps).start().await.unwrap();
    let handle = engine.start(&sleeps, ()).id("s").await.unwrap();
    assert_eq!(soon(handle.result()).await.expect("it hangs").unwrap(), 7);
}

/// Two operations at once are not supported; but nothing may hang.
#[tokio::test]
async fn a_step_beside_a_sleep_does_not_hang() {
    let races = workflow("races").run(async |ctx: Ctx, ()| {
        let step = ctx.run("slow", async || {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Ok(())
        });
        let slept = either(ctx.sleep(Duration::from_millis(1500)), step.into_future()).await;
        Ok(slept.is_ok())
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&races).start().await.unwrap();
    let handle = engine.start(&races, ()).id("r").await.unwrap();
    let result = soon(handle.result()).await;
    let history = engine.history("r").await.unwrap();
    assert!(result.is_some() || matches!(history.state, ExecutionState::Parked(_)), "{history:?}");
}

/// A run that has continued as new does not continue with the old input, though the future of that call was dropped.
#[tokio::test]
async fn a_run_that_has_continued_as_new_goes_no_further() {
    let goes_on = workflow("goes_on").run(async |ctx: Ctx, number: u32| {
        if number == 0 {
            ctx.run("first", async || Ok(())).await?;
            let _ = once(ctx.continue_as_new::<u32>(1u32)).await;
            ctx.run("late", async || Ok(())).await?;
            return Ok(0);
        }
        Ok(number)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&goes_on).start().await.unwrap();
    let handle = engine.start(&goes_on, 0).id("g").await.unwrap();
    let result = soon(handle.result()).await;
    assert_eq!(result.expect("it hangs").unwrap(), 1);
    assert!(engine.history("g").await.unwrap().operations.is_empty(), "the old run continued");
}

/// The removal of a terminated execution is due like any other.
#[tokio::test]
async fn a_terminated_execution_is_removed() {
    let panics = workflow("panics")
        .keep(Duration::from_secs(60))
        .run(async |_: Ctx, ()| -> Result<(), Failure> { panic!("as it should") });
    let test = TestEngine::new(&panics, 1).await.unwrap();
    test.engine().start(&panics, ()).id("p").await.unwrap();
    test.run(async {
        while test.engine().terminate("p", "enough").await.is_err() {
            tokio::task::yield_now().await;
        }
        test.env().sleep(Duration::from_secs(100)).await;
    })
    .await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(test.history("p").await, Err(WorkflowError::NotFound { .. })), "it is still there");
}

/// Removals that touch the same records are one batch.
#[tokio::test]
async fn removals_that_overlap_are_done() {
    let loops = workflow("loops").keep(Duration::ZERO).run(async |ctx: Ctx, number: u32| {
        ctx.run("a", async || Ok(())).await?;
        std::thread::sleep(Duration::from_micros(50));
        if number < 5 { ctx.continue_as_new(number + 1).await } else { Ok(number) }
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&loops).start().await.unwrap();
    let handles = async {
        for number in 0..50 {
            let handle = engine.start(&loops, 0).id(format!("l{number}").as_str()).await.unwrap();
            let _ = handle.result().await;
        }
    };
    soon(handles).await.expect("it hangs");
    tokio::time::sleep(Duration::from_millis(500)).await;
    for space in engine.store().spaces().await.unwrap() {
        let name = space.name();
        if ["workflow.journal", "workflow.removals", "workflow.executions"].contains(&name) {
            let found = engine.store().view().await.unwrap().scan(&space.all(), store::Order::Ascending, 10_000).await;
            assert_eq!(found.unwrap().len(), 0, "{name}");
        }
    }
}

#[tokio::test]
async fn pauses_may_be_as_long_as_can_be() {
    let fails = workflow("fails").run(async |ctx: Ctx, ()| {
        let retry = Retry::exponential().first_pause(Duration::MAX).longest_pause(Duration::MAX);
        let step = ctx.run("never", async || Err::<(), _>(Failure::new("no"))).retry(retry);
        step.await
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&fails).start().await.unwrap();
    engine.start(&fails, ()).id("f").await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let history = engine.history("f").await.unwrap();
    assert_eq!(history.state, ExecutionState::Waiting);
}

#[tokio::test]
async fn no_pause_stays_no_pause() {
    let tries = workflow("tries").run(async |ctx: Ctx, ()| {
        let retry = Retry::exponential().first_pause(Duration::ZERO);
        let step = ctx.run_with("often", async |attempt| match attempt.number {
            2000 => Ok(2000),
            _ => Err(Failure::new("no")),
        });
        step.retry(retry).await
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&tries).start().await.unwrap();
    let handle = engine.start(&tries, ()).id("t").await.unwrap();
    assert_eq!(soon(handle.result()).await.expect("it pauses").unwrap(), 2000);
}

/// An input that just fits leaves no room for the record of an end.
#[tokio::test]
async fn an_input_that_just_fits_does_not_hang() {
    let echo = workflow("echo").run(async |ctx: Ctx, text: String| {
        ctx.run("first", async || Ok(())).await?;
        tokio::task::yield_now().await;
        Ok(text)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&echo).start().await.unwrap();
    for size in [
        (4 << 20) - 200,
        (4 << 20) - 100,
        (4 << 20) - 80,
        (4 << 20) - 70,
        (4 << 20) - 60,
        (4 << 20) - 50,
        (4 << 20) - 40,
        3 << 20,
    ] {
        let started = engine.start(&echo, "x".repeat(size)).id(format!("e{size}").as_str()).await;
        let Ok(handle) = started else {
            continue;
        };
        let id = handle.id().clone();
        let ended = soon(handle.result());
        let ended = tokio::time::timeout(Duration::from_millis(500), ended).await;
        let history = engine.history(id).await.unwrap();
        assert!(ended.is_ok() || matches!(history.state, ExecutionState::Parked(_)), "{size}");
    }
}

async fn on_disk<I: 'static, O: 'static>(workflow: &Workflow<I, O>) -> (tempfile::TempDir, Engine) {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).register(workflow).start().await.unwrap();
    (directory, engine)
}

/// Two operations at once, as the first operations.
#[tokio::test]
async fn two_first_operations_at_once_do_not_hang() {
    let joins = workflow("joins").run(async |ctx: Ctx, ()| {
        let a = ctx.run("a", async || Ok(1));
        let b = ctx.run("b", async || Ok(2));
        let (a, b) = both(a.into_future(), b.into_future()).await;
        Ok(a? + b?)
    });
    let (_directory, engine) = on_disk(&joins).await;
    let started = soon(engine.start(&joins, ()).id("j")).await.expect("the start hangs");
    let result = soon(engine.handle(&joins, "j").result()).await;
    let history = engine.history("j").await.unwrap();
    assert!(result.is_some() || matches!(history.state, ExecutionState::Parked(_)), "{history:?}");
    started.unwrap();
}

/// A step is dropped while the commit of its intent is in flight.
#[tokio::test]
async fn a_step_dropped_in_its_commit_does_not_hang() {
    for first in [true, false] {
        let is_first_life = Arc::new(AtomicBool::new(true));
        let drops = {
            workflow("drops").timeout(Duration::from_secs(2)).run(move |ctx: Ctx, way: u32| {
                let is_first_life = is_first_life.clone();
                async move {
                    if !first {
                        ctx.run("zero", async || Ok(0)).await?;
                    }
                    if is_first_life.swap(false, Ordering::SeqCst) {
                        let _ = once(ctx.run("dropped", async || Ok(1)).into_future()).await;
                        if way == 0 {
                            std::future::pending::<()>().await;
                        }
                    }
                    ctx.run("two", async || Ok(2)).await
                }
            })
        };
        for way in [0, 1] {
            let (_directory, engine) = on_disk(&drops).await;
            let _ = soon(engine.start(&drops, way).id("d")).await.expect("the start hangs");
            let result = soon(engine.handle(&drops, "d").result()).await;
            let history = engine.history("d").await;
            let state = history.map(|history| history.state);
            assert!(result.is_some() || matches!(state, Ok(ExecutionState::Parked(_))), "{state:?}");
        }
    }
}

#[tokio::test]
async fn extremes_of_sleep() {
    let sleeps = workflow("sleeps").run(async |ctx: Ctx, ()| {
        ctx.sleep_until(Timestamp(0)).await?;
        ctx.sleep(Duration::ZERO).await?;
        let step = ctx.run("x", async || Ok(()));
        step.timeout(Duration::MAX).total_timeout(Duration::MAX).await?;
        ctx.sleep(Duration::MAX).await?;
        Ok(7)
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&sleeps).start().await.unwrap();
    engine.start(&sleeps, ()).id("s").await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(engine.history("s").await.unwrap().state, ExecutionState::Waiting);
    engine.wake("s").await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(engine.history("s").await.unwrap().state, ExecutionState::Waiting);
    assert_eq!(engine.residents(), 0);
}

/// Executions whose results wait to be committed, and whose changes of one slot are too much for one commit.
#[tokio::test]
async fn waiting_results_are_committed_with_the_second_try_of_a_change() {
    let runs = Arc::new(AtomicU32::new(0));
    let large = {
        let runs = runs.clone();
        workflow("large").run(move |ctx: Ctx, number: u32| {
            let runs = runs.clone();
            async move {
                let step = ctx.run("large", async || {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok("x".repeat(3 << 20))
                });
                step.await?;
                ctx.state().global::<Vec<u32>>("list").append(number).await?;
                ctx.sleep(Duration::from_millis(1500)).await?;
                Ok(number)
            }
        })
    };
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&large).start().await.unwrap();
    let release = Arc::new(tokio::sync::Notify::new());
    let slot = engine.states().global().slot::<Vec<u32>>("list");
    let blocked = {
        let (release, slot) = (release.clone(), slot.clone());
        tokio::spawn(async move {
            let release = release.clone();
            slot.container()
                .atomic_state(move |list| {
                    let release = release.clone();
                    async move {
                        release.notified().await;
                        Ok::<_, ()>(list)
                    }
                })
                .await
        })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut handles = Vec::new();
    for number in 0..5 {
        handles.push(engine.start(&large, number).id(format!("l{number}").as_str()).await.unwrap());
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    release.notify_one();
    let _ = blocked.await;
    for handle in &handles {
        let _ = soon(handle.result()).await;
    }
    assert_eq!(runs.load(Ordering::SeqCst), 5);
    for handle in &handles {
        assert!(matches!(engine.history(handle.id()).await.unwrap().state, ExecutionState::Completed(_)));
    }
}

/// A change that was sent before under the same name.
#[tokio::test]
async fn a_repeated_named_change_is_recorded_though_it_is_not_applied() {
    let named = workflow("named").run(async |ctx: Ctx, ()| {
        let slot = ctx.state().global::<u32>("count");
        let a = slot.clone().once("k").increment(1).await?.value;
        let b = slot.clone().once("k").increment(1).await?.value;
        ctx.sleep(Duration::from_millis(1500)).await?;
        let c = slot.increment(1).await?.value;
        Ok((a, b, c))
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&named).start().await.unwrap();
    let handle = engine.start(&named, ()).id("n").await.unwrap();
    let result = soon(handle.result()).await;
    assert_eq!(result.expect("it hangs").unwrap(), (1, 1, 2));
}

/// The time of a change is up while the change waits behind others.
#[tokio::test]
async fn a_change_that_took_too_long_is_the_same_on_replay() {
    let timed = workflow("timed").run(async |ctx: Ctx, ()| {
        let slot = ctx.state().global::<u32>("count").mutation_timeout(Duration::from_millis(100));
        let a = slot.increment(1).await.is_ok();
        ctx.run("between", async || Ok(())).await?;
        ctx.sleep(Duration::from_millis(1500)).await?;
        Ok(a)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&timed).start().await.unwrap();
    let slot = engine.states().global().slot::<u32>("count");
    let blocked = tokio::spawn(async move {
        slot.container()
            .atomic_state(move |list| async move {
                tokio::time::sleep(Duration::from_millis(400)).await;
                Ok::<_, ()>(list)
            })
            .await
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let handle = engine.start(&timed, ()).id("n").await.unwrap();
    let _ = blocked.await;
    let result = soon(handle.result()).await;
    assert!(result.expect("it is parked").unwrap(), "a change of a workflow has no time limit");
}

/// A change that is withdrawn leaves a gap in the journal; the entry after the gap must not be taken for it.
#[tokio::test]
async fn a_gap_in_the_journal_is_noticed() {
    let lives = Arc::new(AtomicU32::new(0));
    let gaps = {
        let lives = lives.clone();
        workflow("gaps").run(move |ctx: Ctx, ()| {
            let lives = lives.clone();
            async move {
                let life = lives.fetch_add(1, Ordering::SeqCst);
                let slot = ctx.state().global::<u32>("count");
                let first = once(slot.increment(1)).await;
                let second = slot.increment(1).await?.value;
                if life == 0 {
                    std::future::pending::<()>().await;
                }
                Ok((first.is_some(), second))
            }
        })
    };
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&gaps).start().await.unwrap();
    engine.start(&gaps, ()).id("g").await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(engine.states().global().slot::<u32>("count").get().await.unwrap(), Some(1));
    let engine = Engine::on(&store).register(&gaps).start().await.unwrap();
    let _ = soon(engine.handle(&gaps, "g").result()).await;
    let count = engine.states().global().slot::<u32>("count").get().await.unwrap();
    assert_eq!(count, Some(1), "it was applied again");
}

/// More entries than one read fetches, and a step that was begun in the entry right at the border.
#[tokio::test]
async fn a_crash_at_the_border_of_what_is_read_ahead() {
    for steps in [63, 64, 65, 128] {
        let bodies = Arc::new(AtomicU32::new(0));
        let many = {
            let bodies = bodies.clone();
            workflow("many").run(move |ctx: Ctx, steps: u32| {
                let bodies = bodies.clone();
                async move {
                    let mut sum = 0;
                    for number in 0..steps {
                        sum += ctx.run("step", async || Ok(number)).await?;
                    }
                    let last = ctx.run("last", async || {
                        if bodies.fetch_add(1, Ordering::SeqCst) == 0 {
                            std::future::pending::<()>().await;
                        }
                        Ok(1)
                    });
                    Ok(sum + last.await?)
                }
            })
        };
        let store = Store::memory().await.unwrap();
        let engine = Engine::on(&store).register(&many).start().await.unwrap();
        engine.start(&many, steps).id("m").await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        engine.stop();
        let engine = Engine::on(&store).register(&many).start().await.unwrap();
        let result = soon(engine.handle(&many, "m").result()).await.expect("it hangs").unwrap();
        assert_eq!(result, steps * (steps - 1) / 2 + 1);
        assert_eq!(bodies.load(Ordering::SeqCst), 2);
        let history = engine.history("m").await.unwrap();
        assert_eq!(history.operations.len() as u32, steps + 1);
        assert_eq!(history.operations.last().unwrap().attempts, 2);
        latchwork::testing::replay(&history, &many).await.unwrap();
    }
}

/// The workflow drops a step in the middle of its body.
#[tokio::test]
async fn a_step_dropped_in_its_body_parks() {
    let drops = workflow("drops").run(async |ctx: Ctx, ()| {
        ctx.run("zero", async || Ok(0)).await?;
        let slow = ctx.run("slow", async || {
            tokio::time::sleep(Duration::from_secs(60)).await;
            Ok(0)
        });
        let late = tokio::time::timeout(Duration::from_millis(100), slow.into_future()).await.is_err();
        let two = ctx.run("two", async || Ok(2)).await?;
        ctx.sleep(Duration::from_millis(1200)).await?;
        Ok((late, two))
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&drops).start().await.unwrap();
    let handle = engine.start(&drops, ()).id("d").await.unwrap();
    // What a replay could not meet again is parked.
    let result = soon(handle.result()).await.expect("the caller is told");
    let Err(WorkflowError::Parked { reason, .. }) = result else { panic!("{result:?}") };
    assert!(matches!(engine.history("d").await.unwrap().state, ExecutionState::Parked(_)));
    assert!(reason.contains("dropped before its end"), "{reason}");
}

/// Panics everywhere: each fails the attempt or parks the execution; none makes it hang.
#[tokio::test]
async fn panics_anywhere_do_not_hang() {
    let panics = workflow("panics").run(async |ctx: Ctx, way: u32| {
        match way {
            0 => {
                ctx.run("a", async || -> Result<(), Failure> { panic!("body") }).retry(Retry::never()).await?;
            }
            1 => {
                ctx.state().global::<u32>("p").update(|_| panic!("mutator")).await?;
            }
            2 => {
                ctx.transaction("t", async |_| -> Result<(), Failure> { panic!("transaction") }).await?;
            }
            3 => {
                let tx = async |tx: latchwork::workflow::Tx| {
                    tx.global::<u32>("q").update(|_| panic!("mutator")).await?;
                    Ok(())
                };
                ctx.transaction("t", tx).await?;
            }
            4 => {
                let _bomb = Bomb;
                ctx.run("hook", async || Ok(())).await?;
            }
            _ => {
                let body = async || {
                    let _bomb = Bomb;
                    tokio::time::sleep(Duration::from_secs(9)).await;
                    Ok(())
                };
                ctx.run("t", body).timeout(Duration::from_millis(10)).retry(Retry::never()).await?;
            }
        }
        Ok(way)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&panics).on_step(|_, name| {
        assert_ne!(name, "hook");
    });
    let engine = engine.start().await.unwrap();
    for way in 0..6 {
        let id = format!("p{way}");
        let handle = engine.start(&panics, way).id(id.as_str()).await.unwrap();
        let ended = tokio::time::timeout(Duration::from_millis(500), handle.result()).await;
        let state = engine.history(id.as_str()).await.unwrap().state;
        assert!(ended.is_ok() || matches!(state, ExecutionState::Parked(_)), "{way} {state:?}");
    }
    assert_eq!(engine.residents(), 0);
}

/// Ids are used again and again while earlier executions of the same id are removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_are_used_again_while_they_are_removed() {
    let quick = workflow("quick").keep(Duration::ZERO).run(async |ctx: Ctx, number: u32| {
        ctx.state().execution::<u32>("own").increment(1).await?;
        ctx.run("a", async || Ok(())).await?;
        if number.is_multiple_of(3) { ctx.continue_as_new(number + 1).await } else { Ok(number) }
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&quick).start().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..4 {
        let (engine, quick) = (engine.clone(), quick.clone());
        tasks.spawn(async move {
            let mut done = 0;
            for number in 0..300 {
                let start =
                    engine.start(&quick, number).id(format!("q{}", task % 2)).idempotency_key(format!("k{number}"));
                match start.await {
                    Ok(handle) => match handle.result().await {
                        Ok(_) => done += 1,
                        Err(WorkflowError::NotFound { .. }) => {}
                        Err(error) => panic!("{error}"),
                    },
                    Err(WorkflowError::AlreadyStarted { .. }) => tokio::task::yield_now().await,
                    Err(error) => panic!("{error}"),
                }
            }
            done
        });
    }
    tokio::time::timeout(Duration::from_secs(20), tasks.join_all()).await.expect("it hangs");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.residents(), 0);
    assert_eq!(engine.parked().await.unwrap(), []);
    for space in engine.store().spaces().await.unwrap() {
        if space.name().starts_with("workflow.") {
            let found = engine.store().view().await.unwrap().scan(&space.all(), store::Order::Ascending, 10_000).await;
            assert_eq!(found.unwrap().len(), 0, "{}", space.name());
        }
    }
}
