//! States: what blocks see of them, what a checkpoint holds, and what comes back after an interruption.

use std::time::Duration;

use latchwork::flow::{Transient, flow, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Log, Tally, TotalPart, add, failure, only, requested, sleeps, tally, test_engine};

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
struct Research {
    plan: Vec<String>,
    current_step: u32,
    findings: std::collections::BTreeMap<String, String>,
    last_claimed: Transient<bool>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct PlanPart {
    plan: Vec<String>,
    current_step: u32,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct StepPart {
    current_step: u32,
    findings: std::collections::BTreeMap<String, String>,
}

/// The example of the guide: findings accumulate over the rounds of a loop.
#[tokio::test]
async fn a_research_pipeline_accumulates_its_findings() {
    let planner = handler("planner").needs::<PlanPart>().tap(async |ctx, _topic: String| {
        ctx.sequencer().patch(json!({"plan": ["search", "analyze", "summarize"], "current_step": 0})).await
    });
    let executor = handler("executor").needs::<StepPart>().tap(async |ctx, topic: String| {
        let step = ctx.sequencer().state().current_step;
        ctx.sequencer().patch(json!({"findings": {format!("step-{step}"): topic}, "last_claimed": true})).await?;
        ctx.sequencer().inc([("current_step", 1)]).await
    });
    let research = sequencer("research-pipeline")
        .state::<Research>()
        .tap(&planner)
        .do_while(|_, ctx| ctx.state().current_step < 3, &executor)
        .map(|_, ctx| ctx.state().findings.clone())
        .build()
        .unwrap();
    let research = flow("research").action("run", research).build().unwrap();
    let engine = Engine::on(&Store::memory().await.unwrap()).flow(&research).start().await.unwrap();
    let request = engine.flow(&research).run("run", "locks").session("s-1").await.unwrap();
    let findings: std::collections::BTreeMap<String, String> = request.result().await.unwrap();
    assert_eq!(findings.keys().collect::<Vec<_>>(), ["step-0", "step-1", "step-2"]);
    let expected = json!({"research-pipeline": {
        "plan": ["search", "analyze", "summarize"],
        "current_step": 3,
        "findings": {"step-0": "locks", "step-1": "locks", "step-2": "locks"},
    }});
    assert_eq!(json!(request.checkpoints().await.unwrap()), expected, "without the transient field");
}

#[tokio::test]
async fn operations_that_do_not_fit_the_type_change_nothing() {
    let wrong = handler("wrong").needs::<TotalPart>().run(async |ctx, value: i64| {
        let state = ctx.sequencer();
        assert!(state.patch(json!({"total": "many"})).await.is_err());
        assert!(state.patch(json!([1])).await.is_err());
        assert!(state.push("total", 1).await.is_err());
        assert!(state.inc([("total", 5), ("seen", 1)]).await.is_err(), "all or none");
        assert!(!state.patch(json!({"total": 0})).await?.changed, "nothing has changed");
        assert_eq!((state.state().total, state.rev()), (0, 0));
        state.set_record("by", "x", 3).await?;
        state.delete_record("by", "x").await?;
        state
            .atomic(async |mut part: TotalPart| {
                part.total += 7;
                Ok(part)
            })
            .await?;
        assert_eq!((state.state().total, state.rev()), (7, 3));
        Ok(value)
    });
    let block = sequencer("chain").state::<Tally>().step(&wrong).build().unwrap();
    let (result, checkpoints, _) = requested(&only(block), 1).await;
    result.unwrap();
    assert_eq!(tally(&checkpoints, "chain").total, 7);
}

#[tokio::test]
async fn a_mutation_within_a_mutation_of_the_same_state_is_refused_at_once() {
    let nests = handler("nests").needs::<TotalPart>().run(async |ctx, value: i64| {
        let (inner, state) = (ctx.clone(), ctx.sequencer());
        let refused = state.atomic(move |part| async move {
            inner.sequencer().inc([("total", 1)]).await?;
            Ok(part)
        });
        let refused = refused.await.unwrap_err();
        assert!(refused.message().contains("mutat"), "{refused}");
        Ok(value)
    });
    let block = sequencer("chain").state::<Tally>().step(&nests).build().unwrap();
    requested(&only(block), 1).await.0.unwrap();
}

#[tokio::test]
async fn a_mutator_that_takes_too_long_changes_nothing() {
    let slow = handler("slow").needs::<TotalPart>().run(async |ctx, value: i64| {
        let env = ctx.sequencer();
        let late = env.atomic(|mut part| async move {
            part.total = 9;
            std::future::pending::<()>().await;
            Ok(part)
        });
        let late = late.await.unwrap_err();
        assert_eq!(late.code(), "latchwork.state");
        assert_eq!(ctx.sequencer().state().total, 0);
        ctx.sequencer().inc([("total", 1)]).await?;
        Ok(value)
    });
    let block = sequencer("chain").state::<Tally>().step(&slow).build().unwrap();
    let flow = flow("test").action("run", block).mutation_timeout(Duration::from_secs(5)).build().unwrap();
    let (result, checkpoints, _) = requested(&flow, 1).await;
    result.unwrap();
    assert_eq!(tally(&checkpoints, "chain").total, 1);
}

#[tokio::test]
async fn a_block_reaches_its_own_state_and_those_around_and_before_it() {
    let looks = handler("looks").needs_target::<TotalPart>("before").needs_target::<TotalPart>("outer").run(
        async |ctx, value: i64| {
            assert_eq!(ctx.path(), "outer/inner/looks");
            assert_eq!(ctx.target::<TotalPart>("before").state().total, 1, "a sibling of the sequencer around it");
            assert_eq!(ctx.target::<TotalPart>("outer").state().total, 1);
            assert!(!ctx.target::<Value>("missing").exists());
            assert!(!ctx.own::<Value>().exists());
            assert!(!ctx.parent::<Value>().exists(), "the sequencer right around it declares no state");
            assert_eq!(ctx.sequencer().value()["total"], json!(1), "the nearest one that declares state");
            ctx.target::<TotalPart>("outer").inc([("total", 10)]).await?;
            Ok(value)
        },
    );
    let log = Log::default();
    let before = sequencer("before").state::<Tally>().step(&add("x", &log)).build().unwrap();
    let inner = sequencer("inner").step(&looks).build().unwrap();
    let outer = sequencer("outer").state::<Tally>().step(&add("y", &log)).step(&before).step(&inner).build().unwrap();
    let (result, checkpoints, _) = requested(&only(outer), 1).await;
    result.unwrap();
    assert_eq!(tally(&checkpoints, "outer").total, 11);
    assert_eq!(tally(&checkpoints, "outer/before").total, 1);
}

/// The engine stops while one of two parallel blocks waits. The other one has ended: only its changes are stored.
#[tokio::test]
async fn a_sibling_that_is_half_done_is_not_in_the_checkpoint_and_doubles_nothing() {
    let log = Log::default();
    let scratch = handler("scratch").tap(async |ctx, _: i64| ctx.sequencer().patch(json!({"scratch": 5})).await);
    let bodies = log.clone();
    let half = handler("half").needs::<TotalPart>().run(move |ctx, value: i64| {
        let bodies = bodies.clone();
        async move {
            bodies.add("half");
            ctx.sequencer().inc([("total", 1)]).await?;
            ctx.receive::<()>("go").await?;
            ctx.sequencer().push("seen", "half").await?;
            Ok(value + 1)
        }
    });
    let block = sequencer("chain")
        .state::<Tally>()
        .tap(&scratch)
        .parallel((&add("done", &log), &half))
        .map(|(a, b), ctx| a + b + i64::from(*ctx.state().scratch))
        .build()
        .unwrap();
    let flow = only(block);
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
    let is_half = async || match request.checkpoints().await.unwrap().get("chain") {
        Some(state) => state["seen"] == json!(["done"]) && log.count("half") > 0,
        None => false,
    };
    while !is_half().await {
        store.env().sleep(Duration::from_millis(1)).await;
    }
    let stored = tally(&request.checkpoints().await.unwrap(), "chain");
    assert_eq!((stored.total, stored.seen), (1, vec!["done".to_string()]), "only what has ended");
    engine.stop();
    drop(engine);

    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).request("r");
    engine.signal("r", "go", &()).await.unwrap();
    assert_eq!(request.result::<i64>().await.unwrap(), 4, "the transient field has its default again");
    assert_eq!(log.count("done"), 1, "what has ended does not run again");
    let stored = tally(&request.checkpoints().await.unwrap(), "chain");
    assert_eq!((stored.total, stored.seen.len()), (2, 2), "the half that ran twice counts once");
    engine.stop();
}

#[tokio::test]
async fn transient_fields_have_their_defaults_again_after_an_interruption() {
    let log = Log::default();
    let sets = handler("sets").tap(async |ctx, _: i64| ctx.sequencer().patch(json!({"scratch": 5, "total": 3})).await);
    let block = sequencer("chain").state::<Tally>().tap(&sets).step(&sleeps("sleeps", &log));
    let block = block.map(|_, ctx| i64::from(*ctx.state().scratch) * 100 + ctx.state().total).build().unwrap();
    let flow = only(block);
    // It sleeps for an hour, and leaves memory.
    let (result, checkpoints, _) = requested(&flow, 1).await;
    assert_eq!(result.unwrap(), 4, "the transient field was lost, and the other was not");
    assert_eq!(tally(&checkpoints, "chain").total, 4);
}

#[tokio::test]
async fn a_state_that_is_too_large_is_a_typed_failure() {
    let large = handler("large").run(async |ctx, value: i64| {
        ctx.sequencer().push("seen", "x".repeat(5 << 20)).await?;
        Ok(value)
    });
    let block = sequencer("chain").state::<Tally>().step(&large).build().unwrap();
    let (result, _, _) = requested(&only(block), 1).await;
    let found = failure(result).get::<latchwork::flow::BlockError>().unwrap();
    assert!(matches!(found, latchwork::flow::BlockError::StateTooLarge { path, .. } if path == "chain/large"));
}

#[tokio::test]
async fn stored_scopes_are_shared_by_requests_and_changed_once() {
    let visits = handler("visits").run(async |ctx, value: i64| {
        ctx.session()?.inc_state("visits", 1).await?;
        ctx.user()?.inc_state("visits", value).await?;
        assert!(ctx.org().is_err());
        ctx.request().set_state(json!({"seen": value})).await?;
        let once = ctx.run_once("charge", async || Ok(value * 2)).await?;
        Ok(once)
    });
    let block = sequencer("chain").step(&visits).build().unwrap();
    let flow = only(block);
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        for visit in [1, 2] {
            let request = engine.flow(&flow).run("run", visit).session("s").user("u").await.unwrap();
            assert_eq!(request.result::<i64>().await.unwrap(), visit * 2);
        }
    })
    .await;
    assert_eq!(engine.states().session("s").get().await.unwrap(), Some(json!({"visits": 2})));
    assert_eq!(engine.states().user("u").get().await.unwrap(), Some(json!({"visits": 3})));
}

/// A loop takes the same room after ten rounds and after a thousand.
#[tokio::test]
async fn a_loop_leaves_nothing_behind_but_its_own_entry() {
    let mut sizes = Vec::new();
    for rounds in [10, 1000] {
        let log = Log::default();
        let body = sequencer("body").state::<Tally>().step(&add("inner", &log)).build().unwrap();
        let block = sequencer("chain").state::<Tally>().do_while(move |v, _| *v < rounds, &body);
        let flow = only(block.step(&add("end", &log)).build().unwrap());
        let (result, checkpoints, engine) = requested(&flow, 0).await;
        assert_eq!(result.unwrap(), rounds + 1);
        assert_eq!(checkpoints.keys().collect::<Vec<_>>(), ["chain"], "rounds leave no checkpoints");
        let history = engine.history("r").await.unwrap();
        sizes.push(history.operations.len());
    }
    assert_eq!(sizes[0], sizes[1], "the entries in the journal");
    assert!(sizes[0] < 6, "{sizes:?}");
}

/// An ephemeral sequencer is one block: it starts again from its beginning, and what its blocks have changed of the
/// states around it counts once.
#[tokio::test]
async fn an_ephemeral_sequencer_starts_again_from_its_beginning() {
    let log = Log::default();
    let inner = sequencer("inner").state::<Tally>().step(&add("deep", &log)).map(|v, ctx| v + ctx.state().total);
    let quick = sequencer("quick").ephemeral().step(&add("a", &log)).step(&inner.build().unwrap());
    let quick = quick.step(&sleeps("b", &log)).step(&add("c", &log)).build().unwrap();
    let chain = sequencer("chain").state::<Tally>().step(&add("before", &log)).step(&quick).step(&add("after", &log));
    // It sleeps for an hour, and leaves memory.
    let (result, checkpoints, engine) = requested(&only(chain.build().unwrap()), 0).await;
    assert_eq!(result.unwrap(), 7);
    assert_eq!(log.all(), ["before", "a", "deep", "b", "a", "deep", "b", "c", "after"]);
    assert_eq!(checkpoints.keys().collect::<Vec<_>>(), ["chain"], "no state inside it is stored");
    let tally = tally(&checkpoints, "chain");
    assert_eq!((tally.total, &tally.seen[..]), (5, &["before", "a", "b", "c", "after"].map(String::from)[..]));
    let operations = engine.history("r").await.unwrap().operations;
    let within = operations.iter().filter(|operation| operation.branch.starts_with("chain/quick/")).count();
    assert!(within <= 1, "{operations:?}");
}

#[tokio::test]
async fn a_block_has_a_state_of_its_own_and_reaches_that_of_its_parent() {
    let counts = handler("counts").state::<Tally>().run(async |ctx, value: i64| {
        ctx.own::<TotalPart>().inc([("total", 1)]).await?;
        // Out of memory: the body runs again, and its own state begins anew.
        ctx.sleep(Duration::from_secs(3600)).await?;
        ctx.own::<TotalPart>().inc([("total", value)]).await?;
        ctx.parent::<TotalPart>().inc([("total", ctx.own::<TotalPart>().state().total)]).await?;
        Ok(value)
    });
    let inner = sequencer("inner").state::<Tally>().step(&counts).build().unwrap();
    let chain = sequencer("chain").state::<Tally>().step(&inner).build().unwrap();
    let (result, checkpoints, _) = requested(&only(chain), 5).await;
    assert_eq!(result.unwrap(), 5);
    let total = |path: &str| tally(&checkpoints, path).total;
    assert_eq!((total("chain/inner/counts"), total("chain/inner")), (6, 6));
    assert!(!checkpoints.contains_key("chain"), "nothing has changed it");
}

#[tokio::test]
async fn a_request_that_ends_removes_its_checkpoints_if_its_flow_says_so() {
    let log = Log::default();
    for (breaks, cleans) in [(false, true), (true, true), (true, false)] {
        let inner = sequencer("inner").state::<Tally>().step(&add("a", &log)).build().unwrap();
        let chain = sequencer("chain").state::<Tally>().step(&inner).step(&sleeps("sleeps", &log));
        let chain = chain.throw_if(move |_, _| breaks.then(|| latchwork::workflow::Failure::new("broken")));
        let mut flow = flow("test").action("run", chain.build().unwrap());
        if cleans {
            flow = flow.cleanup_checkpoints_on_terminal();
        }
        let (result, checkpoints, _) = requested(&flow.build().unwrap(), 1).await;
        assert_eq!((result.is_err(), checkpoints.is_empty()), (breaks, cleans), "{checkpoints:?}");
    }
}

/// History, `why` and fork know the blocks of a flow by their paths.
#[tokio::test]
async fn an_operator_sees_blocks_and_forks_a_request_from_its_start() {
    let log = Log::default();
    let inner = sequencer("inner").step(&add("a", &log)).step(&sleeps("sleeps", &log)).build().unwrap();
    let flow = only(sequencer("chain").state::<Tally>().step(&inner).build().unwrap());
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let flows = engine.flow(&flow);
        flows.run("run", 1).id("r").session("s").await.unwrap();
        while log.count("sleeps") == 0 || engine.residents() > 0 {
            engine.store().env().sleep(Duration::from_secs(1)).await;
        }
        let why = format!("{:?}", engine.why("r").await.unwrap());
        assert!(why.contains("Timer"), "{why}");
        let operations = engine.history("r").await.unwrap().operations;
        let mut paths: Vec<&str> = operations.iter().map(|operation| &*operation.branch).collect();
        paths.sort_unstable();
        assert_eq!(paths, ["chain/inner/", "chain/inner/a/", "chain/inner/sleeps/", "chain/inner/sleeps/"]);
        let refused = engine.fork("r").at("chain/inner/a/").await.unwrap_err();
        assert!(refused.to_string().contains("forked from its start only"), "{refused}");
        let id = engine.fork("r").await.unwrap();
        for request in [flows.request(id), flows.request("r")] {
            assert_eq!(request.result::<i64>().await.unwrap(), 3);
            assert_eq!(tally(&request.checkpoints().await.unwrap(), "chain").total, 2, "it has states of its own");
        }
    })
    .await;
    assert_eq!(log.count("a"), 2, "the fork runs from the start");
}
