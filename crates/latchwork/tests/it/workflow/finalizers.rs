//! Finalizers: the commit that ends an execution starts them, whatever the end, and nothing else does.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{
    Batch, Ctx, Engine, ExecutionFilter, ExecutionState, Failure, Finished, FinishedAs, Queue, Retry, Supersede,
    Workflow, WorkflowError, workflow,
};
use serde_json::json;

const SECOND: Duration = Duration::from_secs(1);

/// Ends as its input says. After a step that fails at first, its finalizer adds what it was given to a slot.
fn ends() -> Workflow<String, u64> {
    let ends = workflow("ends").timeout(1000 * SECOND).run(async |ctx: Ctx, how: String| match &*how {
        "fails" => Err(Failure::new("it failed").with_code("broken")),
        "panics" => panic!("it panicked"),
        "completes" => Ok(7),
        "continues" => ctx.continue_as_new("completes").await,
        _ => ctx.sleep(100_000 * SECOND).await.map(|()| 0),
    });
    ends.finally(async |ctx: Ctx, finished: Finished<String>| {
        let flaky = ctx.run_with("flaky", async |attempt: latchwork::workflow::Attempt| match attempt.number {
            1 => Err(Failure::new("not yet")),
            _ => Ok(()),
        });
        flaky.retry(Retry::exponential().max_attempts(3)).await?;
        ctx.state().global::<Vec<Finished<String>>>("told").append(finished).await?;
        Ok(())
    })
}

async fn told(engine: &Engine) -> Vec<(String, String, FinishedAs)> {
    let told = engine.states().global().slot::<Vec<Finished<String>>>("told").get().await.unwrap().unwrap_or_default();
    told.into_iter().map(|it| (it.id.to_string(), it.input, it.outcome)).collect()
}

#[tokio::test]
async fn a_finalizer_runs_after_every_kind_of_end() {
    let ends = ends();
    for away in [false, true] {
        let test = TestEngine::new(&ends, 1).await.unwrap();
        let engine = test.engine();
        let mut expected = Vec::new();
        for (how, outcome) in [
            ("completes", FinishedAs::Completed(Some(json!(7)))),
            ("fails", FinishedAs::Failed(Failure::new("it failed").with_code("broken"))),
            ("cancelled", FinishedAs::Cancelled("enough".into())),
            ("terminated", FinishedAs::Terminated("enough".into())),
            ("timed out", FinishedAs::TimedOut),
            ("panics", FinishedAs::Terminated("it was parked".into())),
        ] {
            let handle = engine.start(&ends, how.into()).id(how).await.unwrap();
            if away {
                test.run(test.env().sleep(5 * SECOND)).await;
            }
            match how {
                "cancelled" => handle.cancel("enough").await.unwrap(),
                "terminated" => handle.terminate("enough").await.unwrap(),
                // A parked execution has not ended.
                "panics" => {
                    test.run(test.env().sleep(5 * SECOND)).await;
                    assert_eq!(told(engine).await, expected, "{how}");
                    handle.terminate("it was parked").await.unwrap();
                }
                _ => {}
            }
            let _ = test.run(handle.result()).await;
            test.run(test.env().sleep(10 * SECOND)).await;
            expected.push((how.to_string(), how.to_string(), outcome));
            assert_eq!(told(engine).await, expected, "{how}");
        }
        let finalizers = engine.list(ExecutionFilter::new().workflow("ends.finally")).await.unwrap().items;
        assert_eq!(finalizers.len(), 6);
        assert!(finalizers.iter().all(|it| matches!(it.state, ExecutionState::Completed(_))), "{finalizers:?}");
    }
}

/// The process ends right before and right after each commit, including the commit of the end: the finalizer is started
/// once, and ends. A caller that waits for the result does not wait for the finalizer.
#[tokio::test]
async fn a_crash_at_any_commit_neither_loses_nor_repeats_a_finalizer() {
    for how in ["completes", "fails", "continues"] {
        let crashes = Crashes::of(ends, how.into()).outside(move |engine| async move {
            while let Ok(page) = engine.list(ExecutionFilter::new().workflow("ends.finally")).await {
                assert!(page.items.len() <= 1, "{how}");
                engine.store().env().sleep(SECOND).await;
            }
        });
        let crashes = crashes.run(async |outcome| match (how, &outcome.result) {
            ("fails", Err(WorkflowError::Failed { .. })) | ("completes" | "continues", Ok(7)) => {}
            (_, other) => panic!("{how}: {other:?}"),
        });
        assert!(crashes.await >= 2, "{how}");
    }
    // Up to the end of the finalizer: an execution waits for the value that its child's finalizer stores.
    let waits = {
        let ends = ends();
        workflow("waits").run(move |ctx: Ctx, ()| {
            let ends = ends.clone();
            async move {
                let result = ctx.child(&ends, "completes".into()).await?;
                for _ in 0..100 {
                    let told = ctx.state().global::<Vec<Finished<String>>>("told").get().await?.unwrap_or_default();
                    if !told.is_empty() {
                        // Time for a second finalizer, which must not come.
                        ctx.sleep(100 * SECOND).await?;
                        let told = ctx.state().global::<Vec<Finished<String>>>("told").get().await?;
                        return Ok((result, told.unwrap_or_default().len()));
                    }
                    ctx.sleep(SECOND).await?;
                }
                Err(Failure::new("the finalizer did not run"))
            }
        })
    };
    let crashes = Crashes::of(|| waits.clone(), ()).register(ends).run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &(7, 1), "{:?}", outcome.crash);
    });
    let crashes = crashes.await;
    assert!(crashes >= 12, "{crashes}");
}

#[tokio::test]
async fn a_finalizer_neither_delays_the_result_nor_changes_it_by_failing() {
    let order = workflow("order").run(async |_: Ctx, n: u64| Ok(n)).finally(async |ctx: Ctx, _: Finished<u64>| {
        ctx.sleep(3600 * SECOND).await?;
        Err(Failure::new("the finalizer failed"))
    });
    let test = TestEngine::new(&order, 1).await.unwrap();
    let engine = test.engine();
    let before = test.env().now();
    assert_eq!(test.complete(&order, 5).await.unwrap(), 5);
    assert!(test.env().now().0 - before.0 < 3_000_000_000, "the result waited for the finalizer");
    test.run(test.env().sleep(4000 * SECOND)).await;
    let page = engine.list(ExecutionFilter::new().workflow("order.finally")).await.unwrap();
    assert!(matches!(&page.items[0].state, ExecutionState::Failed(_)), "{page:?}");
}

/// One id is used again and again, at the same virtual time: each end has a finalizer of its own.
#[tokio::test]
async fn every_restart_of_an_id_has_a_finalizer_of_its_own() {
    let ends = ends();
    let test = TestEngine::new(&ends, 1).await.unwrap();
    for _ in 0..5 {
        let handle = test.engine().start(&ends, "completes".into()).id("same").or_restart().await.unwrap();
        // No time passes meanwhile.
        assert_eq!(handle.result().await.unwrap(), 7);
    }
    let finalizers = test.engine().list(ExecutionFilter::new().workflow("ends.finally")).await.unwrap().items;
    assert_eq!(finalizers.len(), 5);
    test.run(test.env().sleep(20 * SECOND)).await;
    assert_eq!(told(test.engine()).await.len(), 5);
}

/// Input and output take all the room of a record, and the parent also receives the output: the end is still stored.
#[tokio::test]
async fn an_end_that_is_as_large_as_can_be_is_stored_with_its_finalizer() {
    let large = |bytes: usize| {
        // Together with the result of the step, the end is more than one commit holds.
        let echo = workflow("echo")
            .run(move |ctx: Ctx, _: String| async move { ctx.run("give", async || Ok("o".repeat(bytes))).await });
        echo.finally(async |ctx: Ctx, finished: Finished<String>| {
            let whole = matches!(&finished.outcome, FinishedAs::Completed(Some(_)));
            ctx.state().global::<(usize, bool)>("told").set((finished.input.len(), whole)).await?;
            Ok(())
        })
    };
    let room = (4 << 20) - (256 << 10);
    for (input, output) in [(room - 10, 1), (room / 2, room / 2 - 10), (10, room - 20)] {
        let echo = large(output);
        let parent = {
            let echo = echo.clone();
            workflow("parent").run(move |ctx: Ctx, input: usize| {
                let echo = echo.clone();
                async move { Ok(ctx.child(&echo, "i".repeat(input)).await?.len()) }
            })
        };
        let store = Store::memory().await.unwrap();
        let engine = Engine::on(&store).register(&parent).register(&echo).start().await.unwrap();
        let handle = engine.start(&parent, input).await.unwrap();
        assert_eq!(handle.result().await.unwrap(), output, "{input} and {output}");
        let told = loop {
            let page = engine.list(ExecutionFilter::new().workflow("echo.finally")).await.unwrap();
            match &page.items[0].state {
                ExecutionState::Completed(_) => break engine.states().global().slot("told").get().await.unwrap(),
                ExecutionState::Running | ExecutionState::Waiting => tokio::task::yield_now().await,
                other => panic!("{input} and {output}: {other:?}"),
            }
        };
        let told: (usize, bool) = told.unwrap();
        assert_eq!(told, (input, true), "the finalizer gets the whole input and output");
    }
}

#[tokio::test]
async fn a_workflow_and_its_finalizer_are_registered_together() {
    let ends = ends();
    let other = workflow("ends.finally").run(async |_: Ctx, ()| Ok(()));
    let store = Store::memory().await.unwrap();
    let twice = Engine::on(&store).register(&ends).register(&other).start().await;
    assert!(matches!(twice, Err(WorkflowError::RegisteredTwice { .. })));
}

/// Impossible finalizers are refused at the registration.
#[tokio::test]
async fn an_impossible_finalizer_is_refused_at_the_registration() {
    let plain = || workflow("w").run(async |_: Ctx, n: u64| Ok(n));
    let batch = || workflow("w").batch(Batch::new(2, SECOND)).run(async |_: Ctx, all: Vec<u64>| Ok(all));
    let (one, many) = (async |_: Ctx, _: Finished<u64>| Ok(()), async |_: Ctx, _: Finished<Vec<u64>>| Ok(()));
    for (wrong, told) in [
        (plain().finally(one).finally(one), "it has two finalizers"),
        (batch().finally_batch(many).finally_batch(many), "it has two finalizers"),
        (batch().finally(one), "it has batches, so its finalizer is set with `finally_batch`"),
        (plain().finally_batch(many), "it has no batches, so its finalizer is set with `finally`"),
    ] {
        let store = Store::memory().await.unwrap();
        match Engine::on(&store).register(&wrong).start().await {
            Err(error @ WorkflowError::Policy { .. }) => {
                assert_eq!(error.to_string(), format!("workflow \"w\" cannot be registered: {told}"));
            }
            other => panic!("{told}: {other:?}"),
        }
    }
}

/// What the finalizer of a batch was given: the id, the inputs, and how the batch ended.
type ToldOfBatch = Vec<(String, Vec<u64>, FinishedAs)>;

/// The finalizer gets the inputs of the function, also of a batch that never began.
#[tokio::test]
async fn a_finalizer_of_a_batch_gets_all_inputs() {
    let batch = workflow("batch").batch(Batch::new(3, 60 * SECOND)).run(async |_: Ctx, all: Vec<u64>| Ok(all));
    let batch = batch.finally_batch(async |ctx: Ctx, finished: Finished<Vec<u64>>| {
        let told = (finished.id.to_string(), finished.input, finished.outcome);
        ctx.state().global::<ToldOfBatch>("told").append(told).await?;
        Ok(())
    });
    let test = TestEngine::new(&batch, 1).await.unwrap();
    let engine = test.engine();
    for n in 1..=3 {
        engine.start(&batch, n).id("full").await.unwrap();
    }
    test.run(engine.handle(&batch, "full").of_item(2).result()).await.unwrap();
    for how in ["cancelled", "terminated"] {
        for n in 4..=5 {
            engine.start(&batch, n).id(how).await.unwrap();
        }
        match how {
            "cancelled" => engine.cancel(how, "enough").await.unwrap(),
            _ => engine.terminate(how, "enough").await.unwrap(),
        }
    }
    test.run(test.env().sleep(SECOND)).await;
    let mut told = engine.states().global().slot::<ToldOfBatch>("told").get().await.unwrap().unwrap();
    told.sort_by(|a, b| a.0.cmp(&b.0));
    let expected = [
        ("cancelled".to_string(), vec![4, 5], FinishedAs::Cancelled("enough".into())),
        ("full".to_string(), vec![1, 2, 3], FinishedAs::Completed(Some(json!([1, 2, 3])))),
        ("terminated".to_string(), vec![4, 5], FinishedAs::Terminated("enough".into())),
    ];
    assert_eq!(told, expected);
}

/// An execution that never began has ended as well: cancelled in the queue, by its time limit there, or with its
/// parent.
#[tokio::test]
async fn a_finalizer_runs_after_the_end_of_a_queued_execution() {
    let limited = workflow("ends").concurrency(1).when_full(Queue::new().timeout(1000 * SECOND));
    let limited = limited.run(async |ctx: Ctx, _: String| ctx.receive::<()>("end").await);
    let limited = limited.finally(async |ctx: Ctx, finished: Finished<String>| {
        ctx.state().global::<Vec<Finished<String>>>("told").append(finished).await?;
        Ok(())
    });
    let child = limited.clone();
    let parent = workflow("parent").run(move |ctx: Ctx, ()| {
        let limited = child.clone();
        async move { ctx.child(&limited, "child".into()).id("child").start().await.map(drop) }
    });
    let test = TestEngine::build(1).register(&limited).register(&parent).start().await.unwrap();
    let engine = test.engine();
    for id in ["runs", "cancelled", "terminated", "timed out"] {
        engine.start(&limited, id.into()).id(id).await.unwrap();
    }
    engine.cancel("cancelled", "enough").await.unwrap();
    engine.terminate("terminated", "enough").await.unwrap();
    test.complete(&parent, ()).await.unwrap();
    test.run(test.env().sleep(1010 * SECOND)).await;
    let mut told = told(engine).await;
    told.sort_by(|a, b| a.0.cmp(&b.0));
    let outcomes: Vec<_> = told.iter().map(|(id, input, outcome)| (&**id, &**input, outcome.clone())).collect();
    let parent = r#"has ended"#;
    assert!(matches!(&outcomes[1].2, FinishedAs::Cancelled(reason) if reason.contains(parent)), "{outcomes:?}");
    assert_eq!((outcomes[1].0, outcomes.len()), ("child", 4));
    let others = [
        ("cancelled", "cancelled", FinishedAs::Cancelled("enough".into())),
        ("terminated", "terminated", FinishedAs::Terminated("enough".into())),
        ("timed out", "timed out", FinishedAs::TimedOut),
    ];
    assert_eq!([&outcomes[0], &outcomes[2], &outcomes[3]], others.each_ref());
}

/// An execution that was superseded has ended as well.
#[tokio::test]
async fn a_finalizer_runs_after_the_end_of_a_superseded_execution() {
    for how in [Supersede::Cancel, Supersede::Terminate] {
        for away in [false, true] {
            let ends = ends();
            let test = TestEngine::new(&ends, 1).await.unwrap();
            let engine = test.engine();
            engine.start(&ends, "first".into()).id("e").await.unwrap();
            if away {
                test.run(test.env().sleep(5 * SECOND)).await;
            }
            engine.start(&ends, "completes".into()).id("e").supersede(how).await.unwrap();
            test.run(test.env().sleep(60 * SECOND)).await;
            let mut told = told(engine).await;
            told.sort_by(|a, b| b.1.cmp(&a.1));
            let inputs: Vec<&str> = told.iter().map(|(_, input, _)| &**input).collect();
            assert_eq!(inputs, ["first", "completes"], "{how:?} {away}");
            let reason = "another start has taken its place".to_string();
            let expected = match how {
                Supersede::Cancel => FinishedAs::Cancelled(reason),
                _ => FinishedAs::Terminated(reason),
            };
            assert_eq!(told[0].2, expected, "{how:?} {away}");
        }
    }
}

/// The commit that continues as new also releases a lock; it is still not an end.
#[tokio::test]
async fn no_finalizer_runs_when_an_execution_continues_as_new() {
    let continues = workflow("ends").run(async |ctx: Ctx, n: u64| {
        let _guard = ctx.mutex("lock").acquire().await?;
        if n < 3 { ctx.continue_as_new(n + 1).await } else { Ok(n) }
    });
    let continues = continues.finally(async |_: Ctx, _: Finished<u64>| Ok(()));
    let test = TestEngine::new(&continues, 1).await.unwrap();
    assert_eq!(test.complete(&continues, 0).await.unwrap(), 3);
    let page = test.engine().list(ExecutionFilter::new().workflow("ends.finally")).await.unwrap();
    assert_eq!(page.items.len(), 1);
}

/// The end of a parent with more children than one commit can cancel.
#[tokio::test]
async fn an_end_that_takes_several_commits_has_one_finalizer() {
    let child = workflow("child").run(async |ctx: Ctx, _: String| ctx.receive::<()>("never").await);
    let parent = {
        let child = child.clone();
        workflow("ends").run(move |ctx: Ctx, count: u64| {
            let child = child.clone();
            async move {
                for number in 0..count {
                    ctx.child(&child, "c".repeat(3 << 20)).id(format!("child {number}")).start().await?;
                }
                ctx.sleep(10 * SECOND).await?;
                Err::<(), _>(Failure::new("enough"))
            }
        })
    };
    let parent = parent.finally(async |_: Ctx, _: Finished<u64>| Ok(()));
    let test = TestEngine::build(1).register(&child).register(&parent).start().await.unwrap();
    let handle = test.engine().start(&parent, 5).await.unwrap();
    let failed = test.run(handle.result()).await;
    assert!(matches!(failed, Err(WorkflowError::Failed { .. })), "{failed:?}");
    let page = test.engine().list(ExecutionFilter::new().workflow("ends.finally")).await.unwrap();
    assert_eq!(page.items.len(), 1);
}
