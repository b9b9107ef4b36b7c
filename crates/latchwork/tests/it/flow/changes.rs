//! Flows that change while a request waits: a step is inserted, removed, renamed, moved, or gets another type.

use std::time::Duration;

use latchwork::flow::{Block, Flow, SequencerBuilder, handler, otherwise, sequencer, when};
use latchwork::store::Store;
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Log, Tally, add, only};

/// Waits for a signal.
fn waits(log: &Log) -> Block<i64, i64> {
    let log = log.clone();
    handler("waits").run(move |ctx, value: i64| {
        let log = log.clone();
        async move {
            log.add("waits");
            ctx.receive::<()>("go").await?;
            Ok(value + 100)
        }
    })
}

pub(super) type Chain = SequencerBuilder<Tally, i64, i64>;
pub(super) type Build = fn(Chain, &Log) -> Chain;

/// Puts the chain that changes into something else.
pub(super) type Wrap = fn(Build, &Log) -> Flow;

pub(super) fn chain(build: Build, log: &Log) -> Block<i64, i64> {
    build(sequencer("chain").state::<Tally>(), log).build().unwrap()
}

const WRAPS: [(&str, Wrap); 4] = [
    ("alone", |build, log| only(chain(build, log))),
    ("nested", |build, log| {
        only(sequencer("outer").state::<Tally>().step(&add("outside", log)).step(&chain(build, log)).build().unwrap())
    }),
    ("in a loop", |build, log| {
        let twice = |_: &i64, ctx: &latchwork::flow::Look<Tally>| ctx.state().total < 2;
        let counts = add("counts", log);
        let body = sequencer("body").step(&counts).step(&chain(build, log)).build().unwrap();
        only(sequencer("outer").state::<Tally>().do_while(twice, &body).build().unwrap())
    }),
    ("in a branch", |build, log| {
        let never = add("never", log);
        let cases = vec![when(|v: &i64, _: &_| *v < 0, &never), otherwise(&chain(build, log))];
        only(sequencer("outer").state::<Tally>().branch(cases).build().unwrap())
    }),
];

async fn until(engine: &Engine, what: impl AsyncFn() -> bool) {
    for _ in 0..10_000 {
        if what().await {
            return;
        }
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    panic!("it takes too long");
}

/// Runs a request with one flow until it waits, and continues it with another one. Returns its output, or why it was
/// parked, and the bodies that the second life has run.
pub(super) async fn changed(wrap: Wrap, before: Build, after: Build) -> (Result<i64, String>, Vec<String>) {
    let store = Store::memory().await.unwrap();
    let (first, second) = (Log::default(), Log::default());
    let flow = wrap(before, &first);
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    engine.flow(&flow).run("run", 1).id("r").await.unwrap();
    until(&engine, async || first.count("waits") == 1).await;
    until(&engine, async || !engine.history("r").await.unwrap().operations.is_empty()).await;
    engine.stop();
    drop(engine);

    let flow = wrap(after, &second);
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).request("r");
    let ended = async {
        loop {
            let parked = engine.parked().await.unwrap();
            if let Some((_, reason)) = parked.into_iter().next() {
                return Err(reason);
            }
            let history = engine.history("r").await.unwrap();
            if let latchwork::workflow::ExecutionState::Completed(value) = history.state {
                return Ok(value.as_i64().unwrap());
            }
            if second.count("waits") > 0 || !format!("{:?}", history.state).contains("Completed") {
                let _ = engine.signal("r", "go", &()).await;
            }
            engine.store().env().sleep(Duration::from_millis(2)).await;
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(20), ended).await.expect("it ends");
    let _ = request;
    engine.stop();
    // A body that waits may leave memory, and then runs again up to its wait.
    let mut ran = second.all();
    ran.dedup_by(|a, b| a == b && *a == "waits");
    (ended, ran)
}

/// What is changed, the flow before and after, the output, and the bodies of the second life in the first round.
pub(super) type Row = (&'static str, Build, Build, i64, &'static [&'static str]);

pub(super) fn rows() -> Vec<Row> {
    vec![
        (
            "nothing",
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            102,
            &["waits"],
        ),
        (
            "a step is inserted before the step that waits",
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            |chain, log| chain.step(&add("a", log)).step(&add("new", log)).step(&waits(log)),
            103,
            &["new", "waits"],
        ),
        (
            "a step is inserted at the beginning",
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            |chain, log| chain.step(&add("new", log)).step(&add("a", log)).step(&waits(log)),
            102,
            &["new", "waits"],
        ),
        (
            "a step is inserted at the end",
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            |chain, log| chain.step(&add("a", log)).step(&waits(log)).step(&add("new", log)),
            103,
            &["waits", "new"],
        ),
        (
            "a step is removed",
            |chain, log| chain.step(&add("a", log)).step(&add("b", log)).step(&waits(log)),
            |chain, log| chain.step(&add("b", log)).step(&waits(log)),
            103,
            &["waits"],
        ),
        (
            "a step is renamed",
            |chain, log| chain.step(&add("a", log)).step(&waits(log)),
            |chain, log| chain.step(&add("other", log)).step(&waits(log)),
            102,
            &["other", "waits"],
        ),
        (
            "steps are swapped",
            |chain, log| chain.step(&add("a", log)).map(|v, _| v * 10).step(&add("b", log)).step(&waits(log)),
            |chain, log| chain.step(&add("b", log)).step(&add("a", log)).step(&waits(log)),
            102,
            &["waits"],
        ),
        (
            "a function keeps what it has chosen",
            |chain, log| chain.step(&add("a", log)).map(|v, _| v * 10).step(&waits(log)),
            |chain, log| chain.step(&add("a", log)).map(|v, _| v * 1000).step(&waits(log)),
            120,
            &["waits"],
        ),
    ]
}

#[tokio::test]
async fn a_flow_may_change_while_a_request_waits() {
    for (what, before, after, output, bodies) in rows() {
        let (result, ran) = changed(WRAPS[0].1, before, after).await;
        assert_eq!(
            (result, &ran[..]),
            (Ok(output), &bodies.iter().map(ToString::to_string).collect::<Vec<_>>()[..]),
            "{what}"
        );
        for (around, wrap) in &WRAPS[1..] {
            let (result, ran) = changed(*wrap, before, after).await;
            assert!(result.is_ok(), "{what}, {around}: {result:?}");
            let ran: Vec<&str> = ran.iter().map(String::as_str).filter(|body| *body != "counts").collect();
            assert_eq!(&ran[..bodies.len()], bodies, "{what}, {around}");
        }
    }
}

#[tokio::test]
async fn an_output_that_does_not_fit_any_more_and_a_block_of_another_kind_park_the_request() {
    let texts: Build = |chain, log| {
        let log = log.clone();
        let text = handler("a").run(move |_, value: i64| {
            log.add("a");
            std::future::ready(Ok(format!("{value}")))
        });
        let back = handler("b").run(async |_, text: String| Ok(text.len() as i64));
        chain.step(&text).step(&back)
    };
    let numbers: Build = |chain, log| chain.step(&add("a", log)).step(&waits(log));
    let (result, ran) = changed(WRAPS[0].1, numbers, texts).await;
    assert_eq!(
        result,
        Err("the recorded output of block chain/a/ does not fit its type: invalid type: integer `2`, \
                            expected a string at line 1 column 1"
            .to_string())
    );
    assert!(ran.is_empty());

    let nested: Build = |chain, log| {
        let inner = sequencer("a").step(&add("x", log)).build().unwrap();
        chain.step(&inner).step(&waits(log))
    };
    let (result, ran) = changed(WRAPS[0].1, numbers, nested).await;
    let reason = "block chain/a/ is sequencer \"a\" in the flow, and handler \"a\" in its trace";
    assert_eq!((result, ran.len()), (Err(reason.to_string()), 0));
}

/// The state of a later program: the total is a text now.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Texts {
    total: String,
}

/// A block without needs, so that the state around it can have any type.
fn plain(name: &str, log: &Log) -> Block<i64, i64> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).run(move |_, value: i64| {
        log.add(&own);
        std::future::ready(Ok(value + 1))
    })
}

#[tokio::test]
async fn a_state_that_does_not_fit_its_type_any_more_parks_the_request() {
    // The state of a sequencer that runs, and of one that has ended.
    let before: [Build; 2] = [
        |chain, log| {
            let inner = sequencer("inner").state::<Tally>().step(&add("a", log)).step(&waits(log));
            chain.step(&inner.build().unwrap())
        },
        |chain, log| {
            let inner = sequencer("inner").state::<Tally>().step(&add("a", log));
            chain.step(&inner.build().unwrap()).step(&waits(log))
        },
    ];
    let after: [Build; 2] = [
        |chain, log| {
            let inner = sequencer("inner").state::<Texts>().step(&plain("a", log)).step(&waits(log));
            chain.step(&inner.build().unwrap())
        },
        |chain, log| {
            let inner = sequencer("inner").state::<Texts>().step(&plain("a", log));
            chain.step(&inner.build().unwrap()).step(&waits(log))
        },
    ];
    for (before, after) in before.into_iter().zip(after) {
        for ((around, wrap), path) in WRAPS.iter().zip(["", "outer/", "outer/body/body/", "outer/"]) {
            let (result, ran) = changed(*wrap, before, after).await;
            let reason = format!(
                "the recorded state of block {path}chain/inner/ does not fit its type: invalid type: integer `1`, \
                 expected a string"
            );
            assert_eq!((result, ran.len()), (Err(reason), 0), "{around}");
        }
    }
}

/// Waits in the second round of a loop.
fn waits_later(log: &Log) -> Block<i64, i64> {
    let log = log.clone();
    handler("waits").run(move |ctx, value: i64| {
        let log = log.clone();
        async move {
            if value > 1 {
                log.add("waits");
                ctx.receive::<()>("go").await?;
            }
            Ok(value + 1)
        }
    })
}

#[tokio::test]
async fn a_value_that_went_back_and_does_not_fit_any_more_parks_the_request() {
    let numbers: Build = |chain, log| chain.step(&waits_later(log).named("a")).loop_back("a", |v, _| *v < 3);
    let texts: Build = |chain, log| {
        let log = log.clone();
        let text = handler("a").run(move |_, value: String| {
            log.add("a");
            std::future::ready(Ok(value))
        });
        let back = chain.map(|v, _| v.to_string()).step(&text).loop_back("a", |v, _| v.len() < 3);
        back.map(|text, _| text.len() as i64)
    };
    let (result, ran) = changed(WRAPS[0].1, numbers, texts).await;
    let reason = "the recorded output of block chain/loop_back>a/ does not fit its type: invalid type: integer `2`, \
                  expected a string at line 1 column 1";
    assert_eq!((result, ran.len()), (Err(reason.to_string()), 0));
}
