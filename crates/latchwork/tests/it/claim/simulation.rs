//! Claims under faults from a seed: crashes, restarts, pauses with a second engine, lost answers, slow commits and
//! jumps of the clock. Parcels go through a cycle: paid (reverted after a crash), shipped (retried), audited (a durable
//! action) and taken back. An oracle compares what bodies and handlers saw with what is stored.
//!
//! The oracle checks: each attempt of a firing runs its body at most once; the writes and after-effects of a transition
//! exist exactly if the transition does; the after-effects of an entity come in the order of its transitions; in the
//! end nothing is claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use latchwork::claim::{
    ActionCtx, AfterEffect, ClaimError, ClaimStep, ClaimWorkflow, Claims, DurableAction, DurableCall, Fired, Outcome,
    Recovery, StoredClaims, TransitionKind, durable_action,
};
use latchwork::entity::{Add, EntityError, Query, Update};
use latchwork::json;
use latchwork::store::Env;
use latchwork::testing::{Caller, Faults, Report, Simulation};
use latchwork::workflow::{Ctx, Engine, Retry, WorkflowError};
use parking_lot::Mutex;

use crate::workflow::simulation::campaign_of;

/// The lease of all steps.
const LEASE: Duration = Duration::from_secs(2);

/// The first words of a complaint about an entity that stays claimed.
const STUCK: &str = "still claimed";

/// The number of clients that fire steps.
const CLIENTS: u64 = 3;

/// What happened outside of the store.
#[derive(Default)]
struct Seen {
    /// The bodies that began: the key of the firing, and the attempt.
    bodies: Vec<(String, u32)>,
    effects: Vec<AfterEffect>,
    /// The transitions that callers know as done: entity and rev.
    done: BTreeSet<(String, u64)>,
    complaints: Vec<String>,
    /// How often each scene occurred.
    scenes: BTreeMap<String, u32>,
}

#[derive(Clone)]
struct Play {
    seen: Arc<Mutex<Seen>>,
    lives: Arc<Mutex<BTreeMap<u32, Arc<tokio::sync::OnceCell<Claims>>>>>,
    /// The clients that are done, in any life.
    finished: Arc<Mutex<BTreeSet<u64>>>,
    audit: DurableAction,
}

fn config() -> ClaimWorkflow {
    let retried = |step: ClaimStep| ClaimStep { recovery: Recovery::Retry, attempts: Some(1000), ..step };
    let leased = |step: ClaimStep| ClaimStep { lease: Some(LEASE), ..step };
    ClaimWorkflow::new("parcel", "parcels", "parcel")
        .statuses(["new", "paying", "paid", "shipping", "shipped", "auditing", "audited"])
        .step(leased(
            ClaimStep::new(1, "pay", "new", "paid").action("Pay").claimed("paying").after("Receipt").after("Books"),
        ))
        .step(leased(retried(
            ClaimStep::new(2, "ship", "paid", "shipped").action("Ship").claimed("shipping").after("Label"),
        )))
        .step(leased(
            ClaimStep::new(3, "audit", "shipped", "audited").action("Audit").claimed("auditing").after("Report"),
        ))
        .step(ClaimStep::new(4, "take_back", "audited", "new").action("TakeBack").after("Sorry"))
}

impl Play {
    fn new() -> Play {
        let audit = durable_action("Audit", async |ctx: Ctx, call: DurableCall| {
            // A crash counts as an attempt, and an execution with no attempts left is parked.
            let often = Retry::exponential().max_attempts(1000);
            ctx.run("look", async || Ok(1)).retry(often).await?;
            ctx.sleep(Duration::from_secs(call.input["pause"].as_u64().unwrap_or_default())).await?;
            match call.input["fails"].as_bool() {
                Some(true) => Ok(Outcome::failure("it does not add up")),
                _ => Ok(Outcome::done()),
            }
        });
        Play { seen: Arc::default(), lives: Arc::default(), finished: Arc::default(), audit }
    }

    /// The claims of a life. All callers of the life share them.
    async fn claims(&self, caller: &Caller) -> Result<Claims, ClaimError> {
        let cell = self.lives.lock().entry(caller.life()).or_default().clone();
        cell.get_or_try_init(|| self.start(caller)).await.cloned()
    }

    async fn start(&self, caller: &Caller) -> Result<Claims, ClaimError> {
        let act = |name: &str| {
            let (play, env, name) = (self.clone(), caller.env().clone(), name.to_string());
            move |ctx: ActionCtx| play.clone().act(env.clone(), name.clone(), ctx)
        };
        let tell = || {
            let play = self.clone();
            move |effect: AfterEffect| {
                let mut seen = play.seen.lock();
                let fails = effect.attempt == 1 && effect.rev.is_multiple_of(5);
                if !fails {
                    seen.effects.push(effect);
                }
                std::future::ready(if fails { Err("not now") } else { Ok(()) })
            }
        };
        let mut claims = Claims::on(caller.engine()).workflow(config()).durable_action(&self.audit);
        for action in ["Pay", "Ship", "TakeBack"] {
            claims = claims.action(action, act(action));
        }
        for effect in ["Receipt", "Books", "Label", "Report", "Sorry"] {
            claims = claims.after_effect(effect, tell());
        }
        claims.start().await
    }

    async fn act(self, env: Env, name: String, ctx: ActionCtx) -> Result<Outcome, String> {
        self.seen.lock().bodies.push((ctx.key(), ctx.attempt()));
        // Only the transition writes the mark: in the end there are as many marks as transitions.
        ctx.add(Add::new("mark").data(json!({"of": ctx.entity().id, "by": name})));
        let pauses = [0, 0, 10, 500, 3 * LEASE.as_millis() as u64 + 100];
        env.sleep(Duration::from_millis(pauses[(env.random() % 5) as usize])).await;
        let scene = match ctx.heartbeat().await {
            Ok(()) => "held",
            Err(_) => "told that it is lost",
        };
        *self.seen.lock().scenes.entry(scene.into()).or_default() += 1;
        match env.random() % 8 {
            0 => Ok(Outcome::failure("no luck")),
            1 => Ok(Outcome::rejection("no way")),
            2 => Err("it broke".into()),
            3 => panic!("it panics"),
            _ => Ok(Outcome::output(ctx.attempt())),
        }
    }

    /// Fires random steps, and sometimes acts as an operator.
    async fn client(self, number: u64, caller: Caller) -> Result<(), WorkflowError> {
        let claims = self.claims(&caller).await.map_err(gone)?;
        let (env, entities) = (caller.env().clone(), caller.engine().entities().clone());
        for parcel in 0..2 {
            let parcel = Add::new("parcel").id(format!("p{parcel}")).data(json!({"status": "new"})).if_absent(true);
            entities.add(parcel).await.map_err(of_entities)?;
        }
        for _ in 0..12 {
            let id = format!("p{}", env.random() % 2);
            let parcel = entities.get(&*id).await.map_err(of_entities)?;
            let status = parcel.map(|parcel| parcel.data["status"].as_str().unwrap_or("?").to_string());
            let step = match status.as_deref() {
                Some("new" | "paying") => "pay",
                Some("paid" | "shipping") => "ship",
                Some("shipped" | "auditing") => "audit",
                _ => "take_back",
            };
            let input = json!({"pause": env.random() % 4, "fails": env.random().is_multiple_of(5)});
            let fired = claims.fire("parcel", step, &*id).actor(format!("c{number}")).input(input).await;
            let scene = match &fired {
                Ok(Fired::Done(done)) => {
                    self.seen.lock().done.insert((id.clone(), done.rev.0));
                    "done"
                }
                Ok(Fired::ClaimFailed(_)) => "claim failed",
                Ok(Fired::Conflict(_)) => "conflict",
                Ok(Fired::Failure(_)) => "failure",
                Ok(Fired::Rejection(_)) => "rejection",
                Ok(Fired::NotPermitted(_)) => "not permitted",
                Ok(Fired::Lost(_)) => "lost",
                Ok(_) => "something else",
                Err(ClaimError::Action { .. }) => "error",
                Err(error) => return Err(gone(error.clone())),
            };
            *self.seen.lock().scenes.entry(scene.into()).or_default() += 1;
            if env.random().is_multiple_of(12) {
                match env.random() % 2 {
                    0 => drop(entities.update(Update::new(&*id).metadata(json!({"seen": number}))).await),
                    _ => {
                        let operator = claims.operate().await.map_err(gone)?;
                        if operator.release(&*id, "operator", "it took too long").await.is_ok() {
                            *self.seen.lock().scenes.entry("released by an operator".into()).or_default() += 1;
                        }
                    }
                }
            }
            env.sleep(Duration::from_millis(env.random() % 700)).await;
        }
        self.finished.lock().insert(number);
        Ok(())
    }

    /// Waits until all other clients are done and nothing is left to do.
    async fn closer(self, caller: Caller) -> Result<(), WorkflowError> {
        let claims = self.claims(&caller).await.map_err(gone)?;
        let env = caller.env().clone();
        let stored = StoredClaims::on(caller.engine().store()).await.map_err(gone)?;
        while self.finished.lock().len() < CLIENTS as usize {
            env.sleep(Duration::from_secs(1)).await;
        }
        // All clients are done. From now on an entity stays claimed at most for an action, a lease, a sweep, and the
        // pause of a process that stood still.
        let mut quiet = 0;
        for _ in 0..100_000 {
            let open = stored.list().await.map_err(gone)?.items.len();
            quiet = if open == 0 && claims.undelivered() == 0 { quiet + 1 } else { 0 };
            if quiet > 40 {
                return Ok(());
            }
            env.sleep(Duration::from_secs(1)).await;
        }
        self.seen.lock().complaints.push("an entity stays claimed, or an after-effect stays undelivered".into());
        Ok(())
    }

    fn simulation(&self, seed: u64) -> Simulation {
        let mut simulation = Simulation::new(seed).register(self.audit.workflow());
        for number in 0..CLIENTS {
            let play = self.clone();
            simulation = simulation.client(move |caller| play.clone().client(number, caller));
        }
        let play = self.clone();
        simulation = simulation.client(move |caller| play.clone().closer(caller));
        let play = self.clone();
        simulation.afterwards(move |engine| async move { play.judge(&engine).await.map_err(gone) })
    }

    async fn judge(&self, engine: &Engine) -> Result<(), ClaimError> {
        let stored = StoredClaims::on(engine.store()).await?;
        let mut seen = std::mem::take(&mut *self.seen.lock());
        let open = stored.list().await?.items;
        if !open.is_empty() {
            seen.complaints.push(format!("{STUCK}: {open:?}"));
        }
        let (mut marks, mut transitions) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
        for mark in engine.entities().find(&Query::of("mark").limit(1000)).await?.items {
            *marks.entry(mark.data["by"].as_str().unwrap_or("?").into()).or_default() += 1;
        }
        let names = BTreeMap::from([("pay", "Pay"), ("ship", "Ship"), ("take_back", "TakeBack"), ("audit", "")]);
        let mut due: BTreeMap<(String, u64), usize> = BTreeMap::new();
        for parcel in ["p0", "p1"] {
            let status = engine.entities().get(parcel).await?.map(|parcel| parcel.data["status"].to_string());
            if status.is_some_and(|status| ["\"paying\"", "\"shipping\"", "\"auditing\""].contains(&&*status)) {
                seen.complaints.push(format!("{STUCK}: {parcel}"));
            }
            for transition in stored.history(parcel).limit(1000).await?.items {
                if transition.kind == TransitionKind::Done {
                    *transitions.entry(names[&*transition.step].into()).or_default() += 1;
                    let effects = if transition.step == "pay" { 2 } else { 1 };
                    due.insert((parcel.into(), transition.rev.0), effects);
                }
            }
        }
        transitions.remove("");
        if marks != transitions {
            seen.complaints.push(format!("marks {marks:?}, transitions {transitions:?}"));
        }
        let missing: Vec<_> = seen.done.iter().filter(|done| !due.contains_key(done)).cloned().collect();
        seen.complaints.extend(missing.iter().map(|done| format!("{done:?} was reported as done and is not")));
        let mut firsts: BTreeMap<String, Vec<(u64, String)>> = BTreeMap::new();
        let mut told = BTreeSet::new();
        let mut effects = std::mem::take(&mut seen.effects);
        // A life that stood still may have just made a transition.
        effects.extend(stored.undelivered().limit(1000).await?.items);
        for effect in &effects {
            if told.insert(effect.key.clone()) {
                let number = effect.key.rsplit(':').next().unwrap_or_default().to_string();
                firsts.entry(effect.entity.to_string()).or_default().push((effect.rev, number));
            }
            if !due.contains_key(&(effect.entity.to_string(), effect.rev)) {
                seen.complaints.push(format!("an after-effect without its transition: {effect:?}"));
            }
        }
        for (parcel, order) in &firsts {
            let mut sorted = order.clone();
            sorted.sort();
            if *order != sorted {
                seen.complaints.push(format!("after-effects of {parcel} came as {order:?}"));
            }
        }
        for ((parcel, rev), effects) in due {
            let told = effects_of(&told, &parcel, rev);
            if told != effects {
                seen.complaints.push(format!("{parcel} at {rev}: {told} of {effects} after-effects"));
            }
        }
        let bodies = seen.bodies.clone();
        let mut counts = BTreeMap::<_, u32>::new();
        bodies.into_iter().for_each(|body| *counts.entry(body).or_default() += 1);
        let twice: Vec<String> = counts.iter().filter(|(_, count)| **count > 1).map(|it| format!("{it:?}")).collect();
        seen.complaints.extend(twice.into_iter().map(|body| format!("a body ran twice: {body}")));
        *self.seen.lock() = seen;
        Ok(())
    }
}

fn effects_of(told: &BTreeSet<String>, parcel: &str, rev: u64) -> usize {
    let prefix = format!("{parcel}:{rev}:");
    told.iter().filter(|key| key.starts_with(&prefix)).count()
}

/// The life of this engine is over, or the store is unavailable: the caller returns in the next life.
fn gone(error: ClaimError) -> WorkflowError {
    match error {
        ClaimError::Store(error) => error.into(),
        ClaimError::Entity(error) => of_entities(error),
        ClaimError::Stopped => WorkflowError::Stopped,
        error => WorkflowError::Corrupt { place: error.to_string() },
    }
}

fn of_entities(error: EntityError) -> WorkflowError {
    match error {
        EntityError::Store(error) => error.into(),
        error => error.into(),
    }
}

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let play = Play::new();
    let report = play.simulation(seed).faults(faults).timeout(Duration::from_secs(3 * 86_400)).run();
    let mut complaints = play.seen.lock().complaints.clone();
    // If all clients were done before the last life began, no client has started claims in it, and it has no janitor.
    let has_janitor = play.lives.lock().get(&report.lives).is_some_and(|claims| claims.initialized());
    complaints.retain(|complaint| has_janitor || !complaint.starts_with(STUCK));
    complaints.extend(report.stuck.clone());
    complaints.extend(report.errors.iter().map(ToString::to_string));
    complaints.extend(report.misfiled.iter().cloned());
    (report, complaints)
}

#[test]
fn claims_keep_their_promises_under_any_faults() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.payload().downcast_ref::<&str>().copied().unwrap_or_default();
        if text != "it panics" {
            eprintln!("{panic}");
        }
    }));
    campaign_of(simulate, 100);
}

/// A simulation in which nothing happens proves nothing.
#[test]
fn every_scene_of_claims_occurs() {
    let mut played = BTreeMap::<String, u32>::new();
    for seed in 1..=60 {
        let play = Play::new();
        play.simulation(seed).timeout(Duration::from_secs(3 * 86_400)).run();
        let scenes = std::mem::take(&mut play.seen.lock().scenes);
        scenes.into_iter().for_each(|(scene, times)| *played.entry(scene).or_default() += times);
    }
    println!("{played:?}");
    for scene in [
        "done",
        "claim failed",
        "failure",
        "rejection",
        "error",
        "lost",
        "conflict",
        "held",
        "told that it is lost",
        "released by an operator",
    ] {
        assert!(played.contains_key(scene), "{scene}: {played:?}");
    }
}
