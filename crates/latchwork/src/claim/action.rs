//! What an action is given: its entity, what it was asked for, and writes that land with the final status.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::claim::claims::Inner;
use crate::claim::error::{ClaimError, Result};
use crate::claim::stored::Claim;
use crate::entity::{Add, Entities, Entity, EntityId, Remove, Transaction, Update};
use crate::json::{self, JsonError};
use crate::lock::Session;
use crate::state::{MutationError, Slot, StateError, States, Steward};
use crate::store::{Check, Key, Rev, Right};
use crate::workflow::{Boxed, ExecutionId, Workflow};

/// What an action is given. It is cheap to clone.
#[derive(Clone)]
pub struct ActionCtx {
    inner: Arc<Given>,
}

struct Given {
    claims: Arc<Inner>,
    claim: Claim,
    entity: Entity,
    input: Value,
    token: Option<ClaimToken>,
    session: Option<Session>,
    staged: Mutex<Staged>,
}

/// Writes that land with the final status, or not at all.
#[derive(Clone, Default)]
pub(crate) struct Staged {
    /// The data of the action's own entity.
    pub(crate) data: Option<Value>,
    pub(crate) others: Transaction,
    pub(crate) has_others: bool,
    pub(crate) slots: Vec<SlotChange>,
    pub(crate) starts: Vec<Starting>,
    /// What is wrong with what was staged.
    pub(crate) wrong: Option<(&'static str, JsonError)>,
}

/// A change of a slot, made anew on each try to commit.
pub(crate) type SlotChange =
    Arc<dyn Fn(Arc<dyn Steward>) -> Boxed<'static, std::result::Result<(), StateError>> + Send + Sync>;

/// An execution that is started with the final status.
#[derive(Clone)]
pub(crate) struct Starting {
    pub(crate) workflow: String,
    /// JSON text.
    pub(crate) input: String,
    pub(crate) id: ExecutionId,
}

/// The fencing token of a claim: larger than that of every earlier claim on the entity. It holds as long as nobody else
/// has written the entity, released the claim or taken it over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimToken {
    pub(crate) entity: EntityId,
    pub(crate) key: Key,
    pub(crate) rev: Rev,
}

impl ClaimToken {
    /// The number, for receivers that remember the largest they have seen.
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

/// A claim was taken away from its action: its lease was over, or an operator has released the claim or changed the
/// entity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the claim on entity {entity:?} is lost: nothing that the action writes from now on will land")]
pub struct ClaimLost {
    /// The entity.
    pub entity: EntityId,
}

impl ActionCtx {
    pub(crate) fn new(
        claims: &Arc<Inner>,
        claim: &Claim,
        entity: Entity,
        input: Value,
        session: Option<Session>,
    ) -> ActionCtx {
        let token = claim.terms.claim_into.as_ref().map(|_| ClaimToken {
            entity: entity.id.clone(),
            key: claims.ledger.entities.key(&entity.id),
            rev: Rev(claim.token),
        });
        let (claims, claim, staged) = (claims.clone(), claim.clone(), Mutex::default());
        ActionCtx { inner: Arc::new(Given { claims, claim, entity, input, token, session, staged }) }
    }

    /// The entity, as it is while the action runs: of a claimed step, at the claiming status.
    pub fn entity(&self) -> &Entity {
        &self.inner.entity
    }

    /// The requester that the step was fired for.
    pub fn requester(&self) -> &str {
        &self.inner.claim.requester
    }

    /// Who has fired the step, if that was said.
    pub fn actor(&self) -> Option<&str> {
        self.inner.claim.actor.as_deref()
    }

    /// The step's key.
    pub fn step(&self) -> &str {
        &self.inner.claim.terms.step_key
    }

    /// The input that the step was fired with.
    pub fn input(&self) -> &Value {
        &self.inner.input
    }

    /// The input as a value of one's own type.
    pub fn parse_input<T: DeserializeOwned>(&self) -> std::result::Result<T, serde_json::Error> {
        T::deserialize(&self.inner.input)
    }

    /// The fencing token. A step that is not claimed has none.
    pub fn token(&self) -> Option<&ClaimToken> {
        self.inner.token.as_ref()
    }

    /// How often the action was begun under this claim, from 1 on: more than once only by the recovery `retry`, or for
    /// an operator.
    pub fn attempt(&self) -> u32 {
        self.inner.claim.attempts
    }

    /// The same for every attempt of this firing, and unlike that of any other: for receivers that can use an
    /// idempotency key.
    pub fn key(&self) -> String {
        self.inner.claim.id.to_string()
    }

    /// Looks whether the claim still holds. Its lease is renewed without this, as long as the process lives.
    pub async fn heartbeat(&self) -> Result<(), ClaimLost> {
        let lost = ClaimLost { entity: self.inner.entity.id.clone() };
        if self.is_lost() {
            return Err(lost);
        }
        let ledger = &self.inner.claims.ledger;
        // While the store does not serve, nobody can take the claim away either.
        let Ok(view) = ledger.store.view().await else { return Ok(()) };
        match ledger.entities.standing(&view, &self.inner.entity.id).await {
            Ok(None) => Err(lost),
            Ok(Some(standing)) if standing.rev != self.inner.entity.rev => Err(lost),
            Ok(Some(_)) | Err(_) => Ok(()),
        }
    }

    /// Whether the claim is known to be lost, because its lease could not be renewed.
    pub fn is_lost(&self) -> bool {
        self.inner.session.as_ref().is_some_and(Session::is_lost)
    }

    /// What is left of the lease if it is not renewed: it is, three times in each lease.
    pub fn lease(&self) -> Duration {
        self.inner.claim.terms.lease()
    }

    fn stage<T>(&self, stage: impl FnOnce(&mut Staged) -> T) -> T {
        stage(&mut self.inner.staged.lock())
    }

    pub(crate) fn take_staged(&self) -> Staged {
        self.stage(std::mem::take)
    }

    fn json(staged: &mut Staged, what: &'static str, value: &impl Serialize) -> Option<Value> {
        match json::to_value(value) {
            Ok(value) => Some(value),
            Err(cause) => {
                staged.wrong.get_or_insert((what, cause));
                None
            }
        }
    }

    /// Replaces the data of the entity. The status is the engine's: it is set afterwards.
    pub fn set_data(&self, data: impl Serialize) {
        self.stage(|staged| staged.data = Self::json(staged, "the entity's data", &data));
    }

    /// Merges this into the data of the entity, as a JSON merge patch does (RFC 7396).
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
    pub fn add(&self, add: Add) {
        self.other(|others| others.add(add));
    }

    /// Changes another entity.
    pub fn update(&self, update: Update) {
        self.other(|others| others.update(update));
    }

    /// Removes another entity.
    pub fn remove(&self, remove: impl Into<Remove>) {
        self.other(|others| others.remove(remove));
    }

    /// Has the transition land only while this right holds, such as that of a lock's token.
    pub fn guard(&self, right: &impl Right) {
        self.other(|others| others.guard(right));
    }

    /// Changes a slot. The change is made when the transition is committed, and again if others were faster: it must do
    /// nothing else.
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

    /// Starts an execution with the final status, and gives its id.
    pub fn start<I: Serialize, O>(&self, workflow: &Workflow<I, O>, input: &I) -> ExecutionId {
        let number = self.stage(|staged| staged.starts.len());
        let id = ExecutionId::from(format!("{}:{}:{number}", workflow.name(), self.inner.claim.id));
        self.start_as(workflow, input, id.clone());
        id
    }

    /// Starts an execution of this id with the final status. If the id is taken, the transition fails.
    pub fn start_as<I: Serialize, O>(&self, workflow: &Workflow<I, O>, input: &I, id: impl Into<ExecutionId>) {
        let (workflow, id) = (workflow.name().to_string(), id.into());
        self.stage(|staged| {
            let Some(input) = Self::json(staged, "the input of an execution", input) else { return };
            staged.starts.push(Starting { workflow, input: input.to_string(), id });
        });
    }

    /// The entities of the store, to read from.
    pub fn entities(&self) -> &Entities {
        &self.inner.claims.ledger.entities
    }

    /// The state of the store: to read from, and for [`ActionCtx::update_slot`].
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

impl Staged {
    /// Whether nothing but the entity itself is written.
    pub(crate) fn is_alone(&self) -> bool {
        !self.has_others && self.slots.is_empty()
    }

    pub(crate) fn check(&self) -> Result<()> {
        match &self.wrong {
            Some((what, cause)) => Err(ClaimError::Json { what, cause: cause.clone() }),
            None => Ok(()),
        }
    }
}
