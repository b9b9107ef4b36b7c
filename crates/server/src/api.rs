//! The API of one namespace: what a program registers, and what every route of it can use. It knows no route and no
//! listener.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use latchwork::claim::Claims;
use latchwork::entity::Entities;
use latchwork::flow::{Flow, Flows};
use latchwork::store::Env;
use latchwork::workflow::Engine;
use tokio::sync::watch;

use crate::access::Access;
use crate::calls::Calls;
use crate::limits::Limits;
use crate::router::{Beside, assemble};
use crate::tasks::{self, Tasks};
use crate::workers::Workers;

/// The name of the namespace whose routes are at `/v1` itself.
pub(crate) const DEFAULT: &str = "default";

/// The API on one engine.
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::store::Store;
/// use latchwork::workflow::Engine;
/// use latchwork_server::Api;
///
/// let engine = Engine::on(&Store::memory().await?).start().await?;
/// let application = axum::Router::new().nest("/latchwork", Api::on(&engine).router());
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "an Api does nothing until its router is served"]
pub struct Api {
    engine: Engine,
    claims: Option<Claims>,
    flows: BTreeMap<String, Flows>,
    tasks: Tasks,
    access: Access,
    limits: Limits,
}

impl Api {
    /// The API on an engine. It starts what the engine has registered.
    pub fn on(engine: &Engine) -> Api {
        let (access, limits) = (Access::local(), Limits::default());
        let tasks = Tasks::on(engine.store());
        Api { engine: engine.clone(), claims: None, flows: BTreeMap::new(), tasks, access, limits }
    }

    /// Serves claims.
    pub fn claims(mut self, claims: &Claims) -> Api {
        self.claims = Some(claims.clone());
        self
    }

    /// Serves the actions of a flow that is registered with the engine.
    pub fn flow(mut self, flow: &Flow) -> Api {
        self.flows.insert(flow.kind().into(), self.engine.flow(flow));
        self
    }

    /// Serves the tasks of these workers, so that a worker that waits gets a task at once. The workers are registered
    /// with the engine, and with the claims, by their own methods.
    pub fn workers(mut self, workers: &Workers) -> Api {
        self.tasks = workers.shared();
        self
    }

    /// Who may use the API. A [`Server`](crate::Server) has an access of its own, which replaces this one.
    pub fn access(mut self, access: Access) -> Api {
        self.access = access;
        self
    }

    /// How much a request may ask for. A [`Server`](crate::Server) has limits of its own, which replace these.
    pub fn limits(mut self, limits: Limits) -> Api {
        self.limits = limits;
        self
    }

    /// The routes, for an application of your own: `/v1/…`, `/openapi.json`, `/docs`, `/healthz` and `/readyz`, to be
    /// nested or merged.
    ///
    /// axum tells the router where a request comes from if the application is served by
    /// `into_make_service_with_connect_info::<SocketAddr>()`. Otherwise every request counts as one of another machine,
    /// which the default [`Access`] refuses.
    pub fn router(self) -> Router {
        let (access, limits) = (self.access.clone(), self.limits);
        // The application decides when it ends: streams end with its connections.
        let closing = Closing::new(watch::Sender::new(false));
        assemble(BTreeMap::from([(DEFAULT.to_string(), self)]), access, limits, closing, Beside::Others)
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(crate) fn into_namespace(self, name: &str, access: Access, limits: Limits, closing: Closing) -> Namespace {
        let Api { engine, claims, flows, tasks, .. } = self;
        let calls = Calls::on(engine.store());
        tasks.have_traces_of(&engine);
        let (name, keeper) = (name.into(), AtomicBool::new(false));
        let namespace =
            Namespace(Arc::new(Inner { name, engine, claims, flows, calls, tasks, keeper, access, limits, closing }));
        namespace.keep_tasks();
        namespace
    }
}

/// Tells streams that the server shuts down.
pub(crate) type Closing = Arc<watch::Sender<bool>>;

/// What a route uses: the namespace that the request is for. It is the state of every route.
#[derive(Clone)]
pub(crate) struct Namespace(Arc<Inner>);

struct Inner {
    name: String,
    engine: Engine,
    claims: Option<Claims>,
    flows: BTreeMap<String, Flows>,
    calls: Calls,
    tasks: Tasks,
    /// True if a task keeps the tasks.
    keeper: AtomicBool,
    access: Access,
    limits: Limits,
    closing: Closing,
}

impl tasks::Kept for Inner {
    fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl Namespace {
    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.0.engine
    }

    pub(crate) fn entities(&self) -> &Entities {
        self.0.engine.entities()
    }

    /// The claims that the program has registered, if any.
    pub(crate) fn claims(&self) -> Option<&Claims> {
        self.0.claims.as_ref()
    }

    /// The flows that the program has registered, by name.
    pub(crate) fn flows(&self) -> &BTreeMap<String, Flows> {
        &self.0.flows
    }

    pub(crate) fn env(&self) -> &Env {
        self.0.engine.store().env()
    }

    pub(crate) fn calls(&self) -> &Calls {
        &self.0.calls
    }

    pub(crate) fn tasks(&self) -> &Tasks {
        self.keep_tasks();
        &self.0.tasks
    }

    /// Starts the keeper of the tasks, once. An application may mount a router before it has a runtime.
    fn keep_tasks(&self) {
        if let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !self.0.keeper.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(tasks::keep(Arc::downgrade(&self.0)));
        }
    }

    pub(crate) fn access(&self) -> &Access {
        &self.0.access
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.0.limits
    }

    /// Resolves when the server shuts down: what would go on without end, such as a stream, ends then.
    pub(crate) fn closing(&self) -> impl Future<Output = ()> + Send + use<> {
        closed(&self.0.closing)
    }
}

/// Resolves when the server shuts down.
pub(crate) fn closed(closing: &Closing) -> impl Future<Output = ()> + Send + use<> {
    let mut closing = closing.subscribe();
    async move {
        // Without a sender, the server is gone.
        let _ = closing.wait_for(|is_closing| *is_closing).await;
    }
}
