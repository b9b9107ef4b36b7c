//! Failures of verbs and wrong calls in bodies: a failure is recorded, so that a second life fails in the same way.

use std::sync::Arc;

use latchwork::flow::{Flow, Look, SequencerBuilder, handler, sequencer, when};
use latchwork::testing::Crashes;
use latchwork::workflow::{Ctx, Failure};
use parking_lot::Mutex;
use serde_json::json;

use super::{Log, Tally, add, failure, input, note, only, requested, tally};

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
        ("branch", |chain, log| chain.branch(vec![when(|_, ctx: &Look<Tally>| ctx.state().total > 5, &add("a", log))])),
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

/// Code of a workflow that a body calls with its own context.
async fn begins_anew(ctx: &Ctx) -> Result<i64, Failure> {
    ctx.continue_as_new(json!({"input": 7})).await
}

#[tokio::test]
async fn a_body_cannot_continue_as_new() {
    let log = Log::default();
    for is_within in [false, true] {
        let anew = handler("anew").run(move |ctx, _: i64| async move {
            match is_within {
                true => ctx.join((async |ctx: Ctx| begins_anew(&ctx).await, async |_: Ctx| ())).await.0,
                false => begins_anew(&ctx).await,
            }
        });
        let chain = sequencer("chain").state::<Tally>().step(&add("a", &log)).step(&anew).build().unwrap();
        let failure = failure(requested(&only(chain), 1).await.0);
        assert_eq!((failure.code(), failure.step()), ("latchwork.continue_as_new", Some("chain/anew")), "{failure}");
    }
}

#[tokio::test]
async fn run_once_returns_the_first_record_of_its_key() {
    let log = Log::default();
    let effects = log.clone();
    let twice = handler("twice").run(move |ctx, value: i64| {
        let log = effects.clone();
        async move {
            let effect = async |number: i64| {
                log.add(&format!("effect {number}"));
                Ok(number)
            };
            let first = ctx.run_once("charge", async || effect(value).await).await?;
            let second: i64 = ctx.run_once("charge", async || effect(value + 10).await).await?;
            let other: i64 = ctx.run_once("mail", async || effect(value + 20).await).await?;
            // Out of memory: the body runs again.
            ctx.sleep(std::time::Duration::from_secs(3600)).await?;
            let third: i64 = ctx.run_once("charge", async || effect(value + 30).await).await?;
            let (ctx, other_ctx) = (ctx.clone(), ctx.clone());
            let beside = ctx.join((
                async |_: Ctx| ctx.run_once("beside", async || effect(40).await).await,
                async |_: Ctx| other_ctx.run_once("beside", async || effect(50).await).await,
            ));
            let (left, right) = beside.await;
            Ok([first, second, third, other, left?, right?].iter().fold(0, |sum, it| sum * 100 + it))
        }
    });
    let chain = sequencer("chain").state::<Tally>().step(&twice).build().unwrap();
    let (result, _, _) = requested(&only(chain), 1).await;
    assert_eq!(result.unwrap(), 10_101_214_040);
    assert_eq!(log.all(), ["effect 1", "effect 21", "effect 40"]);
}

/// A failure of the effect is recorded, too.
#[tokio::test]
async fn run_once_returns_the_recorded_failure_of_its_key() {
    let log = Log::default();
    let effects = log.clone();
    let fails = handler("fails").run(move |ctx, value: i64| {
        let log = effects.clone();
        async move {
            for _ in 0..2 {
                let failed = ctx.run_once::<_, _, i64>("charge", async || {
                    log.add("effect");
                    Err(Failure::new("no funds").with_code("funds").not_retryable())
                });
                assert_eq!(failed.await.unwrap_err().code(), "funds");
            }
            Ok(value)
        }
    });
    let chain = sequencer("chain").state::<Tally>().step(&fails).build().unwrap();
    assert_eq!(requested(&only(chain), 1).await.0.unwrap(), 1);
    assert_eq!(log.count("effect"), 1);
}
