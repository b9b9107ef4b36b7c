//! The canary: new code replays the histories of running executions before it takes work. Each row of a table is a new
//! version of the code, and what is reported of it. After each check the store is as it was, and no body has run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork::flow::sequencer;
use latchwork::workflow::{CanaryReport, ExecutionFilter, Failure, Retry, Status};

use super::*;
use crate::flow::{Log, add, only, sleeps};

/// Counts the bodies of new code. None may run.
#[derive(Clone, Default)]
struct Bodies(Arc<AtomicU64>);

impl Bodies {
    fn run(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// A body with this result.
    fn ran<T>(&self, result: T) -> Result<T, Failure> {
        self.run();
        Ok(result)
    }
}

/// Checks the running executions against code, and that nothing of it has any effect.
async fn check<I, O>(store: &Store, bodies: &Bodies, code: &Workflow<I, O>) -> CanaryReport {
    let state = async || {
        let stats = store.stats().await.unwrap();
        (stats.generation, stats.applied, stats.refused, stats.keys)
    };
    let before = state().await;
    let builder = Engine::on(store).register(code);
    let report = in_time(builder.check_running(100).timeout(Duration::from_millis(500)).into_future()).await.unwrap();
    assert_eq!(state().await, before, "nothing is written");
    assert_eq!(bodies.0.load(Ordering::SeqCst), 0, "no body runs");
    report
}

/// Waits until as many executions as given have this status.
async fn settled(engine: &Engine, status: Status, count: usize) {
    for _ in 0..3000 {
        if engine.list(ExecutionFilter::new().is(status)).await.unwrap().items.len() == count {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{count} executions do not become {status:?}: {:?}", engine.list(ExecutionFilter::new()).await.unwrap());
}

fn order() -> Workflow<u64, u64> {
    workflow("order").run(async |ctx: Ctx, price: u64| {
        let paid = ctx.run("charge", async || Ok(price)).input(&price).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        ctx.run("ship", async || Ok(paid)).await
    })
}

/// A new version of the code of `order`.
macro_rules! order {
    (|$ctx:ident, $price:ident, $bodies:ident| $code:expr) => {
        (|bodies: &Bodies| -> Workflow<u64, u64> {
            workflow("order").with(bodies.clone()).run(async |$ctx: Ctx, $bodies: Bodies, $price: u64| {
                let _ = &$bodies;
                $code
            })
        }) as fn(&Bodies) -> Workflow<u64, u64>
    };
}

const HOUR: Duration = Duration::from_secs(3600);

/// A new version of the code; and what is reported of it: the place, the journal, and the code.
type Case = (&'static str, Code, Option<[&'static str; 3]>);

type Code = fn(&Bodies) -> Workflow<u64, u64>;

fn changed_steps() -> Vec<Case> {
    vec![
        (
            "a renamed step",
            order!(|ctx, price, bodies| ctx.run("pay", async || bodies.ran(price)).input(&price).await),
            Some(["0", "step \"charge\"", "step \"pay\""]),
        ),
        (
            "an inserted step",
            order!(|ctx, price, bodies| {
                let paid = ctx.run("charge", async || bodies.ran(price)).input(&price).await?;
                ctx.run("check", async || bodies.ran(())).await?;
                ctx.sleep(HOUR).await?;
                Ok(paid)
            }),
            Some(["1", "sleep", "step \"check\""]),
        ),
        (
            "a changed input of a step",
            order!(|ctx, price, bodies| ctx.run("charge", async || bodies.ran(price)).input(&(price + 1)).await),
            Some(["0", "step \"charge\", with other arguments", "step \"charge\""]),
        ),
        (
            "another type of a result",
            order!(|ctx, price, bodies| {
                ctx.run("charge", async || bodies.ran("paid".to_string())).input(&price).await?;
                Ok(price)
            }),
            Some(["0", "step \"charge\"", "step \"charge\" with another type"]),
        ),
        (
            "a changed time",
            order!(|ctx, price, bodies| {
                let paid = ctx.run("charge", async || bodies.ran(price)).input(&price).await?;
                ctx.sleep(HOUR * 2).await?;
                Ok(paid)
            }),
            Some(["1", "sleep, with other arguments", "sleep"]),
        ),
        (
            "an earlier end",
            order!(|ctx, price, bodies| ctx.run("charge", async || bodies.ran(price)).input(&price).await),
            Some(["1", "sleep", "the code has ended"]),
        ),
    ]
}

fn what_fits() -> Vec<Case> {
    vec![
        (
            "the same",
            order!(|ctx, price, bodies| {
                let paid = ctx.run("charge", async || bodies.ran(price)).input(&price).await?;
                ctx.sleep(HOUR).await?;
                ctx.run("ship", async || bodies.ran(paid)).await
            }),
            None,
        ),
        (
            "an inserted step behind a marker",
            order!(|ctx, price, bodies| {
                let paid = ctx.run("charge", async || bodies.ran(price)).input(&price).await?;
                if ctx.version("checked", 1..=2).await == 2 {
                    ctx.run("check", async || bodies.ran(())).await?;
                }
                ctx.sleep(HOUR).await?;
                ctx.run("ship", async || bodies.ran(paid)).await
            }),
            None,
        ),
        (
            "a step inserted after the wait in progress",
            order!(|ctx, price, bodies| {
                let paid = ctx.run("charge", async || bodies.ran(price)).input(&price).await?;
                ctx.sleep(HOUR).await?;
                ctx.run("check", async || bodies.ran(())).await?;
                ctx.run("ship", async || bodies.ran(paid)).await
            }),
            None,
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_is_reported_with_its_place_and_both_sides() {
    let (store, bodies) = (Store::memory().await.unwrap(), Bodies::default());
    let engine = Engine::on(&store).register(&order()).start().await.unwrap();
    engine.start(&order(), 7).id("a").await.unwrap();
    settled(&engine, Status::Asleep, 1).await;
    for (what, code, expected) in changed_steps().into_iter().chain(what_fits()) {
        let report = check(&store, &bodies, &code(&bodies)).await;
        assert_eq!((report.replayed, report.other_versions, report.has_more), (1, 0, false), "{what}");
        let found = report.misfits.iter().map(|it| {
            assert_eq!((&*it.id, &*it.workflow, it.version), ("a", "order", 1), "{what}");
            [&it.place, &it.journal, &it.code].map(|side| side.as_deref().unwrap())
        });
        assert_eq!(found.collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>(), "{what}: {report:?}");
    }
    // The execution goes on as if nothing had looked at it.
    assert_eq!(engine.describe("a").await.unwrap().status(), Status::Asleep);
}

#[tokio::test(flavor = "multi_thread")]
async fn code_that_panics_never_ends_or_takes_another_input_is_a_finding() {
    let (store, bodies) = (Store::memory().await.unwrap(), Bodies::default());
    let engine = Engine::on(&store).register(&order()).start().await.unwrap();
    engine.start(&order(), 7).id("a").await.unwrap();
    settled(&engine, Status::Asleep, 1).await;
    let table: Vec<(Code, &str)> = vec![
        (
            order!(|ctx, price, bodies| {
                ctx.run("charge", async || {
                    bodies.run();
                    Ok(price)
                })
                .input(&price)
                .await?;
                panic!("a fault in the new code")
            }),
            "it panicked: a fault in the new code",
        ),
        (
            order!(|ctx, _price, bodies| {
                let _ = &ctx;
                loop {
                    tokio::task::yield_now().await;
                }
            }),
            "does not come to the end of the journal within 500ms",
        ),
        (
            order!(|ctx, price, bodies| {
                ctx.run("charge", async || {
                    bodies.run();
                    Ok(price)
                })
                .input(&price)
                .await?;
                std::future::pending().await
            }),
            "does not come to the end of the journal within 500ms",
        ),
        (
            order!(|ctx, _price, bodies| {
                let _ = &ctx;
                std::thread::sleep(Duration::from_secs(20));
                Ok(1)
            }),
            "does not come to the end of the journal within 500ms",
        ),
    ];
    for (code, expected) in table {
        let report = check(&store, &bodies, &code(&bodies)).await;
        let [misfit] = &report.misfits[..] else { panic!("{expected}: {report:?}") };
        assert!(misfit.reason.contains(expected), "{misfit:?}");
        assert_eq!(misfit.place, None);
    }
    let other = workflow("order").run(async |_: Ctx, name: String| Ok(name));
    let report = check(&store, &bodies, &other).await;
    assert!(report.misfits[0].reason.contains("the input of workflow \"order\""), "{report:?}");
}

/// Each kind of operation that can be in progress; `first` is the name of the step before it. Old code has no counter.
fn waiter(first: &'static str, bodies: Option<Bodies>) -> Workflow<String, u64> {
    workflow("waiter").with((first, bodies)).run(
        async |ctx: Ctx, (first, bodies): (_, Option<Bodies>), kind: String| {
            let ran = || bodies.iter().for_each(Bodies::run);
            ctx.run(first, async || {
                ran();
                Ok(1)
            })
            .await?;
            match kind.as_str() {
                "step" => {
                    let hangs = async || {
                        ran();
                        std::future::pending::<Result<u64, Failure>>().await
                    };
                    ctx.run("hang", hangs).await
                }
                "retry" => {
                    let fails = async || {
                        ran();
                        Err::<u64, _>(Failure::new("not yet"))
                    };
                    ctx.run("fail", fails).retry(Retry::exponential().first_pause(HOUR).longest_pause(HOUR)).await
                }
                "signal" => ctx.receive::<u64>("go").await,
                "update" => Ok(ctx.receive_update::<u64, u64>("go").await?.value),
                "lock" => {
                    let guard = ctx.mutex("taken").acquire().await?;
                    ctx.sleep(HOUR).await?;
                    guard.release().await?;
                    Ok(1)
                }
                "child" => ctx.child(&order(), 1).id("inner").await,
                "saga" => {
                    let code = ctx.saga(async |saga| {
                        let undone = bodies.clone();
                        saga.compensate("undo", move || {
                            undone.iter().for_each(Bodies::run);
                            std::future::ready(Ok(()))
                        });
                        ctx.sleep(HOUR).await?;
                        Ok(1)
                    });
                    code.await
                }
                "transaction" => {
                    let counted = ctx.state().global::<u64>("count").increment(1).await?.value;
                    ctx.sleep(HOUR).await?;
                    Ok(counted)
                }
                _ => {
                    let second = if first == "other" { "two" } else { "one" };
                    let both = ctx.try_join((
                        async |ctx: Ctx| ctx.sleep(HOUR).await,
                        async |ctx: Ctx| {
                            let name = if kind == "join" { second } else { "one" };
                            ctx.run(name, async || {
                                ran();
                                Ok(1)
                            })
                            .await?;
                            ctx.receive::<u64>("go").await
                        },
                    ));
                    Ok(both.await?.1)
                }
            }
        },
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_in_progress_fits_and_does_not_happen_again() {
    let (store, bodies) = (Store::memory().await.unwrap(), Bodies::default());
    let old = waiter("begin", None);
    let engine = Engine::on(&store).register(&old).register(&order()).start().await.unwrap();
    let held = engine.mutex("taken").acquire().await.unwrap();
    let kinds = ["step", "retry", "signal", "update", "lock", "child", "saga", "transaction", "join"];
    for kind in kinds {
        engine.start(&old, kind.into()).id(kind).await.unwrap();
    }
    settled(&engine, Status::Running, 1).await;
    settled(&engine, Status::Waiting, kinds.len()).await; // the child sleeps, too
    let builder = Engine::on(&store).register(&waiter("begin", Some(bodies.clone()))).register(&order());
    let before = store.stats().await.unwrap();
    let report = in_time(builder.check_running(100).into_future()).await.unwrap();
    assert_eq!((report.replayed, &report.misfits[..]), (kinds.len() + 1, &[][..]));
    assert_eq!(store.stats().await.unwrap().applied, before.applied, "nothing is written");
    assert_eq!(bodies.0.load(Ordering::SeqCst), 0, "no body runs");
    let renamed = check(&store, &bodies, &waiter("start", Some(bodies.clone()))).await;
    assert_eq!(renamed.misfits.len(), kinds.len(), "{renamed:?}");
    drop(held);
}

/// A branch that waits does not hide another branch that does not fit.
#[tokio::test(flavor = "multi_thread")]
async fn a_misfit_in_a_branch_beside_one_that_waits_is_found() {
    let (store, bodies) = (Store::memory().await.unwrap(), Bodies::default());
    let branches = |second: &'static str, bodies: Option<Bodies>| -> Workflow<u64, u64> {
        workflow("beside").with((second, bodies)).run(
            async |ctx: Ctx, (second, bodies): (&str, Option<Bodies>), _: u64| {
                let both = ctx.try_join((
                    async |ctx: Ctx| ctx.sleep(HOUR).await,
                    async |ctx: Ctx| {
                        let ran = ctx.run(second, async || {
                            bodies.iter().for_each(Bodies::run);
                            Ok(1)
                        });
                        ran.await?;
                        ctx.receive::<u64>("go").await
                    },
                ));
                Ok(both.await?.1)
            },
        )
    };
    let engine = Engine::on(&store).register(&branches("one", None)).start().await.unwrap();
    engine.start(&branches("one", None), 1).id("a").await.unwrap();
    settled(&engine, Status::Waiting, 1).await;
    let report = check(&store, &bodies, &branches("one", Some(bodies.clone()))).await;
    assert!(report.fits() && report.replayed == 1, "{report:?}");
    let report = check(&store, &bodies, &branches("two", Some(bodies.clone()))).await;
    let [misfit] = &report.misfits[..] else { panic!("{report:?}") };
    assert_eq!(misfit.place.as_deref(), Some("0.1/0"), "{misfit:?}");
    assert_eq!(misfit.journal.as_deref(), Some("step \"one\""));
    assert_eq!(misfit.code.as_deref(), Some("step \"two\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flow_is_replayed_by_its_traces_and_the_body_of_a_handler_does_not_run_again() {
    let (store, old, new) = (Store::memory().await.unwrap(), Log::default(), Log::default());
    let build = |log: &Log| {
        let chain = sequencer("chain").state::<crate::flow::Tally>().step(&add("a", log)).step(&sleeps("b", log));
        only(chain.build().unwrap())
    };
    let engine = Engine::on(&store).flow(&build(&old)).start().await.unwrap();
    engine.flow(&build(&old)).run("run", 1).id("r").await.unwrap();
    settled(&engine, Status::Asleep, 1).await;
    assert_eq!(old.all(), ["a", "b"]);
    let before = store.stats().await.unwrap().applied;
    let report = in_time(Engine::on(&store).flow(&build(&new)).check_running(10).into_future()).await.unwrap();
    assert!(report.fits() && report.replayed == 1, "{report:?}");
    let inner = sequencer("a").step(&add("c", &new)).build().unwrap();
    let chain = sequencer("chain").state::<crate::flow::Tally>().step(&inner).step(&sleeps("b", &new));
    let other = only(chain.build().unwrap());
    let report = in_time(Engine::on(&store).flow(&other).check_running(10).into_future()).await.unwrap();
    assert_eq!(report.misfits[0].journal.as_deref(), Some("handler \"a\""), "{report:?}");
    assert_eq!(report.misfits[0].code.as_deref(), Some("sequencer \"a\""), "{report:?}");
    assert_eq!((new.all(), store.stats().await.unwrap().applied), (Vec::new(), before));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_check_is_bounded_and_looks_only_at_running_executions_of_its_versions() {
    let (store, bodies) = (Store::memory().await.unwrap(), Bodies::default());
    let quick = workflow("quick").run(async |_: Ctx, n: u64| Ok(n));
    let stuck = workflow("stuck").run(async |_: Ctx, _: u64| -> Result<u64, Failure> { panic!("it is parked") });
    let engine = Engine::on(&store).register(&order()).register(&quick).register(&stuck).start().await.unwrap();
    for number in 0..7 {
        engine.start(&order(), number).id(format!("o{number}")).await.unwrap();
        engine.start(&quick, number).await.unwrap().result().await.unwrap();
    }
    engine.start(&stuck, 1).await.unwrap();
    settled(&engine, Status::Asleep, 7).await;
    settled(&engine, Status::Parked, 1).await;
    let renamed = order!(|ctx, price, bodies| ctx.run("pay", async || Ok(price)).await)(&bodies);
    for (limit, replayed, has_more) in [(0, 0, true), (3, 3, true), (7, 7, false), (100, 7, false)] {
        let builder = Engine::on(&store).register(&renamed).register(&quick).register(&stuck);
        let report = builder.check_running(limit).await.unwrap();
        assert_eq!((report.replayed, report.has_more), (replayed, has_more), "limit {limit}");
        let ids: Vec<String> = report.misfits.iter().map(|misfit| misfit.id.to_string()).collect();
        assert_eq!(ids, (0..replayed).map(|number| format!("o{number}")).collect::<Vec<_>>(), "the oldest first");
    }
    let second = workflow("order").version(2).run(async |ctx: Ctx, n: u64| ctx.run("pay", async || Ok(n)).await);
    let report = check(&store, &bodies, &second).await;
    assert_eq!((report.replayed, report.other_versions, report.fits()), (0, 7, true), "left to other nodes");
    let both = workflow("order").version(2).continues([1]);
    let both = both.run(async |ctx: Ctx, n: u64| ctx.run("pay", async || Ok(n)).await);
    assert_eq!(check(&store, &bodies, &both).await.misfits.len(), 7);
    assert_eq!(Engine::on(&store).check_running(10).await.unwrap(), CanaryReport::default(), "nothing is registered");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_program_checks_beside_the_nodes_that_work_and_joins_if_all_fits() {
    let store = Store::memory().await.unwrap();
    let old = named(&store, "old").register(&waits()).start().await.unwrap();
    let handle = old.start(&waits(), 1).id("a").await.unwrap();
    let new = workflow("waits").version(2).continues([1]).run(async |ctx: Ctx, base: u64| {
        let number = ctx.receive::<u64>("go").await?;
        let sum = ctx.run("step", async || Ok(base + number)).await?;
        ctx.run("more", async || Ok(sum * 2)).await
    });
    settled(&old, Status::Waiting, 1).await;
    let builder = named(&store, "new").register(&new);
    let report = builder.check_running(1000).await.unwrap();
    assert!(report.fits() && report.replayed == 1, "{report:?}");
    assert_eq!(Nodes::on(&store).list().await.unwrap().len(), 1, "the check takes no part");
    let engine = builder.start().await.unwrap();
    old.shutdown().await.unwrap();
    engine.signal("a", "go", &2_u64).await.unwrap();
    assert_eq!(in_time(engine.handle(&new, handle.id().clone()).result_through_parks()).await.unwrap(), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_is_only_read_and_a_missing_one_is_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("data");
    let report = Engine::open(&path).register(&order()).check_running(10).await.unwrap();
    assert_eq!((report, path.exists()), (CanaryReport::default(), false));
    let engine = Engine::open(&path).register(&order()).start().await.unwrap();
    engine.start(&order(), 7).id("a").await.unwrap();
    settled(&engine, Status::Asleep, 1).await;
    engine.shutdown().await.unwrap();
    let bodies = Bodies::default();
    let renamed = order!(|ctx, price, bodies| ctx.run("pay", async || Ok(price)).await)(&bodies);
    let builder = Engine::open(&path).register(&renamed);
    assert_eq!(builder.check_running(10).await.unwrap().misfits.len(), 1);
    let again = Engine::open(&path).register(&order()).start().await.unwrap();
    assert_eq!(again.describe("a").await.unwrap().status(), Status::Asleep);
}
