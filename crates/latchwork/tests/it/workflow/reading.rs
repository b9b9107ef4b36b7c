//! Executions that are read without an engine.

use latchwork::store::{Store, StoreError};
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, ExecutionState, Executions, WaitsFor, WorkflowError, workflow,
};
use serde_json::json;

#[tokio::test]
async fn without_an_engine_the_same_is_read_and_nothing_is_run() {
    let home = tempfile::tempdir().unwrap();
    let talk = workflow("talk").run(async |ctx: Ctx, n: u32| {
        ctx.publish("asked", &n).await?;
        let name = ctx.run("name", async || Ok("Ada".to_string())).await?;
        ctx.set_attribute("name", name.as_str()).await?;
        ctx.receive::<u32>("answer").await
    });
    let outer = workflow("outer").run({
        let talk = talk.clone();
        move |ctx: Ctx, ()| {
            let talk = talk.clone();
            async move { ctx.child(&talk, 2).id("inner").await }
        }
    });
    let engine = Engine::open(home.path()).register(&talk).register(&outer).start().await.unwrap();
    engine.start(&talk, 1).id("one").tag("first").idempotency_key("k").await.unwrap();
    engine.start(&outer, ()).id("outer").await.unwrap();
    for id in ["one", "outer", "inner"] {
        while !matches!(engine.why(id).await, Ok(why) if !why.resident && why.state == ExecutionState::Waiting) {
            tokio::task::yield_now().await;
        }
    }
    let listed = engine.list(ExecutionFilter::new()).await.unwrap();
    let (mut described, mut operations) = (Vec::new(), Vec::new());
    for execution in &listed.items {
        described.push(engine.describe(&execution.id).await.unwrap());
        operations.push(engine.operations(&execution.id).await.unwrap());
    }
    let why = engine.why("one").await.unwrap();
    engine.stop();
    engine.store().close().await.unwrap();

    let store = Store::open_read_only(home.path()).await.unwrap();
    let executions = Executions::on(&store).await.unwrap();
    assert_eq!(executions.list(ExecutionFilter::new()).await.unwrap(), listed);
    for ((execution, described), operations) in listed.items.iter().zip(&described).zip(&operations) {
        assert_eq!(&executions.describe(&execution.id).await.unwrap(), described);
        assert_eq!(&executions.operations(&execution.id).await.unwrap(), operations);
    }
    assert_eq!(executions.why("one").await.unwrap(), why);
    let one = executions.describe("one").await.unwrap();
    assert_eq!((one.input, one.idempotency_key.as_deref()), (json!(1), Some("k")));
    assert_eq!(one.published["asked"], json!(1));
    assert_eq!(one.attributes["name"], "Ada".into());
    assert_eq!(one.waits[0].what, WaitsFor::Signal("answer".into()));
    let (outer, inner) = (executions.describe("outer").await.unwrap(), executions.describe("inner").await.unwrap());
    assert_eq!((outer.children, inner.parent), (vec!["inner".into()], Some("outer".into())));
    let missing = executions.describe("missing").await;
    assert!(matches!(missing, Err(WorkflowError::NotFound { .. })), "{missing:?}");
    let refused = Engine::on(&store).start().await.err();
    assert!(matches!(refused, Some(WorkflowError::Store(StoreError::ReadOnly))), "{refused:?}");
}

#[tokio::test]
async fn a_store_that_no_engine_was_on_has_no_executions() {
    let store = Store::memory().await.unwrap();
    let before = store.generation().await.unwrap();
    let executions = Executions::on(&store).await.unwrap();
    let page = executions.list(ExecutionFilter::new()).await.unwrap();
    assert_eq!((page.items.len(), page.next), (0, None));
    assert!(matches!(executions.why("a").await, Err(WorkflowError::NotFound { .. })));
    assert!(matches!(executions.operations("a").await, Err(WorkflowError::NotFound { .. })));
    let wrong = executions.list(ExecutionFilter::new().waits_for(WaitsFor::Store)).await;
    assert!(matches!(wrong, Err(WorkflowError::List { .. })), "{wrong:?}");
    assert_eq!(store.generation().await.unwrap(), before, "looking writes nothing");
}
