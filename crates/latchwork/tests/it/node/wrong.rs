//! Bad input: each is an error that says what to do.

use super::*;
use latchwork::workflow::WorkflowError;

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_of_one_name_a_lease_of_zero_and_odd_names_are_errors() {
    let (store, waits) = (Store::memory().await.unwrap(), waits());
    let first = named(&store, "a").register(&waits).start().await.unwrap();
    let error = named(&store, "a").register(&waits).start().await.err().unwrap();
    assert!(matches!(&error, WorkflowError::NodeNameTaken { name } if name == "a"), "{error}");
    for (options, message) in [
        (NodeOptions::new().lease(Duration::ZERO), "the shortest is 100ms"),
        (NodeOptions::new().name(""), "1 to 128 bytes"),
        (NodeOptions::new().name("a\nb"), "no control characters"),
        (NodeOptions::new().name("x".repeat(129)), "1 to 128 bytes"),
    ] {
        let error = Engine::on(&store).register(&waits).node(options).start().await.err().unwrap();
        assert!(error.to_string().contains(message), "{error}");
    }
    // A node that has died leaves its name when its lease is over.
    first.stop();
    let again = in_time(named(&store, "a").register(&waits).start()).await.unwrap();
    assert_eq!(shares(&Nodes::on(&store).list().await.unwrap()), [64]);
    drop(again);
}

#[tokio::test]
async fn two_definitions_of_one_version_are_an_error() {
    let store = Store::memory().await.unwrap();
    let version = |version: u32| workflow("w").version(version).run(async |_: Ctx, n: u64| Ok(n));
    let claims_one: Workflow<u64, u64> = workflow("w").version(2).continues([1]).run(async |_: Ctx, n: u64| Ok(n));
    let error = Engine::on(&store).register(&version(1)).register(&claims_one).start().await.err().unwrap();
    assert!(matches!(error, WorkflowError::RegisteredTwice { version: 1, .. }), "{error}");
    assert!(Engine::on(&store).register(&version(1)).register(&version(2)).start().await.is_ok());
}
