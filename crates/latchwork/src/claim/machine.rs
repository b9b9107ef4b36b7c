//! A configured workflow, prepared for firing: which requester can fire which step at which status, and with which
//! terms.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::claim::config::{ClaimStep, ClaimWorkflow, StepGuard};
use crate::claim::error::{ClaimError, Result};
use crate::claim::stored::{EffectTerms, Terms, TimerTerms};
use crate::entity::{EntityId, Standing};
use crate::json::Path;

/// The lease of a step that configures none.
const LEASE: Duration = Duration::from_secs(30);

/// The maximum number of attempts under the recovery `retry`, for a step that configures none.
const ATTEMPTS: u32 = 3;

pub(crate) struct Machine {
    pub(crate) config: ClaimWorkflow,
    pub(crate) path: Path,
    pub(crate) claiming: BTreeSet<String>,
    /// The terms of each step of the configuration.
    steps: Vec<StepTerms>,
}

/// The terms of a step.
struct StepTerms {
    by: BTreeMap<String, Arc<Terms>>,
    /// For requesters that the workflow does not name. Only if it declares no requesters and the step is for all.
    others: Option<Arc<Terms>>,
}

impl Machine {
    /// Prepares a valid configuration. `started` holds the workflows that run as after-effects, by the after-effect's
    /// name.
    pub(crate) fn new(config: ClaimWorkflow, started: &BTreeMap<String, String>) -> Result<Machine> {
        let path = Path::parse(&config.meta.status_field).map_err(|_| ClaimError::Config { findings: Vec::new() })?;
        let steps = config.steps.iter().map(|step| {
            let terms = |requester: &str| terms(&config, step, requester, started).map(Arc::new);
            let requesters = config.all_requesters().into_iter();
            let by = requesters.filter_map(|requester| Some((requester.to_string(), terms(requester)?))).collect();
            // No requester has this name, so only values for all requesters apply.
            let others = if config.requesters.is_empty() { terms("\0") } else { None };
            StepTerms { by, others }
        });
        let steps = steps.collect();
        let claiming = config.claiming().into_iter().map(str::to_string).collect();
        Ok(Machine { path, claiming, steps, config })
    }

    /// The id of an entity; of a row if the workflow is on a user's own table.
    pub(crate) fn entity(&self, id: &EntityId) -> EntityId {
        self.config.meta.table.as_ref().map_or_else(|| id.clone(), |table| table.entity(id))
    }

    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    /// The status of an entity.
    pub(crate) fn status<'a>(&self, standing: &'a Standing) -> Result<&'a str> {
        let (id, field) = (&standing.id, &self.config.meta.status_field);
        if standing.entity_type() != self.config.meta.entity_type {
            let (workflow, expected) = (self.config.name.clone(), self.config.meta.entity_type.clone());
            return Err(ClaimError::WrongType {
                id: id.clone(),
                workflow,
                expected,
                found: standing.entity_type().into(),
            });
        }
        status_at(&self.path, standing.data())
            .ok_or_else(|| ClaimError::NoStatus { id: id.clone(), field: field.clone() })
    }

    /// The steps with that key, at all statuses, with their indexes.
    pub(crate) fn steps<'a>(&'a self, key: &'a str) -> impl Iterator<Item = (usize, &'a ClaimStep)> + 'a {
        self.config.steps.iter().enumerate().filter(move |(_, step)| step.step_key == key)
    }

    /// The terms of a step for a requester. `None` if the requester cannot fire it.
    pub(crate) fn terms(&self, step: usize, requester: &str) -> Option<&Arc<Terms>> {
        let terms = &self.steps[step];
        match terms.by.get(requester) {
            Some(terms) => Some(terms),
            // A requester that the workflow names, but this step does not, is not one of the others.
            None if self.steps.iter().any(|step| step.by.contains_key(requester)) => None,
            None => terms.others.as_ref(),
        }
    }

    /// The requesters that can fire a step.
    pub(crate) fn allowed(&self, step: usize) -> Vec<String> {
        self.steps[step].by.keys().cloned().collect()
    }

    /// The guards of a step for a requester.
    pub(crate) fn guards(&self, step: usize, requester: &str) -> &[StepGuard] {
        let guards = self.config.steps[step].guards.as_ref();
        guards.and_then(|guards| guards.of(requester)).map_or(&[], Vec::as_slice)
    }

    /// The timers of the steps that start at a status.
    pub(crate) fn timers(&self, status: &str) -> Vec<TimerTerms> {
        timers(&self.config, status)
    }
}

fn terms(
    config: &ClaimWorkflow,
    step: &ClaimStep,
    requester: &str,
    started: &BTreeMap<String, String>,
) -> Option<Terms> {
    let into = step.successful_state.of(requester)?.clone();
    let effects = step.success_after_effect.as_ref().and_then(|effects| effects.of(requester));
    let effect = |name: &String| EffectTerms { name: name.clone(), workflow: started.get(name).cloned() };
    Some(Terms {
        workflow: config.name.clone(),
        module: config.meta.owning_module.clone(),
        entity_type: config.meta.entity_type.clone(),
        status_field: config.meta.status_field.clone(),
        step_id: step.step_id,
        step_key: step.step_key.clone(),
        from: step.status.clone(),
        claim_into: step.claim(requester).map(|claim| claim.claim_into.clone()),
        timers: timers(config, &into),
        into,
        action: step.action.as_ref().and_then(|action| action.of(requester)).cloned(),
        effects: effects.into_iter().flatten().map(effect).collect(),
        lease_us: step.lease.unwrap_or(LEASE).as_micros() as u64,
        recovery: step.recovery,
        most_attempts: step.attempts.unwrap_or(ATTEMPTS),
    })
}

fn timers(config: &ClaimWorkflow, status: &str) -> Vec<TimerTerms> {
    let from = config.steps.iter().filter(|step| step.status == status);
    let timer = |step: &ClaimStep| {
        let after_us = step.timer.as_ref()?.after.as_micros() as u64;
        Some(TimerTerms { step_id: step.step_id, after_us })
    };
    from.filter_map(timer).collect()
}

impl Terms {
    pub(crate) fn lease(&self) -> Duration {
        Duration::from_micros(self.lease_us)
    }

    /// Returns the data of an entity with another status.
    pub(crate) fn with_status(&self, data: &Value, status: &str) -> Value {
        let mut data = data.clone();
        if let Ok(path) = Path::parse(&self.status_field) {
            set_status(&path, &mut data, status);
        }
        data
    }

    /// Returns the status in an entity's data.
    pub(crate) fn status<'a>(&self, data: &'a Value) -> Option<&'a str> {
        status_at(&Path::parse(&self.status_field).ok()?, data)
    }

    /// The step as messages name it.
    pub(crate) fn step(&self) -> String {
        format!("{} ({})", self.step_key, self.step_id)
    }
}

pub(crate) fn status_at<'a>(path: &Path, data: &'a Value) -> Option<&'a str> {
    path.find(data)?.as_str()
}

/// Sets the text at a path. Replaces every other value on the way by an object: an action may have replaced the data.
pub(crate) fn set_status(path: &Path, data: &mut Value, status: &str) {
    let mut at = data;
    for segment in path.segments() {
        if let Value::Array(items) = at
            && let Some(index) = crate::json::array_index(segment).filter(|index| *index < items.len())
        {
            let Value::Array(items) = at else { return };
            at = &mut items[index];
            continue;
        }
        if !at.is_object() {
            *at = Value::Object(serde_json::Map::new());
        }
        let Value::Object(fields) = at else { return };
        at = fields.entry(segment.clone()).or_insert(Value::Null);
    }
    *at = Value::String(status.into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_status_is_set_at_its_path_whatever_the_data_are() {
        for (path, before, after) in [
            ("status", json!({"status": "a", "n": 1}), json!({"status": "b", "n": 1})),
            ("a.b", json!({"a": {"b": "x", "c": 2}}), json!({"a": {"b": "b", "c": 2}})),
            ("a.b", json!(null), json!({"a": {"b": "b"}})),
            ("l.1.s", json!({"l": [0, {"s": "a"}]}), json!({"l": [0, {"s": "b"}]})),
            ("l.9", json!({"l": [0]}), json!({"l": {"9": "b"}})),
        ] {
            let (path, mut data) = (Path::parse(path).unwrap(), before);
            set_status(&path, &mut data, "b");
            assert_eq!(data, after);
            assert_eq!(status_at(&path, &data), Some("b"));
        }
    }
}
