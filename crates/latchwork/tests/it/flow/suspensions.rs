//! Questions and answers: one answer wins, a bad one leaves the question open, and no question is asked twice.

use std::time::Duration;

use latchwork::flow::{
    AnswerKind, Block, BlockError, Flow, FlowError, RequestHandle, SequencerBuilder, Suspension, flow, handler,
    sequencer,
};
use latchwork::store::Store;
use latchwork::workflow::{Engine, Failure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Log, Tally, add, fails, failure, only, test_engine};

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Price {
    cents: u32,
}

fn asking(log: &Log) -> Flow {
    let asks = |name: &str| {
        let log = log.clone();
        let own = name.to_string();
        handler(name).run(move |ctx, value: i64| {
            let (log, own) = (log.clone(), own.clone());
            async move {
                log.add(&own);
                let allow = [AnswerKind::Submit, AnswerKind::Reject, AnswerKind::Skip];
                let question = ctx.suspend(&own).message("What does it cost?").data(json!({"item": value}));
                let answer = question.schema_of::<Price>().allow(allow).await?;
                Ok(match answer.kind {
                    AnswerKind::Submit => value + i64::from(answer.read::<Price>()?.cents),
                    _ => value,
                })
            }
        })
    };
    let chain = sequencer("chain").state::<Tally>().step(&add("a", log)).step(&asks("first")).step(&add("b", log));
    only(chain.step(&asks("second")).build().unwrap())
}

#[tokio::test]
async fn a_request_waits_for_answers_over_restarts_and_asks_each_question_once() {
    let (store, log) = (Store::memory().await.unwrap(), Log::default());
    let flow = asking(&log);
    let mut output = None;
    for life in 0..3 {
        let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
        let flows = engine.flow(&flow);
        let request = match life {
            0 => flows.run("run", 1).id("r").session("s").await.unwrap(),
            _ => flows.request("r"),
        };
        if life > 0 {
            let question = loop {
                if let [question] = &flows.suspensions("run").await.unwrap().items[..] {
                    break question.clone();
                }
                tokio::task::yield_now().await;
            };
            let reason = ["first", "second"][life - 1];
            assert_eq!((&*question.reason, &*question.path), (reason, &*format!("chain/{reason}")));
            assert_eq!((&*question.message, question.is_open), ("What does it cost?", true));
            let answer = |kind, value: serde_json::Value| flows.answer(&question.id, kind, value, "ada");
            assert!(matches!(answer(AnswerKind::Approve, json!(null)).await, Err(FlowError::NotAllowed { .. })));
            let bad = answer(AnswerKind::Submit, json!({"cents": "many"})).await;
            assert!(matches!(&bad, Err(FlowError::BadAnswer { reason, .. }) if reason.contains("cents")), "{bad:?}");
            assert_eq!(request.suspensions().await.unwrap().len(), 1, "a bad answer leaves the question open");
            let race = futures_util::future::join_all((0..8).map(|_| answer(AnswerKind::Submit, json!({"cents": 50}))));
            let won = race.await.into_iter().filter(Result::is_ok).count();
            assert_eq!(won, 1, "one caller wins");
            let late = answer(AnswerKind::Skip, json!(null)).await;
            assert!(matches!(&late, Err(FlowError::Answered { decision }) if decision.by == "ada"), "{late:?}");
        }
        if life == 2 {
            output = Some(request.result::<i64>().await.unwrap());
        } else {
            let next = ["first", "second"][life];
            while log.count(next) == 0
                || !flows.suspensions("run").await.unwrap().items.iter().any(|it| it.reason == next)
            {
                tokio::task::yield_now().await;
            }
        }
        engine.stop();
    }
    assert_eq!(output, Some(103));
    assert_eq!((log.count("a"), log.count("b")), (1, 1), "{:?}", log.all());
    assert!(matches!(
        Engine::on(&store).flow(&flow).start().await.unwrap().flow(&flow).suspension("x").await,
        Err(FlowError::UnknownQuestion { .. })
    ));
}

#[tokio::test]
async fn a_suspended_request_leaves_memory() {
    let log = Log::default();
    let flow = asking(&log);
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        while engine.residents() > 0 {
            engine.store().env().sleep(Duration::from_secs(1)).await;
        }
        for _ in 0..2 {
            let question = loop {
                if let Some(question) = request.suspensions().await.unwrap().pop() {
                    break question;
                }
                engine.store().env().sleep(Duration::from_secs(1)).await;
            };
            engine.flow(&flow).answer(&question.id, AnswerKind::Skip, (), "ada").await.unwrap();
        }
        assert_eq!(request.result::<i64>().await.unwrap(), 3);
    })
    .await;
}

#[tokio::test]
async fn an_answer_after_the_time_limit_is_refused_and_the_wait_fails() {
    let asks = handler("asks").run(async |ctx, value: i64| {
        ctx.suspend("now").timeout(Duration::from_secs(60)).await?;
        Ok(value)
    });
    let block = sequencer("chain").step(&asks).build().unwrap();
    let flow = flow("test").action("run", block).build().unwrap();
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        let question = loop {
            if let Some(question) = request.suspensions().await.unwrap().pop() {
                break question;
            }
            tokio::task::yield_now().await;
        };
        let late = failure(request.result::<i64>().await).get::<BlockError>();
        assert_eq!(late, Some(BlockError::Unanswered { path: "chain/asks".into(), reason: "now".into() }));
        let refused = engine.flow(&flow).answer(&question.id, AnswerKind::Approve, (), "ada").await;
        assert!(matches!(refused, Err(FlowError::Closed { .. })), "{refused:?}");
    })
    .await;
}

/// The loser of a race has an open question: it is closed in the commit that records the winner.
#[tokio::test]
async fn a_question_of_a_block_that_was_given_up_is_closed() {
    let log = Log::default();
    let asks = handler("asks").run(async |ctx, value: i64| {
        ctx.suspend("never").await?;
        Ok(value)
    });
    let sleeps = handler("sleeps").run(async |ctx, value: i64| {
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(value + 1)
    });
    let block = sequencer("chain").state::<Tally>().race(&[&asks, &sleeps]).step(&super::sleeps("end", &log));
    let flow = only(block.build().unwrap());
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        while request.suspensions().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        while log.count("end") == 0 {
            engine.store().env().sleep(Duration::from_secs(60)).await;
        }
        assert!(request.suspensions().await.unwrap().is_empty());
        assert_eq!(request.result::<i64>().await.unwrap(), 3);
    })
    .await;
}

/// The schema belongs to the question: every caller is held to it, also one that knows nothing of flows.
#[tokio::test]
async fn a_decision_without_the_flow_is_held_to_the_schema_too() {
    let flow = asking(&Log::default());
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        let question = open(&request).await;
        let review = engine.review(&question.id);
        let refused = review.decide("submit", "ada", "no value").await.unwrap_err();
        assert!(refused.to_string().contains("null is not of type"), "{refused}");
        assert_eq!(request.suspensions().await.unwrap(), [question], "it is still open");
        review.decide("skip", "ada", "an answer without a value").await.unwrap();
        while request.suspensions().await.unwrap().iter().all(|it| it.reason != "second") {
            engine.store().env().sleep(Duration::from_secs(1)).await;
        }
        let question = open(&request).await;
        engine.flow(&flow).answer(&question.id, AnswerKind::Submit, json!({"cents": 7}), "ada").await.unwrap();
        assert_eq!(request.result::<i64>().await.unwrap(), 10);
    })
    .await;
}

/// The open question of a request.
async fn open(request: &RequestHandle) -> Suspension {
    loop {
        if let Some(question) = request.suspensions().await.unwrap().pop() {
            return question;
        }
        tokio::task::yield_now().await;
    }
}

/// Asks a question of its own name.
fn asks(name: &str) -> Block<i64, i64> {
    let own = name.to_string();
    handler(name).run(move |ctx, value: i64| {
        let own = own.clone();
        async move { Ok(value + i64::from(ctx.suspend(&own).await?.is_approved())) }
    })
}

type Build = fn(SequencerBuilder<Tally, i64, i64>) -> SequencerBuilder<Tally, i64, i64>;

/// Each row: where questions are asked, the paths of those that are open at the same time, and the output.
#[tokio::test]
async fn questions_are_asked_anywhere_in_a_flow() {
    let table: [(&str, Build, &[&str], i64); 6] = [
        (
            "parallel",
            |chain| chain.parallel((&asks("a"), &asks("b"))).map(|(a, b), _| a * 10 + b),
            &["chain/a", "chain/b"],
            22,
        ),
        (
            "for_each",
            |chain| each(chain.map(|v, _| vec![v, v]).for_each(2, &asks("a"))),
            &["chain/a/a", "chain/a/a@1"],
            4,
        ),
        ("work", |chain| chain.work(&asks("a")).step(&asks("b")).wait_for_work(), &["chain/a", "chain/b"], 2),
        ("work at the end", |chain| chain.work(&asks("a")), &["chain/a"], 1),
        (
            "nested",
            |chain| {
                let inner = sequencer("inner").state::<Tally>().step(&asks("a")).build().unwrap();
                chain.step(&sequencer("middle").step(&inner).build().unwrap())
            },
            &["chain/middle/inner/a"],
            2,
        ),
        (
            "rescue",
            |chain| {
                let mends = handler("mends")
                    .run(async |ctx, _: Failure| Ok(if ctx.suspend("mends").await?.is_approved() { 7_i64 } else { 0 }));
                chain.step(&fails("breaks", &Log::default())).rescue(|_, _| true, &mends)
            },
            &["chain/mends"],
            7,
        ),
    ];
    for (place, build, paths, output) in table {
        let flow = only(build(sequencer("chain").state::<Tally>()).build().unwrap());
        let test = test_engine(&flow).await;
        let engine = test.engine().clone();
        test.run(async {
            let (flows, env) = (engine.flow(&flow), engine.store().env());
            let request = flows.run("run", 1).id("r").await.unwrap();
            while request.suspensions().await.unwrap().len() < paths.len() || engine.residents() > 0 {
                env.sleep(Duration::from_secs(1)).await;
            }
            let open = flows.suspensions("run").await.unwrap().items;
            let mut found: Vec<&str> = open.iter().map(|question| &*question.path).collect();
            found.sort_unstable();
            assert_eq!(found, paths, "{place}");
            for question in &open {
                flows.answer(&question.id, AnswerKind::Approve, (), "ada").await.unwrap();
            }
            assert_eq!(request.result::<i64>().await.unwrap(), output, "{place}");
        })
        .await;
    }
}

fn each(chain: SequencerBuilder<Tally, i64, Vec<i64>>) -> SequencerBuilder<Tally, i64, i64> {
    chain.map(|list, _| list.iter().sum())
}

/// A suspension is not a failure, and the end of its time is one.
#[tokio::test]
async fn a_rescue_sees_no_question_but_the_end_of_its_time() {
    let log = Log::default();
    let late = handler("late").run(async |ctx, value: i64| {
        ctx.suspend("late").timeout(Duration::from_secs(3600)).await?;
        Ok(value)
    });
    let mended = log.clone();
    let mends = handler("mends").run(move |_, failure: Failure| {
        mended.add(failure.step().unwrap_or_default());
        std::future::ready(Ok(7_i64))
    });
    let chain = sequencer("chain").state::<Tally>().step(&asks("first")).step(&late).rescue(|_, _| true, &mends);
    let flow = only(chain.build().unwrap());
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        let question = open(&request).await;
        engine.store().env().sleep(Duration::from_secs(7200)).await;
        assert_eq!(log.all(), [""; 0], "it waits");
        engine.flow(&flow).answer(&question.id, AnswerKind::Approve, (), "ada").await.unwrap();
        assert_eq!(request.result::<i64>().await.unwrap(), 7);
    })
    .await;
    assert_eq!(log.all(), ["chain/late"]);
}
