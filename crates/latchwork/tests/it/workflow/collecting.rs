//! The collector: batches by size and by time, over runs that continue as new. And the example program itself.

// Only one test uses the program's `main`, and no other module uses its public items.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/collector.rs"]
mod program;

use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::WaitsFor;

#[test]
fn the_example_ends() {
    program::main().unwrap();
}

/// Items come in two bursts; between them the collector is out of memory. No item is lost where the collector continues
/// as new.
#[tokio::test]
async fn every_item_is_in_one_batch_and_the_collector_never_ends() {
    let collector = program::collector();
    let test = TestEngine::new(&collector, 1).await.unwrap();
    let engine = test.engine();
    let start = program::Collector { size: 4, wait_ms: 5000, batches: 2, done: 0 };
    for (burst, batches) in [(10, 3), (7, 5), (1, 6)] {
        for number in 0..burst {
            let started = engine.start(&collector, start.clone()).id("c").signal("item", &format!("{number}"));
            started.await.unwrap();
        }
        let handle = engine.handle(&collector, "c");
        let done = test.run(handle.wait_until("done", |done: &u64| *done >= batches)).await.unwrap();
        assert_eq!(done, batches, "as many as it takes, and no more");
        test.run(test.env().sleep(Duration::from_secs(60))).await;
        assert_eq!(engine.residents(), 0);
        let why = engine.why("c").await.unwrap();
        assert_eq!(why.waits[0].what, WaitsFor::Signal("item".into()));
    }
    assert_eq!(test.bodies().len(), 6, "one for each batch");
    assert_eq!(engine.describe("c").await.unwrap().run, 3, "two batches a run");
    engine.terminate("c", "the test is over").await.unwrap();
}
