//! Reads configurations from JSON. Every error in a file becomes a finding with its position, and reading continues.
//! The rules between fields are checked in `validate.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde::de::{Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::claim::config::{
    ActionFacts, ClaimMeta, ClaimState, ClaimStep, ClaimWorkflow, Each, Janitor, Recovery, StepGuard, Timer, duration,
};
use crate::claim::finding::{Finding, Findings, Position, Route, Rule};
use crate::claim::table::UserTable;

/// The contents of a file, and the positions of its values.
pub(crate) struct ConfigSource {
    pub(crate) workflows: Vec<ClaimWorkflow>,
    pub(crate) findings: Findings,
    places: HashMap<Route, Position>,
}

impl ConfigSource {
    /// Returns all findings, ordered by position.
    pub(crate) fn finish(self) -> Vec<Finding> {
        let ConfigSource { findings, places, .. } = self;
        let position = |route: &Route| {
            let mut route = Some(route.clone());
            while let Some(here) = route {
                if let Some(position) = places.get(&here) {
                    return Some(*position);
                }
                route = here.outer();
            }
            None
        };
        let placed = findings.found.into_iter().map(|(route, finding)| {
            let position = finding.position.or_else(|| position(&route));
            Finding { position, ..finding }
        });
        let mut placed: Vec<Finding> = placed.collect();
        placed.sort_by_key(|finding| finding.position);
        placed
    }
}

/// Reads one workflow, or a list of them.
pub(crate) fn read(text: &str) -> ConfigSource {
    let mut reader = ConfigReader { text, lines: lines(text), findings: Findings::default(), places: HashMap::new() };
    let mut workflows = Vec::new();
    let root = Route::default();
    match serde_json::from_str::<&RawValue>(text) {
        Err(error) => {
            reader.findings.add(Rule::Format, root, None, format!("the file is not JSON: {error}"));
            if let Some((_, finding)) = reader.findings.found.last_mut() {
                finding.position = Some(Position { line: error.line(), column: error.column() });
            }
        }
        Ok(raw) if raw.get().starts_with('[') => {
            for (number, raw) in reader.list(raw, &root).into_iter().enumerate() {
                workflows.extend(reader.workflow(raw, &root.to(number)));
            }
        }
        Ok(raw) => workflows.extend(reader.workflow(raw, &root.to(0))),
    }
    ConfigSource { workflows, findings: reader.findings, places: reader.places }
}

/// The offset of each line in a text.
fn lines(text: &str) -> Vec<usize> {
    std::iter::once(0).chain(text.match_indices('\n').map(|(end, _)| end + 1)).collect()
}

struct ConfigReader<'a> {
    text: &'a str,
    lines: Vec<usize>,
    findings: Findings,
    places: HashMap<Route, Position>,
}

/// The fields of an object that were not read yet.
struct UnreadFields<'a> {
    route: Route,
    left: BTreeMap<String, &'a RawValue>,
}

impl<'a> ConfigReader<'a> {
    fn wrong(&mut self, route: &Route, message: impl Into<String>) {
        self.findings.add(Rule::Format, route.clone(), None, message);
    }

    /// Records the position of a value. The value is a slice of the text, so its address gives the offset.
    fn note(&mut self, raw: &'a RawValue, route: &Route) {
        let offset = (raw.get().as_ptr() as usize).saturating_sub(self.text.as_ptr() as usize);
        let line = self.lines.partition_point(|begin| *begin <= offset);
        let begin = self.lines.get(line.saturating_sub(1)).copied().unwrap_or_default();
        let column = self.text.get(begin..offset).map_or(0, |before| before.chars().count()) + 1;
        self.places.insert(route.clone(), Position { line, column });
    }

    fn list(&mut self, raw: &'a RawValue, route: &Route) -> Vec<&'a RawValue> {
        self.note(raw, route);
        serde_json::from_str(raw.get()).unwrap_or_else(|_| {
            self.wrong(route, format!("this must be a list, not {}", kind(raw)));
            Vec::new()
        })
    }

    fn object(&mut self, raw: &'a RawValue, route: &Route) -> Option<UnreadFields<'a>> {
        self.note(raw, route);
        let mut text = serde_json::Deserializer::from_str(raw.get());
        let Ok(pairs) = text.deserialize_map(Pairs) else {
            self.wrong(route, format!("this must be an object, not {}", kind(raw)));
            return None;
        };
        let mut left = BTreeMap::new();
        for (name, value) in pairs {
            self.note(value, &route.to(&name));
            if left.contains_key(&name) {
                let message = format!("the field {name:?} occurs twice: remove one of them");
                self.findings.add(Rule::DuplicateField, route.to(&name), None, message);
            }
            left.insert(name, value);
        }
        Some(UnreadFields { route: route.clone(), left })
    }

    /// The fields that are left are unknown.
    fn end(&mut self, fields: UnreadFields<'a>, known: &str) {
        for name in fields.left.keys() {
            self.wrong(&fields.route.to(name), format!("unknown field {name:?}; the fields here are {known}"));
        }
    }

    /// Reads a value of a type.
    fn value<T: serde::de::DeserializeOwned>(&mut self, raw: &'a RawValue, route: &Route, what: &str) -> Option<T> {
        serde_json::from_str(raw.get())
            .map_err(|_| self.wrong(route, format!("this must be {what}, not {}", kind(raw))))
            .ok()
    }

    fn field<T: serde::de::DeserializeOwned>(
        &mut self,
        fields: &mut UnreadFields<'a>,
        name: &str,
        what: &str,
    ) -> Option<T> {
        let raw = fields.left.remove(name)?;
        self.value(raw, &fields.route.to(name), what)
    }

    /// Like `field`, but the field must exist.
    fn required<T: serde::de::DeserializeOwned>(
        &mut self,
        fields: &mut UnreadFields<'a>,
        name: &str,
        what: &str,
    ) -> Option<T> {
        if !fields.left.contains_key(name) {
            self.wrong(&fields.route, format!("the field {name:?} is missing: {what}"));
        }
        self.field(fields, name, what)
    }

    fn duration(&mut self, fields: &mut UnreadFields<'a>, name: &str) -> Option<Duration> {
        let route = fields.route.to(name);
        let text: String = self.field(fields, name, "a duration such as \"30s\"")?;
        let read = duration::read(&text);
        if read.is_none() {
            self.wrong(&route, format!("{text:?} is not a duration: use a number and ms, s, m, h or d, as in \"30s\""));
        }
        read
    }

    /// Reads one of several words.
    fn word<T: Copy>(&mut self, fields: &mut UnreadFields<'a>, name: &str, words: &[(&str, T)]) -> Option<T> {
        let route = fields.route.to(name);
        let all = words.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ");
        let text: String = self.field(fields, name, &format!("one of {all}"))?;
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        if found.is_none() {
            self.wrong(&route, format!("{text:?} is not one of {all}"));
        }
        found
    }

    /// Reads one value, or an object with one value for each requester.
    fn each<T>(
        &mut self,
        fields: &mut UnreadFields<'a>,
        name: &str,
        mut read: impl FnMut(&mut ConfigReader<'a>, &'a RawValue, &Route, Option<&str>) -> Option<T>,
    ) -> Option<Each<T>> {
        let (raw, route) = (fields.left.remove(name)?, fields.route.to(name));
        if !raw.get().starts_with('{') {
            return Some(Each::All(read(self, raw, &route, None)?));
        }
        let values = self.object(raw, &route)?;
        let mut each = BTreeMap::new();
        for (requester, raw) in values.left {
            if let Some(value) = read(self, raw, &route.to(&requester), Some(&requester)) {
                each.insert(requester, value);
            }
        }
        Some(Each::By(each))
    }

    fn workflow(&mut self, raw: &'a RawValue, route: &Route) -> Option<ClaimWorkflow> {
        let mut fields = self.object(raw, route)?;
        let name: Option<String> = self.required(&mut fields, "workflow", "the name of the workflow");
        self.findings.in_workflow(name.as_deref().unwrap_or("without a name"));
        let names = "a list of names";
        let status_types = self.required(&mut fields, "status_types", names).unwrap_or_default();
        let initial = self.field(&mut fields, "initial", names).unwrap_or_default();
        let requesters: BTreeSet<String> = self.field(&mut fields, "requesters", names).unwrap_or_default();
        let shared_claiming = self.field(&mut fields, "shared_claiming", "true or false").unwrap_or_default();
        let meta = match fields.left.remove("meta") {
            Some(raw) => self.meta(raw, &route.to("meta")),
            None => {
                self.wrong(route, "the field \"meta\" is missing: owning_module, entity_type and status_field");
                None
            }
        };
        let mut actions = BTreeMap::new();
        if let Some(raw) = fields.left.remove("actions") {
            let route = route.to("actions");
            for (name, raw) in self.object(raw, &route).map(|fields| fields.left).unwrap_or_default() {
                let facts = self.facts(raw, &route.to(&name));
                actions.insert(name, facts.unwrap_or_default());
            }
        }
        let mut steps = Vec::new();
        match fields.left.remove("steps") {
            Some(raw) => {
                let route = route.to("steps");
                for (number, raw) in self.list(raw, &route).into_iter().enumerate() {
                    steps.extend(self.step(raw, &route.to(number)));
                    self.findings.out_of_step();
                }
            }
            None => self.wrong(route, "the field \"steps\" is missing: a list of steps"),
        }
        let known = "workflow, meta, status_types, initial, requesters, actions, shared_claiming and steps";
        self.end(fields, known);
        let name = name?;
        Some(ClaimWorkflow { name, meta: meta?, status_types, initial, requesters, actions, shared_claiming, steps })
    }

    fn meta(&mut self, raw: &'a RawValue, route: &Route) -> Option<ClaimMeta> {
        let mut fields = self.object(raw, route)?;
        let owning_module = self.required(&mut fields, "owning_module", "the name of a module");
        let entity_type = self.required(&mut fields, "entity_type", "the type of the entities");
        let status_field = self.required(&mut fields, "status_field", "where the status is in an entity's data");
        let table = fields.left.remove("table").map(|raw| self.table(raw, &route.to("table")));
        let words = [("engine", Janitor::Engine), ("module", Janitor::Module)];
        let janitor = self.word(&mut fields, "janitor", &words).unwrap_or_default();
        self.end(fields, "owning_module, entity_type, status_field, table and janitor");
        let (owning_module, entity_type, status_field) = (owning_module?, entity_type?, status_field?);
        let table = match table {
            Some(table) => Some(table?),
            None => None,
        };
        Some(ClaimMeta { owning_module, entity_type, status_field, table, janitor })
    }

    fn table(&mut self, raw: &'a RawValue, route: &Route) -> Option<UserTable> {
        let mut fields = self.object(raw, route)?;
        let name = self.required(&mut fields, "name", "the name of the table");
        let id = self.required(&mut fields, "id", "the column that identifies a row");
        let version = self.required(&mut fields, "version", "the column with the version of a row");
        self.end(fields, "name, id and version");
        Some(UserTable { name: name?, id: id?, version: version? })
    }

    fn facts(&mut self, raw: &'a RawValue, route: &Route) -> Option<ActionFacts> {
        let mut fields = self.object(raw, route)?;
        let non_idempotent = self.field(&mut fields, "non_idempotent", "true or false").unwrap_or_default();
        let writes_nothing = self.field(&mut fields, "writes_nothing", "true or false").unwrap_or_default();
        self.end(fields, "non_idempotent and writes_nothing");
        Some(ActionFacts { non_idempotent, writes_nothing })
    }

    fn step(&mut self, raw: &'a RawValue, route: &Route) -> Option<ClaimStep> {
        let mut fields = self.object(raw, route)?;
        let step_id: Option<u64> = self.required(&mut fields, "step_id", "a whole number");
        let step_key: Option<String> = self.required(&mut fields, "step_key", "the name of the step");
        self.findings.in_step(step_key.as_deref().unwrap_or("without a key"), step_id.unwrap_or_default());
        let status: Option<String> = self.required(&mut fields, "status", "the status that the step starts at");
        let name =
            |reader: &mut ConfigReader<'a>, raw, route: &Route, _: Option<&str>| reader.value(raw, route, "a name");
        let action = self.each(&mut fields, "action", name);
        if !fields.left.contains_key("successful_state") {
            self.wrong(route, "the field \"successful_state\" is missing: the status that the step leads to");
        }
        let successful_state = self.each(&mut fields, "successful_state", name);
        let claim_state = self.claim_state(&mut fields);
        let success_after_effect =
            self.each(&mut fields, "success_after_effect", |reader, raw, route, _| match raw.get().starts_with('"') {
                true => Some(vec![reader.value(raw, route, "a name")?]),
                false => reader.value(raw, route, "a name or a list of names"),
            });
        let guards = self.each(&mut fields, "guards", |reader, raw, route, _| {
            let guards = reader.list(raw, route).into_iter().enumerate();
            Some(guards.filter_map(|(number, raw)| reader.guard(raw, &route.to(number))).collect())
        });
        let lease = self.duration(&mut fields, "lease");
        let words = [("revert", Recovery::Revert), ("retry", Recovery::Retry), ("needs_review", Recovery::NeedsReview)];
        let recovery = self.word(&mut fields, "recovery", &words).unwrap_or_default();
        let attempts = self.field(&mut fields, "attempts", "a whole number");
        let timer = fields.left.remove("timer").and_then(|raw| self.timer(raw, &route.to("timer")));
        let non_idempotent = self.field(&mut fields, "non_idempotent", "true or false").unwrap_or_default();
        let known = "step_id, step_key, status, action, successful_state, successful_claim_state, \
                     success_after_effect, guards, lease, recovery, attempts, timer and non_idempotent";
        self.end(fields, known);
        Some(ClaimStep {
            step_id: step_id?,
            step_key: step_key?,
            status: status?,
            action,
            successful_state: successful_state?,
            claim_state,
            success_after_effect,
            guards,
            lease,
            recovery,
            attempts,
            timer,
            non_idempotent,
        })
    }

    fn claim_state(&mut self, fields: &mut UnreadFields<'a>) -> Option<Each<ClaimState>> {
        const NAMES: [&str; 2] = ["successful_claim_state", "claim_state"];
        if NAMES.iter().all(|name| fields.left.contains_key(*name)) {
            let message = "\"claim_state\" is another name for \"successful_claim_state\": leave one of them out";
            self.findings.add(Rule::TwoClaimNames, fields.route.to(NAMES[1]), None, message);
            fields.left.remove(NAMES[1]);
        }
        let name = NAMES.into_iter().find(|name| fields.left.contains_key(*name))?;
        self.each(fields, name, |reader, raw, route, requester| {
            reader.note(raw, route);
            let Ok([claim_into, revert_to]) = serde_json::from_str::<[String; 2]>(raw.get()) else {
                let message = "a claim is a list of two statuses: [claim_into, revert_to]";
                reader.findings.add(Rule::ClaimPair, route.clone(), requester, message);
                return None;
            };
            Some(ClaimState { claim_into, revert_to })
        })
    }

    fn guard(&mut self, raw: &'a RawValue, route: &Route) -> Option<StepGuard> {
        if raw.get().starts_with('"') {
            return Some(StepGuard { guard: self.value(raw, route, "a name")?, reason: None });
        }
        let mut fields = self.object(raw, route)?;
        let guard = self.required(&mut fields, "guard", "the name of the guard");
        let reason = self.field(&mut fields, "reason", "the reason for the caller, as text");
        self.end(fields, "guard and reason");
        Some(StepGuard { guard: guard?, reason })
    }

    fn timer(&mut self, raw: &'a RawValue, route: &Route) -> Option<Timer> {
        let mut fields = self.object(raw, route)?;
        if !fields.left.contains_key("after") {
            self.wrong(route, "the field \"after\" is missing: a duration such as \"2d\"");
        }
        let after = self.duration(&mut fields, "after");
        let requester = self.required(&mut fields, "requester", "the requester that the step is fired for");
        self.end(fields, "after and requester");
        Some(Timer { after: after?, requester: requester? })
    }
}

/// The kind of a value, in words.
fn kind(raw: &RawValue) -> &'static str {
    match raw.get().as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "a list of other things",
        Some(b'"') => "a text",
        Some(b't' | b'f') => "true or false",
        Some(b'n') => "null",
        _ => "this number",
    }
}

/// The fields of an object in their order, including duplicates.
struct Pairs;

impl<'de> Visitor<'de> for Pairs {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }
}
