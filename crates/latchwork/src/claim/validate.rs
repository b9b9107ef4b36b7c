//! The rules of a configuration. All rules are checked, and all findings are reported together. This file reads no JSON
//! and knows no positions in a file: `read.rs` does.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::claim::config::{ActionFacts, ClaimState, ClaimStep, ClaimWorkflow, Each};
use crate::claim::finding::{Findings, Route, Rule};
use crate::claim::table::quoted;
use crate::json::Path;

/// The shortest and the longest lease.
const LEASES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(366 * 24 * 3600));

/// The longest name, in bytes.
const LONGEST_NAME: usize = 256;

/// What the program that runs a workflow has registered. With `None`, names are not checked.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    pub(crate) actions: Option<BTreeMap<String, ActionFacts>>,
    pub(crate) after_effects: Option<BTreeSet<String>>,
    pub(crate) guards: Option<BTreeSet<String>>,
}

/// Checks workflows. The path of each starts with its index in the list.
pub(crate) fn validate(workflows: &[ClaimWorkflow], known: &Registered, findings: &mut Findings) {
    let mut names = BTreeSet::new();
    for (number, workflow) in workflows.iter().enumerate() {
        findings.in_workflow(&workflow.name);
        let route = Route::default().to(number);
        if !names.insert(&workflow.name) {
            let message = "another workflow has the same name: give each workflow its own name";
            findings.add(Rule::DuplicateId, route.to("workflow"), None, message);
        }
        ConfigValidator { workflow, known, route, findings }.validate();
    }
}

struct ConfigValidator<'a> {
    workflow: &'a ClaimWorkflow,
    known: &'a Registered,
    route: Route,
    findings: &'a mut Findings,
}

/// The path of a field, or of a requester's value in it.
fn within(route: &Route, field: &str, requester: Option<&str>) -> Route {
    let route = route.to(field);
    requester.map_or(route.clone(), |requester| route.to(requester))
}

impl ConfigValidator<'_> {
    fn validate(mut self) {
        self.whole();
        let (mut ids, mut keys) = (BTreeSet::new(), BTreeSet::new());
        for (number, step) in self.workflow.steps.iter().enumerate() {
            self.findings.in_step(&step.step_key, step.step_id);
            let route = self.route.to("steps").to(number);
            if !ids.insert(step.step_id) {
                let message = format!("another step also has the number {}: give each step its own", step.step_id);
                self.findings.add(Rule::DuplicateId, route.to("step_id"), None, message);
            }
            if !keys.insert((&step.step_key, &step.status)) {
                let message = format!("another step at status {:?} has the same key", step.status);
                self.findings.add(Rule::DuplicateId, route.to("step_key"), None, message);
            }
            self.step(step, &route);
            self.findings.out_of_step();
        }
        self.ambiguous();
        if self.findings.is_whole(&self.workflow.name) {
            self.reachable();
        }
    }

    fn is_status(&self, status: &str) -> bool {
        self.workflow.status_types.iter().any(|known| known == status)
    }

    /// Checks the fields of the workflow other than its steps.
    fn whole(&mut self) {
        let workflow = self.workflow;
        self.short(&workflow.name, self.route.to("workflow"));
        let mut seen = BTreeSet::new();
        for (number, status) in workflow.status_types.iter().enumerate() {
            if !seen.insert(status) {
                let message = format!("status {status:?} is declared twice");
                self.findings.add(Rule::DuplicateId, self.route.to("status_types").to(number), None, message);
            }
        }
        for status in workflow.initial.iter().filter(|status| !seen.contains(status)) {
            let message = format!("status {status:?} is not in status_types");
            self.findings.add(Rule::UnknownStatus, self.route.to("initial"), None, message);
        }
        let field = &workflow.meta.status_field;
        if let Err(error) = Path::parse(field) {
            let message = format!("{field:?} is not a path in an entity's data: {error}");
            self.findings.add(Rule::Format, self.route.to("meta").to("status_field"), None, message);
        }
        if let Some(table) = &workflow.meta.table {
            let route = self.route.to("meta").to("table");
            let names = [("name", table.quoted()), ("id", quoted(&table.id)), ("version", quoted(&table.version))];
            for (field, error) in names.into_iter().filter_map(|(field, name)| Some((field, name.err()?))) {
                self.findings.add(Rule::Format, route.to(field), None, error);
            }
            if let Err(error) = quoted(field) {
                self.findings.add(Rule::Format, self.route.to("meta").to("status_field"), None, error);
            }
        }
        for (name, text) in
            [("owning_module", &workflow.meta.owning_module), ("entity_type", &workflow.meta.entity_type)]
        {
            if text.is_empty() {
                self.findings.add(Rule::Format, self.route.to("meta").to(name), None, "this is empty");
            }
        }
    }

    fn step(&mut self, step: &ClaimStep, route: &Route) {
        if !self.is_status(&step.status) {
            let message = format!("status {:?} is not in status_types", step.status);
            self.findings.add(Rule::UnknownStatus, route.to("status"), None, message);
        }
        if self.workflow.claiming().contains(step.status.as_str()) {
            let message = format!("{:?} is a claiming status: only the end of its claim leads from it", step.status);
            self.findings.add(Rule::StartsClaiming, route.to("status"), None, message);
        }
        for (requester, status) in step.successful_state.values() {
            if !self.is_status(status) {
                let message = format!("status {status:?} is not in status_types");
                let route = within(route, "successful_state", requester);
                self.findings.add(Rule::UnknownStatus, route, requester, message);
            }
        }
        self.requesters(step, route);
        for (requester, claim) in step.claim_state.iter().flat_map(Each::values) {
            self.claim(step, requester, claim, &within(route, "successful_claim_state", requester));
        }
        self.names(step, route);
        self.limits(step, route);
    }

    /// Checks the requesters of a step.
    fn requesters(&mut self, step: &ClaimStep, route: &Route) {
        let named: BTreeSet<&str> = step.named().collect();
        let declared = &self.workflow.requesters;
        for requester in &named {
            if !declared.is_empty() && !declared.contains(*requester) {
                let message = "the workflow does not declare this requester";
                self.findings.add(Rule::UnknownRequester, route.clone(), Some(requester), message);
            }
            if !step.is_for(requester) {
                let message = "there is no successful_state for this requester";
                self.findings.add(Rule::NoSuccessfulState, route.clone(), Some(requester), message);
            }
        }
        let all = self.workflow.all_requesters();
        let fires: Vec<&str> = all.into_iter().filter(|requester| step.is_for(requester)).collect();
        let claims = fires.iter().filter(|requester| step.claim(requester).is_some()).count();
        if claims > 0 {
            for requester in fires.iter().filter(|requester| step.claim(requester).is_none()) {
                let message = "the step is claimed for other requesters but not for this one: both can run at once";
                self.findings.add(Rule::PartlyClaimed, route.to("successful_claim_state"), Some(requester), message);
            }
        }
    }

    /// Checks the two statuses of a claim: only one caller at a time may claim, and recovery needs a status to revert
    /// to.
    fn claim(&mut self, step: &ClaimStep, requester: Option<&str>, claim: &ClaimState, route: &Route) {
        let ClaimState { claim_into, revert_to } = claim;
        let mut add = |rule, message| self.findings.add(rule, route.clone(), requester, message);
        for status in [claim_into, revert_to] {
            if !self.workflow.status_types.contains(status) {
                add(Rule::ClaimStatuses, format!("status {status:?} is not in status_types"));
            }
        }
        if claim_into == revert_to {
            add(Rule::ClaimNoOp, format!("it claims into {claim_into:?} and reverts to the same status"));
        } else if revert_to != &step.status {
            add(Rule::RevertElsewhere, format!("it reverts to {revert_to:?}, but the step is at {:?}", step.status));
        }
        if claim_into == &step.status {
            add(Rule::ClaimFromItself, format!("it claims into {claim_into:?}, where it starts: every caller passes"));
        }
        let finals = step.successful_state.values();
        let is_final = |of: Option<&str>| requester.is_none() || of.is_none() || of == requester;
        if finals.into_iter().any(|(of, status)| is_final(of) && status == claim_into) {
            add(Rule::ClaimIntoFinal, format!("it claims into {claim_into:?}, the status that the step leads to"));
        }
    }

    /// Checks the names that a step uses.
    fn names(&mut self, step: &ClaimStep, route: &Route) {
        let declared = &self.workflow.actions;
        for (requester, action) in step.action.iter().flat_map(Each::values) {
            let known = self.known.actions.as_ref();
            let is_known = known.is_none_or(|known| known.contains_key(action))
                && (declared.is_empty() || declared.contains_key(action));
            let route = within(route, "action", requester);
            if !is_known {
                let message = format!("there is no action {action:?}");
                self.findings.add(Rule::UnknownAction, route.clone(), requester, message);
            }
            let facts = [known.and_then(|known| known.get(action)), declared.get(action)];
            let non_idempotent = facts.iter().flatten().any(|facts| facts.non_idempotent) || step.non_idempotent;
            let writes_nothing = facts.iter().flatten().any(|facts| facts.writes_nothing);
            let all = self.workflow.all_requesters();
            let of = requester.map_or(all.into_iter().map(Some).collect(), |requester| vec![Some(requester)]);
            let of = if of.is_empty() { vec![None] } else { of };
            for requester in of {
                let claim = match requester {
                    Some(requester) if !step.is_for(requester) => continue,
                    Some(requester) => step.claim(requester),
                    None => step.claim_state.as_ref().and_then(|claims| claims.values().first().map(|(_, it)| *it)),
                };
                if non_idempotent && claim.is_none() {
                    let message = format!("action {action:?} does harm if it runs twice, but the step is not claimed");
                    self.findings.add(Rule::Unclaimed, route.clone(), requester, message);
                }
                if writes_nothing && claim.is_some() {
                    let message = format!("action {action:?} writes nothing: use an after-effect without a claim");
                    self.findings.add(Rule::ClaimedForNothing, route.clone(), requester, message);
                }
            }
        }
        for (requester, effects) in step.success_after_effect.iter().flat_map(Each::values) {
            for effect in effects {
                if self.known.after_effects.as_ref().is_some_and(|known| !known.contains(effect)) {
                    let (route, message) =
                        (within(route, "success_after_effect", requester), "there is no after-effect");
                    self.findings.add(Rule::UnknownAfterEffect, route, requester, format!("{message} {effect:?}"));
                }
            }
        }
        for (requester, guards) in step.guards.iter().flat_map(Each::values) {
            for guard in guards {
                if self.known.guards.as_ref().is_some_and(|known| !known.contains(&guard.guard)) {
                    let (route, message) = (within(route, "guards", requester), "there is no guard");
                    self.findings.add(Rule::UnknownGuard, route, requester, format!("{message} {:?}", guard.guard));
                }
            }
        }
    }

    /// Checks the length of a name: names are parts of keys and of execution ids.
    fn short(&mut self, name: &str, route: Route) {
        if name.len() > LONGEST_NAME {
            let message = format!("a name has at most {LONGEST_NAME} bytes; this one has {}", name.len());
            self.findings.add(Rule::Limits, route, None, message);
        }
    }

    fn limits(&mut self, step: &ClaimStep, route: &Route) {
        self.short(&step.step_key, route.to("step_key"));
        for (requester, action) in step.action.iter().flat_map(Each::values) {
            self.short(action, within(route, "action", requester));
        }
        for (requester, effects) in step.success_after_effect.iter().flat_map(Each::values) {
            effects.iter().for_each(|effect| self.short(effect, within(route, "success_after_effect", requester)));
        }
        if let Some(lease) = step.lease.filter(|lease| !(LEASES.0..=LEASES.1).contains(lease)) {
            let message = format!("a lease of {lease:?} is shorter than 10 ms or longer than a year");
            self.findings.add(Rule::Limits, route.to("lease"), None, message);
        }
        if step.attempts == Some(0) {
            let message = "the action would never run: remove this field, or write 1 or more";
            self.findings.add(Rule::Limits, route.to("attempts"), None, message);
        }
        if step.timer.as_ref().is_some_and(|timer| timer.after > LEASES.1 * 100) {
            self.findings.add(Rule::Limits, route.to("timer"), None, "this is longer than a hundred years");
        }
    }

    /// All steps that claim into a status must revert to the same status: otherwise recovery cannot know which.
    fn ambiguous(&mut self) {
        if self.workflow.shared_claiming {
            return;
        }
        let mut reverts: BTreeMap<&str, (&ClaimStep, &str)> = BTreeMap::new();
        for (number, step) in self.workflow.steps.iter().enumerate() {
            for (requester, claim) in step.claim_state.iter().flat_map(Each::values) {
                let (first, revert_to) = *reverts.entry(&claim.claim_into).or_insert((step, &claim.revert_to));
                if revert_to != claim.revert_to {
                    let message = format!(
                        "it claims into {:?} and reverts to {:?}, but step {} ({}) reverts to {revert_to:?} from \
                         there: give each its own claiming status, or set \"shared_claiming\": true",
                        claim.claim_into, claim.revert_to, first.step_key, first.step_id
                    );
                    let route = self.route.to("steps").to(number);
                    let route = within(&route, "successful_claim_state", requester);
                    self.findings.in_step(&step.step_key, step.step_id);
                    self.findings.add(Rule::ClaimAmbiguous, route, requester, message);
                    self.findings.out_of_step();
                }
            }
        }
    }

    fn reachable(&mut self) {
        let workflow = self.workflow;
        let mut reached: BTreeSet<&str> = workflow.starts().iter().map(String::as_str).collect();
        let mut left: Vec<&str> = reached.iter().copied().collect();
        while let Some(status) = left.pop() {
            let steps = workflow.steps.iter().filter(|step| step.status == status);
            let ends = steps.clone().flat_map(|step| step.successful_state.values()).map(|(_, status)| status);
            let claims = steps.filter_map(|step| step.claim_state.as_ref()).flat_map(Each::values);
            let claims = claims.flat_map(|(_, claim)| [&claim.claim_into, &claim.revert_to]);
            left.extend(ends.chain(claims).map(String::as_str).filter(|status| reached.insert(status)));
        }
        for (number, status) in workflow.status_types.iter().enumerate() {
            if !reached.contains(status.as_str()) {
                let message = format!("no step leads to status {status:?}");
                self.findings.add(Rule::UnreachableStatus, self.route.to("status_types").to(number), None, message);
            }
        }
    }
}
