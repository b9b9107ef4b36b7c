//! Failures of verbs and wrong calls in bodies: a failure is recorded, so that a second life fails in the same way.

use std::sync::Arc;

use latchwork::flow::{Flow, Look, SequencerBuilder, handler, sequencer, when};
use latchwork::testing::Crashes;
use latchwork::workflow::Failure;
use parking_lot::Mutex;
use serde_json::json;

use super::{Log, Tally, add, input, note, only, tally};

type Build = fn(SequencerBuilder<Tally, i64, i64>, &Log) -> SequencerBuilder<Tally, i64, i64>;

/// A chain whose verb fails, and a rescue that changes the state so that the verb would not fail any more.
fn rescued(build: Build, log: &Log) -> Flow {
    let repairs = handler("repairs").run(async |ctx, _: Failure| {
        ctx.sequencer().patch(json!({"total": 100})).await?;
        Ok(0_i64)
    });
    let mends = sequencer("mends").step(&repairs).step(&add("mended", log)).build().unwrap();
    let inner = build(sequencer("inner").state::<Tally>(), log).step(&add("after", log)).rescue(|_, _| true, &mends);
    only(sequencer("chain").step(&inner.build().unwrap()).build().unwrap())
}

/// Each row: a verb that fails. A second life finds the state that the rescue has changed, and must not go on.
#[tokio::test]
async fn a_verb_that_has_failed_fails_again_after_a_crash_in_its_rescue() {
    let table: [(&str, Build); 5] = [
        ("do_while", |chain, log| chain.most_rounds(2).do_while(|_, ctx| ctx.state().total < 5, &add("a", log))),
        ("do_until", |chain, log| chain.most_rounds(2).do_until(|_, ctx| ctx.state().total > 5, &add("a", log))),
        ("loop_back", |chain, log| {
            chain.most_rounds(2).step(&add("a", log)).loop_back("a", |_, ctx| ctx.state().total < 50)
        }),
        ("wait_for_condition", |chain, log| {
            chain.work(&note("a", log)).wait_for_condition(|_, ctx| ctx.state().total > 5)
        }),
        ("branch", |chain, log| {
            chain.branch(vec![when(|_, ctx: &Look<Tally>| ctx.state().total > 5, &add("a", log))])
        }),
    ];
    for (verb, build) in table {
        let current: Arc<Mutex<(Log, Option<Flow>)>> = Arc::default();
        let made = current.clone();
        let make = move || {
            let log = Log::default();
            let flow = rescued(build, &log);
            let workflow = flow.workflow::<i64, i64>("run").unwrap();
            *made.lock() = (log, Some(flow));
            workflow
        };
        let count = Crashes::of(make, input(1)).run(async |outcome| {
            let (log, flow) = current.lock().clone();
            let crash = &outcome.crash;
            assert_eq!(*outcome.result.as_ref().unwrap(), 1, "{verb}, {crash}");
            assert_eq!(log.count("after"), 0, "{verb}, {crash}: both paths ran: {:?}", log.all());
            let request = outcome.engine().flow(&flow.unwrap()).request("execution");
            let state = tally(&request.checkpoints().await.unwrap(), "chain/inner");
            assert_eq!((state.total, state.by.get("mended")), (101, Some(&1)), "{verb}, {crash}");
        });
        assert!(count.await >= 6, "{verb}");
    }
}
