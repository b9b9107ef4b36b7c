//! Commits that other threads make while the code of an execution is polled: they never contain one half of a decision
//! without the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, First2, Workflow, workflow};
use parking_lot::{Condvar, Mutex};

/// Blocks the first thread that passes.
#[derive(Default)]
struct Gate {
    is_reached: AtomicBool,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        if !self.is_reached.swap(true, Ordering::SeqCst) {
            let mut is_open = self.is_open.lock();
            while !*is_open && !self.opened.wait_for(&mut is_open, Duration::from_secs(20)).timed_out() {}
        }
    }

    fn open(&self) {
        *self.is_open.lock() = true;
        self.opened.notify_all();
    }

    /// Polls a flag: the blocked thread might keep a task that it wakes for itself.
    async fn reached(&self, store: &Store) {
        while !self.is_reached.load(Ordering::SeqCst) {
            store.env().sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Receives a signal or sleeps, whichever is first, and counts meanwhile. The receipt and the end of the race are one
/// poll, and the thread is blocked between them.
fn receives(gate: &Arc<Gate>) -> Workflow<(), (bool, Option<u32>)> {
    let gate = gate.clone();
    workflow("receives").run(move |ctx: Ctx, ()| {
        let gate = gate.clone();
        async move {
            let gate = &gate;
            let receives = async |ctx: Ctx| {
                let first = ctx.select((
                    async |ctx: Ctx| ctx.sleep(Duration::from_millis(900)).await,
                    async |ctx: Ctx| {
                        let received = ctx.receive::<u32>("go").await;
                        gate.pass();
                        received
                    },
                ));
                match first.await {
                    First2::Second(received) => Ok((true, Some(received?))),
                    First2::First(slept) => {
                        slept?;
                        let received = ctx.receive::<u32>("go").timeout(Duration::from_millis(100)).await;
                        Ok((false, received?))
                    }
                }
            };
            let counts = async |ctx: Ctx| ctx.state().global::<u32>("count").increment(1u32).await.map(drop);
            ctx.join((receives, counts)).await.0
        }
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_receipt_is_not_committed_before_the_race_that_it_decides() {
    let (store, gate) = (Store::memory().await.unwrap(), Arc::new(Gate::default()));
    let receives = receives(&gate);
    let engine = Engine::on(&store).register(&receives).start().await.unwrap();
    // The execution's change waits behind this one, until the code is in the middle of a poll.
    let (slot, held, waits) = (engine.states().global().slot::<u32>("count"), gate.clone(), store.clone());
    let begun = Arc::new(AtomicBool::new(false));
    let begins = begun.clone();
    let holds = tokio::spawn(async move {
        let change = move |_| {
            let (begins, held, waits) = (begins.clone(), held.clone(), waits.clone());
            async move {
                begins.store(true, Ordering::SeqCst);
                held.reached(&waits).await;
                Ok::<_, Failure>(Some(json!(10)))
            }
        };
        slot.container().atomic_state(change).await.unwrap();
    });
    while !begun.load(Ordering::SeqCst) {
        store.env().sleep(Duration::from_millis(1)).await;
    }
    let handle = engine.start(&receives, ()).id("r").await.unwrap();
    handle.signal("go", &5).await.unwrap();
    holds.await.unwrap();
    let slot = engine.states().global().slot::<u32>("count");
    while slot.get().await.unwrap() != Some(11) {
        store.env().sleep(Duration::from_millis(1)).await;
    }
    // The process ends here. When the next process starts, the sleep is over.
    store.env().sleep(Duration::from_secs(1)).await;
    let next = Engine::on(&store).register(&receives).start().await.unwrap();
    let result = next.handle(&receives, "r").result().await;
    gate.open();
    assert_eq!(result.unwrap(), (false, Some(5)), "the sleep was first, and the signal is still there");
}
