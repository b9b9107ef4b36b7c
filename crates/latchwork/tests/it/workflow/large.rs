//! Large values, and many at once: a commit holds only so much, and larger work takes several commits.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, ExecutionState, Failure, Workflow, workflow};

use crate::lock::letting_go::within_an_hour;

const SECOND: Duration = Duration::from_secs(1);

const LARGE: usize = 3 << 20;

fn large(letter: char) -> String {
    std::iter::repeat_n(letter, LARGE).collect()
}

/// Returns the result of a step.
fn echo() -> Workflow<String, String> {
    workflow("echo").run(async |ctx: Ctx, input: String| {
        ctx.sleep(3 * SECOND).await?;
        ctx.run("echo", async || Ok(large('x'))).await.map(|text| text + &input)
    })
}

#[tokio::test]
async fn a_child_may_give_a_large_result_to_a_large_parent() {
    let parent = workflow("parent").run(async |ctx: Ctx, _: String| {
        let result = ctx.child(&echo(), "y".into()).await?;
        Ok(result.len())
    });
    let test = TestEngine::build(1).register(&echo()).register(&parent).start().await.unwrap();
    let handle = test.engine().start(&parent, large('p')).await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), LARGE + 1);
}

#[tokio::test]
async fn large_results_of_branches_that_end_together_are_recorded() {
    let wide = workflow("wide").run(async |ctx: Ctx, ()| {
        let texts =
            ctx.try_map('a'..='h', 8, async |ctx: Ctx, letter| ctx.run("large", async || Ok(large(letter))).await);
        let texts = texts.await?;
        ctx.sleep(10 * SECOND).await?;
        Ok(texts.iter().filter_map(|text| text.chars().next()).collect::<String>())
    });
    let test = TestEngine::new(&wide, 1).await.unwrap();
    assert_eq!(test.complete(&wide, ()).await.unwrap(), "abcdefgh");
}

/// However the parent ends: its end and the cancellation of its children are too much for one commit.
#[tokio::test]
async fn the_end_of_a_parent_cancels_large_children_and_many() {
    let child = workflow("child").run(async |ctx: Ctx, _: String| ctx.receive::<()>("never").await);
    let parent = workflow("parent").run({
        let child = child.clone();
        move |ctx: Ctx, (count, is_large, sleeps): (u64, bool, bool)| {
            let child = child.clone();
            async move {
                for number in 0..count {
                    let input = if is_large { large('c') } else { "c".into() };
                    ctx.child(&child, input).id(format!("child {number}")).start().await?;
                }
                ctx.sleep(if sleeps { 1000 * SECOND } else { 10 * SECOND }).await?;
                Err::<(), _>(Failure::new("enough"))
            }
        }
    });
    for (count, is_large, sleeps) in [(5, true, false), (5, true, true), (3_000, false, false)] {
        let test = TestEngine::build(1).register(&child).register(&parent).start().await.unwrap();
        let engine = test.engine();
        let handle = engine.start(&parent, (count, is_large, sleeps)).id("parent").await.unwrap();
        if sleeps {
            test.run(test.env().sleep(20 * SECOND)).await;
            engine.terminate("parent", "enough").await.unwrap();
        }
        test.run(test.env().sleep(60 * SECOND)).await;
        // This is a lot of work, and takes no virtual time.
        for _ in 0..1_000_000 {
            tokio::task::yield_now().await;
            if matches!(engine.why("parent").await.unwrap().state, ExecutionState::Failed(_)) {
                break;
            }
        }
        let error = within_an_hour(&test, handle.result()).await.unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
        for number in 0..count {
            let child = engine.handle(&child, format!("child {number}"));
            let _ = within_an_hour(&test, child.result()).await.unwrap_err();
            let state = engine.why(child.id()).await.unwrap().state;
            assert!(matches!(state, ExecutionState::Cancelled(_)), "{number}: {state:?}");
        }
    }
}

/// All waiters are out of memory, and each has a large input that is written again when it is woken.
#[tokio::test]
async fn a_release_admits_all_waiters_however_large_their_inputs() {
    let reads = workflow("reads").run(async |ctx: Ctx, _: String| {
        let guard = ctx.rw_lock("l").read().await?;
        guard.release().await
    });
    for (readers, size) in [(300, 60_000), (6, LARGE)] {
        for ends_by in ["release", "end"] {
            let writes = workflow("writes").run(async |ctx: Ctx, releases: bool| {
                let guard = ctx.rw_lock("l").write().await?;
                ctx.receive::<()>("go").await?;
                if releases {
                    assert!(guard.release().await?);
                    return ctx.sleep(SECOND).await;
                }
                std::mem::forget(guard);
                Ok(())
            });
            let test = TestEngine::build(1).register(&reads).register(&writes).start().await.unwrap();
            let engine = test.engine();
            engine.start(&writes, ends_by == "release").id("writes").await.unwrap();
            test.run(test.env().sleep(5 * SECOND)).await;
            let mut handles = Vec::new();
            for number in 0..readers {
                let input: String = std::iter::repeat_n('r', size).collect();
                handles.push(engine.start(&reads, input).id(format!("reader {number}")).await.unwrap());
            }
            test.run(test.env().sleep(5 * SECOND)).await;
            assert_eq!(engine.residents(), 0);
            engine.signal("writes", "go", &()).await.unwrap();
            for handle in handles {
                assert!(within_an_hour(&test, handle.result()).await.unwrap(), "{readers} by {ends_by}");
            }
            assert!(engine.parked().await.unwrap().is_empty());
        }
    }
}

/// Each of the branches starts or receives something large, all at the same moment.
#[tokio::test]
async fn large_messages_and_children_of_branches_are_recorded() {
    let kid = workflow("kid").run(async |ctx: Ctx, input: String| {
        ctx.sleep(5 * SECOND).await?;
        Ok(if input.len() > 9 { "small".into() } else { large('k') })
    });
    for way in 0..3u64 {
        let wide = workflow("wide").run({
            let kid = kid.clone();
            move |ctx: Ctx, way: u64| {
                let kid = kid.clone();
                async move {
                    let kid = &kid;
                    let all = ctx.try_map(0..6, 6, async |ctx: Ctx, number: u64| match way {
                        0 => ctx.receive::<String>(&format!("s{number}")).await,
                        1 => ctx.child(kid, "a".into()).await,
                        _ => ctx.child(kid, large('i')).await,
                    });
                    let all = all.await?;
                    ctx.sleep(SECOND).await?;
                    Ok(all.len())
                }
            }
        });
        let test = TestEngine::build(1).register(&kid).register(&wide).start().await.unwrap();
        let handle = test.engine().start(&wide, way).id("wide").await.unwrap();
        test.run(test.env().sleep(2 * SECOND)).await;
        for number in 0..6 {
            if way == 0 {
                test.engine().signal("wide", &format!("s{number}"), &large('s')).await.unwrap();
            }
        }
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 6, "way {way}");
    }
}

/// An execution that holds thousands of locks ends, continues as new or is terminated, and all its locks become free;
/// also if the process ends just then.
#[tokio::test]
async fn an_execution_with_thousands_of_locks_releases_them() {
    const LOCKS: u64 = 2_500;
    let holds = workflow("holds").run(async |ctx: Ctx, (way, run): (u64, u64)| {
        if run == 0 {
            for number in 0..LOCKS {
                std::mem::forget(ctx.mutex(format!("m{number}")).acquire().await?);
            }
        }
        match (way, run) {
            (0, _) => Ok(run),
            (1, 0) => ctx.continue_as_new((way, 1)).await,
            (1, _) => {
                let again = ctx.mutex("m7").acquire().await?;
                again.release().await.map(|_| run)
            }
            _ => ctx.receive("never").await,
        }
    });
    for way in 0..4 {
        let store = Store::memory().await.unwrap();
        let engine = Engine::on(&store).register(&holds).start().await.unwrap();
        let handle = engine.start(&holds, (way, 0)).id("holds").await.unwrap();
        if way < 2 {
            assert_eq!(handle.result().await.unwrap(), way);
        } else {
            while engine.locks().inspect(format!("m{}", LOCKS - 1)).await.is_err() {
                tokio::task::yield_now().await;
            }
            engine.terminate("holds", "enough").await.unwrap();
        }
        let engine = match way {
            3 => {
                engine.stop();
                Engine::on(&store).register(&holds).start().await.unwrap()
            }
            _ => engine,
        };
        for number in 0..LOCKS {
            drop(engine.mutex(format!("m{number}")).acquire().await.unwrap());
        }
    }
}
