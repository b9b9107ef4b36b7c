//! The context of an action: its entity, its input, and the writes that are committed together with the final status.
//! It commits nothing itself: `finish.rs` commits what an action has staged.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::claim::claims::ClaimsInner;
use crate::claim::error::{ClaimError, Result};
use crate::claim::rows::SqlWork;
use crate::claim::stored::Claim;
use crate::claim::table::ROWS;
use crate::entity::{Add, Entities, Entity, EntityId, Remove, Transaction, Update};
use crate::json::{self, JsonError};
use crate::lock::Session;
use crate::state::{MutationError, Slot, StateError, States, Steward};
use crate::store::{Check, Key, Rev, Right};
use crate::workflow::{Boxed, ExecutionId, Workflow};

/// The context of an action. It is cheap to clone.
#[derive(Clone)]
pub struct ActionCtx {
    inner: Arc<ActionInner>,
}

struct ActionInner {
    claims: Arc<ClaimsInner>,
    claim: Claim,
    entity: Entity,
    input: Value,
    token: Option<ClaimToken>,
    session: Option<Session>,
    staged: Mutex<StagedWrites>,
}

/// Writes that are committed together with the final status, or not at all.
#[derive(Clone, Default)]
pub(crate) struct StagedWrites {
    /// The new data of the action's own entity.
    pub(crate) data: Option<Value>,
    pub(crate) others: Transaction,
    pub(crate) has_others: bool,
    pub(crate) slots: Vec<SlotChange>,
    pub(crate) starts: Vec<StagedStart>,
    /// SQL that runs in the transaction of the final status.
    pub(crate) sql: Vec<SqlWork>,
    /// The first staged value that JSON cannot hold.
    pub(crate) wrong: Option<(&'static str, JsonError)>,
}

/// A change of a slot. It is computed again for each attempt to commit.
pub(crate) type SlotChange =
    Arc<dyn Fn(Arc<dyn Steward>) -> Boxed<'static, std::result::Result<(), StateError>> + Send + Sync>;

/// An execution that starts in the commit of the final status.
#[derive(Clone)]
pub(crate) struct StagedStart {
    pub(crate) workflow: String,
    /// JSON text.
    pub(crate) input: String,
    pub(crate) id: ExecutionId,
}

/// The fencing token of a claim. It is larger than the token of every earlier claim on the entity. It is valid until
/// another caller writes the entity, releases the claim or takes it over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimToken {
    pub(crate) entity: EntityId,
    pub(crate) key: Key,
    pub(crate) rev: Rev,
}

impl ClaimToken {
    /// The number, for receivers that remember the largest number they have seen.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// if let Some(token) = ctx.token() {
    ///     println!("the token is {}", token.number());
    /// }
    /// # }
    /// ```
    pub fn number(&self) -> u64 {
        self.rev.0
    }
}

impl Right for ClaimToken {
    fn check(&self) -> Check {
        Check::AtRev(self.key.clone(), self.rev)
    }

    fn lost(&self) -> String {
        format!("the claim on entity {:?} is not held under token {}", self.entity, self.rev)
    }
}

/// A claim was taken away from its action: its lease has expired, or an operator has released the claim or changed the
/// entity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the claim on entity {entity:?} is lost: no later write of the action will be committed")]
pub struct ClaimLost {
    /// The entity.
    pub entity: EntityId,
}

impl ActionCtx {
    pub(crate) fn new(
        claims: &Arc<ClaimsInner>,
        claim: &Claim,
        entity: Entity,
        input: Value,
        session: Option<Session>,
    ) -> ActionCtx {
        // The record of a row is in the user's table, so no commit of the store can check it.
        let is_row = entity.id.starts_with(ROWS);
        let token = claim.terms.claim_into.as_ref().filter(|_| !is_row).map(|_| ClaimToken {
            entity: entity.id.clone(),
            key: claims.ledger.entities.key(&entity.id),
            rev: Rev(claim.token),
        });
        let (claims, claim, staged) = (claims.clone(), claim.clone(), Mutex::default());
        ActionCtx { inner: Arc::new(ActionInner { claims, claim, entity, input, token, session, staged }) }
    }

    /// The entity as it is while the action runs. In a claimed step it is at the claiming status.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let price = ctx.entity().data["price"].as_u64();
    /// # }
    /// ```
    pub fn entity(&self) -> &Entity {
        &self.inner.entity
    }

    /// The requester that the step was fired for.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// println!("fired for {}", ctx.requester());
    /// # }
    /// ```
    pub fn requester(&self) -> &str {
        &self.inner.claim.requester
    }

    /// The actor that has fired the step, if one was given.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let actor = ctx.actor().unwrap_or("unknown");
    /// # }
    /// ```
    pub fn actor(&self) -> Option<&str> {
        self.inner.claim.actor.as_deref()
    }

    /// The step's key.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// println!("step {} of {}", ctx.step(), ctx.entity().id);
    /// # }
    /// ```
    pub fn step(&self) -> &str {
        &self.inner.claim.terms.step_key
    }

    /// The input that the step was fired with.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let amount = ctx.input()["amount"].as_u64().unwrap_or_default();
    /// # }
    /// ```
    pub fn input(&self) -> &Value {
        &self.inner.input
    }

    /// The input as a value of the caller's own type.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) -> Result<(), Box<dyn std::error::Error>> {
    /// let (amount, currency): (u64, String) = ctx.parse_input()?;
    /// # Ok(()) }
    /// ```
    pub fn parse_input<T: DeserializeOwned>(&self) -> std::result::Result<T, serde_json::Error> {
        T::deserialize(&self.inner.input)
    }

    /// The fencing token. `None` if the step is not claimed.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let number = ctx.token().map(|token| token.number());
    /// # }
    /// ```
    pub fn token(&self) -> Option<&ClaimToken> {
        self.inner.token.as_ref()
    }

    /// The number of this attempt under the claim, counted from 1. It is more than 1 only after the recovery `retry`,
    /// or if an operator has started the action again.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// if ctx.attempt() > 1 {
    ///     println!("an earlier attempt has not ended");
    /// }
    /// # }
    /// ```
    pub fn attempt(&self) -> u32 {
        self.inner.claim.attempts
    }

    /// An idempotency key for receivers that accept one. All attempts of this firing have the same key, and no other
    /// firing has it.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let idempotency_key = ctx.key(); // pass it to the bank
    /// # }
    /// ```
    pub fn key(&self) -> String {
        self.inner.claim.id.to_string()
    }

    /// Checks whether the claim still holds. The lease is renewed without this call, for as long as the process lives.
    ///
    /// ```
    /// # use latchwork::claim::{ActionCtx, ClaimLost};
    /// # async fn example(ctx: ActionCtx) -> Result<(), ClaimLost> {
    /// ctx.heartbeat().await?; // before the next part of the work
    /// # Ok(()) }
    /// ```
    pub async fn heartbeat(&self) -> Result<(), ClaimLost> {
        let lost = ClaimLost { entity: self.inner.entity.id.clone() };
        if self.is_lost() {
            return Err(lost);
        }
        let ledger = &self.inner.claims.ledger;
        // While the store is unavailable, no other caller can take the claim away either.
        let Ok(view) = ledger.store.view().await else { return Ok(()) };
        match ledger.standing(&view, &self.inner.entity.id).await {
            Ok(None) => Err(lost),
            Ok(Some(standing)) if standing.rev != self.inner.entity.rev => Err(lost),
            Ok(Some(_)) | Err(_) => Ok(()),
        }
    }

    /// True if the claim is known to be lost because its lease could not be renewed.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// if ctx.is_lost() {
    ///     println!("nothing that this action writes will be committed");
    /// }
    /// # }
    /// ```
    pub fn is_lost(&self) -> bool {
        self.inner.session.as_ref().is_some_and(Session::is_lost)
    }

    /// The length of the lease. The engine renews it three times per lease.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// println!("the lease is {:?}", ctx.lease());
    /// # }
    /// ```
    pub fn lease(&self) -> Duration {
        self.inner.claim.terms.lease()
    }

    fn stage<T>(&self, stage: impl FnOnce(&mut StagedWrites) -> T) -> T {
        stage(&mut self.inner.staged.lock())
    }

    pub(crate) fn take_staged(&self) -> StagedWrites {
        self.stage(std::mem::take)
    }

    fn json(staged: &mut StagedWrites, what: &'static str, value: &impl Serialize) -> Option<Value> {
        match json::to_value(value) {
            Ok(value) => Some(value),
            Err(cause) => {
                staged.wrong.get_or_insert((what, cause));
                None
            }
        }
    }

    /// Replaces the data of the entity. The engine sets the status in it afterwards.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::json;
    /// # fn example(ctx: ActionCtx) {
    /// ctx.set_data(json!({"price": 7, "is_paid": true}));
    /// # }
    /// ```
    pub fn set_data(&self, data: impl Serialize) {
        self.stage(|staged| staged.data = Self::json(staged, "the entity's data", &data));
    }

    /// Merges this patch into the data of the entity, as a JSON merge patch (RFC 7396).
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::json;
    /// # fn example(ctx: ActionCtx) {
    /// ctx.merge_data(json!({"paid_by": ctx.requester()}));
    /// # }
    /// ```
    pub fn merge_data(&self, patch: impl Serialize) {
        self.stage(|staged| {
            let Some(patch) = Self::json(staged, "the entity's data", &patch) else { return };
            let data = staged.data.get_or_insert_with(|| self.inner.entity.data.clone());
            json::merge(data, &patch);
        });
    }

    fn other(&self, write: impl FnOnce(Transaction) -> Transaction) {
        self.stage(|staged| {
            staged.others = write(std::mem::take(&mut staged.others));
            staged.has_others = true;
        });
    }

    /// Adds another entity.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// # fn example(ctx: ActionCtx) {
    /// ctx.add(Add::new("payment").data(json!({"of": ctx.entity().id, "amount": 7})));
    /// # }
    /// ```
    pub fn add(&self, add: Add) {
        self.other(|others| others.add(add));
    }

    /// Changes another entity.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// # fn example(ctx: ActionCtx) {
    /// ctx.update(Update::new("account-1").data(json!({"balance": 7})));
    /// # }
    /// ```
    pub fn update(&self, update: Update) {
        self.other(|others| others.update(update));
    }

    /// Removes another entity.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// ctx.remove("draft-7");
    /// # }
    /// ```
    pub fn remove(&self, remove: impl Into<Remove>) {
        self.other(|others| others.remove(remove));
    }

    /// Commits the transition only if this right still holds, for example the token of a lock.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::lock::LockGuard;
    /// # fn example(ctx: ActionCtx, held: LockGuard) {
    /// ctx.guard(held.token());
    /// # }
    /// ```
    pub fn guard(&self, right: &impl Right) {
        self.other(|others| others.guard(right));
    }

    /// Changes a slot. `change` is called when the transition is committed, and again if another commit was faster. It
    /// must have no side effects.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # fn example(ctx: ActionCtx) {
    /// let income = ctx.states().global().slot::<u64>("income");
    /// ctx.update_slot(&income, |sum| sum.unwrap_or(0) + 7);
    /// # }
    /// ```
    pub fn update_slot<T, F>(&self, slot: &Slot<T>, change: F)
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        F: Fn(Option<T>) -> T + Send + Sync + 'static,
    {
        let (slot, change) = (slot.clone(), Arc::new(change));
        let change: SlotChange = Arc::new(move |steward| {
            let (slot, change) = (slot.clone().by(steward), change.clone());
            Box::pin(async move {
                match slot.try_update(move |value| Ok::<_, std::convert::Infallible>(change(value))).await {
                    Ok(_) => Ok(()),
                    Err(MutationError::State(error)) => Err(error),
                    Err(MutationError::Refused(never)) => match never {},
                }
            })
        });
        self.stage(|staged| staged.slots.push(change));
    }

    /// Runs SQL on the user's own tables in the transaction of the final status, on a store in PostgreSQL: both take
    /// effect, or neither. It is called when the transition is committed, and again if the transaction is rolled back
    /// for a deadlock or a lost connection. An error of it fails the transition, and the claim is released. `?` accepts
    /// any error.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::store::SqlTx;
    /// # fn example(ctx: ActionCtx, invoice: i64) {
    /// ctx.sql(move |tx: SqlTx| async move {
    ///     tx.execute("INSERT INTO payments (invoice) VALUES ($1)", &[&invoice]).await?;
    ///     Ok(())
    /// });
    /// # }
    /// ```
    #[cfg(feature = "postgres")]
    pub fn sql<F, Fut>(&self, work: F)
    where
        F: Fn(crate::store::SqlTx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), crate::claim::ActionError>> + Send + 'static,
    {
        let work: SqlWork = Arc::new(move |tx| Box::pin(work(tx)));
        self.stage(|staged| staged.sql.push(work));
    }

    /// Starts an execution in the commit of the final status. Returns its id.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::workflow::Workflow;
    /// # fn example(ctx: ActionCtx, mail: Workflow<String, ()>) {
    /// let id = ctx.start(&mail, &"ada@example.org".to_string());
    /// # }
    /// ```
    pub fn start<I: Serialize, O>(&self, workflow: &Workflow<I, O>, input: &I) -> ExecutionId {
        let number = self.stage(|staged| staged.starts.len());
        let id = ExecutionId::from(format!("{}:{}:{number}", workflow.name(), self.inner.claim.id));
        self.start_as(workflow, input, id.clone());
        id
    }

    /// Starts an execution with this id in the commit of the final status. If the id is taken, the transition fails.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # use latchwork::workflow::Workflow;
    /// # fn example(ctx: ActionCtx, mail: Workflow<String, ()>) {
    /// ctx.start_as(&mail, &"ada@example.org".to_string(), "mail-7");
    /// # }
    /// ```
    pub fn start_as<I: Serialize, O>(&self, workflow: &Workflow<I, O>, input: &I, id: impl Into<ExecutionId>) {
        let (workflow, id) = (workflow.name().to_string(), id.into());
        self.stage(|staged| {
            let Some(input) = Self::json(staged, "the input of an execution", input) else { return };
            staged.starts.push(StagedStart { workflow, input: input.to_string(), id });
        });
    }

    /// The entities of the store, for reading.
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # async fn example(ctx: ActionCtx) -> Result<(), Box<dyn std::error::Error>> {
    /// let customer = ctx.entities().get("customer-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn entities(&self) -> &Entities {
        &self.inner.claims.ledger.entities
    }

    /// The state of the store, for reading and for [`ActionCtx::update_slot`].
    ///
    /// ```
    /// # use latchwork::claim::ActionCtx;
    /// # async fn example(ctx: ActionCtx) -> Result<(), Box<dyn std::error::Error>> {
    /// let income = ctx.states().global().slot::<u64>("income").get().await?;
    /// # Ok(()) }
    /// ```
    pub fn states(&self) -> &States {
        &self.inner.claims.ledger.states
    }
}

impl std::fmt::Debug for ActionCtx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (entity, step) = (&self.inner.entity.id, &self.inner.claim.terms.step_key);
        f.debug_struct("ActionCtx").field("entity", entity).field("step", step).finish_non_exhaustive()
    }
}

impl StagedWrites {
    /// True if only the entity itself is written.
    pub(crate) fn is_alone(&self) -> bool {
        !self.has_others && self.slots.is_empty()
    }

    /// The SQL that goes with the final status, and the name of the action.
    pub(crate) fn sql_of<'a>(&'a self, claim: &'a Claim) -> (&'a [SqlWork], &'a str) {
        (&self.sql, claim.terms.action.as_deref().unwrap_or_default())
    }

    pub(crate) fn check(&self) -> Result<()> {
        match &self.wrong {
            Some((what, cause)) => Err(ClaimError::Json { what, cause: cause.clone() }),
            None => Ok(()),
        }
    }
}
