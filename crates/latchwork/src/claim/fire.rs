//! Firing a step: claim the entity, run the action, commit its result. The commits are in `ledger.rs` and `finish.rs`.

use std::future::{Future, IntoFuture};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use serde::Serialize;
use serde_json::Value;
use tracing::{Instrument, Span};

use crate::claim::action::{ActionCtx, StagedWrites};
use crate::claim::claims::{Action, Claims, ClaimsInner, PlainAction};
use crate::claim::config::StepGuard;
use crate::claim::durable::DurableFired;
use crate::claim::error::{ActionError, ClaimError, Result, panicked};
use crate::claim::finish::{Firing, TransitionOutcome};
use crate::claim::hold::{ClaimTurn, HeldClaim};
use crate::claim::ledger::{EndReason, LedgerOutcome};
use crate::claim::machine::Machine;
use crate::claim::outcome::{
    ClaimFailed, ClaimHolder, Conflict, Fired, Lost, NotPermitted, Outcome, Reason, Transitioned,
};
use crate::claim::stored::{Claim, ClaimPhase, ClaimSpaces, FiredOnce, Logged, Terms};
use crate::entity::{Entity, EntityId, Standing};
use crate::json::{self, JsonError};
use crate::lane::{Once, OnceCall, OnceFound};
use crate::lock::{Owner, Session};
use crate::record::Record;
use crate::store::{Order, View};
use crate::workflow::Boxed;

/// The maximum number of attempts to claim an entity while other callers write it without claiming it.
const TRIES: u32 = 1000;

/// A step that is about to be fired.
#[must_use = "nothing is fired until this is awaited"]
pub struct Fire {
    claims: Claims,
    call: FireCall,
    wrong: Option<JsonError>,
}

/// The arguments of a firing.
#[derive(Debug, Clone)]
pub(crate) struct FireCall {
    pub(crate) workflow: String,
    pub(crate) which: Which,
    pub(crate) entity: EntityId,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    pub(crate) input: Value,
    pub(crate) once: Option<Once>,
    /// What is checked before the firing begins, because of its key.
    pub(crate) begun: OnceCall,
}

impl FireCall {
    /// Its idempotency key, as its claim stores it.
    fn fired_once(&self) -> Option<FiredOnce> {
        let (once, fingerprint) = (self.once.as_ref()?, self.begun.fingerprint()?);
        Some(FiredOnce { key: once.key().into(), fingerprint })
    }
}

/// Names a step of a workflow.
#[derive(Debug, Clone)]
pub(crate) enum Which {
    Key(String),
    Id(u64),
}

impl Claims {
    /// Fires a step of a workflow for an entity. The requester is `system`, unless [`Fire::by`] sets another.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let fired = claims.fire("invoice", "pay", "i-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn fire(&self, workflow: impl Into<String>, step: impl Into<String>, entity: impl Into<EntityId>) -> Fire {
        let call = FireCall {
            workflow: workflow.into(),
            which: Which::Key(step.into()),
            entity: entity.into(),
            requester: "system".into(),
            actor: None,
            input: Value::Null,
            once: None,
            begun: OnceCall::default(),
        };
        Fire { claims: self.clone(), call, wrong: None }
    }
}

impl Fire {
    /// Sets the requester.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let fired = claims.fire("invoice", "pay", "i-1").by("admin").await?;
    /// # Ok(()) }
    /// ```
    pub fn by(mut self, requester: impl Into<String>) -> Fire {
        self.call.requester = requester.into();
        self
    }

    /// Sets the actor, for the history.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let fired = claims.fire("invoice", "pay", "i-1").by("admin").actor("ada@example.org").await?;
    /// # Ok(()) }
    /// ```
    pub fn actor(mut self, actor: impl Into<String>) -> Fire {
        self.call.actor = Some(actor.into());
        self
    }

    /// Sets the input of the action.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # use latchwork::json;
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let fired = claims.fire("invoice", "pay", "i-1").input(json!({"amount": 7})).await?;
    /// # Ok(()) }
    /// ```
    pub fn input(mut self, input: impl Serialize) -> Fire {
        match json::to_value(&input) {
            Ok(input) => self.call.input = input,
            Err(wrong) => self.wrong = Some(wrong),
        }
        self
    }
}

impl Fire {
    /// Sets the idempotency key of this firing. If it is fired again under the key, the action does not run a second
    /// time: the answer is that of the first firing, or [`Fired::Running`] while that goes on. A firing whose process
    /// died is made again once its claim was released. A step that is not claimed keeps the answer of a transition
    /// only.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let fired = claims.fire("invoice", "pay", "i-1").once("request-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn once(mut self, once: impl Into<Once>) -> Fire {
        self.call.once = Some(once.into());
        self
    }
}

impl IntoFuture for Fire {
    type Output = Result<Fired>;
    type IntoFuture = Boxed<'static, Result<Fired>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let Fire { claims, call, wrong } = self;
            if let Some(cause) = wrong {
                return Err(ClaimError::Json { what: "the input of a step", cause });
            }
            claims.inner.fire(call).await
        })
    }
}

/// The step, if it can be fired at the moment, or the reasons why not.
enum Possible<'a> {
    Step(&'a Arc<Terms>),
    Refused(Vec<Reason>),
}

/// A claimed entity, and the session that holds the claim.
type Claimed = (HeldClaim, Box<Firing>, Session);

impl ClaimsInner {
    /// Fires a step. Futures that are awaited rarely are boxed, here and below: a future has the size of the largest
    /// future that it may await, and every firing allocates one.
    pub(crate) async fn fire(self: &Arc<ClaimsInner>, call: FireCall) -> Result<Fired> {
        let machine = self.machine(&call.workflow)?;
        machine.knows(&call.which)?;
        let mut call = FireCall { entity: machine.entity(&call.entity), ..call };
        // True if this caller has tried to claim and another caller was faster.
        let mut is_outrun = false;
        for _ in 0..TRIES {
            if self.ledger.engine.is_stopped() {
                return Err(ClaimError::Stopped);
            }
            if let Some(before) = self.fired_before(&mut call).await? {
                return Ok(before);
            }
            let (view, standing) = self.ledger.find(&call.entity).await?;
            let standing = standing.ok_or_else(|| ClaimError::NotFound { id: call.entity.clone() })?;
            let terms = match self.possible(machine, &standing, &call)? {
                Possible::Step(terms) => terms,
                Possible::Refused(reasons) => return self.refuse(&view, machine, &standing, is_outrun, reasons).await,
            };
            // A claim of another workflow may be on the entity: that workflow has its own status in the same entity.
            if let Some(claim) = self.claim_that_holds(&view, &standing).await? {
                let (status, holder) = (terms.from.clone(), Some(self.holder(&view, &claim).await?));
                return Ok(Fired::ClaimFailed(ClaimFailed { status, holder }));
            }
            drop(view);
            let action = match &terms.action {
                None => None,
                Some(name) => Some(self.actions.get(name).cloned().ok_or_else(|| self.no_action(name))?),
            };
            let fired = match (&terms.claim_into, action) {
                (Some(_), Some(Action::Durable(workflow))) => {
                    self.claim_for_execution(&standing, terms, &call, &workflow).await?
                }
                (Some(_), Some(Action::Plain(action))) => match ClaimTurn::take(self, &call.entity) {
                    Ok(turn) => {
                        let (claims, terms, call) = (self.clone(), terms.clone(), call.clone());
                        self.to_its_end(async move { claims.fire_claimed(turn, standing, terms, call, action).await })
                            .await?
                    }
                    // The entity is read again when the claim of the other caller has landed or was refused.
                    Err(other) => {
                        let _ = other.acquire().await;
                        None
                    }
                },
                // A step without an action has nothing that could run twice. A durable action is always claimed.
                (claim_into, action) => {
                    let action = action.and_then(Action::plain);
                    let (claims, terms, own) = (self.clone(), terms.clone(), call.clone());
                    let firing = async move { claims.fire_unclaimed(standing, &terms, &own, action).await };
                    match self.to_its_end(firing).await? {
                        Fired::Conflict(_) if claim_into.is_some() => None,
                        // Another attempt under the same key may be what has changed the entity.
                        conflict @ Fired::Conflict(_) => Some(self.fired_before(&mut call).await?.unwrap_or(conflict)),
                        fired => Some(fired),
                    }
                }
            };
            match fired {
                Some(fired) => return Ok(fired),
                None => is_outrun = true,
            }
        }
        Err(ClaimError::Contended { id: call.entity, tries: TRIES })
    }

    /// What became of an earlier firing under the same idempotency key. Notes what has to be checked if there was none.
    async fn fired_before(&self, call: &mut FireCall) -> Result<Option<Fired>> {
        let Some(once) = &call.once else { return Ok(None) };
        let FireCall { workflow, which, entity, requester, input, .. } = &*call;
        let step = match which {
            Which::Key(key) => key.clone(),
            Which::Id(id) => id.to_string(),
        };
        let change = ("claim.fire", workflow, step, entity, requester, input);
        // The claim is read first: if it ends between both reads, the answer is there.
        let view = self.ledger.view().await?;
        let claim = self.ledger.claim_on(&view, entity).await?.map(|(claim, _)| claim);
        match self.ledger.engine.once.find::<DurableFired>(&self.ledger.store, Some(once), &change).await? {
            OnceFound::Answered(fired) => return Ok(Some(fired.into_fired(entity, true))),
            OnceFound::Anew(begun) => call.begun = begun,
        }
        let own = call.fired_once();
        match claim.filter(|claim| own.is_some() && claim.once == own) {
            Some(claim) => Ok(Some(Fired::Running(Box::new(self.holder(&view, &claim).await?)))),
            None => Ok(None),
        }
    }

    /// The claim that holds the entity at its present rev, if there is one.
    async fn claim_that_holds(&self, view: &View, standing: &Standing) -> Result<Option<Claim>> {
        let found = self.ledger.claim_on(view, &standing.id).await?;
        Ok(found.map(|(claim, _)| claim).filter(|claim| claim.token == standing.rev.0))
    }

    /// Runs work to its end, also if the caller drops this future or stops polling it.
    async fn to_its_end<T: Send + 'static>(&self, work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
        self.ledger.engine.node.runtime.run(work.in_current_span()).await.unwrap_or(Err(ClaimError::Stopped))
    }

    /// Claims an entity, and runs the action. Returns `None` if another caller was faster.
    async fn fire_claimed(
        self: Arc<ClaimsInner>,
        turn: ClaimTurn,
        standing: Standing,
        terms: Arc<Terms>,
        call: FireCall,
        action: PlainAction,
    ) -> Result<Option<Fired>> {
        let claimed = self.try_claim(&standing, &terms, &call).await;
        drop(turn);
        match claimed? {
            Some((held, firing, session)) => self.run(held, *firing, session, action).await.map(Some),
            None => Ok(None),
        }
    }

    fn no_action(&self, name: &str) -> ClaimError {
        let error = ActionError::new(format!("this program has no action {name:?}"));
        ClaimError::Action { action: name.into(), error }
    }

    /// Returns the step, if it can be fired.
    fn possible<'a>(&self, machine: &'a Machine, standing: &Standing, call: &FireCall) -> Result<Possible<'a>> {
        let status = machine.status(standing)?;
        let steps = machine.config.steps.iter().enumerate().filter(|(_, step)| match &call.which {
            Which::Key(key) => step.step_key == *key,
            Which::Id(id) => step.step_id == *id,
        });
        let Some((at, _)) = steps.clone().find(|(_, step)| step.status == status) else {
            let expected = steps.map(|(_, step)| step.status.clone()).collect();
            return Ok(Possible::Refused(vec![Reason::Status { expected }]));
        };
        let mut reasons = Vec::new();
        let terms = machine.terms(at, &call.requester);
        if terms.is_none() {
            reasons.push(Reason::Requester { allowed: machine.allowed(at) });
        }
        if !machine.guards(at, &call.requester).is_empty() {
            reasons.extend(self.refusals(machine, at, &call.requester, &standing.entity(), &call.input));
        }
        Ok(match terms.filter(|_| reasons.is_empty()) {
            Some(terms) => Possible::Step(terms),
            None => Possible::Refused(reasons),
        })
    }

    /// Returns the reasons of all guards that refuse the step.
    pub(crate) fn refusals(
        &self,
        machine: &Machine,
        step: usize,
        requester: &str,
        entity: &Entity,
        input: &Value,
    ) -> Vec<Reason> {
        let refusal = |guard: &StepGuard| {
            let check = self.guards.get(&guard.guard)?;
            // A guard that panics refuses.
            let checked = std::panic::catch_unwind(AssertUnwindSafe(|| check(entity, input)));
            let checked = checked.unwrap_or_else(|panic| Err(panicked(&*panic).to_string()));
            let said = checked.err()?;
            let message = guard.reason.clone().unwrap_or(said);
            Some(Reason::Guard { guard: guard.guard.clone(), message })
        };
        machine.guards(step, requester).iter().filter_map(refusal).collect()
    }

    /// Returns why a step cannot be fired: another caller has claimed the entity or was faster, or the reasons apply.
    async fn refuse(
        &self,
        view: &View,
        machine: &Machine,
        standing: &Standing,
        is_outrun: bool,
        reasons: Vec<Reason>,
    ) -> Result<Fired> {
        let status = machine.status(standing)?.to_string();
        if machine.claiming.contains(&status) {
            let holder = match self.ledger.claim_on(view, &standing.id).await? {
                Some((claim, _)) => Some(self.holder(view, &claim).await?),
                None => None,
            };
            return Ok(Fired::ClaimFailed(ClaimFailed { status, holder }));
        }
        Ok(match is_outrun {
            true => Fired::ClaimFailed(ClaimFailed { status, holder: None }),
            false => Fired::NotPermitted(NotPermitted { status, reasons }),
        })
    }

    /// Returns the holder of a claim.
    pub(crate) async fn holder(&self, view: &View, claim: &Claim) -> Result<ClaimHolder> {
        self.ledger.holder(view, claim).await
    }

    /// Returns a new claim for a call.
    pub(crate) fn new_claim(&self, standing: &Standing, terms: &Arc<Terms>, call: &FireCall, owner: Owner) -> Claim {
        let env = self.ledger.store.env();
        let is_claimed = terms.claim_into.is_some() && terms.action.is_some();
        Claim {
            id: env.uuid(),
            terms: terms.clone(),
            requester: call.requester.clone(),
            actor: call.actor.clone(),
            input: call.input.to_string(),
            owner,
            token: if is_claimed { standing.rev.next().0 } else { standing.rev.0 },
            since_us: env.now().0,
            attempts: 1,
            phase: ClaimPhase::Held,
            once: call.fired_once(),
        }
    }

    /// Claims an entity. Returns `None` if another caller was faster.
    async fn try_claim(
        self: &Arc<ClaimsInner>,
        standing: &Standing,
        terms: &Arc<Terms>,
        call: &FireCall,
    ) -> Result<Option<Claimed>> {
        let session = self.service().own_session(terms.lease()).await?;
        let claim = self.new_claim(standing, terms, call, Owner::Session(session.id()));
        let held = HeldClaim::new(self, &claim);
        let once = self.ledger.once_of(&claim).await?;
        let firing = |standing| {
            let (once, by) = (once.clone(), OnceCall::default());
            Firing { claim: claim.clone(), standing, reason: String::new(), once, by }
        };
        let mut replaces = None;
        for _ in 0..2 {
            match self.ledger.claim(standing, &claim, replaces, call.begun.unanswered()).await {
                Ok(LedgerOutcome::Landed(standing)) => return Ok(Some((held, Box::new(firing(standing)), session))),
                // A caller has changed the entity while it was claimed. That claim does not hold the entity any more.
                Ok(LedgerOutcome::Claimed) if replaces.is_none() => {
                    let found = self.ledger.claim_on(&self.ledger.view().await?, &standing.id).await?;
                    replaces = found.filter(|(found, _)| found.token != standing.rev.0).map(|(_, rev)| rev);
                    if replaces.is_none() {
                        break;
                    }
                }
                Ok(sent) => {
                    if matches!(sent, LedgerOutcome::SessionLost) {
                        self.service().sessions.forget_own(session.id());
                    }
                    break;
                }
                Err(error) if error.is_passing() => {
                    // The commit may have landed. If the store cannot be read now, the janitor finds the claim later.
                    let view = self.ledger.view().await?;
                    let found = self.ledger.claim_on(&view, &standing.id).await?;
                    let standing = self.ledger.standing(&view, &standing.id).await?;
                    let is_ours = found.is_some_and(|(found, _)| found == claim);
                    return match standing.filter(|standing| is_ours && standing.rev.0 == claim.token) {
                        Some(standing) => Ok(Some((held, Box::new(firing(standing)), session))),
                        None => Err(error),
                    };
                }
                Err(error) => return Err(error),
            }
        }
        held.settled();
        Ok(None)
    }

    /// Runs the action of a claim, and commits its result.
    pub(crate) async fn run(
        self: Arc<ClaimsInner>,
        held: HeldClaim,
        firing: Firing,
        session: Session,
        action: PlainAction,
    ) -> Result<Fired> {
        let claim = &firing.claim;
        let input = serde_json::from_str(&claim.input).unwrap_or_default();
        let ctx = ActionCtx::new(&self, claim, firing.standing.entity(), input, Some(session));
        let acted = self.act(&action, &ctx, claim).await;
        let staged = ctx.take_staged();
        let (why, fired) = match acted {
            Ok(Outcome::Success { output }) => match self.finish(&firing, &staged, output).await {
                Ok(Some(fired)) => {
                    held.settled();
                    return Ok(fired);
                }
                Ok(None) => {
                    let reason = Box::pin(self.lost_reason(&firing)).await;
                    let lost = Lost { entity: firing.standing.id.clone(), reason };
                    (EndReason::new("the entity was changed while it was claimed"), Ok(Fired::Lost(lost)))
                }
                Err(error) => (EndReason::new(format!("the transition could not be committed: {error}")), Err(error)),
            },
            Ok(Outcome::Failure(failure)) => {
                let why = EndReason::new(format!("the action failed: {}", failure.message));
                let why = why.answered(&firing.once, &DurableFired::Failure(failure.clone()));
                (why, Ok(Fired::Failure(failure)))
            }
            Ok(Outcome::Rejection(rejection)) => {
                let why = EndReason::new(format!("the action rejected it: {}", rejection.message));
                let why = why.answered(&firing.once, &DurableFired::Rejection(rejection.clone()));
                (why, Ok(Fired::Rejection(rejection)))
            }
            Err(error) => {
                let why = EndReason::new(format!("the action ended with an error: {error}"));
                let action = claim.terms.action.clone().unwrap_or_default();
                (why, Err(ClaimError::Action { action, error }))
            }
        };
        match Box::pin(self.ledger.give_up(&firing, &why)).await {
            Ok(_) => held.settled(),
            // The caller gets the result of the action all the same. The janitor ends the claim.
            Err(error) => {
                let entity = &firing.standing.id;
                tracing::warn!(%entity, %error, "claim could not be released: the janitor will do it");
            }
        }
        fired
    }

    /// Commits a transition. Returns `None` if the entity was changed before.
    async fn finish(&self, firing: &Firing, staged: &StagedWrites, output: Value) -> Result<Option<Fired>> {
        json::check(&output).map_err(|cause| ClaimError::Json { what: "the output of an action", cause })?;
        let terms = &firing.claim.terms;
        Ok(match self.ledger.finish(firing, staged, &output).await? {
            TransitionOutcome::Done(rev) => {
                let (from, to) = (terms.from.clone(), terms.into.clone());
                Some(Fired::Done(Transitioned { from, to, rev, output, repeated: false }))
            }
            TransitionOutcome::Moved => None,
        })
    }

    /// Returns why a claim was taken away.
    async fn lost_reason(&self, firing: &Firing) -> String {
        let last = async {
            let view = self.ledger.view().await?;
            let log = self.ledger.spaces.log_of(&firing.standing.id);
            let last = view.scan(&log, Order::Descending, 1).await?;
            let newer = |(key, _): &(_, _)| ClaimSpaces::read_rev(key).is_some_and(|rev| rev > firing.standing.rev);
            let last = last.into_iter().find(newer).and_then(|(_, item)| Logged::decode(&item.value).ok());
            Ok::<_, ClaimError>(last.map(|logged| logged.reason).filter(|reason| !reason.is_empty()))
        };
        match last.await {
            Ok(Some(reason)) => format!("the claim was taken away: {reason}"),
            _ => "the entity was changed or removed while it was claimed".into(),
        }
    }

    /// Runs the action of a step that is not claimed, and commits its result if the entity has not changed meanwhile.
    async fn fire_unclaimed(
        self: &Arc<ClaimsInner>,
        standing: Standing,
        terms: &Arc<Terms>,
        call: &FireCall,
        action: Option<PlainAction>,
    ) -> Result<Fired> {
        let expected = standing.rev;
        // This claim is not stored, and no session holds it.
        let claim = self.new_claim(&standing, terms, call, Owner::Session(uuid::Uuid::nil()));
        let terms = Arc::new(Terms { claim_into: None, ..(**terms).clone() });
        let claim = Claim { terms: terms.clone(), ..claim };
        let (once, by) = (call.begun.clone(), OnceCall::default());
        let firing = Firing { claim, standing, reason: String::new(), once, by };
        let (outcome, staged) = match action {
            None => (Outcome::done(), StagedWrites::default()),
            Some(action) => {
                let entity = firing.standing.entity();
                let ctx = ActionCtx::new(self, &firing.claim, entity, call.input.clone(), None);
                let acted = self.act(&action, &ctx, &firing.claim).await;
                let name = terms.action.clone().unwrap_or_default();
                (acted.map_err(|error| ClaimError::Action { action: name, error })?, ctx.take_staged())
            }
        };
        match outcome {
            Outcome::Success { output } => match self.finish(&firing, &staged, output).await? {
                Some(fired) => Ok(fired),
                None => {
                    let view = self.ledger.view().await?;
                    let now = self.ledger.standing(&view, &call.entity).await?;
                    let status = now.and_then(|now| terms.status(now.data()).map(str::to_string));
                    Ok(Fired::Conflict(Conflict { status, expected }))
                }
            },
            Outcome::Failure(failure) => Ok(Fired::Failure(failure)),
            Outcome::Rejection(rejection) => Ok(Fired::Rejection(rejection)),
        }
    }

    /// Runs an action in a span of its own. A panic becomes an error.
    async fn act(
        &self,
        action: &PlainAction,
        ctx: &ActionCtx,
        claim: &Claim,
    ) -> std::result::Result<Outcome, ActionError> {
        let span = self.span_of(ctx, claim);
        let (action, ctx) = (action.clone(), ctx.clone());
        let acting = AssertUnwindSafe(async move { action(ctx).await }).catch_unwind();
        let acted = acting.instrument(span.clone()).await.unwrap_or_else(|panic| Err(panicked(&*panic)));
        match &acted {
            Ok(Outcome::Success { .. } | Outcome::Rejection(_)) => {}
            Ok(Outcome::Failure(failure)) => {
                span.record("error", &failure.message);
            }
            Err(error) => {
                span.record("error", tracing::field::display(error));
            }
        }
        acted
    }

    fn span_of(&self, ctx: &ActionCtx, claim: &Claim) -> Span {
        let terms = &claim.terms;
        tracing::info_span!(
            "action",
            namespace = self.ledger.engine.name.as_deref(),
            workflow = terms.workflow,
            step = terms.step_key,
            name = terms.action,
            entity = %ctx.entity().id,
            claim = %claim.id,
            attempt = claim.attempts,
            error = tracing::field::Empty,
        )
    }
}

impl Machine {
    fn knows(&self, which: &Which) -> Result<()> {
        let is_known = match which {
            Which::Key(key) => self.steps(key).next().is_some(),
            Which::Id(id) => self.config.steps.iter().any(|step| step.step_id == *id),
        };
        if is_known {
            return Ok(());
        }
        let step = match which {
            Which::Key(key) => key.clone(),
            Which::Id(id) => id.to_string(),
        };
        let mut known: Vec<String> = self.config.steps.iter().map(|step| step.step_key.clone()).collect();
        known.sort();
        known.dedup();
        Err(ClaimError::UnknownStep { workflow: self.name().into(), step, known })
    }
}
