//! Claim workflows on an engine: what is registered for them, and the checks before they start. It runs no action:
//! `fire.rs` does.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Notify, Semaphore};

use crate::claim::action::ActionCtx;
use crate::claim::config::{ActionFacts, ClaimWorkflow, Each, Janitor, Recovery};
use crate::claim::durable::DurableAction;
use crate::claim::error::{ActionError, ClaimError, Result, Uncovered};
use crate::claim::finding::{Finding, Findings, Rule};
use crate::claim::janitor::{self, Abandoned};
use crate::claim::ledger::Ledger;
use crate::claim::machine::Machine;
use crate::claim::outbox::{AfterEffect, EffectOutbox, Handler};
use crate::claim::outcome::{IntoDelivery, IntoOutcome, Outcome};
use crate::claim::read;
use crate::claim::rows::Rows;
use crate::claim::stored::ClaimSpaces;
use crate::claim::timers;
use crate::claim::validate::{self, Registered};
use crate::entity::{Add, Entity, EntityId, OpReceipt};
use crate::lane::Part;
use crate::lock::service::Service;
use crate::node::alarm::{self, Alarms};
use crate::workflow::{Boxed, Engine, Workflow, engine};

/// The maximum number of steps that timers fire at the same time.
const RINGING: usize = 256;

/// Claim workflows on an engine. Handles are cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::claim::{ActionCtx, Claims, Outcome};
/// use latchwork::entity::Add;
/// use latchwork::store::Store;
/// use latchwork::workflow::Engine;
/// use latchwork::json;
///
/// let engine = Engine::on(&Store::memory().await?).start().await?;
/// let claims = Claims::on(&engine)
///     .configure(r#"{
///       "workflow": "invoice",
///       "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
///       "status_types": ["sent", "paying", "paid"],
///       "steps": [{
///         "step_id": 20, "step_key": "apply_payment", "status": "sent",
///         "action": { "admin": "ApplyPayment" },
///         "successful_claim_state": { "admin": ["paying", "sent"] },
///         "successful_state": { "admin": "paid" }
///       }]
///     }"#)
///     .action("ApplyPayment", async |ctx: ActionCtx| {
///         ctx.add(Add::new("payment").data(json!({"of": ctx.entity().id, "amount": ctx.input()["amount"]})));
///         Outcome::done()
///     })
///     .start()
///     .await?;
///
/// claims.add("invoice", Add::new("invoice").id("i-1").data(json!({"status": "sent"}))).await?;
/// let fired = claims.fire("invoice", "apply_payment", "i-1").by("admin").input(json!({"amount": 7})).await?;
/// assert_eq!(fired.done().unwrap().to, "paid");
/// // The second call is refused: the invoice is not at `sent` any more.
/// assert!(claims.fire("invoice", "apply_payment", "i-1").by("admin").await?.is_refused());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Claims {
    pub(crate) inner: Arc<ClaimsInner>,
}

pub(crate) struct ClaimsInner {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) machines: BTreeMap<String, Machine>,
    pub(crate) actions: BTreeMap<String, Action>,
    pub(crate) guards: BTreeMap<String, GuardFn>,
    pub(crate) covers: BTreeMap<String, Cover>,
    pub(crate) outbox: Arc<EffectOutbox>,
    pub(crate) alarms: Arc<Alarms>,
    /// Each step that a timer fires holds one permit.
    pub(crate) ringing: Arc<Semaphore>,
    /// The entities that callers in this process are about to claim.
    pub(crate) claiming: Mutex<HashMap<EntityId, Arc<Semaphore>>>,
    /// Makes the janitor sweep at once.
    pub(crate) nudge: Arc<Notify>,
    pub(crate) sweep_every: Duration,
}

/// A registered action.
#[derive(Clone)]
pub(crate) enum Action {
    Plain(PlainAction),
    /// The name of a workflow of the engine.
    Durable(String),
}

impl Action {
    /// The function of an action that is not a workflow.
    pub(crate) fn plain(self) -> Option<PlainAction> {
        match self {
            Action::Plain(action) => Some(action),
            Action::Durable(_) => None,
        }
    }
}

pub(crate) type PlainAction =
    Arc<dyn Fn(ActionCtx) -> Boxed<'static, std::result::Result<Outcome, ActionError>> + Send + Sync>;
pub(crate) type GuardFn = Arc<dyn Fn(&Entity, &Value) -> std::result::Result<(), String> + Send + Sync>;
pub(crate) type Cover = Arc<dyn Fn(Abandoned) -> Boxed<'static, Recovery> + Send + Sync>;

/// A claiming status that the janitor of a module must cover.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeclaredClaim {
    /// The workflow that declares it.
    pub workflow: String,
    /// The module that owns the workflow.
    pub module: String,
    /// The type of the workflow's entities.
    pub entity_type: String,
    /// The claiming status.
    pub claim_into: String,
    /// The statuses that its claims revert to. There are several only if the workflow sets `shared_claiming`.
    pub revert_to: Vec<String>,
}

/// Claim workflows that are about to start.
#[must_use = "nothing is served until this is started"]
pub struct ClaimsBuilder {
    engine: Engine,
    /// The texts of configuration files.
    texts: Vec<String>,
    workflows: Vec<ClaimWorkflow>,
    actions: BTreeMap<String, Action>,
    facts: BTreeMap<String, ActionFacts>,
    durable: Vec<DurableAction>,
    handlers: BTreeMap<String, Handler>,
    /// The workflows that run as after-effects, by the names of the after-effects.
    started: BTreeMap<String, String>,
    guards: BTreeMap<String, GuardFn>,
    covers: BTreeMap<String, Cover>,
    sweep_every: Duration,
    effect_attempts: u32,
    twice: Vec<String>,
}

impl Claims {
    /// Returns a builder for claim workflows on the store of an engine.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # use latchwork::workflow::Engine;
    /// # async fn example(engine: Engine, file: &str) -> Result<()> {
    /// let claims = Claims::on(&engine).configure(file).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn on(engine: &Engine) -> ClaimsBuilder {
        ClaimsBuilder {
            engine: engine.clone(),
            texts: Vec::new(),
            workflows: Vec::new(),
            actions: BTreeMap::new(),
            facts: BTreeMap::new(),
            durable: Vec::new(),
            handlers: BTreeMap::new(),
            started: BTreeMap::new(),
            guards: BTreeMap::new(),
            covers: BTreeMap::new(),
            sweep_every: Duration::from_secs(1),
            effect_attempts: 10,
            twice: Vec::new(),
        }
    }

    /// Adds an entity at a status that entities of the workflow start at, and sets the timers of that status. If an
    /// entity is added in another way, the next process sets its timers when it starts.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// # async fn example(claims: Claims) -> Result<()> {
    /// claims.add("invoice", Add::new("invoice").id("i-1").data(json!({"status": "sent"}))).await?;
    /// # Ok(()) }
    /// ```
    pub async fn add(&self, workflow: &str, add: Add) -> Result<OpReceipt> {
        let (inner, machine) = (&self.inner, self.inner.machine(workflow)?);
        if let Some(table) = &machine.config.meta.table {
            let reason = "its rows are inserted by SQL, at a status that they may start at".into();
            return Err(ClaimError::Table { workflow: workflow.into(), table: table.name.clone(), reason });
        }
        let ledger = &inner.ledger;
        let given = add.clone().checked(0)?;
        let meta = &machine.config.meta;
        let id = add.id.clone().unwrap_or_else(|| ledger.store.env().uuid().into());
        if *given.entity_type != *meta.entity_type {
            let (workflow, expected) = (workflow.to_string(), meta.entity_type.clone());
            return Err(ClaimError::WrongType { id, workflow, expected, found: given.entity_type.to_string() });
        }
        let no_status = || ClaimError::NoStatus { id: id.clone(), field: meta.status_field.clone() };
        let status = crate::claim::machine::status_at(&machine.path, &given.data).ok_or_else(no_status)?.to_string();
        let allowed = machine.config.starts();
        if !allowed.contains(&status) {
            return Err(ClaimError::NotInitial { workflow: workflow.into(), found: status, allowed: allowed.to_vec() });
        }
        let now = ledger.store.env().now();
        let set = timers::set(Part::default(), ledger, workflow, &machine.timers(&status), (&id, 0), now);
        let (ledger, add) = (ledger.clone(), add.id(id.clone()));
        // In a task that also finishes if the caller drops this future: the answer of the commit sets the timers in
        // memory.
        let added = inner.ledger.engine.node.runtime.run(async move { ledger.add(add, set).await });
        added.await.unwrap_or(Err(ClaimError::Stopped))
    }

    /// The number of after-effects that this process knows and has not delivered yet.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # fn example(claims: Claims) {
    /// println!("{} after-effects are on their way", claims.undelivered());
    /// # }
    /// ```
    pub fn undelivered(&self) -> usize {
        self.inner.outbox.known()
    }
}

impl ClaimsBuilder {
    /// Adds the claim workflows of a configuration file, given as text. [`ClaimsBuilder::start`] reports what is wrong
    /// with it.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: Engine) -> Result<(), Box<dyn std::error::Error>> {
    /// let file = std::fs::read_to_string("invoices.json")?;
    /// let claims = Claims::on(&engine).configure(file);
    /// # Ok(()) }
    /// ```
    pub fn configure(mut self, json: impl Into<String>) -> ClaimsBuilder {
        self.texts.push(json.into());
        self
    }

    /// Adds a claim workflow.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimStep, ClaimWorkflow, Claims};
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice")
    ///     .statuses(["sent", "paying", "paid"])
    ///     .step(ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay"));
    /// let claims = Claims::on(engine).workflow(invoice);
    /// # }
    /// ```
    pub fn workflow(mut self, workflow: ClaimWorkflow) -> ClaimsBuilder {
        self.workflows.push(workflow);
        self
    }

    /// Registers an action under the name that the configuration uses for it. It returns an [`Outcome`], or a `Result`
    /// if it can fail: see [`IntoOutcome`].
    ///
    /// ```
    /// # use latchwork::claim::{ActionCtx, Claims, Outcome};
    /// # use latchwork::json;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).action("Pay", async |ctx: ActionCtx| {
    ///     ctx.merge_data(json!({"paid_by": ctx.requester()}));
    ///     Outcome::done()
    /// });
    /// # }
    /// ```
    pub fn action<F, Fut, R>(mut self, name: impl Into<String>, action: F) -> ClaimsBuilder
    where
        F: Fn(ActionCtx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: IntoOutcome,
    {
        let plain: PlainAction = Arc::new(move |ctx| {
            let acting = action(ctx);
            Box::pin(async move { acting.await.into_outcome() })
        });
        self.register(name.into(), Action::Plain(plain));
        self
    }

    /// Registers an action that is a durable workflow. The execution owns the claim, and continues after a restart.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, DurableCall, Outcome, durable_action};
    /// # use latchwork::workflow::{Ctx, Engine};
    /// # fn example(engine: &Engine) {
    /// let close = durable_action("Close", async |ctx: Ctx, call: DurableCall| {
    ///     ctx.run("collect", async || Ok(7)).await?;
    ///     Ok(Outcome::output(call.input))
    /// });
    /// let claims = Claims::on(engine).durable_action(&close);
    /// # }
    /// ```
    pub fn durable_action(mut self, action: &DurableAction) -> ClaimsBuilder {
        self.register(action.name().into(), Action::Durable(action.name().into()));
        // A caller that gets no answer cannot know whether the execution was started.
        self.facts.entry(action.name().into()).or_default().non_idempotent = true;
        self.durable.push(action.clone());
        self
    }

    fn register(&mut self, name: String, action: Action) {
        self.facts.entry(name.clone()).or_default();
        if self.actions.insert(name.clone(), action).is_some() {
            self.twice.push(format!("action {name:?} is registered twice"));
        }
    }

    /// Declares that an action does harm if it runs twice. Every step with this action must then be claimed.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).non_idempotent("Pay");
    /// # }
    /// ```
    pub fn non_idempotent(mut self, action: impl Into<String>) -> ClaimsBuilder {
        self.facts.entry(action.into()).or_default().non_idempotent = true;
        self
    }

    /// Registers the handler of an after-effect. It is called at least once for each transition, after the commit.
    ///
    /// ```
    /// # use latchwork::claim::{AfterEffect, Claims};
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).after_effect("SendReceipt", async |paid: AfterEffect| {
    ///     println!("a receipt for {}, under the key {}", paid.entity, paid.key);
    /// });
    /// # }
    /// ```
    pub fn after_effect<F, Fut, R>(mut self, name: impl Into<String>, handler: F) -> ClaimsBuilder
    where
        F: Fn(AfterEffect) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = R> + Send + 'static,
        R: IntoDelivery,
    {
        let handler: Handler = Arc::new(move |effect| {
            let handling = handler(effect);
            Box::pin(async move { handling.await.into_delivery() })
        });
        let name = name.into();
        if self.handlers.insert(name.clone(), handler).is_some() || self.started.contains_key(&name) {
            self.twice.push(format!("after-effect {name:?} is registered twice"));
        }
        self
    }

    /// Registers a workflow as an after-effect. It is started in the commit of the transition, so exactly once. It must
    /// also be registered with the engine.
    ///
    /// ```
    /// # use latchwork::claim::{AfterEffect, Claims};
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// # fn example(engine: &Engine) {
    /// let books = workflow("books").run(async |_: Ctx, paid: AfterEffect| Ok(paid.rev));
    /// let claims = Claims::on(engine).after_effect_workflow("TellBooks", &books);
    /// # }
    /// ```
    pub fn after_effect_workflow<O>(
        mut self,
        name: impl Into<String>,
        workflow: &Workflow<AfterEffect, O>,
    ) -> ClaimsBuilder {
        let name = name.into();
        if self.started.insert(name.clone(), workflow.name().into()).is_some() || self.handlers.contains_key(&name) {
            self.twice.push(format!("after-effect {name:?} is registered twice"));
        }
        self
    }

    /// Registers a guard. It gets the entity and the input, and returns an error with the reason if the step must not
    /// be fired. It must have no side effects.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).guard("has_amount", |_, input| match input["amount"].as_u64() {
    ///     Some(_) => Ok(()),
    ///     None => Err("a payment needs an amount".into()),
    /// });
    /// # }
    /// ```
    pub fn guard(
        mut self,
        name: impl Into<String>,
        guard: impl Fn(&Entity, &Value) -> std::result::Result<(), String> + Send + Sync + 'static,
    ) -> ClaimsBuilder {
        self.guards.insert(name.into(), Arc::new(guard));
        self
    }

    /// The claiming statuses that a module must cover because its workflows declare `"janitor": "module"`.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine, file: &str) {
    /// for declared in Claims::on(engine).configure(file).declared("billing") {
    ///     println!("{} declares {}", declared.workflow, declared.claim_into);
    /// }
    /// # }
    /// ```
    pub fn declared(&self, module: &str) -> Vec<DeclaredClaim> {
        let (workflows, _) = self.read();
        let of_module = |workflow: &&ClaimWorkflow| workflow.meta.owning_module == module;
        workflows.iter().filter(of_module).flat_map(declared).collect()
    }

    /// Registers the janitor of a module for all claiming statuses that [`ClaimsBuilder::declared`] returns for it. It
    /// is called for every claim whose owner is gone, and decides what happens to the claim.
    ///
    /// ```
    /// # use latchwork::claim::{Abandoned, Claims, Recovery};
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).cover("billing", async |claim: Abandoned| match claim.attempts {
    ///     1 => Recovery::Revert,
    ///     _ => Recovery::NeedsReview,
    /// });
    /// # }
    /// ```
    pub fn cover<F, Fut>(mut self, module: impl Into<String>, janitor: F) -> ClaimsBuilder
    where
        F: Fn(Abandoned) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Recovery> + Send + 'static,
    {
        self.covers.insert(module.into(), Arc::new(move |abandoned| Box::pin(janitor(abandoned))));
        self
    }

    /// Sets how often the janitor looks for claims whose owners are gone. The default is every second.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).sweep_every(Duration::from_secs(5));
    /// # }
    /// ```
    pub fn sweep_every(mut self, every: Duration) -> ClaimsBuilder {
        self.sweep_every = every.max(Duration::from_millis(1));
        self
    }

    /// Sets how many times an after-effect is tried before it becomes a dead letter. The default is ten.
    ///
    /// ```
    /// # use latchwork::claim::Claims;
    /// # use latchwork::workflow::Engine;
    /// # fn example(engine: &Engine) {
    /// let claims = Claims::on(engine).after_effect_attempts(20);
    /// # }
    /// ```
    pub fn after_effect_attempts(mut self, attempts: u32) -> ClaimsBuilder {
        self.effect_attempts = attempts.max(1);
        self
    }

    /// Returns all workflows, and everything that is wrong with them.
    fn read(&self) -> (Vec<ClaimWorkflow>, Vec<Finding>) {
        let effects = self.handlers.keys().chain(self.started.keys()).cloned().collect();
        let known = Registered {
            actions: Some(self.facts.clone().into_iter().filter(|(name, _)| self.actions.contains_key(name)).collect()),
            after_effects: Some(effects),
            guards: Some(self.guards.keys().cloned().collect()),
        };
        let (mut workflows, mut findings) = (Vec::new(), Vec::new());
        for text in &self.texts {
            let mut source = read::read(text);
            let read = std::mem::take(&mut source.workflows);
            validate::validate(&read, &known, &mut source.findings);
            workflows.extend(read);
            findings.extend(source.finish());
        }
        let mut found = Findings::default();
        validate::validate(&self.workflows, &known, &mut found);
        workflows.extend(self.workflows.iter().cloned());
        let mut names = BTreeSet::new();
        for workflow in workflows.iter().filter(|workflow| !names.insert(&workflow.name)) {
            found.in_workflow(&workflow.name);
            let message = "another configuration has a workflow of the same name: give each workflow its own name";
            found.add(Rule::DuplicateId, Default::default(), None, message);
        }
        for message in &self.twice {
            found.add(Rule::DuplicateId, Default::default(), None, message);
        }
        for name in self.started.values().filter(|name| self.engine.inner.definition(name).is_none()) {
            let message = format!("the engine does not know the workflow {name:?}: register it with the engine, too");
            found.add(Rule::UnknownAfterEffect, Default::default(), None, message);
        }
        for action in self.durable.iter().filter(|it| self.engine.inner.definition(it.name()).is_none()) {
            let message = format!("the engine does not know the workflow of action {:?}: register it", action.name());
            found.add(Rule::UnknownAction, Default::default(), None, message);
        }
        findings.extend(found.found.into_iter().map(|(_, finding)| finding));
        (workflows, findings)
    }

    /// Checks the configuration, and that every claiming status has a janitor. Then starts to recover the claims of
    /// processes that are gone, and to deliver after-effects.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimWorkflow, Claims, Result};
    /// # use latchwork::workflow::Engine;
    /// # async fn example(engine: Engine, invoice: ClaimWorkflow) -> Result<()> {
    /// let claims = Claims::on(&engine).workflow(invoice).start().await?;
    /// # Ok(()) }
    /// ```
    pub async fn start(self) -> Result<Claims> {
        let (workflows, findings) = self.read();
        for warning in findings.iter().filter(|finding| finding.rule.is_warning()) {
            tracing::warn!("{warning}");
        }
        let findings: Vec<Finding> = findings.into_iter().filter(|finding| !finding.rule.is_warning()).collect();
        if !findings.is_empty() {
            return Err(ClaimError::Config { findings });
        }
        let uncovered = |declared: &DeclaredClaim| !self.covers.contains_key(&declared.module);
        let missing = workflows.iter().flat_map(declared).filter(uncovered).map(|declared| Uncovered {
            workflow: declared.workflow,
            module: declared.module,
            status: declared.claim_into,
        });
        let missing: Vec<Uncovered> = missing.collect();
        if !missing.is_empty() {
            return Err(ClaimError::Uncovered { missing });
        }
        for workflow in &workflows {
            self.check_table(workflow)?;
        }
        let rows = Rows::boot(&self.engine.inner.store, &workflows).await?;
        let mut machines = BTreeMap::new();
        for workflow in workflows {
            machines.insert(workflow.name.clone(), Machine::new(workflow, &self.started)?);
        }
        self.begin(machines, rows).await
    }

    /// An execution ends its claim in a commit of its own, which cannot change a row.
    fn check_table(&self, workflow: &ClaimWorkflow) -> Result<()> {
        let Some(table) = &workflow.meta.table else { return Ok(()) };
        let actions = workflow.steps.iter().filter_map(|step| step.action.as_ref()).flat_map(Each::values);
        let is_durable = |name: &str| matches!(self.actions.get(name), Some(Action::Durable(_)));
        match actions.map(|(_, name)| name).find(|name| is_durable(name)) {
            None => Ok(()),
            Some(name) => {
                let reason =
                    format!("action {name:?} is a workflow; start it as an after-effect, or make it an action");
                Err(ClaimError::Table { workflow: workflow.name.clone(), table: table.name.clone(), reason })
            }
        }
    }

    async fn begin(self, machines: BTreeMap<String, Machine>, rows: Option<Arc<Rows>>) -> Result<Claims> {
        let engine = self.engine.inner.clone();
        if ClaimsInner::on(&engine).is_some() {
            return Err(ClaimError::AlreadyStarted);
        }
        let (node, store) = (engine.node.clone(), engine.store.clone());
        let spaces = ClaimSpaces::declare(&store).await?;
        let (outbox, acked) =
            EffectOutbox::new(engine.name.clone(), &node, &spaces, self.handlers, self.effect_attempts);
        let alarms = Alarms::new(&node, &spaces.timers);
        let ledger = Arc::new(Ledger {
            store,
            entities: engine.entities.clone(),
            states: engine.states.clone(),
            spaces,
            engine,
            outbox: Arc::downgrade(&outbox),
            timers: Arc::downgrade(&alarms),
            rows,
        });
        let inner = Arc::new(ClaimsInner {
            ledger,
            machines,
            actions: self.actions,
            guards: self.guards,
            covers: self.covers,
            outbox,
            alarms,
            ringing: Arc::new(Semaphore::new(RINGING)),
            claiming: Mutex::default(),
            nudge: Arc::default(),
            sweep_every: self.sweep_every,
        });
        // Before this point, executions write to the stored outbox only. `serve` reads their after-effects from there.
        let above: Arc<dyn Any + Send + Sync> = inner.clone();
        *inner.ledger.engine.above.lock() = Some(Arc::downgrade(&above));
        inner.outbox.serve(acked);
        node.chore(janitor::keep(Arc::downgrade(&inner)));
        node.chore(alarm::keep::<timers::Ring>(Arc::downgrade(&inner)));
        let adopting = Arc::downgrade(&inner);
        node.chore(async move {
            let Some(inner) = adopting.upgrade() else { return };
            if let Err(error) = inner.adopt().await {
                tracing::error!(%error, "could not set all timers of entities that were added without a step");
            }
        });
        Ok(Claims { inner })
    }
}

/// The claiming statuses of a workflow that its module must cover.
fn declared(workflow: &ClaimWorkflow) -> Vec<DeclaredClaim> {
    if workflow.meta.janitor == Janitor::Engine {
        return Vec::new();
    }
    let of = |status: &str| {
        let claims = workflow.steps.iter().filter_map(|step| step.claim_state.as_ref()).flat_map(Each::values);
        let reverts = claims.filter(|(_, it)| it.claim_into == status).map(|(_, it)| it.revert_to.clone());
        let reverts: BTreeSet<String> = reverts.collect();
        DeclaredClaim {
            workflow: workflow.name.clone(),
            module: workflow.meta.owning_module.clone(),
            entity_type: workflow.meta.entity_type.clone(),
            claim_into: status.into(),
            revert_to: reverts.into_iter().collect(),
        }
    };
    workflow.claiming().into_iter().map(of).collect()
}

impl ClaimsInner {
    /// The claims of an engine, if they were started.
    pub(crate) fn on(engine: &engine::EngineInner) -> Option<Arc<ClaimsInner>> {
        let above = engine.above.lock().as_ref()?.upgrade()?;
        above.downcast().ok()
    }

    pub(crate) fn machine(&self, name: &str) -> Result<&Machine> {
        let unknown =
            || ClaimError::UnknownWorkflow { name: name.into(), known: self.machines.keys().cloned().collect() };
        self.machines.get(name).ok_or_else(unknown)
    }

    pub(crate) fn service(&self) -> &Arc<Service> {
        &self.ledger.engine.locks
    }
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claims").field("workflows", &self.inner.machines.keys()).finish_non_exhaustive()
    }
}
