//! After-effects: delivered in order, at least once, under a stable key, and never without their transition.

use std::sync::Arc;
use std::time::Duration;

use latchwork::claim::{ActionCtx, AfterEffect, ClaimStep, ClaimWorkflow, Claims, Fired, Outcome};
use latchwork::entity::Add;
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, workflow};

use super::kit::{Kit, Seen, invoices, sleep};

#[tokio::test]
async fn an_after_effect_that_fails_is_retried_before_the_next_one_is_delivered() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let input = json!({"effect_fails": 2, "amount": 1});
    assert!(kit.claims.fire("invoice", "pay", "i").by("admin").input(input).await.unwrap().is_done());
    kit.deliver().await;
    let effects = kit.seen.effects.lock().clone();
    let seen: Vec<(&str, u32)> = effects.iter().map(|effect| (effect.name.as_str(), effect.attempt)).collect();
    assert_eq!(seen, [("SendReceipt", 3), ("TellBooks", 3)]);
    assert_eq!((effects[0].key.as_str(), effects[1].key.as_str()), ("i:3:0", "i:3:1"));
    assert_eq!((effects[0].from.as_str(), effects[0].to.as_str(), effects[0].rev), ("sent", "paid", 3));
    assert_eq!((&effects[0].output, &effects[0].input["amount"]), (&json!("done"), &json!(1)));
}

#[tokio::test]
async fn an_after_effect_that_never_succeeds_becomes_a_dead_letter_and_can_be_redelivered() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let seen = Arc::new(Seen::default());
    let claims = invoices(&engine, &seen).after_effect_attempts(2).start().await.unwrap();
    let kit = Kit { engine, claims, seen };
    kit.add("i").await;
    let input = json!({"effect_fails": 2});
    assert!(kit.claims.fire("invoice", "pay", "i").by("admin").input(input).await.unwrap().is_done());
    kit.deliver().await;
    assert_eq!(kit.seen.delivered(), []);
    let operator = kit.claims.operate().await.unwrap();
    let dead = operator.stored().dead_letters().await.unwrap().items;
    let named: Vec<_> =
        dead.iter().map(|dead| (dead.effect.key.as_str(), dead.attempts, dead.error.as_str())).collect();
    assert_eq!(named, [("i:3:0", 2, "the mail server is away"), ("i:3:1", 2, "the mail server is away")]);
    let first = operator.stored().dead_letters().limit(1).await.unwrap();
    assert_eq!((first.items, first.next.is_some()), (dead[..1].to_vec(), true));
    let rest = operator.stored().dead_letters().after(first.next).await.unwrap();
    assert_eq!((rest.items, rest.next), (dead[1..].to_vec(), None));
    // It fails twice more, and is a dead letter again. The other one stays as it is.
    operator.redeliver("i:3:0").await.unwrap();
    assert!(operator.redeliver("i:9:0").await.is_err());
    kit.deliver().await;
    assert_eq!(operator.stored().dead_letters().await.unwrap().items.len(), 2);
}

// All callers expect the same after-effect: the same entity, the same rev, the same number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_lose_the_race_for_an_unclaimed_step_do_not_remove_the_winners_after_effect() {
    let directory = tempfile::tempdir().unwrap();
    let kit = Kit::on(&Store::open(directory.path()).await.unwrap()).await;
    for number in 0..50 {
        let id = format!("i{number}");
        kit.add(&id).await;
        let fire = |_| tokio::spawn(kit.claims.fire("invoice", "remind", id.as_str()).into_future());
        let callers: Vec<_> = (0..4).map(fire).collect();
        let mut done = 0;
        for caller in callers {
            done += usize::from(caller.await.unwrap().unwrap().is_done());
        }
        assert_eq!(done, 1);
    }
    kit.deliver().await;
    assert_eq!(kit.seen.delivered().len(), 50);
}

#[tokio::test]
async fn the_next_process_delivers_what_was_not_delivered() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).await.unwrap();
    let away = Engine::on(&store).start().await.unwrap();
    let seen = Arc::new(Seen::default());
    let hangs = Claims::on(&away)
        .workflow(notes())
        .action("Finish", finish)
        .after_effect("Tell", async |_| std::future::pending::<Result<(), String>>().await)
        .start()
        .await
        .unwrap();
    for note in ["a", "b"] {
        hangs.add("note", Add::new("note").id(note).data(json!({"status": "open"}))).await.unwrap();
        assert!(hangs.fire("note", "finish", note).await.unwrap().is_done());
        assert!(hangs.fire("note", "reopen", note).await.unwrap().is_done());
    }
    assert_eq!(hangs.undelivered(), 4);
    away.stop();
    drop(hangs);
    store.close().await.unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let told = seen.clone();
    let claims = Claims::on(&engine).workflow(notes()).action("Finish", finish);
    let claims = claims.after_effect("Tell", move |effect| {
        told.effects.lock().push(effect);
        std::future::ready(Ok::<_, String>(()))
    });
    let _claims = claims.start().await.unwrap();
    while seen.effects.lock().len() < 4 {
        sleep(Duration::from_millis(2)).await;
    }
    for note in ["a", "b"] {
        let effects = seen.effects.lock().clone();
        let of: Vec<u64> = effects.iter().filter(|it| it.entity.as_str() == note).map(|it| it.rev).collect();
        assert!(of.is_sorted() && of.len() == 2, "{of:?}");
    }
}

fn notes() -> ClaimWorkflow {
    ClaimWorkflow::new("note", "notes", "note")
        .statuses(["open", "done"])
        .step(ClaimStep::new(1, "finish", "open", "done").action("Finish").after("Tell"))
        .step(ClaimStep::new(2, "reopen", "done", "open").after("Tell"))
}

async fn finish(_: ActionCtx) -> Result<Outcome, String> {
    Ok(Outcome::done())
}

#[tokio::test]
async fn a_workflow_as_an_after_effect_starts_in_the_commit_of_the_transition() {
    let tell = workflow("tell").run(async |ctx: Ctx, effect: AfterEffect| {
        ctx.run("send", async || Ok(())).await?;
        Ok(effect.key)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&tell).start().await.unwrap();
    let claims = Claims::on(&engine).workflow(notes()).action("Finish", finish);
    let claims = claims.after_effect_workflow("Tell", &tell).start().await.unwrap();
    claims.add("note", Add::new("note").id("n").data(json!({"status": "open"}))).await.unwrap();
    assert!(claims.fire("note", "finish", "n").await.unwrap().is_done());
    assert_eq!(engine.handle(&tell, "Tell:n:2:0").result().await.unwrap(), "n:2:0");
    assert_eq!(claims.undelivered(), 0);
}

// What an action writes through its context is committed with the transition or not at all: entities, slots,
// executions.
#[tokio::test]
async fn all_writes_of_an_action_are_committed_with_the_final_status_or_not_at_all() {
    let ship = workflow("ship").run(async |_: Ctx, parcel: String| Ok(parcel));
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&ship).start().await.unwrap();
    let starts = ship.clone();
    let workflow = ClaimWorkflow::new("note", "notes", "note")
        .statuses(["open", "busy", "done"])
        .step(ClaimStep::new(1, "finish", "open", "done").action("Finish").claimed("busy"));
    let claims = Claims::on(&engine).workflow(workflow).action("Finish", move |ctx: ActionCtx| {
        let ship = starts.clone();
        async move {
            ctx.add(Add::new("mark").id(format!("mark of {}", ctx.entity().id)));
            ctx.update_slot(&ctx.states().global().slot::<u64>("finished"), |finished| finished.unwrap_or(0) + 1);
            ctx.start_as(&ship, &ctx.entity().id.to_string(), ctx.input()["as"].as_str().unwrap_or("s"));
            Ok::<_, String>(Outcome::done())
        }
    });
    let claims = claims.start().await.unwrap();
    let finished = engine.states().global().slot::<u64>("finished");
    for (note, id, succeeds) in [("a", "s1", true), ("b", "s1", false), ("b", "s2", true)] {
        let add = Add::new("note").id(note).data(json!({"status": "open"})).if_absent(true);
        claims.add("note", add).await.unwrap();
        let fired = claims.fire("note", "finish", note).input(json!({"as": id})).await;
        assert_eq!(matches!(fired, Ok(Fired::Done(_))), succeeds, "{fired:?}");
        if !succeeds {
            // The id is taken: nothing is written, and the claim is released.
            assert!(fired.unwrap_err().to_string().contains("s1"));
            assert_eq!(engine.entities().get("mark of b").await.unwrap(), None);
            assert_eq!(finished.get().await.unwrap(), Some(1));
        }
    }
    assert_eq!(finished.get().await.unwrap(), Some(2));
    assert_eq!(engine.handle(&ship, "s2").result().await.unwrap(), "b");
}

// Other callers change the slot all the time. The change is computed again from their latest value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_other_callers_change_meanwhile_loses_no_update() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let workflow = ClaimWorkflow::new("note", "notes", "note")
        .statuses(["open", "busy", "done"])
        .step(ClaimStep::new(1, "finish", "open", "done").action("Finish").claimed("busy"));
    let claims = Claims::on(&engine).workflow(workflow).action("Finish", async |ctx: ActionCtx| {
        ctx.update_slot(&ctx.states().global().slot::<u64>("count"), |count| count.unwrap_or(0) + 1);
        Ok::<_, String>(Outcome::done())
    });
    let claims = claims.start().await.unwrap();
    let count = engine.states().global().slot::<u64>("count");
    let mut tasks = Vec::new();
    for note in 0..20 {
        let (claims, count) = (claims.clone(), count.clone());
        tasks.push(tokio::spawn(async move {
            let id = format!("n{note}");
            claims.add("note", Add::new("note").id(&*id).data(json!({"status": "open"}))).await.unwrap();
            count.increment(1).await.unwrap();
            assert!(claims.fire("note", "finish", &*id).await.unwrap().is_done());
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(count.get().await.unwrap(), Some(40));
}

// The caller gives up while the commit of an unclaimed step is on its way. The commit lands and has its after-effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_after_effect_is_delivered_even_if_the_caller_gives_up() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let seen = Arc::new(Seen::default());
    let told = seen.clone();
    let claims = Claims::on(&engine).workflow(notes()).action("Finish", finish);
    let claims = claims.after_effect("Tell", move |effect| {
        told.effects.lock().push(effect);
        std::future::ready(Ok::<_, String>(()))
    });
    let claims = claims.start().await.unwrap();
    let mut done = 0;
    for note in 0..100 {
        let id = format!("n{note}");
        claims.add("note", Add::new("note").id(&*id).data(json!({"status": "open"}))).await.unwrap();
        let fire = std::future::IntoFuture::into_future(claims.fire("note", "finish", &*id));
        let _ = tokio::time::timeout(Duration::from_micros(note * 5), fire).await;
    }
    for _ in 0..2_000 {
        sleep(Duration::from_millis(1)).await;
        done = 0;
        for note in 0..100 {
            let entity = engine.entities().get(format!("n{note}")).await.unwrap().unwrap();
            done += usize::from(entity.data["status"] == "done");
        }
        if seen.effects.lock().len() == done && claims.undelivered() == 0 {
            break;
        }
    }
    assert_eq!(seen.effects.lock().len(), done);
}

// The id of an entity may be as long as the id of an execution.
#[tokio::test]
async fn a_workflow_as_an_after_effect_starts_for_an_entity_with_a_long_id() {
    let tell = workflow("tell").run(async |_: Ctx, effect: AfterEffect| Ok(effect.key));
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&tell).start().await.unwrap();
    let claims = Claims::on(&engine).workflow(notes()).action("Finish", finish);
    let claims = claims.after_effect_workflow("Tell", &tell).start().await.unwrap();
    let id = "n".repeat(512);
    claims.add("note", Add::new("note").id(&*id).data(json!({"status": "open"}))).await.unwrap();
    assert!(claims.fire("note", "finish", &*id).await.unwrap().is_done());
    let found = engine.list(ExecutionFilter::new().workflow("tell")).await.unwrap().items;
    assert_eq!(found.len(), 1);
    assert_eq!(engine.handle(&tell, found[0].id.clone()).result().await.unwrap(), format!("{id}:2:0"));
}
