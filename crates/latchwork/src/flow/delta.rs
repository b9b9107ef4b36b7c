//! The change that a mutator has made, as operations: what it added to a number or a list counts as an addition. So the
//! changes of several blocks can be told apart. A pure function.

use serde_json::{Number, Value};

use crate::json::Path;
use crate::state::StateOp;

/// The operations that make `after` of `before`.
pub(crate) fn delta(before: &Value, after: &Value) -> Vec<StateOp> {
    let mut ops = Vec::new();
    add(&mut ops, &mut Vec::new(), before, after);
    ops
}

fn add(ops: &mut Vec<StateOp>, path: &mut Vec<String>, before: &Value, after: &Value) {
    if before == after {
        return;
    }
    match (before, after) {
        (Value::Object(old), Value::Object(new)) if new.keys().chain(old.keys()).all(|key| !key.is_empty()) => {
            let here = Path::new(path.iter()).ok();
            for key in old.keys().filter(|key| !new.contains_key(*key)) {
                ops.push(StateOp::DeleteRecord(here.clone(), key.clone()));
            }
            for (key, value) in new {
                match old.get(key) {
                    None => ops.push(StateOp::SetRecord(here.clone(), key.clone(), value.clone())),
                    Some(was) => {
                        path.push(key.clone());
                        add(ops, path, was, value);
                        path.pop();
                    }
                }
            }
        }
        (Value::Number(old), Value::Number(new)) if less(new, old).is_some() => {
            ops.extend(less(new, old).map(|by| StateOp::Increment(Path::new(path.iter()).ok(), by)));
        }
        (Value::Array(old), Value::Array(new)) if new.starts_with(old) => {
            ops.push(StateOp::Push(Path::new(path.iter()).ok(), new[old.len()..].to_vec()));
        }
        _ => ops.push(match path.split_last() {
            Some((key, parents)) => StateOp::SetRecord(Path::new(parents.iter()).ok(), key.clone(), after.clone()),
            None => StateOp::Set(after.clone()),
        }),
    }
}

/// The difference of two integers. Others are replaced: sums of fractions are not exact.
fn less(a: &Number, b: &Number) -> Option<Number> {
    Some(a.as_i64()?.checked_sub(b.as_i64()?)?.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_is_told_as_additions_where_it_is_one() {
        let table = [
            (json!({"n": 1}), json!({"n": 4}), json!({"n": 10}), json!({"n": 13})),
            (json!({"l": [1]}), json!({"l": [1, 2]}), json!({"l": [9]}), json!({"l": [9, 2]})),
            (json!({"l": [1, 2]}), json!({"l": [2]}), json!({"l": [9]}), json!({"l": [2]})),
            (
                json!({"r": {"a": 1}}),
                json!({"r": {"b": 2}}),
                json!({"r": {"a": 1, "c": 3}}),
                json!({"r": {"b": 2, "c": 3}}),
            ),
            (json!({"s": "x"}), json!({"s": "y"}), json!({"s": "z"}), json!({"s": "y"})),
            (json!({"f": 0.5}), json!({"f": 1.5}), json!({"f": 9.0}), json!({"f": 1.5})),
            (json!({"": 1}), json!({"": 2}), json!({}), json!({"": 2})),
        ];
        for (before, after, other, expected) in table {
            let ops = delta(&before, &after);
            for (start, end) in [(before, after), (other, expected)] {
                let mut state = Some(start);
                ops.iter().for_each(|op| drop(op.apply("k", &mut state).unwrap()));
                assert_eq!(state, Some(end), "{ops:?}");
            }
        }
    }
}
