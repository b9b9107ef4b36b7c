//! Reviews: opened, listed, decided once, and closed by whatever ends the wait for them.

use std::time::Duration;

use latchwork::store::ErrorKind;
use latchwork::testing::{Crashes, Side, TestEngine};
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, ExecutionState, Failure, First2, ReviewError, ReviewState, WaitsFor, Workflow,
    WorkflowError, workflow,
};
use latchwork::{CursorError, json};

use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Opens a review, and returns the chosen option and who chose it.
fn refund() -> Workflow<u64, String> {
    workflow("refund").run(async |ctx: Ctx, amount: u64| {
        let question = json!({"amount": amount, "order": 7});
        let decision = ctx.review("refund", &question, ["approve", "reject"]).await?;
        ctx.run("tell", async || Ok(())).await?;
        Ok(format!("{} by {} because {}", decision.option, decision.by, decision.reason))
    })
}

async fn settled() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

/// The ids of open reviews.
async fn open(engine: &Engine) -> Vec<String> {
    engine.reviews().await.unwrap().items.into_iter().map(|review| review.id).collect()
}

#[tokio::test]
async fn a_review_is_listed_while_it_is_open_and_decided_once() {
    let refund = refund();
    let test = TestEngine::new(&refund, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&refund, 80).id("r").await.unwrap();
    settled().await;
    let page = engine.reviews().await.unwrap();
    let [review] = &page.items[..] else { panic!("{page:?}") };
    assert_eq!((&*review.execution, &*review.workflow, &*review.name), ("r", "refund", "refund"));
    assert_eq!((&review.question, &review.state), (&json!({"amount": 80, "order": 7}), &ReviewState::Open));
    assert_eq!((review.options.join(" "), review.until, page.next), ("approve reject".into(), None, None));
    let waits = WaitsFor::Review("refund".into());
    assert_eq!(engine.why("r").await.unwrap().waits[0].what, waits);
    test.run(test.env().sleep(3 * SECOND)).await;
    assert_eq!(engine.residents(), 0, "it waits out of memory");
    let listed = engine.list(ExecutionFilter::new().waits_for(waits)).await.unwrap();
    assert_eq!(listed.items.len(), 1);

    let it = engine.review(&review.id);
    let refused = it.decide("perhaps", "ada", "").await.unwrap_err();
    assert!(matches!(&refused, WorkflowError::NotOffered { offered, .. } if offered.len() == 2), "{refused:?}");
    assert_eq!(refused.to_string(), format!("review {:?} offers approve, reject, not \"perhaps\"", review.id));
    assert!(matches!(it.decide("approve", "", "").await, Err(WorkflowError::Name { .. })));
    let long = "r".repeat(70_000);
    assert!(matches!(it.decide("approve", "ada", &long).await, Err(WorkflowError::PayloadTooLong { .. })));
    for unknown in ["", "no", "no/r", &review.id.replace("/r", "/x"), "00000000-0000-0000-0000-000000000000/r"] {
        let error = engine.review(unknown).decide("approve", "ada", "").await.unwrap_err();
        assert!(matches!(error, WorkflowError::UnknownReview { .. }), "{unknown}: {error:?}");
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    let decision = it.decide("approve", "ada", "it was lost").await.unwrap();
    assert_eq!((&*decision.option, &*decision.by, &*decision.reason), ("approve", "ada", "it was lost"));
    assert!(open(engine).await.is_empty());
    match it.decide("reject", "bob", "no").await {
        Err(WorkflowError::ReviewDecided { decision: made, .. }) => assert_eq!(*made, decision),
        other => panic!("{other:?}"),
    }
    assert_eq!(test.run(handle.result()).await.unwrap(), "approve by ada because it was lost");
    assert_eq!(it.describe().await.unwrap().state, ReviewState::Decided(decision));
}

/// The process ends right before and right after each commit: also between the opening and the wait, and between the
/// decision and its receipt. After each crash the test checks that no review is open that is decided or not waited for.
#[tokio::test]
async fn a_crash_at_any_commit_loses_no_review_and_no_decision() {
    let refund = refund();
    let crashes = Crashes::of(|| refund.clone(), 80).outside(|engine| async move {
        loop {
            let Ok(page) = engine.reviews().await else { return };
            for review in page.items {
                let _ = engine.review(review.id).decide("reject", "bob", "no").await;
            }
            engine.store().env().sleep(SECOND).await;
        }
    });
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), "reject by bob because no", "{:?}", outcome.crash);
    });
    let crashes = crashes.await;
    assert!(crashes >= 6, "{crashes}");
}

/// Fifty callers at once, each for another option, on two threads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_fifty_deciders_one_wins_and_the_others_get_its_decision() {
    let many = workflow("many")
        .run(async |ctx: Ctx, ()| Ok(ctx.review("many", &(), (0..50).map(|option| option.to_string())).await?.option));
    let store = latchwork::store::Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&many).start().await.unwrap();
    for round in 0..10 {
        let handle = engine.start(&many, ()).id(format!("m{round}")).await.unwrap();
        let id = loop {
            match open(&engine).await.pop() {
                Some(id) => break id,
                None => tokio::task::yield_now().await,
            }
        };
        let mut deciders = tokio::task::JoinSet::new();
        for option in 0..50 {
            let review = engine.review(&id);
            deciders.spawn(async move { review.decide(&option.to_string(), &format!("p{option}"), "").await });
        }
        let (mut won, mut told) = (Vec::new(), Vec::new());
        for decided in deciders.join_all().await {
            match decided {
                Ok(decision) => won.push(decision),
                Err(WorkflowError::ReviewDecided { decision, .. }) => told.push(*decision),
                // The execution has ended meanwhile; the decision is still known.
                Err(other) => panic!("{other:?}"),
            }
        }
        assert_eq!((won.len(), told.len()), (1, 49));
        assert!(told.iter().all(|decision| *decision == won[0]));
        assert_eq!(handle.result().await.unwrap(), won[0].option);
    }
}

#[tokio::test]
async fn a_review_that_is_not_decided_in_time_is_closed() {
    let timed = workflow("timed").run(async |ctx: Ctx, ()| {
        let review = ctx.review("slow", &"?", ["yes"]).timeout(3600 * SECOND);
        let decided = review.await?.map(|decision| decision.option);
        ctx.sleep(10 * SECOND).await?;
        Ok(decided)
    });
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&timed, ()).id("t").await.unwrap();
    settled().await;
    let page = engine.reviews().await.unwrap();
    let review = &page.items[0];
    assert_eq!(review.until.unwrap().since(review.opened), Duration::from_secs(3600));
    test.run(test.env().sleep(3601 * SECOND)).await;
    settled().await;
    assert!(open(engine).await.is_empty());
    let late = engine.review(&review.id).decide("yes", "ada", "").await;
    assert!(matches!(late, Err(WorkflowError::ReviewClosed { .. })), "{late:?}");
    assert_eq!(test.run(handle.result()).await.unwrap(), None);
    assert_eq!(engine.review(&review.id).describe().await.unwrap().state, ReviewState::Closed);
    let crashes =
        Crashes::of(|| timed.clone(), ()).run(async |outcome| assert_eq!(outcome.result.as_ref().unwrap(), &None));
    assert!(crashes.await >= 8);
}

/// The race: a decision comes at the very moment when the time is up. If the caller was told that its decision counts,
/// it counts.
#[tokio::test]
async fn a_decision_that_was_accepted_counts_though_the_time_is_up() {
    let timed = workflow("timed").run(async |ctx: Ctx, ()| {
        let decided = ctx.review("slow", &"?", ["yes"]).timeout(5 * SECOND).await?;
        Ok(decided.is_some())
    });
    let (mut counted, mut closed) = (0, 0);
    for turns in 0..60 {
        let test = TestEngine::new(&timed, 1).await.unwrap();
        let engine = test.engine();
        let handle = engine.start(&timed, ()).id("t").await.unwrap();
        settled().await;
        let id = open(engine).await.pop().unwrap();
        let review = engine.review(id);
        let decides = async {
            test.env().sleep(5 * SECOND).await;
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            review.decide("yes", "ada", "").await
        };
        let decided = test.run(decides).await;
        let was_decided = test.run(handle.result()).await.unwrap();
        assert_eq!(decided.is_ok(), was_decided, "after {turns} turns: {decided:?}");
        if was_decided { counted += 1 } else { closed += 1 }
    }
    assert!(counted > 0 && closed > 0, "{counted} and {closed}: both happen");
}

/// A review is closed when its execution ends, in whatever way, or continues without it.
#[tokio::test]
async fn a_review_is_closed_with_the_execution_or_branch_that_opened_it() {
    let ends = workflow("ends").timeout(1000 * SECOND).run(async |ctx: Ctx, how: String| {
        let review = ctx.review("q", &how, ["yes"]);
        match &*how {
            "returns" => drop(review.open().await?),
            "fails" => {
                let _review = review.open().await?;
                return Err(Failure::new("it failed"));
            }
            "continues" => {
                let _review = review.open().await?;
                return ctx.continue_as_new("signalled").await;
            }
            "signalled" => drop(ctx.receive::<()>("end").await?),
            "races" => {
                let first = ctx.select((
                    async |ctx: Ctx| ctx.review("q", &"raced", ["yes"]).await,
                    async |ctx: Ctx| ctx.receive::<()>("end").await,
                ));
                assert!(matches!(first.await, First2::Second(Ok(()))));
                ctx.receive::<()>("end").await?;
            }
            _ => drop(review.await?),
        }
        Ok(())
    });
    let test = TestEngine::new(&ends, 1).await.unwrap();
    let engine = test.engine();
    for how in ["returns", "fails", "continues", "cancelled", "terminated", "timed out", "races"] {
        for away in [false, true] {
            let id = format!("{how} {away}");
            let handle = engine.start(&ends, how.into()).id(&id).await.unwrap();
            settled().await;
            let known = open(engine).await;
            if away {
                test.run(test.env().sleep(5 * SECOND)).await;
            }
            match how {
                "cancelled" => handle.cancel("enough").await.unwrap(),
                "terminated" => handle.terminate("enough").await.unwrap(),
                "timed out" => test.run(test.env().sleep(1001 * SECOND)).await,
                "races" | "continues" => handle.signal("end", &()).await.unwrap(),
                _ => {}
            }
            settled().await;
            assert_eq!(open(engine).await, [""; 0], "{id}");
            for review in &known {
                let late = engine.review(review).decide("yes", "ada", "").await.unwrap_err();
                assert!(matches!(late, WorkflowError::ReviewClosed { .. }), "{id}: {late:?}");
            }
            let is_there_first = !matches!(how, "returns" | "fails" | "continues");
            assert_eq!(known.len(), usize::from(is_there_first), "{id}");
            if how == "races" {
                handle.signal("end", &()).await.unwrap();
            }
            let _ = test.run(handle.result()).await;
        }
    }
    for how in ["returns", "continues", "races"] {
        let crashes = Crashes::of(|| ends.clone(), how.into()).outside(|engine| async move {
            while let Ok(()) = engine.signal("execution", "end", &()).await {
                engine.store().env().sleep(10 * SECOND).await;
            }
        });
        let crashes = crashes.run(async |outcome| assert!(outcome.result.is_ok(), "{outcome:?}"));
        assert!(crashes.await >= 4, "{how}");
    }
}

/// A fork that keeps the opening of a review waits for a decision of its own; a fork that keeps the decision does not
/// wait.
#[tokio::test]
async fn a_fork_has_reviews_of_its_own() {
    let refund = refund();
    let test = TestEngine::new(&refund, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&refund, 80).id("r").await.unwrap();
    settled().await;
    let id = open(engine).await.pop().unwrap();
    engine.review(&id).decide("approve", "ada", "1").await.unwrap();
    test.run(handle.result()).await.unwrap();
    for (at, opens) in [("0", true), ("1", true), ("2", false)] {
        let fork = engine.fork("r").at(at).await.unwrap();
        settled().await;
        let known = open(engine).await;
        assert_eq!(known.len(), usize::from(opens), "at {at}");
        for review in known {
            assert!(review.ends_with(&*fork), "{review}");
            engine.review(review).decide("reject", "bob", at).await.unwrap();
        }
        let result = test.run(engine.handle(&refund, &fork).result()).await.unwrap();
        let expected = if opens { format!("reject by bob because {at}") } else { "approve by ada because 1".into() };
        assert_eq!(result, expected, "at {at}");
    }
    assert!(matches!(engine.history("r").await.unwrap().state, ExecutionState::Completed(_)));
}

#[tokio::test]
async fn open_reviews_are_listed_in_pages_by_workflow_and_name() {
    let asks = |name: &'static str| {
        workflow(name).run(async |ctx: Ctx, review: String| Ok(ctx.review(&review, &(), ["yes"]).await?.option))
    };
    let workflows = [asks("a"), asks("b"), asks("c")];
    let test = workflows.iter().fold(TestEngine::build(1), |test, workflow| test.register(workflow));
    let test = test.start().await.unwrap();
    let engine = test.engine();
    for workflow in &workflows {
        for number in 0..12 {
            let name = ["x", "yy", "zzz"][number % 3].to_string();
            engine.start(workflow, name).await.unwrap();
        }
    }
    settled().await;
    let all = engine.reviews().await.unwrap().items;
    assert_eq!(all.len(), 36);
    for (workflow, name, count) in [
        (None, None, 36),
        (Some("b"), None, 12),
        (None, Some("yy"), 12),
        (Some("c"), Some("x"), 4),
        (None, Some("n"), 0),
    ] {
        let list = || {
            let list = workflow.iter().fold(engine.reviews(), |list, it: &&str| list.workflow(*it));
            name.iter().fold(list, |list, it: &&str| list.name(*it))
        };
        let is_meant = |of: &str, meant: Option<&str>| meant.is_none_or(|meant| meant == of);
        let meant: Vec<_> =
            all.iter().filter(|it| is_meant(&it.workflow, workflow) && is_meant(&it.name, name)).cloned().collect();
        assert_eq!(meant.len(), count);
        for limit in [1, 3, 4, 5, 100] {
            let (mut found, mut cursor) = (Vec::new(), None);
            loop {
                let page = list().limit(limit).after(cursor).await.unwrap();
                assert!(page.items.len() == limit || page.next.is_none());
                found.extend(page.items);
                cursor = page.next;
                if cursor.is_none() {
                    break;
                }
            }
            assert_eq!(found, meant, "{workflow:?} {name:?} in pages of {limit}");
        }
    }
    let page = engine.reviews().limit(1).await.unwrap();
    let other = engine.reviews().name("x").after(page.next).await;
    assert!(matches!(other, Err(WorkflowError::Cursor(CursorError::OtherQuery { .. }))), "{other:?}");
}

#[tokio::test]
async fn an_impossible_review_is_a_typed_failure() {
    let wrong = workflow("wrong").run(async |ctx: Ctx, (name, options): (String, Vec<String>)| {
        let failure = ctx.review(&name, &(), options).await.unwrap_err();
        assert_eq!(failure.code(), "latchwork.review");
        assert_eq!(failure.get::<ReviewError>().unwrap().to_string(), failure.message());
        Ok(failure.message().to_string())
    });
    let test = TestEngine::new(&wrong, 1).await.unwrap();
    for (name, options, why) in [
        ("", &["a"][..], "1 to 256 bytes"),
        (&"n".repeat(257), &["a"], "1 to 256 bytes"),
        ("n", &[], "has 0 options"),
        ("n", &["a", "b", "a"], "\"a\" cannot be an option of review \"n\": it is listed twice"),
        ("n", &["a", ""], "it is empty"),
    ] {
        let options = options.iter().map(|option| option.to_string()).collect();
        let told = test.complete(&wrong, (name.into(), options)).await.unwrap();
        assert!(told.contains(why), "{told}");
    }
    assert!(open(test.engine()).await.is_empty());
}

/// The race: the execution ends with the first decision while another decision is in flight. The second caller gets the
/// first decision, and not an error that the review is closed.
#[tokio::test]
async fn a_decider_that_comes_while_the_execution_ends_gets_the_decision() {
    let asks = workflow("asks").run(async |ctx: Ctx, ()| Ok(ctx.review("q", &(), ["yes", "no"]).await?.option));
    for turns in 0..60 {
        let test = TestEngine::new(&asks, 1).await.unwrap();
        let engine = test.engine();
        let handle = engine.start(&asks, ()).id("a").await.unwrap();
        settled().await;
        let id = open(engine).await.pop().unwrap();
        let (first, second) = (engine.review(&id), engine.review(&id));
        let later = async {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            second.decide("no", "bob", "").await
        };
        let (first, second) = tokio::join!(first.decide("yes", "ada", ""), later);
        match (first, second) {
            (Ok(made), Err(WorkflowError::ReviewDecided { decision, .. }))
            | (Err(WorkflowError::ReviewDecided { decision, .. }), Ok(made)) => {
                assert_eq!(*decision, made, "after {turns} turns");
                assert_eq!(test.run(handle.result()).await.unwrap(), made.option);
            }
            other => panic!("after {turns} turns: {other:?}"),
        }
    }
}

/// The race: the decision or the end of the time is in flight when the other lands. The first to land counts, and both
/// sides are told the same.
#[tokio::test]
async fn a_decision_that_races_with_the_end_of_the_time_is_accepted_or_not() {
    for decides_first in [false, true] {
        let timed = workflow("timed").run(async |ctx: Ctx, ()| {
            let decided = ctx.review("slow", &"?", ["yes"]).timeout(5 * SECOND).await?;
            Ok(decided.is_some())
        });
        let stage = Stage::new(|builder| builder.register(&timed)).await;
        let engine = stage.engine.clone();
        let handle = engine.start(&timed, ()).id("t").await.unwrap();
        stage.turns().await;
        let review = engine.review(open(&engine).await.pop().unwrap());
        stage.hold_to("workflow.reviews", Side::Before).await;
        let decided = if decides_first {
            // The commit that closes the review is in flight.
            stage.pass(6 * SECOND).await;
            let decided = review.decide("yes", "ada", "").await;
            stage.open();
            decided
        } else {
            let decides = stage.begins(async move { review.decide("yes", "ada", "").await }).await;
            stage.pass(6 * SECOND).await;
            stage.open();
            stage.turns().await;
            stage.done(decides).await
        };
        stage.turns().await;
        assert_eq!(decided.is_ok(), decides_first, "{decided:?}");
        assert_eq!(handle.result().await.unwrap(), decides_first);
        assert_eq!(open(&engine).await, [""; 0]);
    }
}

/// The next run does not know the reviews of the run before.
#[tokio::test]
async fn a_review_of_a_run_that_was_continued_is_not_known() {
    let continues = workflow("continues").run(async |ctx: Ctx, n: u32| {
        let review = ctx.review("q", &n, ["yes"]).open().await?;
        if n == 0 {
            ctx.receive::<()>("on").await?;
            return ctx.continue_as_new(1).await;
        }
        Ok(review.decision().await?.map(|decision| decision.option))
    });
    let test = TestEngine::new(&continues, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&continues, 0).id("c").await.unwrap();
    settled().await;
    let first = open(engine).await.pop().unwrap();
    engine.signal("c", "on", &()).await.unwrap();
    settled().await;
    let known = open(engine).await;
    assert!(known.len() == 1 && known[0] != first, "{known:?}");
    let error = engine.review(&first).decide("yes", "ada", "").await.unwrap_err();
    assert!(matches!(error, WorkflowError::UnknownReview { .. }), "{error:?}");
    engine.review(&known[0]).decide("yes", "ada", "").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap().as_deref(), Some("yes"));
}

/// The review was in a branch that lost: the fork keeps the winner, and opens no review.
#[tokio::test]
async fn a_fork_opens_no_review_that_was_given_up() {
    let races = workflow("races").run(async |ctx: Ctx, ()| {
        let first = ctx.select((
            async |ctx: Ctx| ctx.review("q", &"raced", ["yes"]).await.map(drop),
            async |ctx: Ctx| ctx.receive::<()>("end").await,
        ));
        assert!(matches!(first.await, First2::Second(Ok(()))));
        ctx.run("last", async || Ok(())).await?;
        ctx.receive::<()>("end").await
    });
    let test = TestEngine::new(&races, 1).await.unwrap();
    let engine = test.engine();
    engine.start(&races, ()).id("r").await.unwrap();
    settled().await;
    assert_eq!(open(engine).await.len(), 1);
    engine.signal("r", "end", &()).await.unwrap();
    settled().await;
    let fork = engine.fork("r").at_step("last").await.unwrap();
    settled().await;
    assert_eq!(open(engine).await, [""; 0]);
    engine.signal(&fork, "end", &()).await.unwrap();
    test.run(engine.handle(&races, &fork).result()).await.unwrap();
}
