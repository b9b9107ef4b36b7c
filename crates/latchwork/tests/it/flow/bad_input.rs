//! What cannot be built or called: each is a typed error that names the blocks.

use latchwork::flow::{Block, BlockError, Busy, Flow, FlowError, flow, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::{Engine, WorkflowError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Log, Tally, TotalPart, add, failure, only, sleeps};

#[derive(Serialize, Deserialize, JsonSchema)]
struct TextPart {
    total: String,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct OtherPart {
    missing: u8,
}

fn needs<P: JsonSchema + serde::de::DeserializeOwned + 'static>(name: &str) -> Block<i64, i64> {
    handler(name).needs::<P>().run(async |_, value: i64| Ok(value))
}

#[test]
fn a_wrong_flow_is_refused_when_it_is_built() {
    let log = Log::default();
    let chain = || sequencer::<i64>("chain").state::<Tally>();
    let many = "x".repeat(129);
    let too_long = format!(
        "{many:?} cannot be the name of a sequencer: it must have 1 to 128 bytes, without `>`, and no `?` at its end"
    );
    let table: Vec<(&str, latchwork::flow::Result<()>, &str)> = vec![
        (
            "a name twice",
            chain().step(&add("a", &log)).step(&add("a", &log)).build().map(drop),
            "sequencer \"chain\" has two blocks of the name \"a\"; give one another name with `named`",
        ),
        ("another name", chain().step(&add("a", &log)).step(&add("a", &log).named("b")).build().map(drop), ""),
        ("a branch of nothing", chain().branch::<i64>(vec![]).build().map(drop), "`branch` in \"chain\" has no blocks"),
        ("a race of nothing", chain().race::<i64>(&[]).build().map(drop), "`race` in \"chain\" has no blocks"),
        (
            "an empty name",
            chain().step(&add("", &log)).build().map(drop),
            "\"\" cannot be the name of a block: it must have 1 to 128 bytes, without `>`, and no `?` at its end",
        ),
        (
            "a name that could be a label",
            chain().step(&add("a>map", &log)).build().map(drop),
            "\"a>map\" cannot be the name of a block: it must have 1 to 128 bytes, without `>`, and no `?` at its end",
        ),
        (
            "a name that could be the label of a condition",
            chain().step(&add("a?", &log)).build().map(drop),
            "\"a?\" cannot be the name of a block: it must have 1 to 128 bytes, without `>`, and no `?` at its end",
        ),
        ("a long name", sequencer::<i64>(&many).step(&add("a", &log)).build().map(drop), &too_long),
        (
            "a field of another type than the sequencer's",
            chain().step(&needs::<TextPart>("texts")).build().map(drop),
            "field \"total\" of the sequencer state is integer (int64) in block \"chain\" and string in \
             \"chain/texts\"",
        ),
        (
            "two blocks that disagree",
            sequencer("inner").step(&needs::<TextPart>("texts")).step(&needs::<TotalPart>("numbers")).build().map(drop),
            "field \"total\" of the sequencer state is string in block \"inner/texts\" and integer (int64) in \
             \"inner/numbers\"",
        ),
        (
            "a field that is missing",
            chain().step(&sequencer("inner").step(&needs::<OtherPart>("other")).build().unwrap()).build().map(drop),
            "block \"chain/inner/other\" needs field \"missing\", which the state of sequencer \"chain\" does not have",
        ),
    ];
    for (what, built, expected) in table.into_iter().chain(wrong_flows(&log)) {
        match built {
            Ok(()) => assert_eq!(expected, "", "{what}"),
            Err(FlowError::TooDeep { .. }) => assert_eq!(expected, "TOO DEEP", "{what}"),
            Err(error) => assert_eq!(error.to_string(), expected, "{what}"),
        }
    }
    let twice = flow("f").action("run", echo()).action("run", echo()).build().unwrap_err();
    assert_eq!(twice.to_string(), "flow \"f\" has two actions of the name \"run\"");
}

/// What is found only when the flow around a sequencer is built, or at its end.
fn wrong_flows(log: &Log) -> Vec<(&'static str, latchwork::flow::Result<()>, &'static str)> {
    let chain = || sequencer::<i64>("chain").state::<Tally>();
    let deep = (0..40)
        .fold(add("x", log), |block, _| sequencer(&"n".repeat(100)).state::<Tally>().step(&block).build().unwrap());
    vec![
        (
            "no state at all",
            flow("f")
                .action("run", sequencer("chain").step(&needs::<TotalPart>("a")).build().unwrap())
                .build()
                .map(drop),
            "block \"chain/a\" needs field \"total\", and no sequencer around it declares state",
        ),
        (
            "a state that is no struct",
            chain().step(&needs::<Vec<u8>>("list")).build().map(drop),
            "the state of \"list\" must be a struct with named fields",
        ),
        (
            "an exit of another type",
            sequencer::<i64>("chain").exit_if(|_, _| true).map(|v, _| v.to_string()).build().map(drop),
            "`exit_if` in \"chain\" gives i64, and the sequencer gives alloc::string::String",
        ),
        (
            "a way back to nowhere",
            chain().step(&add("a", log)).loop_back("b", |_, _| true).build().map(drop),
            "`loop_back` in \"chain\" goes back to \"b\", which is not before it",
        ),
        (
            "a session state that two blocks disagree on",
            flow("f")
                .action("one", handler("a").needs_session::<TextPart>().run(async |_, v: i64| Ok(v)))
                .action("two", handler("b").needs_session::<TotalPart>().run(async |_, v: i64| Ok(v)))
                .build()
                .map(drop),
            "field \"total\" of the session state is string in block \"a\" and integer (int64) in \"b\"",
        ),
        (
            "a target that does not exist",
            flow("f")
                .action("one", handler("a").needs_target::<TotalPart>("x").run(async |_, v: i64| Ok(v)))
                .build()
                .map(drop),
            "block \"a\" needs the state of \"x\", which is neither before it nor around it",
        ),
        (
            "the same action twice",
            flow("f").action("run", add("a", log).named("a")).build().map(drop),
            "block \"a\" needs field \"total\", and no sequencer around it declares state",
        ),
        ("too deep", flow("f").action("run", deep).build().map(drop), "TOO DEEP"),
    ]
}

/// Needs the state of a block of this name.
fn looks_at(target: &str) -> Block<i64, i64> {
    handler("looks").needs_target::<TotalPart>(target).run(async |_, value: i64| Ok(value))
}

#[test]
fn a_target_is_found_before_the_block_and_then_around_it() {
    let log = Log::default();
    let named = |name: &str, block: &Block<i64, i64>| sequencer(name).state::<Tally>().step(block).build().unwrap();
    let x = named("x", &add("a", &log));
    let in_two = named("x", &sequencer("y").step(&named("x", &looks_at("x"))).build().unwrap());
    let chain = || sequencer::<i64>("chain").state::<Tally>();
    let table = [
        ("before", chain().step(&x).step(&looks_at("x")).build(), ""),
        ("around", Ok(named("x", &looks_at("x"))), ""),
        (
            "only after",
            chain().step(&looks_at("x")).step(&x).build(),
            "block \"looks\" needs the state of \"x\", which is neither before it nor around it",
        ),
        (
            "only inside a block before",
            chain().step(&sequencer("y").step(&x).build().unwrap()).step(&looks_at("x")).build(),
            "block \"looks\" needs the state of \"x\", which is neither before it nor around it",
        ),
        (
            "twice around",
            Ok(in_two),
            "block \"looks\" needs the state of \"x\", and several blocks around it have that name",
        ),
        (
            "after the block around it",
            chain().step(&sequencer("y").step(&looks_at("x")).build().unwrap()).step(&x).build(),
            "block \"looks\" needs the state of \"x\", which is neither before it nor around it",
        ),
        (
            "before the block around it",
            chain().step(&x).step(&sequencer("y").step(&looks_at("x")).build().unwrap()).build(),
            "",
        ),
    ];
    for (what, block, expected) in table {
        let built = flow("f").action("run", block.unwrap()).build();
        assert_eq!(built.err().map(|error| error.to_string()).unwrap_or_default(), expected, "{what}");
    }
}

fn echo() -> Block<i64, i64> {
    handler("echo").run(async |_, value: i64| Ok(value))
}

async fn engine(flow: &Flow) -> Engine {
    Engine::on(&Store::memory().await.unwrap()).flow(flow).start().await.unwrap()
}

#[tokio::test]
async fn a_wrong_call_is_refused() {
    let flow = only(echo());
    let engine = engine(&flow).await;
    let flows = engine.flow(&flow);
    let unknown = flows.run("walk", 1).await.unwrap_err();
    assert_eq!(unknown.to_string(), "flow \"test\" has no action \"walk\"; it has [\"run\"]");
    let misfit = flows.run("run", "one").await.unwrap_err();
    assert!(matches!(misfit, FlowError::Workflow(WorkflowError::Input { .. })), "{misfit}");
    assert_eq!(flows.run("run", 7).await.unwrap().result::<i64>().await.unwrap(), 7);
}

#[tokio::test]
async fn for_each_needs_a_list() {
    let echo = handler("echo").run(async |_, value: Value| Ok(value));
    let block = sequencer::<Value>("chain").for_each(1, &echo).map(|list: Vec<Value>, _| json!(list)).build().unwrap();
    let flow = flow("test").action("run", block).build().unwrap();
    let engine = engine(&flow).await;
    let request = engine.flow(&flow).run("run", json!([1, "b"])).await.unwrap();
    assert_eq!(request.result::<Value>().await.unwrap(), json!([1, "b"]));
    let request = engine.flow(&flow).run("run", json!({"a": 1})).await.unwrap();
    let found = failure(request.result::<Value>().await).get::<BlockError>().unwrap();
    assert_eq!(found, BlockError::NotAList { path: "chain/echo".into(), found: "an object".into() });
}

#[tokio::test]
async fn a_busy_session_allows_queues_or_rejects() {
    let log = Log::default();
    for busy in [Busy::Allow, Busy::Queue, Busy::Reject] {
        let block = sequencer("chain").state::<Tally>().step(&sleeps("a", &log)).build().unwrap();
        let flow = flow("test").action("run", block).when_busy(busy).build().unwrap();
        let test = super::test_engine(&flow).await;
        let engine = test.engine().clone();
        test.run(async {
            let flows = engine.flow(&flow);
            let began = engine.store().env().now();
            let first = flows.run("run", 1).session("s").await.unwrap();
            let second = flows.run("run", 2).session("s").await;
            let other = flows.run("run", 3).session("t").await.unwrap();
            let (alone, too) = (flows.run("run", 4).await.unwrap(), flows.run("run", 5).await.unwrap());
            if busy == Busy::Reject {
                assert!(matches!(second, Err(FlowError::Workflow(WorkflowError::LimitReached { .. }))), "{second:?}");
            } else {
                assert_eq!(second.unwrap().result::<i64>().await.unwrap(), 3);
                let hours = (engine.store().env().now().0 - began.0) / 3_600_000_000;
                assert_eq!(hours, if busy == Busy::Queue { 2 } else { 1 });
            }
            for (request, output) in [(first, 2), (other, 4), (alone, 5), (too, 6)] {
                assert_eq!(request.result::<i64>().await.unwrap(), output);
            }
        })
        .await;
    }
}
