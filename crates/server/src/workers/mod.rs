//! Workers in any language: steps of workflows, claim actions and after-effects that are done elsewhere. A worker is
//! called over HTTP at an [`Endpoint`], or takes tasks by long poll. What makes the work durable is the library's and
//! the tasks': the journal of a workflow, a claim, the outbox, the record of a task.

mod call;
mod claims;
mod endpoint;
mod signature;
mod steps;

use std::collections::BTreeMap;

use latchwork::Value;
use latchwork::store::{Env, Store};
use latchwork::workflow::{EngineBuilder, Workflow};

use crate::tasks::Tasks;

pub use endpoint::{Endpoint, EndpointBuilder, EndpointError, EndpointLimits};

/// The workers of a namespace, and what they do: to be registered with its engine and its claims, and served by its
/// [`Api`](crate::Api).
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::claim::Claims;
/// use latchwork::store::Store;
/// use latchwork::workflow::Engine;
/// use latchwork_server::{Api, Endpoint, Workers};
///
/// let store = Store::open("./data").await?;
/// let workers = Workers::on(&store);
/// let (billing, packing) = (Endpoint::builder("http://localhost:8000/work").build()?, workers.tasks("pack"));
/// let billing = workers.endpoint(&billing);
/// let workers = workers
///     .workflow("order", [("charge", billing.clone()), ("pack", packing)])
///     .action("ApplyPayment", billing);
///
/// let engine = workers.register(Engine::on(&store)).start().await?;
/// let claims = Claims::on(&engine).configure(std::fs::read_to_string("invoices.json")?);
/// let claims = workers.serve(claims).start().await?;
/// let api = Api::on(&engine).claims(&claims).workers(&workers);
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "workers do nothing until they are registered with an engine, and served"]
pub struct Workers {
    tasks: Tasks,
    env: Env,
    workflows: BTreeMap<String, Workflow<Value, Value>>,
    actions: BTreeMap<String, Worker>,
    after_effects: BTreeMap<String, Worker>,
}

/// Something outside of this program that does work. Cheap to clone.
#[derive(Clone)]
pub struct Worker {
    reached: Reached,
    env: Env,
}

/// How a worker is reached.
#[derive(Clone)]
enum Reached {
    Endpoint(Endpoint),
    /// Through tasks of this kind.
    Tasks(Tasks, String),
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.reached {
            Reached::Endpoint(endpoint) => f.debug_tuple("Worker").field(endpoint).finish(),
            Reached::Tasks(_, kind) => f.debug_tuple("Worker").field(kind).finish(),
        }
    }
}

impl Workers {
    /// No workers yet, on this store.
    pub fn on(store: &Store) -> Workers {
        let (tasks, env) = (Tasks::on(store), store.env().clone());
        let (workflows, actions, after_effects) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Workers { tasks, env, workflows, actions, after_effects }
    }

    /// A worker that is called at an endpoint.
    pub fn endpoint(&self, endpoint: &Endpoint) -> Worker {
        Worker { reached: Reached::Endpoint(endpoint.clone()), env: self.env.clone() }
    }

    /// Workers that take tasks of a kind.
    pub fn tasks(&self, kind: impl Into<String>) -> Worker {
        Worker { reached: Reached::Tasks(self.tasks.clone(), kind.into()), env: self.env.clone() }
    }

    /// Adds a workflow of steps, one after the other, each done by a worker. A step gets
    /// `{"input": …, "results": {"an earlier step": …}}`; the workflow returns the result of the last one. Executions
    /// that run must find the same steps in the same order: use another name for another order.
    pub fn workflow<N: Into<String>>(
        mut self,
        name: impl Into<String>,
        steps: impl IntoIterator<Item = (N, Worker)>,
    ) -> Workers {
        let name = name.into();
        let steps: Vec<(String, Worker)> = steps.into_iter().map(|(step, worker)| (step.into(), worker)).collect();
        self.workflows.insert(name.clone(), steps::workflow_of(name, steps));
        self
    }

    /// Makes a worker do a claim action. See the guide for what it answers.
    pub fn action(mut self, name: impl Into<String>, worker: Worker) -> Workers {
        self.actions.insert(name.into(), worker);
        self
    }

    /// Makes a worker do an after-effect. An endpoint is called until it succeeds or the after-effect becomes a dead
    /// letter; for workers that take tasks, it is delivered when the task is stored.
    pub fn after_effect(mut self, name: impl Into<String>, worker: Worker) -> Workers {
        self.after_effects.insert(name.into(), worker);
        self
    }

    /// Registers the workflows with an engine.
    pub fn register(&self, engine: EngineBuilder) -> EngineBuilder {
        self.workflows.values().fold(engine, |engine, workflow| engine.register(workflow))
    }

    /// The tasks, for the API that serves them.
    pub(crate) fn shared(&self) -> Tasks {
        self.tasks.clone()
    }
}
