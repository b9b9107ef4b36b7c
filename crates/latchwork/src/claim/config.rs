//! The configuration of a claim workflow: its statuses, and the steps between them. These are plain values: `read.rs`
//! reads them from files, `validate.rs` checks them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::claim::table::UserTable;

/// A claim workflow: the statuses that entities of a type go through, and the steps that lead from one to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct ClaimWorkflow {
    /// Its name.
    #[serde(rename = "workflow")]
    pub name: String,
    /// Its owner, its entities and its janitor.
    pub meta: ClaimMeta,
    /// All statuses, including the claiming statuses. An entity starts at the first, unless `initial` is given.
    pub status_types: Vec<String>,
    /// The statuses that entities start at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub initial: Vec<String>,
    /// All requesters. If empty, every requester that a step names is known.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub requesters: BTreeSet<String>,
    /// Facts about actions. If empty, the program that runs the workflow knows them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub actions: BTreeMap<String, ActionFacts>,
    /// Allows steps from several statuses to share one claiming status. A claim then reverts to the status that it came
    /// from. If false, all steps with the same claiming status must revert to the same status.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub shared_claiming: bool,
    /// The steps.
    pub steps: Vec<ClaimStep>,
}

/// The owner, the entities and the janitor of a claim workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "Meta", deny_unknown_fields))]
pub struct ClaimMeta {
    /// The module that owns the workflow. If `janitor` is `module`, it decides about claims whose process is gone.
    pub owning_module: String,
    /// The type of its entities.
    pub entity_type: String,
    /// The path of the status in an entity's data, such as `status` or `billing.status`.
    pub status_field: String,
    /// The user's own table that holds them, on a store in PostgreSQL. Without it, they are entities of the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<UserTable>,
    /// What recovers the claims of processes that are gone.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub janitor: Janitor,
}

/// What recovers the claims of processes that are gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Janitor {
    /// The engine.
    #[default]
    Engine,
    /// The owning module. It must register a janitor.
    Module,
}

/// Facts about an action that the configuration can state without its code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct ActionFacts {
    /// The action does harm if it runs twice. Every step with it must be claimed.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub non_idempotent: bool,
    /// The action writes nothing. An after-effect would be enough.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub writes_nothing: bool,
}

/// A step from one status to another. A field has one value for all requesters, or one for each.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "Step", deny_unknown_fields))]
pub struct ClaimStep {
    /// Its number, unique in the workflow.
    pub step_id: u64,
    /// Its name. Steps at different statuses may have the same name.
    pub step_key: String,
    /// The status that the step starts at.
    pub status: String,
    /// The action that the step runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<Each<String>>,
    /// The status that the step leads to.
    pub successful_state: Each<String>,
    /// The status of the entity while the action runs, and the status that it returns to if the action does not
    /// succeed.
    #[serde(rename = "successful_claim_state", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<(String, String)>>"))]
    pub claim_state: Option<Each<ClaimState>>,
    /// After-effects: they run after the transition is durable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<OneOrMore>>"))]
    pub success_after_effect: Option<Each<Vec<String>>>,
    /// Conditions that must hold before the step can be fired.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<Vec<GuardOrName>>>"))]
    pub guards: Option<Each<Vec<StepGuard>>>,
    /// How long a claim outlives its process: a number and `ms`, `s`, `m`, `h` or `d`. The default is `30s`.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub lease: Option<Duration>,
    /// What happens to a claim whose process is gone.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub recovery: Recovery,
    /// The maximum number of attempts under the recovery `retry`. After that the claim waits for an operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// Fires the step when the entity has stayed at the step's status for this long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// The action does harm if it runs twice. The step must be claimed.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub non_idempotent: bool,
}

/// The two statuses of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimState {
    /// The claiming status.
    pub claim_into: String,
    /// The status that the entity returns to if the action does not succeed.
    pub revert_to: String,
}

impl Serialize for ClaimState {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (&self.claim_into, &self.revert_to).serialize(serializer)
    }
}

/// One value for all requesters, or one for each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Each<T> {
    /// One value for all requesters.
    All(T),
    /// One value for each requester.
    By(BTreeMap<String, T>),
}

impl<T> Each<T> {
    /// Returns one value for each of these requesters.
    ///
    /// ```
    /// # use latchwork::claim::Each;
    /// let action = Each::by([("admin", "Pay"), ("system", "PayLater")]);
    /// assert_eq!(action.of("system"), Some(&"PayLater"));
    /// ```
    pub fn by<R: Into<String>>(values: impl IntoIterator<Item = (R, T)>) -> Each<T> {
        Each::By(values.into_iter().map(|(requester, value)| (requester.into(), value)).collect())
    }

    /// Returns the value for a requester.
    ///
    /// ```
    /// # use latchwork::claim::Each;
    /// assert_eq!(Each::All("Pay").of("admin"), Some(&"Pay"));
    /// assert_eq!(Each::by([("system", "Pay")]).of("admin"), None);
    /// ```
    pub fn of(&self, requester: &str) -> Option<&T> {
        match self {
            Each::All(value) => Some(value),
            Each::By(values) => values.get(requester),
        }
    }

    /// Returns the requesters that it names. There are none if the value is for all.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        let values = match self {
            Each::All(_) => None,
            Each::By(values) => Some(values),
        };
        values.into_iter().flat_map(|values| values.keys().map(String::as_str))
    }

    /// All values, each with its requester.
    pub(crate) fn values(&self) -> Vec<(Option<&str>, &T)> {
        match self {
            Each::All(value) => vec![(None, value)],
            Each::By(values) => values.iter().map(|(requester, value)| (Some(requester.as_str()), value)).collect(),
        }
    }
}

impl From<&str> for Each<String> {
    fn from(value: &str) -> Each<String> {
        Each::All(value.into())
    }
}

/// A condition that must hold before a step can be fired: a function of the program, and the reason that a refused
/// caller gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(rename = "Guard", deny_unknown_fields))]
pub struct StepGuard {
    /// The function's name.
    pub guard: String,
    /// The reason that a refused caller gets. By default it is the error of the function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What happens to a claim whose process is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Recovery {
    /// The entity returns to the status that it came from.
    #[default]
    Revert,
    /// The action runs again under the same claim.
    Retry,
    /// It is not known whether the action took effect. The entity stays claimed until an operator decides.
    NeedsReview,
}

/// Fires a step after a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct Timer {
    /// How long the entity must have been at the step's status: a number and `ms`, `s`, `m`, `h` or `d`.
    #[serde(with = "duration::whole")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub after: Duration,
    /// The requester that the step is fired for.
    pub requester: String,
}

/// One name or several, in a file.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[allow(dead_code)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

/// A guard or only its name, in a file.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[allow(dead_code)]
enum GuardOrName {
    Name(String),
    Guard(StepGuard),
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ClaimWorkflow {
    /// A workflow of a module, for entities of a type. The status is the field `status` of their data.
    ///
    /// ```
    /// # use latchwork::claim::ClaimWorkflow;
    /// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice");
    /// assert_eq!(invoice.meta.status_field, "status");
    /// ```
    pub fn new(name: impl Into<String>, owning_module: impl Into<String>, entity_type: impl Into<String>) -> Self {
        let meta = ClaimMeta {
            owning_module: owning_module.into(),
            entity_type: entity_type.into(),
            status_field: "status".into(),
            table: None,
            janitor: Janitor::Engine,
        };
        ClaimWorkflow {
            name: name.into(),
            meta,
            status_types: Vec::new(),
            initial: Vec::new(),
            requesters: BTreeSet::new(),
            actions: BTreeMap::new(),
            shared_claiming: false,
            steps: Vec::new(),
        }
    }

    /// Sets the statuses. Entities start at the first of them.
    ///
    /// ```
    /// # use latchwork::claim::ClaimWorkflow;
    /// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]);
    /// ```
    pub fn statuses<S: Into<String>>(mut self, statuses: impl IntoIterator<Item = S>) -> Self {
        self.status_types = statuses.into_iter().map(Into::into).collect();
        self
    }

    /// Makes the workflow work on rows of the user's own table: see [`UserTable`].
    pub fn table(mut self, name: impl Into<String>, id: impl Into<String>, version: impl Into<String>) -> Self {
        self.meta.table = Some(UserTable { name: name.into(), id: id.into(), version: version.into() });
        self
    }

    /// Adds a step.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimStep, ClaimWorkflow};
    /// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice")
    ///     .statuses(["sent", "paid"])
    ///     .step(ClaimStep::new(10, "pay", "sent", "paid"));
    /// ```
    pub fn step(mut self, step: ClaimStep) -> Self {
        self.steps.push(step);
        self
    }

    /// The statuses that entities start at.
    pub(crate) fn starts(&self) -> &[String] {
        let first = self.status_types.get(..1).unwrap_or_default();
        if self.initial.is_empty() { first } else { &self.initial }
    }

    /// Every requester that is declared or named by a step.
    pub(crate) fn all_requesters(&self) -> BTreeSet<&str> {
        let declared = self.requesters.iter().map(String::as_str);
        declared.chain(self.steps.iter().flat_map(ClaimStep::named)).collect()
    }

    /// Every claiming status.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimStep, ClaimWorkflow};
    /// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice")
    ///     .statuses(["sent", "paying", "paid"])
    ///     .step(ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay"));
    /// assert!(invoice.claiming().contains("paying"));
    /// ```
    pub fn claiming(&self) -> BTreeSet<&str> {
        let claims = self.steps.iter().filter_map(|step| step.claim_state.as_ref());
        claims.flat_map(Each::values).map(|(_, claim)| claim.claim_into.as_str()).collect()
    }
}

impl ClaimStep {
    /// A step from one status to another, for all requesters and without an action.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid");
    /// ```
    pub fn new(
        step_id: u64,
        step_key: impl Into<String>,
        status: impl Into<String>,
        successful_state: impl Into<Each<String>>,
    ) -> ClaimStep {
        ClaimStep {
            step_id,
            step_key: step_key.into(),
            status: status.into(),
            action: None,
            successful_state: successful_state.into(),
            claim_state: None,
            success_after_effect: None,
            guards: None,
            lease: None,
            recovery: Recovery::Revert,
            attempts: None,
            timer: None,
            non_idempotent: false,
        }
    }

    /// Sets the action.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid").action("Pay");
    /// ```
    pub fn action(mut self, action: impl Into<Each<String>>) -> ClaimStep {
        self.action = Some(action.into());
        self
    }

    /// Makes the step claimed for all requesters. The entity has this status while the action runs.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid").action("Pay").claimed("paying");
    /// ```
    pub fn claimed(mut self, claim_into: impl Into<String>) -> ClaimStep {
        let claim = ClaimState { claim_into: claim_into.into(), revert_to: self.status.clone() };
        self.claim_state = Some(Each::All(claim));
        self
    }

    /// Makes the step claimed for this requester.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid").action("Pay").claimed_for("admin", "paying");
    /// ```
    pub fn claimed_for(mut self, requester: impl Into<String>, claim_into: impl Into<String>) -> ClaimStep {
        let claim = ClaimState { claim_into: claim_into.into(), revert_to: self.status.clone() };
        let mut claims = match self.claim_state {
            Some(Each::By(claims)) => claims,
            _ => BTreeMap::new(),
        };
        claims.insert(requester.into(), claim);
        self.claim_state = Some(Each::By(claims));
        self
    }

    /// Adds an after-effect: it runs after the transition is durable.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid").after("SendReceipt").after("TellBooks");
    /// ```
    pub fn after(mut self, effect: impl Into<String>) -> ClaimStep {
        match &mut self.success_after_effect {
            Some(Each::All(effects)) => effects.push(effect.into()),
            effects => *effects = Some(Each::All(vec![effect.into()])),
        }
        self
    }

    /// Adds a guard. A refused caller gets the error of the guard's function as the reason.
    ///
    /// ```
    /// # use latchwork::claim::ClaimStep;
    /// let pay = ClaimStep::new(10, "pay", "sent", "paid").guard("has_amount");
    /// ```
    pub fn guard(mut self, guard: impl Into<String>) -> ClaimStep {
        let guard = StepGuard { guard: guard.into(), reason: None };
        match &mut self.guards {
            Some(Each::All(guards)) => guards.push(guard),
            guards => *guards = Some(Each::All(vec![guard])),
        }
        self
    }

    /// The requesters that any field of the step names.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        let actions = self.action.iter().flat_map(Each::named);
        let claims = self.claim_state.iter().flat_map(Each::named);
        let effects = self.success_after_effect.iter().flat_map(Each::named);
        let guards = self.guards.iter().flat_map(Each::named);
        let timer = self.timer.iter().map(|timer| timer.requester.as_str());
        self.successful_state.named().chain(actions).chain(claims).chain(effects).chain(guards).chain(timer)
    }

    /// True if the requester can fire this step.
    pub(crate) fn is_for(&self, requester: &str) -> bool {
        self.successful_state.of(requester).is_some()
    }

    pub(crate) fn claim(&self, requester: &str) -> Option<&ClaimState> {
        self.claim_state.as_ref()?.of(requester)
    }
}

/// Durations as they are written in files: `250ms`, `30s`, `5m`, `2h`, `1d`.
pub(crate) mod duration {
    use std::time::Duration;

    use serde::{Serialize, Serializer};

    const UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

    pub(crate) fn read(text: &str) -> Option<Duration> {
        let digits = text.find(|letter: char| !letter.is_ascii_digit())?;
        let (number, unit) = text.split_at(digits);
        let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
        Some(Duration::from_millis(number.parse::<u64>().ok()?.checked_mul(*millis)?))
    }

    pub(crate) fn write(duration: Duration) -> String {
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let whole = UNITS.iter().rev().find(|(_, unit)| millis > 0 && millis.is_multiple_of(*unit));
        let (name, unit) = whole.unwrap_or(&UNITS[0]);
        format!("{}{name}", millis / unit)
    }

    #[expect(clippy::ref_option, reason = "serde calls it with this type")]
    pub(crate) fn serialize<S: Serializer>(value: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(write).serialize(serializer)
    }

    pub(crate) mod whole {
        use std::time::Duration;

        use serde::{Serialize, Serializer};

        pub(crate) fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
            super::write(*value).serialize(serializer)
        }
    }
}
