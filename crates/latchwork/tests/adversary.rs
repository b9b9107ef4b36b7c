//! Attempts to break the promises of workflows.

// A test ends where something unexpected happens. Real time passes here, since two of the stores do not follow another.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

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
    tokio::time::timeout(Duration::from_secs(5), future.into_future()).await.ok()
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

/// Executions whose results wait to be committed, and whose changes of one slot are too much for one commit.
#[tokio::test]
async fn what_waited_goes_with_the_second_try_of_a_change() {
    let runs = Arc::new(AtomicU32::new(0));
    let large = {
        let runs = runs.clone();
        workflow("large").run(move |ctx: Ctx, number: u32| {
            let runs = runs.clone();
            async move {
                let step = ctx.run("large", async || {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, Failure>("x".repeat(3 << 20))
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
