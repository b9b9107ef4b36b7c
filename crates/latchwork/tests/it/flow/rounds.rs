//! Loops and blocks side by side over interruptions: a body that sleeps leaves memory, and a second life reads what the
//! first has recorded. The output must be that of a life without an interruption.

use std::time::Duration;

use latchwork::flow::{Block, handler, sequencer};
use serde_json::json;

use super::{Log, Tally, TotalPart, add, only, requested, tally};

/// Adds `by`, and counts itself; sleeps first if `sleeps`.
fn plus(name: &str, by: i64, sleeps: bool) -> Block<i64, i64> {
    let own = name.to_string();
    handler(name).needs::<TotalPart>().run(move |ctx, value: i64| {
        let own = own.clone();
        async move {
            if sleeps {
                ctx.sleep(Duration::from_secs(3600)).await?;
            }
            ctx.sequencer().inc([(&*format!("by.{own}"), 1)]).await?;
            Ok(value + by)
        }
    })
}

/// A loop within a loop: after an interruption in the second round of the outer one, the inner one must not continue
/// with the value of its first round.
#[tokio::test]
async fn a_loop_back_within_another_continues_with_the_newest_value() {
    let mut outputs = Vec::new();
    for sleeps in [false, true] {
        let chain = sequencer("chain").state::<Tally>().step(&plus("a", 100, false)).step(&plus("b", 1, sleeps));
        let chain = chain.loop_back("b", |_, ctx| ctx.state().by["b"] % 3 != 0);
        let chain = chain.loop_back("a", |_, ctx| ctx.state().by["a"] < 3);
        let (result, checkpoints, _) = requested(&only(chain.build().unwrap()), 0).await;
        let state = tally(&checkpoints, "chain");
        outputs.push((result.unwrap(), state.by["a"], state.by["b"]));
    }
    assert_eq!(outputs, [(309, 3, 9), (309, 3, 9)]);
}

#[tokio::test]
async fn two_loops_back_to_one_block_are_refused() {
    let log = Log::default();
    let chain = sequencer::<i64>("chain").step(&add("a", &log)).loop_back("a", |_, _| false);
    let error = chain.loop_back("a", |_, _| false).build().unwrap_err();
    assert_eq!(
        error.to_string(),
        "sequencer \"chain\" has two blocks of the name \"loop_back>a\"; give one another name with `named`"
    );
}

/// Two blocks set the same field. The block whose change was called last ends first: its value stays, also in the
/// checkpoint.
#[tokio::test]
async fn the_order_of_calls_counts_and_not_the_order_of_ends() {
    let sets = |name: &str, value: i64, sleeps: bool| {
        handler(name).needs::<TotalPart>().run(move |ctx, input: i64| async move {
            ctx.sequencer().patch(json!({"by": {"last": value}})).await?;
            if sleeps {
                // Not an operation of the context: the request stays in memory until the other block has ended.
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
            }
            Ok(input)
        })
    };
    let reads = handler("reads").needs::<Tally>().run(async |ctx, _: (i64, i64)| {
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(ctx.sequencer().state().by["last"])
    });
    let chain = sequencer("chain").state::<Tally>().parallel((&sets("slow", 1, true), &sets("quick", 2, false)));
    let (result, checkpoints, _) = requested(&only(chain.step(&reads).build().unwrap()), 0).await;
    assert_eq!((result.unwrap(), tally(&checkpoints, "chain").by["last"]), (2, 2));
}

/// Each round of a loop back has operations and work: they leave nothing behind, and no work is lost.
#[tokio::test]
async fn a_loop_back_leaves_nothing_behind_and_waits_for_its_work() {
    let mut sizes = Vec::new();
    for rounds in [3_i64, 30] {
        let works = handler("works").needs::<TotalPart>().tap(async |ctx, _: i64| {
            ctx.sleep(Duration::from_secs(3600)).await?;
            ctx.sequencer().inc([("total", 1)]).await
        });
        let acts = handler("acts").needs::<TotalPart>().run(async |ctx, value: i64| {
            ctx.run("one", async || Ok(1_i64)).await?;
            ctx.run("two", async || Ok(value + 1)).await
        });
        let chain = sequencer("chain").state::<Tally>().work(&works).step(&acts);
        let chain = chain.loop_back("works", move |value, _| *value < rounds);
        let (result, checkpoints, engine) = requested(&only(chain.build().unwrap()), 0).await;
        assert_eq!((result.unwrap(), tally(&checkpoints, "chain").total), (rounds, rounds));
        sizes.push(engine.history("r").await.unwrap().operations.len());
    }
    assert_eq!(sizes[0], sizes[1], "the entries in the journal");
}

/// More blocks begin in one poll than a commit can hold.
#[tokio::test]
async fn thousands_of_items_begin_side_by_side() {
    let log = Log::default();
    let chain = sequencer("chain").state::<Tally>().map(|_, _| (0..6000).collect::<Vec<i64>>());
    let chain = chain.for_each(6000, &add("each", &log)).map(|list: Vec<i64>, _| list.len() as i64);
    let (result, checkpoints, _) = requested(&only(chain.build().unwrap()), 0).await;
    assert_eq!((result.unwrap(), tally(&checkpoints, "chain").total), (6000, 6000));
}
