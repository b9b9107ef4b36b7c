//! What a claim workflow is configured by: statuses, and the steps between them. Plain values; `read.rs` reads them
//! from files, `validate.rs` says what is wrong with them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A claim workflow: the statuses that entities of a type go through, and the steps that lead from one to another.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct ClaimWorkflow {
    /// Its name.
    #[serde(rename = "workflow")]
    pub name: String,
    /// What it is about.
    pub meta: Meta,
    /// All statuses, claiming statuses among them. An entity starts at the first, unless `initial` says otherwise.
    pub status_types: Vec<String>,
    /// The statuses that entities start at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub initial: Vec<String>,
    /// All requesters. Without any, every requester that a step names is known.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub requesters: BTreeSet<String>,
    /// What is known of actions. Without any, the program that runs the workflow knows them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub actions: BTreeMap<String, ActionFacts>,
    /// Whether one claiming status may serve steps of several statuses. A claim then reverts to the status that it came
    /// from. Otherwise all steps with the same claiming status revert to the same status.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub shared_claiming: bool,
    /// The steps.
    pub steps: Vec<Step>,
}

/// What a claim workflow is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct Meta {
    /// The module that owns it, and frees claims whose process is gone if `janitor` says so.
    pub owning_module: String,
    /// The type of its entities.
    pub entity_type: String,
    /// Where an entity's status is in its data: a path such as `status` or `billing.status`.
    pub status_field: String,
    /// What frees the claims of processes that are gone.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub janitor: Janitor,
}

/// What frees the claims of processes that are gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Janitor {
    /// The engine.
    #[default]
    Engine,
    /// The owning module, which has to register for it.
    Module,
}

/// What is known of an action without its code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct ActionFacts {
    /// Whether it does harm if it runs twice: then every step with it has to be claimed.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub non_idempotent: bool,
    /// Whether it writes nothing: then an after-effect would do.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub writes_nothing: bool,
}

/// A step from one status to another. A field holds one value for all requesters, or one for each.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct Step {
    /// Its number, unlike that of any other step of the workflow.
    pub step_id: u64,
    /// Its name. Steps at different statuses may share it.
    pub step_key: String,
    /// The status that it leads from.
    pub status: String,
    /// The action that is run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<Each<String>>,
    /// The status that it leads to.
    pub successful_state: Each<String>,
    /// The status that the entity has while the action runs, and the status it goes back to if the action does not
    /// succeed.
    #[serde(rename = "successful_claim_state", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<(String, String)>>"))]
    pub claim_state: Option<Each<ClaimState>>,
    /// What is done after the transition is durable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<OneOrMore>>"))]
    pub success_after_effect: Option<Each<Vec<String>>>,
    /// What must hold before it can be fired.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<Each<Vec<GuardOrName>>>"))]
    pub guards: Option<Each<Vec<Guard>>>,
    /// How long a claim outlives its process: a number and `ms`, `s`, `m`, `h` or `d`. 30 s unless this is said.
    #[serde(skip_serializing_if = "Option::is_none", with = "duration")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<String>"))]
    pub lease: Option<Duration>,
    /// What becomes of a claim whose process is gone.
    #[serde(skip_serializing_if = "is_default")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub recovery: Recovery,
    /// How often the action is run at the most by the recovery `retry`. After that a person has to look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// Fires the step by itself, if the entity stays at its status for so long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timer: Option<Timer>,
    /// Whether the action does harm if it runs twice: then the step has to be claimed.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub non_idempotent: bool,
}

/// The two statuses of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimState {
    /// The claiming status.
    pub claim_into: String,
    /// The status that it goes back to.
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
    /// For all.
    All(T),
    /// By requester.
    By(BTreeMap<String, T>),
}

impl<T> Each<T> {
    /// One value for each of these requesters.
    pub fn by<R: Into<String>>(values: impl IntoIterator<Item = (R, T)>) -> Each<T> {
        Each::By(values.into_iter().map(|(requester, value)| (requester.into(), value)).collect())
    }

    /// The value for a requester.
    pub fn of(&self, requester: &str) -> Option<&T> {
        match self {
            Each::All(value) => Some(value),
            Each::By(values) => values.get(requester),
        }
    }

    /// The requesters that it names; none if it is for all.
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

/// Something that must hold before a step can be fired: a function of the program's, and what is told if it does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct Guard {
    /// The function's name.
    pub guard: String,
    /// What is told; without it, what the function says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// What becomes of a claim whose process is gone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Recovery {
    /// The entity goes back to the status it came from.
    #[default]
    Revert,
    /// The action is run again under the same claim.
    Retry,
    /// Whether the action has taken effect is not known: the entity stays claimed until an operator has looked.
    NeedsReview,
}

/// Fires a step by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(deny_unknown_fields))]
pub struct Timer {
    /// How long the entity is at the step's status before: a number and `ms`, `s`, `m`, `h` or `d`.
    #[serde(with = "duration::whole")]
    #[cfg_attr(feature = "schema", schemars(with = "String"))]
    pub after: Duration,
    /// The requester it is fired for.
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

/// A guard, or its name alone, in a file.
#[cfg(feature = "schema")]
#[derive(schemars::JsonSchema)]
#[serde(untagged)]
#[allow(dead_code)]
enum GuardOrName {
    Name(String),
    Guard(Guard),
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl ClaimWorkflow {
    /// A workflow of a module, for entities of a type whose status is at `status` in their data.
    pub fn new(name: impl Into<String>, owning_module: impl Into<String>, entity_type: impl Into<String>) -> Self {
        let meta = Meta {
            owning_module: owning_module.into(),
            entity_type: entity_type.into(),
            status_field: "status".into(),
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

    /// Its statuses. Entities start at the first of them.
    pub fn statuses<S: Into<String>>(mut self, statuses: impl IntoIterator<Item = S>) -> Self {
        self.status_types = statuses.into_iter().map(Into::into).collect();
        self
    }

    /// One more step.
    pub fn step(mut self, step: Step) -> Self {
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
        declared.chain(self.steps.iter().flat_map(Step::named)).collect()
    }

    /// Every claiming status.
    pub fn claiming(&self) -> BTreeSet<&str> {
        let claims = self.steps.iter().filter_map(|step| step.claim_state.as_ref());
        claims.flat_map(Each::values).map(|(_, claim)| claim.claim_into.as_str()).collect()
    }
}

impl Step {
    /// A step from one status to another, for all requesters and without an action.
    pub fn new(
        step_id: u64,
        step_key: impl Into<String>,
        status: impl Into<String>,
        successful_state: impl Into<Each<String>>,
    ) -> Step {
        Step {
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

    /// With an action.
    pub fn action(mut self, action: impl Into<Each<String>>) -> Step {
        self.action = Some(action.into());
        self
    }

    /// Claimed: the entity has this status while the action runs, for all requesters.
    pub fn claimed(mut self, claim_into: impl Into<String>) -> Step {
        let claim = ClaimState { claim_into: claim_into.into(), revert_to: self.status.clone() };
        self.claim_state = Some(Each::All(claim));
        self
    }

    /// Claimed for this requester.
    pub fn claimed_for(mut self, requester: impl Into<String>, claim_into: impl Into<String>) -> Step {
        let claim = ClaimState { claim_into: claim_into.into(), revert_to: self.status.clone() };
        let mut claims = match self.claim_state {
            Some(Each::By(claims)) => claims,
            _ => BTreeMap::new(),
        };
        claims.insert(requester.into(), claim);
        self.claim_state = Some(Each::By(claims));
        self
    }

    /// With something that is done after the transition is durable.
    pub fn after(mut self, effect: impl Into<String>) -> Step {
        match &mut self.success_after_effect {
            Some(Each::All(effects)) => effects.push(effect.into()),
            effects => *effects = Some(Each::All(vec![effect.into()])),
        }
        self
    }

    /// With a guard, whose function says why it refuses.
    pub fn guard(mut self, guard: impl Into<String>) -> Step {
        let guard = Guard { guard: guard.into(), reason: None };
        match &mut self.guards {
            Some(Each::All(guards)) => guards.push(guard),
            guards => *guards = Some(Each::All(vec![guard])),
        }
        self
    }

    /// The requesters that a field of the step names.
    pub(crate) fn named(&self) -> impl Iterator<Item = &str> {
        let actions = self.action.iter().flat_map(Each::named);
        let claims = self.claim_state.iter().flat_map(Each::named);
        let effects = self.success_after_effect.iter().flat_map(Each::named);
        let guards = self.guards.iter().flat_map(Each::named);
        let timer = self.timer.iter().map(|timer| timer.requester.as_str());
        self.successful_state.named().chain(actions).chain(claims).chain(effects).chain(guards).chain(timer)
    }

    /// Whether a requester can fire it at all.
    pub(crate) fn is_for(&self, requester: &str) -> bool {
        self.successful_state.of(requester).is_some()
    }

    pub(crate) fn claim(&self, requester: &str) -> Option<&ClaimState> {
        self.claim_state.as_ref()?.of(requester)
    }
}

/// Durations as a file has them: `250ms`, `30s`, `5m`, `2h`, `1d`.
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

    #[expect(clippy::ref_option, reason = "serde calls it so")]
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
