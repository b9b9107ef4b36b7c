//! Definitions and starts that make no sense: a typed error at the registration or at the start.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, Queue, RateLimit, Workflow, WorkflowBuilder, WorkflowError, workflow,
};

const SECOND: Duration = Duration::from_secs(1);

fn plain(builder: WorkflowBuilder) -> Workflow<String, String> {
    builder.run(async |_: Ctx, text: String| Ok(text))
}

#[tokio::test]
async fn impossible_limits_are_refused_at_the_registration() {
    let batch = |max_size, max_wait| {
        workflow("w").batch(Batch::new(max_size, max_wait)).run(async |_: Ctx, texts: Vec<String>| Ok(texts))
    };
    let of = || workflow("w");
    let cases: Vec<(Workflow<String, String>, &str)> = vec![
        (plain(of().concurrency(0)), "a concurrency of 0"),
        (plain(of().concurrency_by(0, |text: &String| text.clone())), "a concurrency of 0"),
        (plain(of().concurrency(5).concurrency_by(0, |text: &String| text.clone())), "a concurrency of 0"),
        (plain(of().when_full(Queue::new())), "a queue needs a limit"),
        (plain(of().concurrency(1).when_full(Queue::new().depth(0))), "a queue of depth 0"),
        (plain(of().concurrency(1).when_full(Queue::new().timeout(Duration::ZERO))), "a time limit of zero"),
        (
            plain(of().concurrency(1).when_full(Queue::new().priority(Duration::ZERO, |_: &String| 1))),
            "an ageing of zero",
        ),
        (plain(of().rate_limit(RateLimit::new(0, SECOND))), "a rate limit of 0"),
        (plain(of().rate_limit(RateLimit::new(1, Duration::ZERO))), "the period of a rate limit"),
        (plain(of().debounce(Debounce::new(Duration::ZERO))), "a window of zero"),
        (plain(of().debounce(Debounce::new(SECOND * 2).max_wait(SECOND))), "longer than its `max_wait`"),
        (batch(0, SECOND), "a batch of 0"),
        (batch(10_001, SECOND), "at most 10,000"),
        (batch(10, Duration::ZERO), "a `max_wait` of zero"),
    ];
    let store = Store::memory().await.unwrap();
    for (workflow, told) in cases {
        match Engine::on(&store).register(&workflow).start().await {
            Err(error @ WorkflowError::Policy { .. }) => {
                assert!(error.to_string().contains(told), "{error} / {told}");
                assert!(error.to_string().starts_with("workflow \"w\" cannot be registered: "), "{error}");
            }
            other => panic!("{other:?} / {told}"),
        }
    }
}

#[tokio::test]
async fn impossible_keys_are_refused_at_the_start() {
    let key = |text: &String| match &**text {
        "panics" => panic!("no key for this"),
        "empty" => String::new(),
        "long" => "x".repeat(513),
        text => text.to_string(),
    };
    let limited: Vec<Workflow<String, String>> = vec![
        plain(workflow("w").concurrency_by(1, key)),
        plain(workflow("w").rate_limit(RateLimit::new(1, SECOND).by(key))),
        plain(workflow("w").debounce(Debounce::new(SECOND).by(key))),
        plain(workflow("w").concurrency(1).when_full(Queue::new().fair(key))),
        workflow("w").batch(Batch::new(2, SECOND).by(key)).run(async |_: Ctx, texts: Vec<String>| Ok(texts)),
    ];
    for workflow in limited {
        let test = TestEngine::new(&workflow, 1).await.unwrap();
        for (input, told) in [("panics", "no key for this"), ("empty", "it is empty"), ("long", "513 bytes")] {
            match test.engine().start(&workflow, input.into()).await {
                Err(error @ WorkflowError::Key { .. }) => assert!(error.to_string().contains(told), "{error}"),
                other => panic!("{other:?}"),
            }
        }
        // The longest possible key works, and the engine is still alive.
        test.engine().start(&workflow, "y".repeat(512)).await.unwrap();
    }
    let misfit = plain(workflow("w").concurrency_by(1, |n: &u64| n.to_string()));
    let test = TestEngine::new(&misfit, 1).await.unwrap();
    let error = test.engine().start(&misfit, "text".into()).await.unwrap_err();
    assert!(error.to_string().contains("the input does not fit"), "{error}");
}

#[tokio::test]
async fn a_gathered_start_has_nothing_of_its_own() {
    let gathered = plain(workflow("w").debounce(Debounce::new(SECOND)));
    let test = TestEngine::new(&gathered, 1).await.unwrap();
    let start = || test.engine().start(&gathered, "x".into());
    for wrong in [start().delay(SECOND).await, start().signal("s", &1).await] {
        assert!(matches!(wrong, Err(WorkflowError::Start { .. })), "{wrong:?}");
    }
    // The id is that of the first start.
    let first = start().id("a").await.unwrap();
    assert_eq!((&**first.id(), &**start().id("b").await.unwrap().id()), ("a", "a"));
    test.run(first.result()).await.unwrap();
    assert!(matches!(start().id("a").await, Err(WorkflowError::AlreadyStarted { .. })));
}
