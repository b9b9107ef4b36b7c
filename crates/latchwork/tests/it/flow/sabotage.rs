//! Flows that are broken on purpose. What the other tests check must notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use latchwork::flow::{Flow, FlowSabotage, flow, sequencer};
use latchwork::testing::Crashes;
use parking_lot::Mutex;

use super::changes::{Wrap, chain, changed, rows};
use super::{Log, Tally, add, input};

#[tokio::test]
async fn a_checkpoint_in_another_commit_than_its_trace_is_noticed() {
    for sabotage in [None, Some(FlowSabotage::CheckpointLater)] {
        let current: Arc<Mutex<Option<Flow>>> = Arc::default();
        let made = current.clone();
        let make = move || {
            let log = Log::default();
            let chain = sequencer("chain").state::<Tally>().step(&add("a", &log)).step(&add("b", &log));
            let flow = flow("test").action("run", chain.step(&add("c", &log)).build().unwrap());
            let flow = sabotage.into_iter().fold(flow, |flow, sabotage| flow.sabotage(sabotage)).build().unwrap();
            let workflow = flow.workflow::<i64, i64>("run").unwrap();
            *made.lock() = Some(flow);
            workflow
        };
        let wrong = AtomicUsize::new(0);
        let count = Crashes::of(make, input(1)).run(async |outcome| {
            let flow = current.lock().clone().unwrap();
            let checkpoints = outcome.engine().flow(&flow).request("execution").checkpoints().await.unwrap();
            let total = checkpoints.get("chain").map(|state| state["total"].clone());
            wrong.fetch_add(usize::from(total != Some(3.into())), Ordering::SeqCst);
        });
        let (count, wrong) = (count.await, wrong.into_inner());
        assert!(wrong < count as usize, "without a crash, nothing is wrong");
        assert_eq!(wrong > 0, sabotage.is_some(), "{wrong} crashes of {count} have lost a change");
    }
}

#[tokio::test]
async fn a_trace_that_is_found_by_position_is_noticed() {
    let broken: Wrap = |build, log| {
        let flow = flow("test").action("run", chain(build, log));
        flow.sabotage(FlowSabotage::TraceByPosition).build().unwrap()
    };
    let mut noticed = Vec::new();
    for (what, before, after, output, bodies) in rows() {
        if !["nothing", "a step is inserted at the beginning", "a step is removed", "steps are swapped"].contains(&what)
        {
            continue;
        }
        let (result, ran) = changed(broken, before, after).await;
        if result != Ok(output) || ran != bodies {
            noticed.push(what);
        }
    }
    assert_eq!(noticed, ["a step is inserted at the beginning", "a step is removed", "steps are swapped"]);
}
