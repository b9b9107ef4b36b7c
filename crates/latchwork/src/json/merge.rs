//! JSON merge patch, RFC 7396: objects merge field by field, null removes a field, any other value replaces.

use serde_json::{Map, Value};

/// Applies `patch` to `target`. The result nests no deeper than the deeper of both. The recursion is no deeper than
/// `patch`, which is already checked.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let mut fields = match target.take() {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    for (key, change) in patch {
        match change {
            Value::Null => drop(fields.remove(key)),
            change => merge(fields.entry(key).or_insert(Value::Null), change),
        }
    }
    *target = Value::Object(fields);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(mut target: Value, patch: Value, expected: Value) {
        let before = target.clone();
        merge(&mut target, &patch);
        assert_eq!(target, expected, "{before} patched by {patch}");
        merge(&mut target, &patch);
        assert_eq!(target, expected, "{before} patched by {patch} twice");
    }

    #[test]
    fn the_examples_of_the_rfc_come_out_as_printed() {
        check(json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"}));
        check(json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"}));
        check(json!({"a": "b"}), json!({"a": null}), json!({}));
        check(json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"}));
        check(json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"}));
        check(json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]}));
        check(json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}}));
        check(json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]}));
        check(json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"]));
        check(json!({"a": "b"}), json!(["c"]), json!(["c"]));
        check(json!({"a": "foo"}), json!(null), json!(null));
        check(json!({"a": "foo"}), json!("bar"), json!("bar"));
        check(json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1}));
        check(json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"}));
        check(json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}}));
    }

    #[test]
    fn the_document_in_section_three_of_the_rfc_too() {
        let target = json!({
            "title": "Goodbye!",
            "author": {"givenName": "John", "familyName": "Doe"},
            "tags": ["example", "sample"],
            "content": "This will be unchanged"
        });
        let patch = json!({
            "title": "Hello!",
            "phoneNumber": "+01-123-456-7890",
            "author": {"familyName": null},
            "tags": ["example"]
        });
        let expected = json!({
            "title": "Hello!",
            "author": {"givenName": "John"},
            "tags": ["example"],
            "content": "This will be unchanged",
            "phoneNumber": "+01-123-456-7890"
        });
        check(target, patch, expected);
    }

    #[test]
    fn nulls_inside_arrays_and_empty_patches_remove_nothing() {
        check(json!({"a": [1]}), json!({"a": [null, {"b": null}]}), json!({"a": [null, {"b": null}]}));
        check(json!({"a": 1}), json!({}), json!({"a": 1}));
        check(json!({"a": 1}), json!({"a": {}}), json!({"a": {}}));
        check(json!(7), json!({}), json!({}));
    }
}
