//! Finalizers: started by the commit that ends an execution, whatever the end, and by nothing else.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{
    Ctx, Engine, ExecutionState, Failure, Filter, Finished, FinishedAs, Retry, Workflow, WorkflowError, workflow,
};
use serde_json::json;

const SECOND: Duration = Duration::from_secs(1);

/// Ends as its input says. Its finalizer adds what it was told to a slot, after a step that fails at first.
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
                // What is parked has not ended.
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
        let finalizers = engine.list(Filter::new().workflow("ends.finally")).await.unwrap().executions;
        assert_eq!(finalizers.len(), 6);
        assert!(finalizers.iter().all(|it| matches!(it.state, ExecutionState::Completed(_))), "{finalizers:?}");
    }
}

/// The process ends right before and right after each commit, that of the end among them: the finalizer is started
/// once, and comes to its end. Whoever waits for the result does not wait for that.
#[tokio::test]
async fn a_crash_at_any_commit_neither_loses_nor_repeats_a_finalizer() {
    for how in ["completes", "fails", "continues"] {
        let crashes = Crashes::of(&ends(), how.into()).outside(move |engine| async move {
            while let Ok(page) = engine.list(Filter::new().workflow("ends.finally")).await {
                assert!(page.executions.len() <= 1, "{how}");
                engine.store().env().sleep(SECOND).await;
            }
        });
        let crashes = crashes.run(|outcome| match (how, &outcome.result) {
            ("fails", Err(WorkflowError::Failed { .. })) | ("completes" | "continues", Ok(7)) => {}
            (_, other) => panic!("{how}: {other:?}"),
        });
        assert!(crashes.await >= 2, "{how}");
    }
    // To the end of the finalizer: an execution that waits for what its own finalizer leaves.
    let waits = {
        let ends = ends();
        workflow("waits").run(move |ctx: Ctx, ()| {
            let ends = ends.clone();
            async move {
                let result = ctx.child(&ends, "completes".into()).await?;
                for _ in 0..100 {
                    let told = ctx.state().global::<Vec<Finished<String>>>("told").get().await?.unwrap_or_default();
                    if !told.is_empty() {
                        // Nothing more comes.
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
    let crashes = Crashes::of(&waits, ()).register(&ends()).run(|outcome| {
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
    assert!(test.env().now().0 - before.0 < 3_000_000_000, "nobody has waited for the finalizer");
    test.run(test.env().sleep(4000 * SECOND)).await;
    let page = engine.list(Filter::new().workflow("order.finally")).await.unwrap();
    assert!(matches!(&page.executions[0].state, ExecutionState::Failed(_)), "{page:?}");
}

/// An id that is used again and again, at one and the same time: each end has a finalizer of its own.
#[tokio::test]
async fn every_restart_of_an_id_has_a_finalizer_of_its_own() {
    let ends = ends();
    let test = TestEngine::new(&ends, 1).await.unwrap();
    for _ in 0..5 {
        let handle = test.engine().start(&ends, "completes".into()).id("same").or_restart().await.unwrap();
        // Time does not go on meanwhile.
        assert_eq!(handle.result().await.unwrap(), 7);
    }
    let finalizers = test.engine().list(Filter::new().workflow("ends.finally")).await.unwrap().executions;
    assert_eq!(finalizers.len(), 5);
    test.run(test.env().sleep(20 * SECOND)).await;
    assert_eq!(told(test.engine()).await.len(), 5);
}

/// Input and output take all the room that there is, the parent is told the output as well: the end is stored all the
/// same.
#[tokio::test]
async fn an_end_that_is_as_large_as_can_be_is_stored_with_its_finalizer() {
    let large = |bytes: usize| {
        let echo = workflow("echo").run(move |_: Ctx, _: String| async move { Ok("o".repeat(bytes)) });
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
            let page = engine.list(Filter::new().workflow("echo.finally")).await.unwrap();
            match &page.executions[0].state {
                ExecutionState::Completed(_) => break engine.states().global().slot("told").get().await.unwrap(),
                ExecutionState::Running | ExecutionState::Waiting => tokio::task::yield_now().await,
                other => panic!("{input} and {output}: {other:?}"),
            }
        };
        let (told, _): (usize, bool) = told.unwrap();
        assert_eq!(told, input);
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
