//! Sagas with branches: completed steps are undone, whichever branch has failed, whatever the others were doing, and
//! wherever the process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::store::Uuid;
use latchwork::testing::{Crashes, TestEngine, crash_everywhere};
use latchwork::workflow::{Attempt, Ctx, Failure, First2, Saga, Workflow, WorkflowError, workflow};
use parking_lot::Mutex;

use crate::lock::letting_go::within_an_hour;

const SECOND: Duration = Duration::from_secs(1);

/// What is booked at present.
type Booked = Arc<Mutex<Vec<String>>>;

/// Registers a compensation, and books something, after a while.
async fn book(ctx: &Ctx, saga: &Saga, booked: &Booked, what: &str, nap: u64) -> Result<(), Failure> {
    ctx.sleep(Duration::from_secs(nap)).await?;
    let (undone, name) = (booked.clone(), what.to_string());
    saga.compensate(&format!("undo {what}"), move || {
        undone.lock().retain(|other| *other != name);
        std::future::ready(Ok(()))
    });
    ctx.run(&format!("book {what}"), async || {
        let mut booked = booked.lock();
        booked.retain(|other| other != what);
        booked.push(what.into());
        Ok(())
    })
    .await
}

/// The ways in which branches fail.
const WAYS: u64 = 6;

async fn branches(ctx: &Ctx, saga: &Saga, booked: &Booked, way: u64) -> Result<(), Failure> {
    let flight = async |ctx: Ctx| book(&ctx, saga, booked, "flight", 2).await;
    // This branch is running, or waits for something that never comes, when the other branch fails.
    let hotel = async |ctx: Ctx| {
        book(&ctx, saga, booked, "hotel", 0).await?;
        ctx.receive::<()>("never").await
    };
    let car = async |ctx: Ctx| {
        book(&ctx, saga, booked, "car", 1).await?;
        ctx.sleep(3 * SECOND).await?;
        Err::<(), _>(Failure::new("no car"))
    };
    match way {
        0 => ctx.try_join((flight, hotel, car)).await.map(drop),
        1 => ctx.try_join((car, hotel, flight)).await.map(drop),
        2 => {
            let (flight, car) = ctx.join((flight, car)).await;
            flight.and(car)
        }
        3 => {
            let all = ctx.try_map(0..6, 3, async |ctx: Ctx, number: u64| {
                book(&ctx, saga, booked, &format!("night {number}"), number % 2).await?;
                if number == 3 { Err(Failure::new("no room")) } else { ctx.sleep(SECOND * number as u32).await }
            });
            all.await.map(drop)
        }
        // A branch that loses is given up, and its bookings would stay. Here it has booked nothing, so nothing stays.
        4 => {
            let first = ctx.select((
                async |ctx: Ctx| {
                    ctx.sleep(2 * SECOND).await?;
                    saga.compensate("undo nothing", async || Ok(()));
                    ctx.receive::<()>("never").await
                },
                async |ctx: Ctx| book(&ctx, saga, booked, "train", 3).await,
            ));
            let First2::Second(train) = first.await else { return Ok(()) };
            train?;
            Err(Failure::new("enough"))
        }
        // Branches of branches.
        _ => {
            let inner = async |ctx: Ctx| ctx.try_join((hotel, flight)).await.map(drop);
            ctx.try_join((inner, car)).await.map(drop)
        }
    }
}

fn trip(booked: &Booked) -> Workflow<u64, String> {
    let booked = booked.clone();
    workflow("trip").run(move |ctx: Ctx, way: u64| {
        let booked = booked.clone();
        async move {
            let result = ctx.saga(async |saga| {
                book(&ctx, &saga, &booked, "insurance", 0).await?;
                branches(&ctx, &saga, &booked, way).await
            });
            Ok(result.await.unwrap_err().message().to_string())
        }
    })
}

#[tokio::test]
async fn branches_of_a_saga_are_undone_under_a_crash_at_every_commit() {
    for way in 0..WAYS {
        let booked = Booked::default();
        let expected = ["no car", "no car", "no car", "no room", "enough", "no car"][way as usize];
        let test = TestEngine::new(&trip(&booked), 1).await.unwrap();
        let handle = test.engine().start(&trip(&booked), way).id("trip").await.unwrap();
        let result = within_an_hour(&test, handle.result()).await.unwrap();
        assert_eq!((&*result, &**booked.lock()), (expected, &[][..]), "way {way}");
        let crashes = Crashes::of(|| trip(&booked), way).run(async |outcome| {
            let result = outcome.result.as_deref().ok();
            assert_eq!(result, Some(expected), "way {way}, {:?}: {:?}", outcome.crash, outcome.result);
            let left = std::mem::take(&mut *booked.lock());
            assert!(left.is_empty(), "way {way}, {:?}: {left:?}", outcome.crash);
        });
        assert!(crashes.await > 10);
    }
}

/// Branches register their compensations in one order, and in another order when they are replayed.
#[tokio::test]
async fn compensations_run_in_the_order_of_the_code() {
    let trip = workflow("trip").run(async |ctx: Ctx, ()| {
        let undone = ctx.saga(async |saga| {
            let late = |nap: u64, name: &'static str| {
                let saga = saga.clone();
                async move |ctx: Ctx| {
                    ctx.sleep(Duration::from_secs(nap)).await?;
                    saga.compensate(name, async || Ok(()));
                    ctx.sleep(SECOND).await
                }
            };
            saga.compensate("a", async || Ok(()));
            let (first, second) = ctx.join((late(5, "b"), late(1, "c"))).await;
            first.and(second)?;
            saga.compensate("d", async || Ok(()));
            Err::<(), _>(Failure::new("enough"))
        });
        Ok(undone.await.unwrap_err().message().to_string())
    });
    let crashes = Crashes::of(|| trip.clone(), ()).run(async |outcome| {
        assert_eq!(outcome.result.as_deref().ok(), Some("enough"), "{:?}: {:?}", outcome.crash, outcome.result);
        let mut bodies = outcome.bodies.clone();
        bodies.dedup();
        let mut order = bodies.iter().map(|body| ["d", "c", "b", "a"].iter().position(|name| name == body).unwrap());
        assert!(order.clone().is_sorted() && order.any(|place| place == 3), "{bodies:?}");
    });
    assert!(crashes.await > 5);
}

/// The execution leaves memory in the pause before the next attempt at a compensation.
#[tokio::test]
async fn a_compensation_that_is_retried_for_long_forgets_no_other() {
    let tries = Arc::new(AtomicU32::new(0));
    let trip = workflow("trip").run(move |ctx: Ctx, ()| {
        let tries = tries.clone();
        async move {
            let ctx = &ctx;
            let booked = ctx.saga(async move |saga| {
                let (a, b) = (saga.clone(), saga.clone());
                let booked = ctx.try_join((
                    async move |ctx: Ctx| {
                        a.compensate("undo a", async || Ok(()));
                        ctx.run("a", async || Ok(())).await
                    },
                    async move |ctx: Ctx| {
                        b.compensate("undo b", move || {
                            let is_busy = tries.fetch_add(1, Ordering::SeqCst) < 3;
                            std::future::ready(if is_busy { Err(Failure::new("busy")) } else { Ok(()) })
                        });
                        ctx.sleep(SECOND / 2).await?;
                        Err::<(), _>(Failure::new("no"))
                    },
                ));
                booked.await.map(drop)
            });
            booked.await
        }
    });
    let test = TestEngine::new(&trip, 1).await.unwrap();
    assert!(matches!(test.complete(&trip, ()).await, Err(WorkflowError::Failed { .. })));
    assert_eq!(test.bodies(), ["a", "undo b", "undo b", "undo b", "undo b", "undo a"]);
}

/// The branch's function registers the compensation before it returns its future.
#[tokio::test]
async fn a_compensation_may_be_registered_before_the_branch_is_awaited() {
    let trip = workflow("trip").run(async |ctx: Ctx, ()| {
        let booked = ctx.saga(async |saga| {
            let a = saga.clone();
            let both = ctx.try_join((
                move |ctx: Ctx| {
                    a.compensate("undo a", async || Ok(()));
                    async move { ctx.run("a", async || Ok(())).await }
                },
                async |ctx: Ctx| {
                    ctx.sleep(SECOND).await?;
                    Err::<(), _>(Failure::new("no"))
                },
            ));
            both.await.map(drop)
        });
        Ok(booked.await.unwrap_err().message().to_string())
    });
    let test = TestEngine::new(&trip, 1).await.unwrap();
    assert_eq!(test.complete(&trip, ()).await.unwrap(), "no");
    assert_eq!(test.bodies(), ["a", "undo a"]);
}

/// The failure that stopped a branch has not happened in a fork from before it.
#[tokio::test]
async fn a_fork_of_a_saga_knows_nothing_of_the_failure_after_it() {
    let trip = workflow("trip").run(async |ctx: Ctx, input: u64| {
        ctx.saga(async |_| {
            let both = ctx.try_join((
                async |ctx: Ctx| {
                    ctx.run("a", async || Ok(())).await?;
                    ctx.sleep(10 * SECOND).await?;
                    ctx.run("c", async || Ok(3)).await
                },
                async |ctx: Ctx| {
                    ctx.run("b", async || Ok(())).await?;
                    if input == 1 { Err(Failure::new("odd")) } else { Ok(4) }
                },
            ));
            both.await.map(|(a, b)| a + b)
        })
        .await
    });
    let test = TestEngine::new(&trip, 1).await.unwrap();
    let handle = test.engine().start(&trip, 1).id("source").await.unwrap();
    assert!(test.run(handle.result()).await.unwrap_err().to_string().contains("odd"));
    let id = test.engine().fork("source").at_step("b").input(&2u64).await.unwrap();
    assert_eq!(test.run(test.engine().handle(&trip, id).result()).await.unwrap(), 7);
    assert_eq!(test.bodies(), ["a", "b", "b", "c"]);
}

/// A replay does not run the body, so it would not know the compensation.
#[tokio::test]
async fn a_compensation_that_is_registered_in_a_body_parks_the_execution() {
    let wrong = workflow("wrong").run(async |ctx: Ctx, ()| {
        ctx.saga(async |saga| {
            let said = || {
                saga.compensate("undo", async || Ok(()));
                std::future::ready(Ok(()))
            };
            ctx.run("book", said).await
        })
        .await
    });
    let test = TestEngine::new(&wrong, 1).await.unwrap();
    let error = test.complete(&wrong, ()).await.unwrap_err();
    assert!(error.to_string().contains("compensation \"undo\" was set while"), "{error}");
}

// A receiver that knows charges by their keys: a refund under another key would find nothing.
#[tokio::test]
async fn a_compensation_knows_the_key_of_the_step_that_it_undoes() {
    let charges: Arc<Mutex<Vec<Uuid>>> = Arc::default();
    let pays = workflow("pays").with(charges.clone()).run(async |ctx: Ctx, charges: Arc<Mutex<Vec<Uuid>>>, ()| {
        let code = ctx.saga(async |saga| {
            for name in ["charge", "charge", "fee"] {
                let (key, refunds) = (ctx.key(name), charges.clone());
                saga.compensate(&format!("refund {name}"), move || {
                    refunds.lock().retain(|charge| *charge != key);
                    std::future::ready(Ok(()))
                });
                let charge = ctx.run_with(name, async |attempt: Attempt| {
                    let mut charges = charges.lock();
                    charges.retain(|charge| *charge != attempt.idempotency_key);
                    charges.push(attempt.idempotency_key);
                    Ok(charges.len())
                });
                charge.await?;
                ctx.sleep(SECOND).await?;
            }
            Err::<(), _>("sold out".into())
        });
        code.await
    });
    let crashes = crash_everywhere(
        || pays.clone(),
        (),
        async |outcome| {
            assert!(matches!(outcome.result, Err(WorkflowError::Failed { .. })), "{:?}", outcome.result);
            assert!(charges.lock().is_empty(), "not refunded: {:?}", outcome.crash);
        },
    );
    assert!(crashes.await > 10);
}

// The next operation is another than the code has said, or one is under way.
#[tokio::test]
async fn a_key_that_is_asked_for_in_the_wrong_place_parks() {
    let asks = workflow("asks").run(async |ctx: Ctx, way: u32| {
        match way {
            0 => _ = ctx.key("charge"),
            1 => _ = ctx.run("body", async || Ok(ctx.key("charge").as_u128())).await?,
            _ => _ = ctx.key("other"),
        }
        ctx.run("other", async || Ok(())).await
    });
    let test = TestEngine::new(&asks, 1).await.unwrap();
    for (way, reason) in [
        (0, "the key of step \"charge\" was asked for, and the next operation is step \"other\""),
        (1, "the key of step \"charge\" was requested while an operation was running"),
    ] {
        match test.complete(&asks, way).await {
            Err(WorkflowError::Parked { reason: found, .. }) => assert_eq!(found, reason),
            other => panic!("{other:?}"),
        }
    }
    test.complete(&asks, 2).await.unwrap();
}
