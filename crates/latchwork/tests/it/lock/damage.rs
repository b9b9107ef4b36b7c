//! One damaged record of a lock, or of an execution that uses locks, costs one lock, one session or one execution and
//! no more.

use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::workflow::{Ctx, Engine, WorkflowError, workflow};

use crate::lock::turnstile::{Harm, Stage, has_ended};

const SECOND: Duration = Duration::from_secs(1);

/// A process that held five locks, each by its own session, has ended. A record of the third is damaged: the lock's
/// record, the request's, the record that lists the session's requests, or the session's own.
#[tokio::test]
async fn sessions_that_are_dead_lose_their_locks_though_a_record_is_damaged() {
    for space in ["lock.heads", "lock.requests", "lock.owned", "lock.sessions"] {
        for harm in Harm::ALL {
            let stage = Stage::new(|engine| engine).await;
            let mut third = Vec::new();
            for number in 0..5 {
                let session = stage.engine.locks().session().lease(10 * SECOND).await.unwrap();
                if number == 2 {
                    third = session.id().as_bytes().to_vec();
                }
                let guard = stage.engine.mutex(format!("m{number}")).by(&session).acquire().await.unwrap();
                std::mem::forget((guard, session));
            }
            stage.engine.stop();
            let of = if matches!(space, "lock.owned" | "lock.sessions") { &third[..] } else { b"m2" };
            stage.damage(space, of, harm).await;
            let engine = Engine::on(stage.engine.store()).start().await.unwrap();
            for _ in 0..10 {
                stage.pass(5 * SECOND).await;
            }
            for number in 0..5 {
                let what = format!("{harm:?} of {space}: m{number}");
                match engine.mutex(format!("m{number}")).try_acquire().await {
                    Ok(guard) if number == 2 => assert!(guard.is_some() == (space == "lock.sessions"), "{what}"),
                    Ok(guard) => assert!(guard.is_some(), "{what}"),
                    Err(error) => assert!(number == 2 && space != "lock.sessions", "{what}: {error}"),
                }
            }
            // Sessions that expire later are found, too.
            let session = engine.locks().session().lease(SECOND).renewed_by_hand().await.unwrap();
            std::mem::forget(engine.mutex("later").by(&session).acquire().await.unwrap());
            std::mem::forget(session);
            for _ in 0..10 {
                stage.pass(SECOND).await;
            }
            assert!(engine.mutex("later").try_acquire().await.unwrap().is_some(), "{harm:?} of {space}");
        }
    }
}

/// Executions have waited for each other in a cycle since before a restart. A record of another execution that waits
/// for a lock is damaged: its own record, its request's, the lock's, or the record that lists its requests.
#[tokio::test]
async fn a_cycle_is_found_though_a_record_beside_it_is_damaged() {
    for space in ["workflow.executions", "lock.requests", "lock.heads", "lock.owned"] {
        for harm in Harm::ALL {
            let cyclic = workflow("cycle").run(async |ctx: Ctx, number: u32| {
                let _mine = ctx.mutex(format!("m{number}")).acquire().await?;
                ctx.sleep(10 * SECOND).await?;
                ctx.mutex(format!("m{}", (number + 1) % 3)).acquire().await.map(drop)
            });
            let holds = workflow("holds").run(async |ctx: Ctx, ()| {
                let _held = ctx.mutex("beside").acquire().await?;
                ctx.sleep(1000 * SECOND).await
            });
            let stage = Stage::new(|engine| engine.register(&cyclic).register(&holds)).await;
            stage.engine.start(&holds, ()).id("aside").await.unwrap();
            for number in 0..3 {
                stage.engine.start(&cyclic, number).id(format!("c{number}")).await.unwrap();
            }
            stage.pass(5 * SECOND).await;
            stage.engine.stop();
            let of = if matches!(space, "workflow.executions" | "lock.owned") { &b"aside"[..] } else { b"beside" };
            stage.damage(space, of, harm).await;
            let engine = Engine::on(stage.engine.store()).register(&cyclic).register(&holds).start().await.unwrap();
            for _ in 0..10 {
                stage.pass(5 * SECOND).await;
            }
            let mut told = 0;
            for number in 0..3 {
                let id = format!("c{number}");
                let what = format!("{harm:?} of {space}: {id}");
                assert!(has_ended(&engine.describe(&*id).await.unwrap().state), "{what}");
                match engine.handle(&cyclic, id).result().await {
                    Ok(()) => {}
                    Err(WorkflowError::Failed { failure, .. }) => {
                        assert!(matches!(failure.get(), Some(LockRefused::Deadlock { .. })), "{what}: {failure}");
                        told += 1;
                    }
                    other => panic!("{what}: {other:?}"),
                }
            }
            assert_eq!(told, 1, "{harm:?} of {space}");
        }
    }
}

/// The first waiter in the queue of a lock is an execution whose record is damaged. The grant passes over it.
#[tokio::test]
async fn a_damaged_execution_in_the_queue_is_passed_over() {
    for harm in Harm::ALL {
        let wants = workflow("wants").run(async |ctx: Ctx, ()| ctx.mutex("m").acquire().await.map(drop));
        let stage = Stage::new(|engine| engine.register(&wants)).await;
        let held = stage.engine.mutex("m").acquire().await.unwrap();
        for number in 0..3 {
            stage.engine.start(&wants, ()).id(format!("e{number}")).await.unwrap();
            stage.pass(2 * SECOND).await;
        }
        assert_eq!(stage.state("m").await.waiting, 3);
        stage.damage("workflow.executions", b"e0", harm).await;
        let released = tokio::spawn(async move { held.release().await });
        assert!(stage.done(released).await.unwrap(), "{harm:?}");
        stage.pass(SECOND).await;
        for id in ["e1", "e2"] {
            assert!(has_ended(&stage.engine.describe(id).await.unwrap().state), "{harm:?}: {id}");
        }
    }
}

/// An execution holds two locks, and the head of one is damaged. The execution ends, and its other lock is free.
#[tokio::test]
async fn an_execution_ends_though_a_lock_that_it_holds_is_damaged() {
    for harm in Harm::ALL {
        let holds = workflow("holds").run(async |ctx: Ctx, ()| {
            let held = (ctx.mutex("good").acquire().await?, ctx.mutex("bad").acquire().await?);
            ctx.sleep(100 * SECOND).await?;
            std::mem::forget(held);
            Ok(())
        });
        let stage = Stage::new(|engine| engine.register(&holds)).await;
        stage.engine.start(&holds, ()).id("h").await.unwrap();
        stage.pass(5 * SECOND).await;
        stage.damage("lock.heads", b"bad", harm).await;
        for _ in 0..11 {
            stage.pass(10 * SECOND).await;
        }
        let state = stage.engine.describe("h").await.unwrap().state;
        assert!(has_ended(&state), "{harm:?}: {state:?}");
        assert!(stage.engine.mutex("good").try_acquire().await.unwrap().is_some(), "{harm:?}");
    }
}

/// The record of a session is damaged while its process renews it. The session is lost, and its lock goes to other
/// requests.
#[tokio::test]
async fn a_session_whose_record_is_damaged_while_it_lives_is_lost() {
    for harm in Harm::ALL {
        let stage = Stage::new(|engine| engine).await;
        let session = stage.engine.locks().session().lease(10 * SECOND).await.unwrap();
        let held = stage.engine.mutex("m").by(&session).acquire().await.unwrap();
        stage.damage("lock.sessions", session.id().as_bytes(), harm).await;
        for _ in 0..40 {
            stage.pass(SECOND).await;
        }
        assert!(session.is_lost() && held.is_lost(), "{harm:?}");
        assert!(stage.engine.mutex("m").try_acquire().await.unwrap().is_some(), "{harm:?}");
    }
}
