//! Very many grants of one semaphore. `LATCHWORK_GRANTS` sets how many; `cargo xtask sim --grants` sets it, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use latchwork::store::Store;
use latchwork::workflow::Engine;
use parking_lot::Mutex;

use crate::workflow::simulation::number;

const PERMITS: u32 = 4;
const WORKERS: u32 = 256;

/// Requests that cannot hold the semaphore at the same time hold it in the order of their tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_million_grants_in_order() {
    let wanted = number("LATCHWORK_GRANTS").unwrap_or(20_000);
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let (begun, count) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(0)));
    // The last token of a request for each number of permits.
    let tokens = Arc::new(Mutex::new([0; PERMITS as usize + 1]));
    let inside = Arc::new(AtomicU32::new(0));
    let mut workers = tokio::task::JoinSet::new();
    for worker in 0..WORKERS {
        let (semaphore, tokens) = (engine.semaphore("s", PERMITS), tokens.clone());
        let (begun, inside, count) = (begun.clone(), inside.clone(), count.clone());
        let permits = 1 + worker % PERMITS;
        workers.spawn(async move {
            let mut last = 0;
            while begun.fetch_add(1, Ordering::SeqCst) < wanted {
                let guard = semaphore.acquire_many(permits).await.unwrap();
                let held = inside.fetch_add(permits, Ordering::SeqCst) + permits;
                assert!(held <= PERMITS, "{held} permits are held");
                let token = guard.token().number();
                assert!(token > last);
                last = token;
                {
                    let mut tokens = tokens.lock();
                    let earlier = &tokens[(PERMITS - permits) as usize + 1..];
                    assert!(earlier.iter().all(|earlier| *earlier < token), "{token} came after {earlier:?}");
                    tokens[permits as usize] = token.max(tokens[permits as usize]);
                    *count.lock() += 1;
                }
                inside.fetch_sub(permits, Ordering::SeqCst);
                assert!(guard.release().await.unwrap());
            }
        });
    }
    workers.join_all().await;
    assert_eq!(*count.lock(), wanted);
    let state = engine.locks().inspect("s").await.unwrap();
    assert_eq!((state.used, state.waiting), (0, 0));
    println!("{wanted} grants");
}
