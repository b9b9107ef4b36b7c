//! Callers and operators that interfere with running executions: they cancel many while these end, complete and fail a
//! token at once, and fork executions in the middle.

use std::sync::Arc;
use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, ExecutionState, Failure, Kind, Retry, Status, Workflow, WorkflowError, workflow,
};

const HOUR: Duration = Duration::from_secs(3600);

fn patient() -> Workflow<u32, u32> {
    workflow("patient").run(async |ctx: Ctx, number: u32| {
        let received = ctx.receive::<u32>("go").await?;
        ctx.run("add", async || Ok(number + received)).await
    })
}

/// Whichever is faster: each execution ends once, as its list says, and none is cancelled unless the report says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn executions_end_while_many_are_cancelled() {
    let (patient, each) = (patient(), 60u32);
    let (mut completed, mut cancelled) = (0, 0);
    for round in 0..6 {
        let store = Store::memory().await.unwrap();
        let engine = Engine::on(&store).register(&patient).start().await.unwrap();
        let mut handles = Vec::new();
        for number in 0..each {
            handles.push(engine.start(&patient, number).id(format!("p{number:03}")).await.unwrap());
        }
        // Signals go from the last execution to the first, so that they meet the cancellations. Each round signals
        // more, and some executions have ended before.
        let signalled: Vec<u32> = (each - 10 * (round + 1)..each).rev().collect();
        for number in &signalled[..5] {
            handles[*number as usize].signal("go", &1u32).await.unwrap();
            handles[*number as usize].result().await.unwrap();
        }
        let sender = engine.clone();
        let sends = tokio::spawn(async move {
            for number in &signalled[5..] {
                match sender.signal(format!("p{number:03}"), "go", &1u32).await {
                    Ok(()) | Err(WorkflowError::Ended { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let report = engine.bulk(ExecutionFilter::new().workflow("patient")).cancel("enough").await.unwrap();
        sends.await.unwrap();
        assert_eq!((report.matched, report.failures), (u64::from(each), 0), "{report:?}");
        assert_eq!(report.done + report.passed_over, report.matched, "{report:?}");
        let mut ends = (0, 0);
        for (number, handle) in handles.iter().enumerate() {
            match handle.result().await {
                Ok(sum) => {
                    assert_eq!(sum, number as u32 + 1);
                    ends.0 += 1;
                }
                Err(WorkflowError::Cancelled { reason, .. }) => {
                    assert_eq!(reason, "enough");
                    ends.1 += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        for (state, count) in [(Status::Completed, ends.0), (Status::Cancelled, ends.1)] {
            assert_eq!(engine.list(ExecutionFilter::new().is(state)).await.unwrap().items.len(), count);
        }
        // An execution that was asked to cancel may still complete; an execution that had ended is not cancelled.
        assert!(ends.1 as u64 <= report.done && report.passed_over <= ends.0 as u64, "{report:?} {ends:?}");
        (completed, cancelled) = (completed + ends.0, cancelled + ends.1);
    }
    assert!(completed >= 30 && cancelled > 0, "{completed} {cancelled}");
}

fn pays() -> Workflow<(), String> {
    workflow("pays").run(async |ctx: Ctx, ()| {
        let payment = ctx.completion::<u32>("payment").await;
        ctx.publish("token", &payment.token()).await?;
        let paid = match payment.wait().await {
            Ok(amount) => format!("paid {amount}"),
            Err(failure) => format!("not paid: {failure}, {}", failure.is_retryable()),
        };
        ctx.run("book", async || Ok(paid.clone())).retry(Retry::exponential().max_attempts(100)).await
    })
}

#[tokio::test]
async fn a_token_that_is_failed_from_outside_fails_once() {
    let pays = pays();
    let test = TestEngine::new(&pays, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&pays, ()).id("p").await.unwrap();
    let token = test.run(handle.wait_until("token", |_: &String| true)).await.unwrap();
    test.run(test.env().sleep(HOUR)).await;
    assert_eq!(engine.residents(), 0);
    engine.fail(&token, Failure::new("declined").not_retryable()).await.unwrap();
    for again in [engine.fail(&token, Failure::new("again")).await, engine.complete(&token, &7u32).await] {
        assert!(matches!(again, Err(WorkflowError::TokenUsed { .. })), "{again:?}");
    }
    assert_eq!(test.run(handle.result()).await.unwrap(), "not paid: declined, false");
    let late = engine.fail(&token, Failure::new("late")).await;
    assert!(matches!(late, Err(WorkflowError::TokenUsed { .. })), "{late:?}");
    let crashes = Crashes::of(|| pays.clone(), ()).outside(async |engine: Engine| {
        let handle = engine.handle(&super::meddling::pays(), "execution");
        let Ok(token) = handle.wait_until("token", |_: &String| true).await else { return };
        let _ = engine.fail(&token, Failure::new("declined")).await;
    });
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), "not paid: declined, true", "{:?}", outcome.crash);
    });
    assert!(crashes.await >= 6);
}

/// The race: one caller completes a token while another fails it. One of them is told that it came too late, and the
/// workflow receives the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_token_completed_and_failed_at_once_has_one_outcome() {
    let (pays, store) = (pays(), Store::memory().await.unwrap());
    let engine = Engine::on(&store).register(&pays).start().await.unwrap();
    for round in 0..50 {
        let handle = engine.start(&pays, ()).id(format!("p{round}")).await.unwrap();
        let token = handle.wait_until("token", |_: &String| true).await.unwrap();
        let (completes, fails) = (engine.clone(), engine.clone());
        let (one, other) = (token.clone(), token);
        let completes = tokio::spawn(async move { completes.complete(&one, &7u32).await });
        let fails = tokio::spawn(async move { fails.fail(&other, Failure::new("declined")).await });
        let (completed, failed) = (completes.await.unwrap(), fails.await.unwrap());
        let expected = match (&completed, &failed) {
            // The execution may have ended by then.
            (Ok(()), Err(WorkflowError::TokenUsed { .. } | WorkflowError::Ended { .. })) => "paid 7",
            (Err(WorkflowError::TokenUsed { .. } | WorkflowError::Ended { .. }), Ok(())) => "not paid: declined, true",
            both => panic!("{both:?}"),
        };
        assert_eq!(handle.result().await.unwrap(), expected);
    }
}

/// Many senders that do not know of each other; none of them finds the signal sent already.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_signal_that_is_sent_by_many_at_once_under_one_id_is_received_once() {
    let collects = workflow("collects").run(async |ctx: Ctx, ()| {
        let mut received = vec![ctx.receive::<u32>("go").await?];
        while received.last() != Some(&0) {
            received.push(ctx.receive::<u32>("go").await?);
        }
        Ok(received)
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&collects).start().await.unwrap();
    for round in 0..40 {
        let handle = engine.start(&collects, ()).id(format!("c{round}")).await.unwrap();
        let barrier = Arc::new(tokio::sync::Barrier::new(8));
        let senders: Vec<_> = (0..8)
            .map(|_| {
                let (engine, barrier, id) = (engine.clone(), barrier.clone(), handle.id().clone());
                tokio::spawn(async move {
                    barrier.wait().await;
                    engine.signal(id, "go", &7u32).id("s").await
                })
            })
            .collect();
        for sender in senders {
            sender.await.unwrap().unwrap();
        }
        handle.signal("go", &0u32).await.unwrap();
        assert_eq!(handle.result().await.unwrap(), [7, 0]);
    }
}

/// Ten steps, with a wait for a signal after every second step.
fn stations() -> Workflow<u64, Vec<u64>> {
    workflow("stations").run(async |ctx: Ctx, input: u64| {
        let mut gave = Vec::new();
        for number in 0..10u64 {
            gave.push(ctx.run(&format!("s{number}"), async || Ok(input + number)).await?);
            if number % 2 == 1 {
                gave.push(ctx.receive::<u64>("go").await?);
            }
        }
        Ok(gave)
    })
}

/// At each station, while the original waits there: the fork has what was recorded by then, and neither sees the other.
#[tokio::test]
async fn an_execution_is_forked_while_it_runs_and_neither_disturbs_the_other() {
    let stations = stations();
    let test = TestEngine::new(&stations, 1).await.unwrap();
    let engine = test.engine();
    let original = engine.start(&stations, 100).id("original").await.unwrap();
    let steps = |history: &latchwork::workflow::History| history.steps().len();
    let mut forks = Vec::new();
    for station in 0..5u64 {
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        let before = test.history("original").await.unwrap();
        assert_eq!(steps(&before), 2 * station as usize + 2);
        let ran = test.bodies().len();
        let fork = engine.fork("original").at_step(format!("s{}", 2 * station + 1)).id(format!("fork{station}"));
        let fork = fork.await.unwrap();
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        // The fork has done that one step, and waits for a signal of its own.
        assert_eq!(test.bodies()[ran..], [format!("s{}", 2 * station + 1)]);
        assert_eq!(test.history("original").await.unwrap(), before, "the original stays as it was");
        engine.signal("original", "go", &station).await.unwrap();
        forks.push((station, fork));
    }
    let expected = |station: u64, since: u64| -> Vec<u64> {
        let at = |number: u64| [Some(100 + number), (number % 2 == 1).then_some(number / 2)];
        let mut gave: Vec<u64> = (0..10).flat_map(at).flatten().collect();
        // Every third value is a signal; from the station on, signals are the fork's own.
        (station..5).for_each(|station| gave[3 * station as usize + 2] += since);
        gave
    };
    assert_eq!(test.run(original.result()).await.unwrap(), expected(5, 0));
    for (station, fork) in forks {
        let state = engine.history(&fork).await.unwrap().state;
        assert!(matches!(state, ExecutionState::Running | ExecutionState::Waiting), "it was sent nothing: {state:?}");
        for signal in station..5 {
            engine.signal(&fork, "go", &(signal + 1000)).await.unwrap();
        }
        assert_eq!(test.run(engine.handle(&stations, &fork).result()).await.unwrap(), expected(station, 1000));
        let history = engine.history(&fork).await.unwrap();
        assert_eq!(history.operations.iter().filter(|operation| operation.kind == Kind::Signal).count(), 5);
    }
}

/// The fork is made while commits of the original are in flight: whatever the fork has seen, its result is the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_execution_is_forked_at_any_moment() {
    let counts = workflow("counts").run(async |ctx: Ctx, until: u64| {
        let mut sum = 0;
        for number in 0..until {
            sum += ctx.run("add", async || Ok(number)).await?;
            ctx.state().workflow::<u64>("all").increment(1u64).await?;
        }
        Ok(sum)
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&counts).start().await.unwrap();
    let (until, mut forks) = (40u64, 0);
    for round in 0..10 {
        let original = engine.start(&counts, until).id(format!("o{round}")).await.unwrap();
        let mut ids = Vec::new();
        loop {
            let operations = engine.history(original.id()).await.unwrap().operations;
            let Some(last) = operations.iter().rfind(|operation| operation.kind == Kind::Step) else { continue };
            ids.push(engine.fork(original.id()).at(last.place.to_string()).await.unwrap());
            if last.place as u64 + 2 >= 2 * until || ids.len() > 40 {
                break;
            }
        }
        let expected: u64 = (0..until).sum();
        assert_eq!(original.result().await.unwrap(), expected);
        for id in &ids {
            assert_eq!(engine.handle(&counts, id).result().await.unwrap(), expected);
        }
        forks += ids.len();
    }
    assert!(forks >= 10, "{forks}");
}
