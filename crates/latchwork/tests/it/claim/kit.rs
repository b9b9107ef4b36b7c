//! Invoices: the claim workflow that most tests of claims use. Its actions do what their input says.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use latchwork::claim::{ActionCtx, AfterEffect, Claims, ClaimsBuilder, Fired, Outcome};
use latchwork::entity::{Add, Query};
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use parking_lot::Mutex;

/// `pay` is claimed and adds a payment; `remind` is not claimed; `close` has no action.
pub(crate) const INVOICES: &str = r#"{
  "workflow": "invoice",
  "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
  "status_types": ["sent", "reminded", "paying", "paid", "closed"],
  "initial": ["sent"],
  "requesters": ["admin", "system"],
  "steps": [
    { "step_id": 10, "step_key": "remind", "status": "sent", "action": "Remind",
      "successful_state": "reminded", "success_after_effect": "SendReminder" },
    { "step_id": 20, "step_key": "pay", "status": "sent", "lease": "2s", "action": "Pay",
      "successful_claim_state": ["paying", "sent"], "successful_state": "paid",
      "success_after_effect": ["SendReceipt", "TellBooks"] },
    { "step_id": 30, "step_key": "close", "status": "paid", "successful_state": { "admin": "closed" },
      "guards": [{ "guard": "is_settled", "reason": "something is left to pay" }] }
  ]
}"#;

/// An action's own error.
#[derive(Debug, thiserror::Error, PartialEq)]
#[error("the bank is closed until {until}")]
pub(crate) struct BankClosed {
    pub(crate) until: u32,
}

/// What the actions and handlers saw.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) bodies: AtomicUsize,
    pub(crate) effects: Mutex<Vec<AfterEffect>>,
}

impl Seen {
    pub(crate) fn bodies(&self) -> usize {
        self.bodies.load(Ordering::SeqCst)
    }

    /// The delivered after-effects, as names and entities.
    pub(crate) fn delivered(&self) -> Vec<(String, String)> {
        self.effects.lock().iter().map(|effect| (effect.name.clone(), effect.entity.to_string())).collect()
    }
}

/// Claims for invoices on an engine.
pub(crate) fn invoices(engine: &Engine, seen: &Arc<Seen>) -> ClaimsBuilder {
    invoices_with(engine, seen, INVOICES)
}

/// Like `invoices`, with another configuration.
pub(crate) fn invoices_with(engine: &Engine, seen: &Arc<Seen>, configuration: &str) -> ClaimsBuilder {
    let (acts, told) = (seen.clone(), seen.clone());
    let handler = move |effect: AfterEffect| {
        let told = told.clone();
        async move {
            if effect.input["effect_fails"].as_u64().is_some_and(|times| u64::from(effect.attempt) <= times) {
                return Err("the mail server is away");
            }
            told.effects.lock().push(effect);
            Ok(())
        }
    };
    Claims::on(engine)
        .configure(configuration)
        .action("Pay", move |ctx: ActionCtx| pay(acts.clone(), ctx))
        .action("Remind", async |ctx: ActionCtx| {
            ctx.merge_data(json!({"reminders": 1}));
            Ok::<_, BankClosed>(Outcome::done())
        })
        .after_effect("SendReceipt", handler.clone())
        .after_effect("TellBooks", handler.clone())
        .after_effect("SendReminder", handler)
        .guard("is_settled", |invoice, _| match invoice.data["left"].as_u64() {
            Some(0) | None => Ok(()),
            Some(left) => Err(format!("{left} are left")),
        })
}

/// Does what its input says.
async fn pay(seen: Arc<Seen>, ctx: ActionCtx) -> Result<Outcome, BankClosed> {
    seen.bodies.fetch_add(1, Ordering::SeqCst);
    let wants = |what: &str| ctx.input()["does"] == what;
    ctx.add(Add::new("payment").data(json!({"of": ctx.entity().id, "amount": ctx.input()["amount"]})));
    ctx.merge_data(json!({"paid_by": ctx.requester()}));
    if let Some(pause) = ctx.input()["pause_ms"].as_u64() {
        ctx.entities().store().env().sleep(Duration::from_millis(pause)).await;
    }
    if wants("fail") {
        return Ok(Outcome::failure("the card was refused"));
    }
    if wants("reject") {
        return Ok(Outcome::rejection("the amount is negative"));
    }
    if wants("error") {
        return Err(BankClosed { until: 8 });
    }
    assert!(!wants("panic"), "the action panics");
    Ok(Outcome::output("done"))
}

/// An engine on a store in memory, with claims.
pub(crate) struct Kit {
    pub(crate) engine: Engine,
    pub(crate) claims: Claims,
    pub(crate) seen: Arc<Seen>,
}

impl Kit {
    pub(crate) async fn new() -> Kit {
        Kit::on(&Store::memory().await.unwrap()).await
    }

    pub(crate) async fn on(store: &Store) -> Kit {
        let engine = Engine::on(store).start().await.unwrap();
        let seen = Arc::new(Seen::default());
        let claims = invoices(&engine, &seen).start().await.unwrap();
        Kit { engine, claims, seen }
    }

    pub(crate) async fn add(&self, id: &str) {
        let invoice = Add::new("invoice").id(id).data(json!({"status": "sent", "amount": 100}));
        self.claims.add("invoice", invoice).await.unwrap();
    }

    pub(crate) async fn pay(&self, id: &str, does: &str) -> latchwork::claim::Result<Fired> {
        self.claims.fire("invoice", "pay", id).by("admin").actor("ann").input(json!({"does": does, "amount": 7})).await
    }

    pub(crate) async fn status(&self, id: &str) -> String {
        let invoice = self.engine.entities().get(id).await.unwrap().unwrap();
        invoice.data["status"].as_str().unwrap().to_string()
    }

    pub(crate) async fn payments(&self) -> usize {
        self.engine.entities().find(&Query::of("payment")).await.unwrap().items.len()
    }

    /// Waits until everything is delivered.
    pub(crate) async fn deliver(&self) {
        for _ in 0..10_000 {
            if self.claims.undelivered() == 0 {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
        panic!("after-effects are not delivered");
    }
}

/// Waits by the machine's clock.
pub(crate) fn sleep(pause: Duration) -> latchwork::store::Sleep {
    latchwork::store::Env::system().sleep(pause)
}
