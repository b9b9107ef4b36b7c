//! Firing steps: the table of failures, races, and what the callers get.

use std::sync::Arc;

use latchwork::claim::{
    ActionCtx, ActionError, AfterEffect, ClaimError, ClaimStep, ClaimWorkflow, Claims, Fired, Outcome, Reason,
};
use latchwork::entity::{Add, Update};
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::Engine;

use super::kit::{BankClosed, Kit, Seen, invoices, invoices_with, sleep};

#[tokio::test]
async fn a_claimed_step_commits_writes_status_and_after_effects_together() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let fired = kit.pay("i", "succeed").await.unwrap();
    let done = fired.done().unwrap();
    assert_eq!((done.from.as_str(), done.to.as_str(), &done.output), ("sent", "paid", &json!("done")));
    let invoice = kit.engine.entities().get("i").await.unwrap().unwrap();
    assert_eq!(invoice.data, json!({"status": "paid", "amount": 100, "paid_by": "admin"}));
    assert_eq!((invoice.rev, kit.payments().await, kit.seen.bodies()), (done.rev, 1, 1));
    kit.deliver().await;
    assert_eq!(
        kit.seen.delivered(),
        [("SendReceipt".to_string(), "i".to_string()), ("TellBooks".to_string(), "i".to_string())]
    );
    let open = kit.claims.operate().await.unwrap().stored().list().await.unwrap().items;
    assert_eq!(open, []);
}

// The first three rows of the table of failures: the claim is released at once, and the caller gets the action's
// result.
#[tokio::test]
async fn an_action_that_does_not_succeed_writes_nothing_and_its_claim_is_released_at_once() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let Fired::Failure(failure) = kit.pay("i", "fail").await.unwrap() else { panic!("a failure") };
    assert_eq!((failure.message.as_str(), kit.status("i").await.as_str()), ("the card was refused", "sent"));
    let Fired::Rejection(rejection) = kit.pay("i", "reject").await.unwrap() else { panic!("a rejection") };
    assert_eq!((rejection.message.as_str(), kit.status("i").await.as_str()), ("the amount is negative", "sent"));
    let Err(ClaimError::Action { error, .. }) = kit.pay("i", "error").await else { panic!("an error") };
    assert_eq!(error.downcast_ref::<BankClosed>(), Some(&BankClosed { until: 8 }));
    assert_eq!(kit.status("i").await, "sent");
    let Err(ClaimError::Action { error, .. }) = kit.pay("i", "panic").await else { panic!("an error") };
    assert!(error.has_panicked() && error.to_string().contains("the action panics"), "{error}");
    assert_eq!((kit.status("i").await.as_str(), kit.payments().await, kit.seen.bodies()), ("sent", 0, 4));
    kit.deliver().await;
    assert_eq!(kit.seen.delivered(), []);
    // Each of them is in the history, with its reason.
    let history = kit.claims.operate().await.unwrap().stored().history("i").limit(10).await.unwrap().items;
    let reasons: Vec<&str> = history.iter().rev().map(|transition| transition.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "the action failed: the card was refused",
            "the action rejected it: the amount is negative",
            "the action ended with an error: the bank is closed until 8",
            "the action ended with an error: it panicked: the action panics",
        ]
    );
    assert!(kit.pay("i", "succeed").await.unwrap().is_done());
}

#[tokio::test]
async fn failure_rejection_and_error_are_different_outcomes_in_json() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let word = |fired: &Fired| serde_json::to_value(fired).unwrap()["outcome"].as_str().unwrap().to_string();
    assert_eq!(word(&kit.pay("i", "fail").await.unwrap()), "failure");
    assert_eq!(word(&kit.pay("i", "reject").await.unwrap()), "rejection");
    assert_eq!(kit.pay("i", "error").await.unwrap_err().to_json()["outcome"], "error");
    let done = serde_json::to_value(kit.pay("i", "succeed").await.unwrap()).unwrap();
    assert_eq!(done, json!({"outcome": "done", "from": "sent", "to": "paid", "rev": 9, "output": "done"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_of_fifty_concurrent_requests_runs_the_body() {
    let directory = tempfile::tempdir().unwrap();
    let kit = Arc::new(Kit::on(&Store::open(directory.path()).await.unwrap()).await);
    for round in 0..20 {
        let id = format!("i{round}");
        kit.add(&id).await;
        let fire = |_| {
            let (kit, id) = (kit.clone(), id.clone());
            tokio::spawn(async move { kit.pay(&id, "succeed").await.unwrap() })
        };
        let tasks: Vec<_> = (0..50).map(fire).collect();
        let (mut done, mut refused) = (0, 0);
        for task in tasks {
            match task.await.unwrap() {
                Fired::Done(_) => done += 1,
                fired if fired.is_refused() => refused += 1,
                fired => panic!("{fired:?}"),
            }
        }
        assert_eq!((done, refused, kit.seen.bodies()), (1, 49, round + 1));
    }
    assert_eq!(kit.payments().await, 20);
}

#[tokio::test]
async fn the_loser_gets_the_holder_of_the_claim_and_the_rest_of_its_lease() {
    let kit = Arc::new(Kit::new().await);
    kit.add("i").await;
    let input = json!({"pause_ms": 300});
    let first = kit.claims.fire("invoice", "pay", "i").by("admin").actor("ann").input(input);
    let first = tokio::spawn(async move { first.await.unwrap() });
    let holder = loop {
        sleep(std::time::Duration::from_millis(5)).await;
        if kit.seen.bodies() == 0 {
            continue;
        }
        match kit.claims.fire("invoice", "pay", "i").by("system").await.unwrap() {
            Fired::ClaimFailed(failed) => {
                assert_eq!(failed.status, "paying");
                break failed.holder.unwrap();
            }
            fired => panic!("{fired:?}"),
        }
    };
    assert_eq!((holder.requester.as_str(), holder.actor.as_deref()), ("admin", Some("ann")));
    assert_eq!(holder.step, "pay (20)");
    let left = holder.lease_left.unwrap().as_millis();
    assert!((1..=2000).contains(&left), "{left}");
    assert!(first.await.unwrap().is_done());
    assert_eq!(kit.seen.bodies(), 1);
}

// Another write commits first. The commit of the step is refused after its body has run.
#[tokio::test]
async fn the_loser_of_an_unclaimed_step_gets_a_conflict_and_has_written_nothing() {
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let seen = Arc::new(Seen::default());
    let (entities, gate) = (engine.entities().clone(), Arc::new(tokio::sync::Semaphore::new(0)));
    let (inside, opens) = (gate.clone(), gate.clone());
    let workflow = latchwork::claim::ClaimWorkflow::new("note", "notes", "note")
        .statuses(["open", "done"])
        .step(latchwork::claim::ClaimStep::new(1, "finish", "open", "done").action("Finish").after("Tell"));
    let claims = latchwork::claim::Claims::on(&engine)
        .workflow(workflow)
        .action("Finish", move |ctx: latchwork::claim::ActionCtx| {
            let inside = inside.clone();
            async move {
                ctx.add(latchwork::entity::Add::new("mark"));
                inside.acquire().await.unwrap().forget();
                Ok::<_, BankClosed>(latchwork::claim::Outcome::done())
            }
        })
        .after_effect("Tell", {
            let seen = seen.clone();
            move |effect| {
                seen.effects.lock().push(effect);
                async { Ok::<_, String>(()) }
            }
        })
        .start()
        .await
        .unwrap();
    let note = latchwork::entity::Add::new("note").id("n").data(json!({"status": "open"}));
    claims.add("note", note).await.unwrap();
    let fire = claims.fire("note", "finish", "n");
    let fire = tokio::spawn(async move { fire.await.unwrap() });
    tokio::task::yield_now().await;
    entities.update(Update::new("n").metadata(json!({"read": true}))).await.unwrap();
    opens.add_permits(1);
    let Fired::Conflict(conflict) = fire.await.unwrap() else { panic!("a conflict") };
    assert_eq!(conflict.status.as_deref(), Some("open"));
    let marks = entities.find(&latchwork::entity::Query::of("mark")).await.unwrap().items.len();
    assert_eq!((marks, claims.undelivered(), seen.effects.lock().len()), (0, 0, 0));
    opens.add_permits(1);
    assert!(claims.fire("note", "finish", "n").await.unwrap().is_done());
}

#[tokio::test]
async fn a_refused_step_lists_all_its_reasons() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let Fired::NotPermitted(why) = kit.claims.fire("invoice", "close", "i").by("system").await.unwrap() else {
        panic!("not permitted")
    };
    assert_eq!(why.reasons, [Reason::Status { expected: vec!["paid".into()] }]);
    kit.pay("i", "succeed").await.unwrap();
    let left = json!({"status": "paid", "left": 3});
    kit.engine.entities().update(Update::new("i").data(left)).await.unwrap();
    let Fired::NotPermitted(why) = kit.claims.fire("invoice", "close", "i").by("system").await.unwrap() else {
        panic!("not permitted")
    };
    let (allowed, guard) = (vec!["admin".to_string()], "is_settled".to_string());
    let message = "something is left to pay".to_string();
    assert_eq!(why.reasons, [Reason::Requester { allowed }, Reason::Guard { guard, message }]);
    let permitted = kit.claims.permitted("invoice", "i", "admin").await.unwrap();
    assert_eq!((permitted.steps.len(), permitted.others.len()), (0, 3));
    kit.engine.entities().update(Update::new("i").data(json!({"status": "paid", "left": 0}))).await.unwrap();
    let permitted = kit.claims.permitted("invoice", "i", "admin").await.unwrap();
    assert_eq!(permitted.steps, ["close"]);
    assert!(kit.claims.fire("invoice", "close", "i").by("admin").await.unwrap().is_done());
}

#[tokio::test]
async fn the_error_for_a_bad_call_says_what_is_wrong() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let fire = |workflow: &str, step: &str, id: &str| kit.claims.fire(workflow, step, id);
    let error = fire("invoices", "pay", "i").await.unwrap_err().to_string();
    assert_eq!(error, r#"there is no claim workflow "invoices"; configured are ["invoice"]"#);
    let error = fire("invoice", "payy", "i").await.unwrap_err().to_string();
    assert_eq!(error, r#"claim workflow "invoice" has no step "payy"; its steps are ["close", "pay", "remind"]"#);
    assert_eq!(fire("invoice", "pay", "j").await.unwrap_err().to_string(), r#"there is no entity "j""#);
    let other = latchwork::entity::Add::new("payment").id("p").data(json!({"status": "sent"}));
    kit.engine.entities().add(other).await.unwrap();
    let error = fire("invoice", "pay", "p").await.unwrap_err().to_string();
    assert!(error.contains(r#"entity "p" is a "payment""#), "{error}");
    let plain = latchwork::entity::Add::new("invoice").id("q").data(json!({"status": 7}));
    kit.engine.entities().add(plain).await.unwrap();
    let error = fire("invoice", "pay", "q").await.unwrap_err().to_string();
    assert_eq!(error, r#"entity "q" has no status: its data have no text at "status""#);
    let late = latchwork::entity::Add::new("invoice").id("r").data(json!({"status": "paid"}));
    let error = kit.claims.add("invoice", late).await.unwrap_err().to_string();
    assert_eq!(error, r#"entities of claim workflow "invoice" start at ["sent"], but this entity is at "paid""#);
}

#[tokio::test]
async fn start_reports_everything_that_is_missing() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let builder = latchwork::claim::Claims::on(&engine).configure(super::kit::INVOICES);
    let Err(ClaimError::Config { findings }) = builder.start().await else { panic!("findings") };
    let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
    for name in ["Pay", "Remind", "SendReceipt", "TellBooks", "SendReminder", "is_settled"] {
        assert!(messages.iter().any(|message| message.contains(name)), "{name}: {messages:?}");
    }
    assert!(findings.iter().all(|finding| finding.position.is_some()));
    let seen = Arc::new(Seen::default());
    let twice = invoices(&engine, &seen).configure(super::kit::INVOICES).start().await;
    assert!(matches!(twice, Err(ClaimError::Config { .. })), "a name is used twice");
}

// A module that must free its claims and has registered no janitor is found at the start, not after the first crash.
#[tokio::test]
async fn claims_do_not_start_if_a_claiming_status_has_no_janitor() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let modular = super::kit::INVOICES.replace(r#""status_field""#, r#""janitor": "module", "status_field""#);
    let claims = || invoices_with(&engine, &Arc::default(), &modular);
    let declared = claims().declared("billing");
    assert_eq!((declared.len(), claims().declared("shipping").len()), (1, 0));
    assert_eq!((declared[0].claim_into.as_str(), declared[0].revert_to.as_slice()), ("paying", &["sent".into()][..]));
    let Err(ClaimError::Uncovered { missing }) = claims().start().await else { panic!("no janitor covers it") };
    let named = "workflow \"invoice\" declares \"paying\", and module \"billing\" has not registered a janitor for it";
    assert_eq!(missing.iter().map(ToString::to_string).collect::<Vec<_>>(), [named]);
    claims().cover("billing", async |claim| claim.recovery).start().await.unwrap();
}

// Two workflows for one entity type, each with its own status field. While one has claimed the entity, the other cannot
// fire.
#[tokio::test]
async fn a_claim_blocks_the_steps_of_other_workflows_on_the_entity() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let (gate, bodies) = (Arc::new(tokio::sync::Semaphore::new(0)), Arc::new(Seen::default()));
    let mut review = ClaimWorkflow::new("review", "audit", "invoice").statuses(["open", "reviewed"]);
    review.meta.status_field = "review.status".into();
    let review = review.step(ClaimStep::new(1, "review", "open", "reviewed").action("Review"));
    let pay = ClaimWorkflow::new("pay", "billing", "invoice").statuses(["sent", "paying", "paid"]);
    let pay = pay.step(ClaimStep::new(1, "pay", "sent", "paid").claimed("paying").action("Pay"));
    let (inside, seen) = (gate.clone(), bodies.clone());
    let claims = Claims::on(&engine).workflow(review).workflow(pay);
    let claims = claims.action("Review", async |_: ActionCtx| Ok::<_, BankClosed>(Outcome::done()));
    let claims = claims.action("Pay", move |_: ActionCtx| {
        let (inside, seen) = (inside.clone(), seen.clone());
        async move {
            seen.bodies.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            inside.acquire().await.unwrap().forget();
            Ok::<_, BankClosed>(Outcome::done())
        }
    });
    let claims = claims.start().await.unwrap();
    let data = json!({"status": "sent", "review": {"status": "open"}});
    engine.entities().add(Add::new("invoice").id("i").data(data)).await.unwrap();
    let fire = claims.fire("pay", "pay", "i");
    let fired = tokio::spawn(async move { fire.await.unwrap() });
    while bodies.bodies() == 0 {
        sleep(std::time::Duration::from_millis(1)).await;
    }
    let refused = claims.fire("review", "review", "i").await.unwrap();
    assert!(matches!(refused, Fired::ClaimFailed(ref failed) if failed.holder.is_some()), "{refused:?}");
    gate.add_permits(1);
    assert!(fired.await.unwrap().is_done());
    assert!(claims.fire("review", "review", "i").await.unwrap().is_done());
    let data = engine.entities().get("i").await.unwrap().unwrap().data;
    assert_eq!(data, json!({"status": "paid", "review": {"status": "reviewed"}}));
}

// An action without errors and a handler without errors name no type of error. `?` turns any error into one that the
// caller gets unchanged.
#[tokio::test]
async fn an_action_returns_an_outcome_or_a_result_with_any_error() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let job = ClaimWorkflow::new("job", "jobs", "job").statuses(["open", "done"]);
    let job = job.step(ClaimStep::new(1, "read", "open", "done").action("Read"));
    let job = job.step(ClaimStep::new(2, "finish", "open", "done").action("Finish").after("Tell"));
    let claims = Claims::on(&engine).workflow(job);
    let claims = claims.action("Finish", async |_: ActionCtx| Outcome::output(7));
    let claims = claims.action("Read", async |_: ActionCtx| -> Result<Outcome, ActionError> {
        Ok(Outcome::output("x".parse::<u32>()?))
    });
    let claims = claims.after_effect("Tell", async |_: AfterEffect| {}).start().await.unwrap();
    claims.add("job", Add::new("job").id("j").data(json!({"status": "open"}))).await.unwrap();
    match claims.fire("job", "read", "j").await {
        Err(ClaimError::Action { error, .. }) => assert!(error.downcast_ref::<std::num::ParseIntError>().is_some()),
        fired => panic!("x is no number: {fired:?}"),
    }
    let fired = claims.fire("job", "finish", "j").await.unwrap();
    assert_eq!(fired.done().unwrap().output, 7);
    while claims.undelivered() > 0 {
        sleep(std::time::Duration::from_millis(1)).await;
    }
}

// A caller stops polling after its claim was sent. The action runs all the same.
#[tokio::test]
async fn a_caller_that_stops_polling_does_not_stop_its_action() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let mut fire = Box::pin(std::future::IntoFuture::into_future(
        kit.claims.fire("invoice", "pay", "i").by("admin").input(json!({})),
    ));
    // Polls until the claim is on its way, and not once more.
    for _ in 0..100 {
        let polled = std::future::poll_fn(|context| std::task::Poll::Ready(fire.as_mut().poll(context).is_pending()));
        assert!(polled.await);
        tokio::task::yield_now().await;
        if kit.status("i").await != "sent" {
            break;
        }
    }
    while kit.status("i").await != "paid" {
        sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(fire.await.unwrap().is_done());
}

#[tokio::test]
async fn claims_can_be_started_only_once_on_an_engine() {
    let kit = Kit::new().await;
    let again = || invoices(&kit.engine, &kit.seen).start();
    assert!(matches!(again().await, Err(ClaimError::AlreadyStarted)));
    let Kit { engine, claims, seen } = kit;
    drop(claims);
    // The previous claims may still have tasks that end.
    for _ in 0..1000 {
        if invoices(&engine, &seen).start().await.is_ok() {
            return;
        }
        sleep(std::time::Duration::from_millis(1)).await;
    }
    panic!("the previous claims never end");
}
