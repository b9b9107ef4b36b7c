//! Old and new code side by side: an execution runs where its workflow and version are.

use super::*;
use latchwork::workflow::{Executions, WorkflowError};

fn greets(version: u32) -> Workflow<String, String> {
    workflow("greets").version(version).with(version).run(async |ctx: Ctx, version: u32, name: String| {
        let more = ctx.receive::<String>("more").await?;
        ctx.run("greet", async || Ok(format!("{name}{more} v{version}"))).await
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn an_execution_runs_on_the_node_that_has_its_version() {
    let store = Store::memory().await.unwrap();
    let (one, two) = (greets(1), greets(2));
    let old = named(&store, "old").register(&one).start().await.unwrap();
    let new = named(&store, "new").register(&two).start().await.unwrap();
    until(&store, "two halves", |nodes| shares(nodes) == [32, 32]).await;
    let mut handles = Vec::new();
    for number in 0..20 {
        handles.push((1, old.start(&one, "Ada".into()).id(format!("o{number}")).await.unwrap()));
        handles.push((2, new.start(&two, "Bob".into()).id(format!("n{number}")).await.unwrap()));
    }
    for (_, handle) in &handles {
        new.signal(handle.id().clone(), "more", &"!").await.unwrap();
    }
    for (version, handle) in &handles {
        let greeting = in_time(handle.result()).await.unwrap();
        assert!(greeting.ends_with(&format!("! v{version}")), "{greeting}");
    }
    // The node with the old version is gone: its executions wait, and say for what.
    let left = old.start(&one, "Eve".into()).id("left").await.unwrap();
    old.shutdown().await.unwrap();
    until(&store, "old is gone", |nodes| shares(nodes) == [64]).await;
    new.signal(left.id().clone(), "more", &"?").await.unwrap();
    let error = in_time(new.handle(&one, "left").result()).await.unwrap_err();
    assert!(matches!(&error, WorkflowError::Parked { reason, .. } if reason.contains("version 1")), "{error}");
    let unrunnable = Executions::on(&store).await.unwrap().unrunnable(10).await.unwrap();
    assert_eq!(unrunnable.iter().map(|it| (&*it.id, it.version)).collect::<Vec<_>>(), [("left", 1)]);
    // A node that continues the version runs it.
    let both = workflow("greets").version(2).continues([1]).run(async |ctx: Ctx, name: String| {
        let more = ctx.receive::<String>("more").await?;
        ctx.run("greet", async || Ok(format!("{name}{more} continued"))).await
    });
    let newest = named(&store, "newest").register(&both).start().await.unwrap();
    assert_eq!(in_time(newest.handle(&both, "left").result_through_parks()).await.unwrap(), "Eve? continued");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_execution_that_was_lent_continues_when_its_host_dies() {
    let store = Store::memory().await.unwrap();
    let (one, waits) = (greets(1), waits());
    let owner = named(&store, "owner").register(&waits).start().await.unwrap();
    let host = doomed(named(&store, "host").register(&one)).await;
    Nodes::on(&store).drain("host", true).await.unwrap();
    until(&store, "the owner owns all", |nodes| shares(nodes) == [0, 64]).await;
    let handle = host.engine.start(&one, "Ada".into()).id("a").await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    host.kill();
    let second = named(&store, "second").register(&one).start().await.unwrap();
    owner.signal("a", "more", &"!").await.unwrap();
    assert_eq!(in_time(second.handle(&one, "a").result_through_parks()).await.unwrap(), "Ada! v1");
    drop(handle);
}
