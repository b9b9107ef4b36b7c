//! The operations on a state, as pure functions: state in, state or error out. They do not know where the state lives,
//! or what else changes it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Number, Value};

use crate::json::{self, Path};
use crate::state::{Result, StateError};

/// A change of a state that is given as data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StateOp {
    /// Replaces it.
    Set(Value),
    /// Removes it.
    Delete,
    /// Merges a JSON merge patch into it.
    Patch(Value),
    /// Adds to the number at a place; a missing number counts as zero.
    Increment(StatePath, Number),
    /// Adds to the end of the list at a place; a missing list counts as empty.
    Push(StatePath, Vec<Value>),
    /// Takes the first element of the list at a place.
    RemoveFirst(StatePath),
    /// Takes the last element of the list at a place.
    RemoveLast(StatePath),
    /// Sets one entry of the record at a place; a missing record counts as empty.
    SetRecord(StatePath, String, Value),
    /// Removes one entry of the record at a place.
    DeleteRecord(StatePath, String),
}

/// A place in a state; `None` is the whole state.
pub(crate) type StatePath = Option<Path>;

/// What an operation did, as watchers see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Event {
    /// The name of the operation's method.
    pub operation: String,
    /// The path in the state; empty for the whole state.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The argument: the amount, the elements, the patch or the value. For an atomic change, the merge patch from the
    /// state before to the state after.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub delta: Value,
    /// How often it was done in a row, by callers whose changes share a commit.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub times: u64,
}

impl Event {
    /// True if the events differ at most in `times`.
    pub(crate) fn is_like(&self, other: &Event) -> bool {
        (&self.operation, &self.path, &self.delta) == (&other.operation, &other.path, &other.delta)
    }
}

fn once() -> u64 {
    1
}

fn is_once(times: &u64) -> bool {
    *times == 1
}

pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn shown(place: &StatePath) -> String {
    place.as_ref().map_or("the state".into(), |path| format!("\"{path}\""))
}

impl StateOp {
    /// Refuses a value that would be nested too deeply at its place.
    pub(crate) fn check(&self) -> std::result::Result<(), json::JsonError> {
        let (place, values, levels) = match self {
            StateOp::Increment(place, _) => (place, &[][..], 0),
            StateOp::Push(place, values) => (place, &values[..], 1),
            StateOp::SetRecord(place, _, value) => (place, std::slice::from_ref(value), 1),
            _ => return Ok(()),
        };
        let depth = levels + place.as_ref().map_or(0, |path| path.segments().len());
        json::check_under(depth, &Value::Null)?;
        values.iter().try_for_each(|value| json::check_under(depth, value))
    }

    /// Changes `state`, which is `None` if there is none. Returns the answer to the caller, and true if anything
    /// changed. On an error nothing has changed: a missing parent is created only where no existing value can be in the
    /// way. `key` is for messages.
    pub(crate) fn apply(&self, key: &str, state: &mut Option<Value>) -> Result<(Value, bool)> {
        Ok(match self {
            StateOp::Set(value) => {
                let changes = state.as_ref() != Some(value);
                *state = Some(value.clone());
                (value.clone(), changes)
            }
            StateOp::Delete => {
                let removed = state.take();
                let changes = removed.is_some();
                (removed.unwrap_or_default(), changes)
            }
            StateOp::Patch(patch) => {
                let changes = state.as_ref().is_none_or(|state| patch_changes(state, patch));
                let state = state.get_or_insert_with(|| Value::Object(Map::new()));
                if !state.is_object() {
                    return Err(not_an_object(key, "the state".into(), state));
                }
                json::merge(state, patch);
                (state.clone(), changes)
            }
            StateOp::Increment(place, by) => {
                let is_new = find(state, place).is_none();
                let found = at(key, state, place, || Value::from(0))?;
                let Value::Number(number) = found else {
                    let (key, place, found) = (key.into(), shown(place), kind_of(found).into());
                    return Err(StateError::NotANumber { key, place, found });
                };
                let out_of_range = || StateError::OutOfRange { key: key.into(), place: shown(place) };
                let sum = sum(number, by).ok_or_else(out_of_range)?;
                let changes = is_new || sum != *number;
                *number = sum;
                (found.clone(), changes)
            }
            StateOp::Push(place, values) => {
                let is_new = find(state, place).is_none();
                let list = list_at(key, state, place)?;
                list.extend(values.iter().cloned());
                (Value::from(list.len()), is_new || !values.is_empty())
            }
            StateOp::RemoveFirst(place) => take(key, state, place, |list| (!list.is_empty()).then(|| list.remove(0)))?,
            StateOp::RemoveLast(place) => take(key, state, place, Vec::pop)?,
            StateOp::SetRecord(place, entry, value) => {
                let before = record_at(key, state, place)?.insert(entry.clone(), value.clone());
                (value.clone(), before.as_ref() != Some(value))
            }
            StateOp::DeleteRecord(place, entry) => match find(state, place) {
                None => (Value::Null, false),
                Some(_) => {
                    let removed = record_at(key, state, place)?.remove(entry);
                    let changes = removed.is_some();
                    (removed.unwrap_or_default(), changes)
                }
            },
        })
    }

    /// True for an operation whose result does not depend on the state before.
    pub(crate) fn writes_always(&self) -> bool {
        matches!(self, StateOp::Set(_) | StateOp::Delete)
    }

    /// The event for watchers.
    pub(crate) fn event(&self, operation: &'static str) -> Event {
        let (path, delta) = match self {
            StateOp::Set(value) | StateOp::Patch(value) => (&None, value.clone()),
            StateOp::Delete => (&None, Value::Null),
            StateOp::Increment(place, by) => (place, Value::Number(by.clone())),
            StateOp::Push(place, values) => (place, Value::Array(values.clone())),
            StateOp::RemoveFirst(place) | StateOp::RemoveLast(place) => (place, Value::Null),
            StateOp::SetRecord(place, entry, value) => {
                (place, Value::Object(Map::from_iter([(entry.clone(), value.clone())])))
            }
            StateOp::DeleteRecord(place, entry) => {
                (place, Value::Object(Map::from_iter([(entry.clone(), Value::Null)])))
            }
        };
        let path = path.as_ref().map(ToString::to_string).unwrap_or_default();
        Event { operation: operation.into(), path, delta, times: 1 }
    }
}

fn find<'a>(state: &'a Option<Value>, place: &StatePath) -> Option<&'a Value> {
    let state = state.as_ref()?;
    place.as_ref().map_or(Some(state), |path| path.find(state))
}

/// The value at a place. It is created if it is missing, with the objects on the way to it.
fn at<'a>(
    key: &str,
    state: &'a mut Option<Value>,
    place: &StatePath,
    missing: impl FnOnce() -> Value,
) -> Result<&'a mut Value> {
    let Some(path) = place else { return Ok(state.get_or_insert_with(missing)) };
    let mut here = state.get_or_insert_with(|| Value::Object(Map::new()));
    let (last, parents) = path.segments().split_last().expect("a path has a segment");
    for (depth, segment) in parents.iter().enumerate() {
        here = step(key, here, path, depth, segment, || Value::Object(Map::new()))?;
    }
    step(key, here, path, parents.len(), last, missing)
}

fn step<'a>(
    key: &str,
    here: &'a mut Value,
    path: &Path,
    depth: usize,
    segment: &str,
    missing: impl FnOnce() -> Value,
) -> Result<&'a mut Value> {
    let found = kind_of(here);
    let refuse = || {
        let place = path.segments()[..depth].join(".");
        let place = if place.is_empty() { "the state".into() } else { format!("{place:?}") };
        StateError::NotAnObject { key: key.into(), place, found: found.into() }
    };
    match here {
        Value::Object(map) => Ok(map.entry(segment).or_insert_with(missing)),
        // An existing element is used; a missing one is not created.
        Value::Array(items) => json::array_index(segment).and_then(|index| items.get_mut(index)).ok_or_else(refuse),
        _ => Err(refuse()),
    }
}

fn list_at<'a>(key: &str, state: &'a mut Option<Value>, place: &StatePath) -> Result<&'a mut Vec<Value>> {
    match at(key, state, place, || Value::Array(Vec::new()))? {
        Value::Array(items) => Ok(items),
        other => Err(StateError::NotAList { key: key.into(), place: shown(place), found: kind_of(other).into() }),
    }
}

fn record_at<'a>(key: &str, state: &'a mut Option<Value>, place: &StatePath) -> Result<&'a mut Map<String, Value>> {
    match at(key, state, place, || Value::Object(Map::new()))? {
        Value::Object(map) => Ok(map),
        other => Err(not_an_object(key, shown(place), other)),
    }
}

fn not_an_object(key: &str, place: String, found: &Value) -> StateError {
    StateError::NotAnObject { key: key.into(), place, found: kind_of(found).into() }
}

/// Takes an element from a list. Takes nothing if the list is missing or empty.
fn take(
    key: &str,
    state: &mut Option<Value>,
    place: &StatePath,
    take: impl FnOnce(&mut Vec<Value>) -> Option<Value>,
) -> Result<(Value, bool)> {
    if find(state, place).is_none() {
        return Ok((Value::Null, false));
    }
    let taken = take(list_at(key, state, place)?);
    let changes = taken.is_some();
    Ok((taken.unwrap_or_default(), changes))
}

/// True if a merge patch would change a value.
fn patch_changes(value: &Value, patch: &Value) -> bool {
    let Value::Object(patch) = patch else { return value != patch };
    let Value::Object(map) = value else { return true };
    patch.iter().any(|(key, patch)| match (map.get(key), patch) {
        (found, Value::Null) => found.is_some(),
        (Some(found), patch) => patch_changes(found, patch),
        (None, _) => true,
    })
}

/// The sum, exact between integers; `None` if it is out of range.
fn sum(a: &Number, b: &Number) -> Option<Number> {
    let whole = |number: &Number| number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    if let (Some(a), Some(b)) = (whole(a), whole(b)) {
        let sum = a + b;
        return i64::try_from(sum).map(Number::from).or_else(|_| u64::try_from(sum).map(Number::from)).ok();
    }
    Number::from_f64(a.as_f64()? + b.as_f64()?)
}

/// The merge patch from `before` to `after`. A null within `after` is shown as a removal, because merge patches cannot
/// express it.
pub(crate) fn difference(before: Option<&Value>, after: Option<&Value>) -> Value {
    match (before, after) {
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), Value::Null));
            let changed = after.iter().filter(|(key, value)| before.get(*key) != Some(value));
            let changed = changed.map(|(key, value)| (key.clone(), difference(before.get(key), Some(value))));
            Value::Object(gone.chain(changed).collect())
        }
        (_, after) => after.cloned().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn place(text: &str) -> StatePath {
        (!text.is_empty()).then(|| Path::parse(text).unwrap())
    }

    fn check(state: Option<Value>, op: StateOp, expected: Result<(Option<Value>, Value), &str>) {
        let mut after = state.clone();
        match (op.apply("k", &mut after), expected) {
            (Ok((answer, changed)), Ok(expected)) => {
                assert_eq!(changed, after != state, "{op:?} of {state:?}");
                assert_eq!((after, answer), expected, "{op:?} of {state:?}");
            }
            (Err(error), Err(expected)) => {
                assert_eq!(error.to_string(), expected, "{op:?} of {state:?}");
                assert_eq!(after, state, "{op:?} failed and left something behind");
            }
            (got, expected) => panic!("{op:?} of {state:?}: {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn increments_are_exact_and_never_turn_another_value_into_a_number() {
        let inc = |path, by: Value| StateOp::Increment(place(path), by.as_number().unwrap().clone());
        let ok = |state: Value, answer: Value| Ok((Some(state), answer));
        check(None, inc("", json!(2)), ok(json!(2), json!(2)));
        check(Some(json!(i64::MAX)), inc("", json!(1)), ok(json!(1u64 << 63), json!(1u64 << 63)));
        check(Some(json!(u64::MAX)), inc("", json!(1)), Err("the state of k would be out of range"));
        check(Some(json!(i64::MIN)), inc("", json!(-1)), Err("the state of k would be out of range"));
        check(Some(json!(f64::MAX)), inc("", json!(f64::MAX)), Err("the state of k would be out of range"));
        check(Some(json!(1)), inc("", json!(0.5)), ok(json!(1.5), json!(1.5)));
        check(None, inc("a.b", json!(-1)), ok(json!({"a": {"b": -1}}), json!(-1)));
        check(Some(json!({"a": [1, 2]})), inc("a.1", json!(5)), ok(json!({"a": [1, 7]}), json!(7)));
        for (value, found) in [(json!(null), "null"), (json!("1"), "a string"), (json!([]), "a list")] {
            let message = format!("\"n\" of k is {found}; only a number can be incremented");
            check(Some(json!({"n": value})), inc("n", json!(1)), Err(&message));
        }
        check(Some(json!({"a": 1})), inc("a.b", json!(1)), Err("\"a\" of k is a number; it must be an object"));
        check(Some(json!({"a": [1]})), inc("a.1", json!(1)), Err("\"a\" of k is a list; it must be an object"));
    }

    #[test]
    fn lists_are_added_to_and_taken_from_at_both_ends() {
        let push = |path, values: Value| StateOp::Push(place(path), values.as_array().unwrap().clone());
        check(None, push("l", json!([1, 2])), Ok((Some(json!({"l": [1, 2]})), json!(2))));
        check(Some(json!([1])), push("", json!([null])), Ok((Some(json!([1, null])), json!(2))));
        let message = "\"l\" of k is an object; only a list can be added to or taken from";
        check(Some(json!({"l": {}})), push("l", json!([1])), Err(message));
        check(Some(json!({"l": {}})), StateOp::RemoveLast(place("l")), Err(message));
        check(Some(json!([1, 2, 3])), StateOp::RemoveFirst(None), Ok((Some(json!([2, 3])), json!(1))));
        check(Some(json!([1, 2, 3])), StateOp::RemoveLast(None), Ok((Some(json!([1, 2])), json!(3))));
        check(Some(json!([])), StateOp::RemoveLast(None), Ok((Some(json!([])), json!(null))));
        check(None, StateOp::RemoveFirst(place("l")), Ok((None, json!(null))));
    }

    #[test]
    fn records_and_patches_accumulate() {
        let set = |entry: &str, value| StateOp::SetRecord(place("findings"), entry.into(), value);
        check(None, set("a", json!(1)), Ok((Some(json!({"findings": {"a": 1}})), json!(1))));
        let both = json!({"findings": {"a": 1, "b": {"c": 2}}});
        check(
            Some(json!({"findings": {"a": 1}})),
            set("b", json!({"c": 2})),
            Ok((Some(both.clone()), json!({"c": 2}))),
        );
        let delete = |entry: &str| StateOp::DeleteRecord(place("findings"), entry.into());
        check(Some(both.clone()), delete("b"), Ok((Some(json!({"findings": {"a": 1}})), json!({"c": 2}))));
        check(Some(both.clone()), delete("x"), Ok((Some(both.clone()), json!(null))));
        check(Some(json!({"a": 1})), delete("x"), Ok((Some(json!({"a": 1})), json!(null))));
        let merged = json!({"findings": {"a": 1, "b": {"c": 2, "d": 3}}});
        let patch = json!({"findings": {"b": {"d": 3}}});
        check(Some(both), StateOp::Patch(patch), Ok((Some(merged.clone()), merged)));
        check(Some(json!([1])), StateOp::Patch(json!({})), Err("the state of k is a list; it must be an object"));
    }

    #[test]
    fn the_difference_is_a_patch_from_one_to_the_other() {
        let states = [
            json!({}),
            json!({"a": 1}),
            json!({"a": {"b": 1, "c": [1]}}),
            json!({"a": {"b": 2}, "d": "x"}),
            json!([1, 2]),
            json!("x"),
        ];
        for before in &states {
            for after in &states {
                let mut patched = before.clone();
                json::merge(&mut patched, &difference(Some(before), Some(after)));
                assert_eq!(&patched, after, "from {before}");
            }
        }
    }
}
