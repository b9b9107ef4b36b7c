//! The claim workflows of the suite, and counts of their actions and after-effects.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use latchwork::claim::{ActionCtx, AfterEffect, Claims, ClaimsBuilder, Fired, Outcome};
use latchwork::entity::Add;
use latchwork::store::{Key, Order, Space};
use latchwork::workflow::Engine;
use serde_json::json;
use tokio::sync::Semaphore;

/// A workflow whose entities go from `a` to `b` and back, both by claimed steps.
pub(crate) const TURN: &str = "turn";
/// The same with an after-effect for each transition.
pub(crate) const TELL: &str = "tell";
/// A workflow whose action waits until the suite releases it.
pub(crate) const HOLD: &str = "hold";

/// The default lease of steps.
pub(crate) const DEFAULT_LEASE: &str = "30s";

fn configuration(hold_lease: &str) -> String {
    let cycle = |name: &str, effect: &[&str]| {
        let step = |id: u64, key: &str, from: &str, into: &str| {
            json!({
                "step_id": id, "step_key": key, "status": from, "action": "Nothing",
                "successful_claim_state": [format!("{from}_claimed"), from], "successful_state": into,
                "success_after_effect": effect,
            })
        };
        json!({
            "workflow": name, "meta": {"owning_module": "bench", "entity_type": name, "status_field": "status"},
            "status_types": ["a", "a_claimed", "b", "b_claimed"],
            "steps": [step(10, "go", "a", "b"), step(20, "back", "b", "a")],
        })
    };
    let hold = json!({
        "workflow": HOLD, "meta": {"owning_module": "bench", "entity_type": HOLD, "status_field": "status"},
        "status_types": ["a", "a_claimed", "b"],
        "steps": [{
            "step_id": 10, "step_key": "go", "status": "a", "action": "Wait", "lease": hold_lease,
            "successful_claim_state": ["a_claimed", "a"], "successful_state": "b",
        }],
    });
    json!([cycle(TURN, &[]), cycle(TELL, &["Tell"]), hold]).to_string()
}

/// Counts what was done.
pub(crate) struct Seen {
    /// Actions that have begun.
    pub(crate) bodies: AtomicUsize,
    /// After-effects that were delivered.
    pub(crate) told: AtomicUsize,
    /// Each permit releases one waiting action.
    pub(crate) gate: Semaphore,
}

impl Seen {
    pub(crate) fn bodies(&self) -> usize {
        self.bodies.load(Ordering::SeqCst)
    }
}

/// An engine on a file store, with claims.
#[derive(Clone)]
pub(crate) struct Kit {
    pub(crate) engine: Engine,
    pub(crate) claims: Claims,
    pub(crate) seen: Arc<Seen>,
}

impl Kit {
    pub(crate) async fn open(directory: &Path) -> Kit {
        Kit::with(directory, DEFAULT_LEASE, |builder| builder).await
    }

    /// Opens an engine with another lease for actions that wait, and other settings.
    pub(crate) async fn with(
        directory: &Path,
        hold_lease: &str,
        set: impl FnOnce(ClaimsBuilder) -> ClaimsBuilder,
    ) -> Kit {
        let engine = Engine::open(directory).start().await.expect("an engine");
        let seen = Arc::new(Seen { bodies: AtomicUsize::new(0), told: AtomicUsize::new(0), gate: Semaphore::new(0) });
        let (runs, waits, told) = (seen.clone(), seen.clone(), seen.clone());
        let builder = Claims::on(&engine)
            .configure(configuration(hold_lease))
            .action("Nothing", move |_: ActionCtx| {
                runs.bodies.fetch_add(1, Ordering::SeqCst);
                async { Ok::<_, std::io::Error>(Outcome::done()) }
            })
            .action("Wait", move |_: ActionCtx| {
                let waits = waits.clone();
                async move {
                    waits.bodies.fetch_add(1, Ordering::SeqCst);
                    waits.gate.acquire().await.expect("the gate is open").forget();
                    Ok::<_, std::io::Error>(Outcome::done())
                }
            })
            .after_effect("Tell", move |_: AfterEffect| {
                told.told.fetch_add(1, Ordering::SeqCst);
                async { Ok::<_, std::io::Error>(()) }
            });
        let claims = set(builder).start().await.expect("claims");
        Kit { engine, claims, seen }
    }

    /// Adds entities of a workflow, at status `a`. They are as large as those of the suite `entities`.
    pub(crate) async fn fill(&self, workflow: &str, count: usize) {
        let data = json!({"status": "a", "name": "an entity of middling size", "text": "x".repeat(80)});
        let numbers: Vec<usize> = (0..count).collect();
        for some in numbers.chunks(1000) {
            let adds = some.iter().map(|number| Add::new(workflow).id(id(workflow, *number)).data(data.clone()));
            self.engine.entities().add_many(adds).await.expect("a batch");
        }
    }

    /// Folds everything into the index, so that neither side works while the other is measured.
    pub(crate) async fn settle(&self) {
        while self.engine.store().maintain().await.expect("maintenance") {}
    }

    pub(crate) async fn fire(&self, workflow: &str, step: &str, number: usize) -> Fired {
        self.claims.fire(workflow, step, id(workflow, number)).await.expect("an answer")
    }

    /// Fires a step that must succeed, on an entity that has made `times` transitions before.
    pub(crate) async fn turn(&self, workflow: &str, number: usize, times: u64) {
        let (step, to) = if times.is_multiple_of(2) { ("go", "b") } else { ("back", "a") };
        let done = self.fire(workflow, step, number).await.done().expect("no other caller wants this entity");
        assert!(done.to == to && done.rev.0 == 1 + 2 * (times + 1), "{done:?}");
    }

    /// Starts actions that wait, one per entity, each for its own caller. Returns the tasks of the callers.
    pub(crate) async fn hold(&self, numbers: impl Iterator<Item = usize>) -> Vec<tokio::task::JoinHandle<Fired>> {
        let before = self.seen.bodies();
        let fire = |number| {
            let kit = self.clone();
            tokio::spawn(async move { kit.fire(HOLD, "go", number).await })
        };
        let held: Vec<_> = numbers.map(fire).collect();
        while self.seen.bodies() < before + held.len() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        held
    }

    /// The status and the rev of an entity.
    pub(crate) async fn at(&self, workflow: &str, number: usize) -> (String, u64) {
        let entity = self.engine.entities().get(id(workflow, number)).await.expect("a read").expect("the entity");
        (entity.data["status"].as_str().expect("a status").into(), entity.rev.0)
    }

    /// The keys of one of the library's spaces.
    pub(crate) async fn keys(&self, space: &str) -> Vec<Key> {
        let store = self.engine.store();
        let spaces = store.spaces().await.expect("spaces");
        let space: &Space = spaces.iter().find(|known| known.name() == space).expect("the space");
        let found = store.view().await.expect("a view").scan(&space.all(), Order::Ascending, usize::MAX).await;
        found.expect("a scan").into_iter().map(|(key, _)| key).collect()
    }
}

pub(crate) fn id(workflow: &str, number: usize) -> String {
    format!("{workflow}-{number:0>12}")
}
