//! Claims whose process is gone or was paused for too long, and what operators do.

use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use latchwork::claim::{ClaimError, Claims, Fired, Recovery, StoredClaims, TransitionKind};
use latchwork::entity::Update;
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use tokio::runtime::Runtime;

use super::kit::{INVOICES, Kit, Seen, invoices_with, sleep};

/// A process with its own runtime. It stands still while its runtime is not driven.
struct Process {
    runtime: Runtime,
    seen: Arc<Seen>,
    engine: Option<Engine>,
    claims: Option<Claims>,
}

fn config(recovery: &str) -> String {
    let config = INVOICES.replace(r#""lease": "2s""#, &format!(r#""lease": "200ms", "recovery": "{recovery}""#));
    assert_ne!(config, INVOICES);
    config
}

impl Process {
    fn start(store: &Store, config: &str) -> Process {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let seen = Arc::new(Seen::default());
        let (engine, claims) = runtime.block_on(async {
            let engine = Engine::on(store).start().await.unwrap();
            let claims = invoices_with(&engine, &seen, config).sweep_every(Duration::from_millis(20));
            let claims = claims.cover("billing", async |claim| claim.recovery).start().await.unwrap();
            (engine, claims)
        });
        Process { runtime, seen, engine: Some(engine), claims: Some(claims) }
    }

    fn claims(&self) -> &Claims {
        self.claims.as_ref().unwrap()
    }

    fn add(&self, id: &str) {
        let add = latchwork::entity::Add::new("invoice").id(id).data(json!({"status": "sent"}));
        self.runtime.block_on(self.claims().add("invoice", add)).unwrap();
    }

    /// Fires `pay`, and returns when its body has begun.
    fn begin(&self, id: &str, pause_ms: u64) -> tokio::task::JoinHandle<latchwork::claim::Result<Fired>> {
        self.begin_with(id, json!({"pause_ms": pause_ms, "amount": 7}))
    }

    fn begin_with(
        &self,
        id: &str,
        input: latchwork::Value,
    ) -> tokio::task::JoinHandle<latchwork::claim::Result<Fired>> {
        let before = self.seen.bodies();
        let fire = self.claims().fire("invoice", "pay", id).by("admin").actor("ann").input(input);
        let fired = self.runtime.spawn(async move { fire.await });
        self.runtime.block_on(async {
            while self.seen.bodies() == before {
                sleep(Duration::from_millis(1)).await;
            }
        });
        fired
    }

    /// Waits until the invoice is at a status. Panics after ten seconds.
    fn until(&self, id: &str, status: &str) {
        let entities = self.engine.as_ref().unwrap().entities().clone();
        self.runtime.block_on(async {
            for _ in 0..5_000 {
                if entities.get(id).await.unwrap().unwrap().data["status"] == status {
                    return;
                }
                sleep(Duration::from_millis(2)).await;
            }
            panic!("{id} does not reach {status}");
        });
    }

    fn payments(&self) -> usize {
        let entities = self.engine.as_ref().unwrap().entities().clone();
        let payments =
            async move { entities.find(&latchwork::entity::Query::of("payment")).await.unwrap().items.len() };
        self.runtime.block_on(payments)
    }

    /// Like SIGKILL: nothing runs any more, and nothing is released.
    fn kill(mut self) {
        let (engine, claims) = (self.engine.take(), self.claims.take());
        std::mem::forget((engine, claims));
        self.runtime.shutdown_background();
    }
}

fn memory() -> Store {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(Store::memory()).unwrap()
}

// A process stands still, and its lease expires by the clocks of other processes. When it continues, its commits are
// refused.
#[test]
fn a_holder_whose_lease_expired_while_it_slept_changes_nothing() {
    let store = memory();
    let first = Process::start(&store, &config("revert"));
    first.add("i");
    let late = first.begin("i", 1);
    let second = Process::start(&store, &config("revert"));
    second.until("i", "sent");
    let paid = second.begin("i", 0);
    assert!(second.runtime.block_on(paid).unwrap().unwrap().is_done());
    let Fired::Lost(lost) = first.runtime.block_on(late).unwrap().unwrap() else { panic!("the claim is lost") };
    assert!(lost.reason.contains("taken away") || lost.reason.contains("changed"), "{}", lost.reason);
    assert_eq!((second.payments(), first.seen.bodies(), second.seen.bodies()), (1, 1, 1));
    second.until("i", "paid");
    let history = second
        .runtime
        .block_on(async { StoredClaims::on(&store).await.unwrap().history("i").limit(9).await.unwrap().items });
    let kinds: Vec<TransitionKind> = history.iter().map(|transition| transition.kind).collect();
    assert_eq!(kinds, [TransitionKind::Done, TransitionKind::Released]);
    assert_eq!((history[1].actor.as_deref(), history[1].reason.as_str()), (Some("janitor"), "its process is gone"));
}

#[test]
fn an_action_that_runs_for_three_leases_keeps_its_claim() {
    let store = memory();
    let process = Process::start(&store, &config("revert"));
    process.add("i");
    let fired = process.begin("i", 700);
    assert!(process.runtime.block_on(fired).unwrap().unwrap().is_done());
    assert_eq!((process.payments(), process.seen.bodies()), (1, 1));
}

#[test]
fn a_claim_that_is_retried_runs_its_action_again_under_a_larger_token() {
    let store = memory();
    let first = Process::start(&store, &config("retry"));
    first.add("i");
    let _fired = first.begin("i", 60_000);
    let open = |process: &Process| {
        let open = async { StoredClaims::on(&store).await.unwrap().get("i").await.unwrap() };
        process.runtime.block_on(open)
    };
    let before = open(&first).unwrap();
    first.kill();
    // The action gets the input of the firing again, including the pause.
    let second = Process::start(&store, &config("retry"));
    let after = loop {
        let open = open(&second).unwrap();
        if open.attempts == 2 {
            break open;
        }
        second.runtime.block_on(async { sleep(Duration::from_millis(5)).await });
    };
    assert!(after.token > before.token);
    assert_eq!(second.seen.bodies(), 1);
}

#[test]
fn a_claim_whose_outcome_is_unknown_waits_for_an_operator() {
    let store = memory();
    let first = Process::start(&store, &config("needs_review"));
    for id in ["a", "b", "c"] {
        first.add(id);
        drop(first.begin_with(id, json!({"pause_ms": if id == "c" { 400 } else { 60_000 }})));
    }
    first.kill();
    let second = Process::start(&store, &config("needs_review"));
    let operator = second.runtime.block_on(second.claims().operate()).unwrap();
    second.runtime.block_on(async {
        loop {
            let open = operator.stored().list().await.unwrap().items;
            if open.iter().all(|claim| claim.holder.needs_review.as_deref() == Some("its process is gone")) {
                break;
            }
            sleep(Duration::from_millis(5)).await;
        }
        // The operator finds that `a` did not take effect and that `b` did. `c` runs again.
        operator.release("a", "eve", "the bank knows nothing of it").await.unwrap();
        operator.complete("b", "eve", "the bank has it").await.unwrap();
        operator.retry("c", "eve", "the bank says so").await.unwrap();
        let twice = operator.release("a", "eve", "again").await;
        assert!(matches!(twice, Err(ClaimError::NotClaimed { .. })), "{twice:?}");
    });
    for (id, status) in [("a", "sent"), ("b", "paid"), ("c", "paid")] {
        second.until(id, status);
    }
    // Only the action of `c` ran again. The after-effects of both transitions are delivered.
    assert_eq!((second.seen.bodies(), second.payments()), (1, 1));
    second.runtime.block_on(async {
        while second.seen.delivered().len() < 4 {
            sleep(Duration::from_millis(2)).await;
        }
        let history = operator.stored().history("b").limit(1).await.unwrap().items.remove(0);
        assert_eq!((history.actor.as_deref(), history.reason.as_str()), (Some("eve"), "the bank has it"));
    });
}

#[test]
fn an_action_that_crashes_its_process_is_retried_up_to_its_attempts_and_then_waits_for_an_operator() {
    let store = memory();
    let config = config("retry").replace(r#""step_id": 20,"#, r#""step_id": 20, "attempts": 2,"#);
    let mut process = Process::start(&store, &config);
    process.add("i");
    drop(process.begin("i", 60_000));
    for _ in 0..2 {
        process.kill();
        process = Process::start(&store, &config);
        process.runtime.block_on(async { sleep(Duration::from_millis(400)).await });
    }
    assert_eq!(process.seen.bodies(), 0);
    let open = async { StoredClaims::on(&store).await.unwrap().get("i").await.unwrap().unwrap() };
    let review = process.runtime.block_on(open).holder.needs_review.unwrap();
    assert_eq!(review, "its process is gone, and the action was begun 2 times");
}

#[test]
fn the_janitor_of_a_module_decides_about_its_claims() {
    let store = memory();
    let module = config("revert").replace(r#""status_field""#, r#""janitor": "module", "status_field""#);
    let first = Process::start(&store, &module);
    first.add("i");
    drop(first.begin("i", 60_000));
    first.kill();
    let second = Process::start(&store, &module);
    second.until("i", "sent");
    let asked = Arc::new(parking_lot::Mutex::new(Vec::new()));
    drop(second.begin("i", 60_000));
    second.kill();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::on(&store).start().await.unwrap();
        let told = asked.clone();
        let claims = invoices_with(&engine, &Arc::default(), &module).sweep_every(Duration::from_millis(20));
        let janitor = move |abandoned: latchwork::claim::Abandoned| {
            told.lock().push((abandoned.entity.to_string(), abandoned.revert_to, abandoned.recovery));
            std::future::ready(Recovery::NeedsReview)
        };
        let _claims = claims.cover("billing", janitor).start().await.unwrap();
        let stored = StoredClaims::on(&store).await.unwrap();
        while stored.get("i").await.unwrap().unwrap().holder.needs_review.is_none() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert_eq!(*asked.lock(), [("i".to_string(), "sent".to_string(), Recovery::Revert)]);
}

#[test]
fn on_a_directory_the_next_process_does_not_wait_for_the_lease() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Store::open(directory.path())).unwrap()
    };
    let year = config("revert").replace("200ms", "365d");
    let store = open();
    let first = Process::start(&store, &year);
    first.add("i");
    drop(first.begin("i", 60_000));
    first.runtime.block_on(store.close()).unwrap();
    first.kill();
    drop(store);
    let second = Process::start(&open(), &year);
    second.until("i", "sent");
}

#[tokio::test]
async fn a_change_of_a_claimed_entity_by_an_operator_wins_and_the_claim_is_lost() {
    let kit = Kit::new().await;
    for (id, meddles) in [("edited", 0), ("moved", 1), ("removed", 2), ("released", 3)] {
        kit.add(id).await;
        let bodies = kit.seen.bodies();
        let fire = kit.claims.fire("invoice", "pay", id).by("admin").input(json!({"pause_ms": 50}));
        let fired = tokio::spawn(async move { fire.await.unwrap() });
        while kit.seen.bodies() == bodies {
            sleep(Duration::from_millis(1)).await;
        }
        let entities = kit.engine.entities();
        match meddles {
            0 => drop(entities.update(Update::new(id).metadata(json!({"note": "look"}))).await.unwrap()),
            1 => drop(entities.update(Update::new(id).data(json!({"status": "closed"}))).await.unwrap()),
            2 => drop(entities.remove(id).await.unwrap()),
            _ => kit.claims.operate().await.unwrap().release(id, "eve", "wrong card").await.unwrap(),
        }
        let fired = fired.await.unwrap();
        assert!(matches!(fired, Fired::Lost(_)), "{id}: {fired:?}");
        let after = entities.get(id).await.unwrap();
        match meddles {
            0 => {
                let after = after.unwrap();
                assert_eq!((&after.data["status"], &after.metadata["note"]), (&json!("sent"), &json!("look")));
            }
            1 => assert_eq!(after.unwrap().data, json!({"status": "closed"})),
            2 => assert_eq!(after, None),
            _ => {
                let Fired::Lost(lost) = fired else { unreachable!() };
                assert_eq!(lost.reason, "the claim was taken away: wrong card");
                assert_eq!(after.unwrap().data["status"], "sent");
            }
        }
    }
    assert_eq!(kit.payments().await, 0);
    assert_eq!(kit.claims.operate().await.unwrap().stored().list().await.unwrap().items, []);
}

// An operator reverts the entity while the action still runs, and another caller claims it. The first action is fenced.
#[tokio::test]
async fn an_entity_that_an_operator_reverted_can_be_claimed_again_and_the_first_claim_is_lost() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let fire = kit.claims.fire("invoice", "pay", "i").by("admin").input(json!({"pause_ms": 100}));
    let first = tokio::spawn(async move { fire.await.unwrap() });
    while kit.seen.bodies() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let back = Update::new("i").data(json!({"status": "sent"}));
    kit.engine.entities().update(back).await.unwrap();
    assert!(kit.pay("i", "succeed").await.unwrap().is_done());
    assert!(matches!(first.await.unwrap(), Fired::Lost(_)));
    assert_eq!((kit.payments().await, kit.status("i").await.as_str(), kit.seen.bodies()), (1, "paid", 2));
}

#[tokio::test]
async fn an_action_runs_to_its_end_even_if_its_caller_gives_up() {
    let kit = Kit::new().await;
    kit.add("i").await;
    let fire = kit.claims.fire("invoice", "pay", "i").by("admin").input(json!({"pause_ms": 30}));
    let fired = tokio::time::timeout(Duration::from_millis(10), fire.into_future()).await;
    assert!(fired.is_err());
    while kit.status("i").await != "paid" {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((kit.payments().await, kit.seen.bodies()), (1, 1));
}

// A claim keeps the terms it was made with. Entities whose status the new configuration does not have are listed.
#[test]
fn a_change_of_the_configuration_does_not_change_open_claims() {
    let store = memory();
    let first = Process::start(&store, &config("needs_review"));
    for id in ["a", "b"] {
        first.add(id);
    }
    drop(first.begin("a", 60_000));
    first.kill();
    let changed = config("needs_review").replace("\"sent\"", "\"mailed\"").replace("\"paid\"", "\"settled\"");
    let second = Process::start(&store, &changed);
    second.runtime.block_on(async {
        let operator = second.claims().operate().await.unwrap();
        while operator.stored().get("a").await.unwrap().unwrap().holder.needs_review.is_none() {
            sleep(Duration::from_millis(5)).await;
        }
        operator.complete("a", "eve", "it was paid").await.unwrap();
        let (mut strays, mut after) = (Vec::new(), None);
        loop {
            let page = second.claims().strays("invoice").limit(1).after(after).await.unwrap();
            strays.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let strays: Vec<_> = strays.iter().map(|(id, status)| (id.as_str(), status.as_deref())).collect();
        assert_eq!(strays, [("a", Some("paid")), ("b", Some("sent"))]);
    });
}

// A change by hand wins, also against an operator who acts on an old list.
#[test]
fn a_claim_in_review_whose_entity_was_moved_by_hand_cannot_be_retried() {
    let store = memory();
    let first = Process::start(&store, &config("needs_review"));
    first.add("i");
    drop(first.begin("i", 60_000));
    first.kill();
    let second = Process::start(&store, &config("needs_review"));
    second.runtime.block_on(async {
        let operator = second.claims().operate().await.unwrap();
        while operator.stored().get("i").await.unwrap().unwrap().holder.needs_review.is_none() {
            sleep(Duration::from_millis(5)).await;
        }
        let entities = second.engine.as_ref().unwrap().entities();
        entities.update(Update::new("i").data(json!({"status": "closed"}))).await.unwrap();
        for tried in [operator.retry("i", "eve", "again").await, operator.complete("i", "eve", "ok").await.map(drop)] {
            assert!(matches!(tried, Err(ClaimError::NotInReview { .. })), "{tried:?}");
        }
        operator.release("i", "eve", "it is closed").await.unwrap();
        assert_eq!(entities.get("i").await.unwrap().unwrap().data["status"], "closed");
        assert_eq!(operator.stored().list().await.unwrap().items, []);
    });
    assert_eq!(second.seen.bodies(), 0);
}

// A janitor that panics or never answers does not delay other claims, and is called again.
#[test]
fn a_module_janitor_that_panics_is_called_again() {
    let store = memory();
    let module = config("revert").replace(r#""status_field""#, r#""janitor": "module", "status_field""#);
    let first = Process::start(&store, &module);
    for id in ["a", "b"] {
        first.add(id);
        drop(first.begin(id, 60_000));
    }
    first.kill();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::on(&store).start().await.unwrap();
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let claims = invoices_with(&engine, &Arc::default(), &module).sweep_every(Duration::from_millis(20));
        let janitor = move |abandoned: latchwork::claim::Abandoned| {
            let first = asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) < 2;
            assert!(!first || abandoned.entity.as_str() != "a", "the janitor panics");
            std::future::ready(Recovery::Revert)
        };
        let _claims = claims.cover("billing", janitor).start().await.unwrap();
        for id in ["b", "a"] {
            while engine.entities().get(id).await.unwrap().unwrap().data["status"] != "sent" {
                sleep(Duration::from_millis(5)).await;
            }
        }
    });
}
