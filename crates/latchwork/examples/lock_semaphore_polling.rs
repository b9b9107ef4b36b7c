//! A vendor that accepts three calls at once, and more executions than that. It is the semaphore of
//! docs/locks/slots.md: `cargo run -p latchwork --example lock_semaphore_polling`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use latchwork::lock::{DurableSemaphore, LockRecord, initial_lock_record};
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A service outside of the process.
#[derive(Debug, Default)]
pub struct Vendor {
    calls: AtomicUsize,
    most: AtomicUsize,
}

impl Vendor {
    async fn call(&self) -> std::result::Result<(), Failure> {
        self.most.fetch_max(1 + self.calls.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
        // A call takes a while.
        for _ in 0..500 {
            tokio::task::yield_now().await;
        }
        self.calls.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// The largest number of calls at once.
    pub fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }
}

/// Calls the vendor while it holds one of three permits.
pub fn call_vendor(vendor: &Arc<Vendor>) -> Result<Workflow<(), ()>> {
    let semaphore = DurableSemaphore::new(3, Duration::from_secs(30))?;
    let vendor = vendor.clone();
    Ok(workflow("call-vendor").run(move |ctx: Ctx, ()| {
        let vendor = vendor.clone();
        async move {
            let slot = ctx.state().workflow::<LockRecord>("vendor-api:lock").initial(initial_lock_record());
            let called = async {
                for _ in 0..1000 {
                    if semaphore.try_acquire(&slot, ctx.id(), ctx.now().await, None).await?.acquired {
                        return ctx.run("call", async || vendor.call().await).await;
                    }
                    ctx.sleep(Duration::from_millis(20)).await?;
                }
                Err(Failure::new("the vendor was busy all the time"))
            };
            let called = called.await;
            semaphore.release(&slot, ctx.id(), ctx.now().await).await?;
            called
        }
    }))
}

/// Starts this many executions at once.
pub async fn run(engine: &Engine, call_vendor: &Workflow<(), ()>, executions: usize) -> Result {
    let mut handles = Vec::new();
    for _ in 0..executions {
        handles.push(engine.start(call_vendor, ()).await?);
    }
    for handle in handles {
        handle.result().await?;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result {
    let vendor = Arc::<Vendor>::default();
    let call_vendor = call_vendor(&vendor)?;
    let engine = Engine::on(&Store::memory().await?).register(&call_vendor).start().await?;
    run(&engine, &call_vendor, 12).await?;
    println!("12 calls, never more than {} at once", vendor.most());
    Ok(())
}
