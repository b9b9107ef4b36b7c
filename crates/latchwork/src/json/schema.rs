//! Bounds of JSON schemas. A validator calls itself for each level of a schema, also for those that references lead to,
//! so that a long chain of references would overflow the stack of the process. This file knows no validator.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// The levels of a schema, along the longest way through its references.
const LEVELS: usize = 200;
/// The levels between two levels of a value: references, and combinations such as `allOf`.
const IN_PLACE: usize = 12;
/// References that lead out of the schema, or to an `$id` in it.
const FOREIGN: usize = 12;

/// Keywords whose schemas are for the same value: one schema, or several.
const SAME: [&str; 8] = ["not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas"];
/// Keywords whose schemas are for a part of the value.
const PART: [&str; 11] = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "dependencies",
];
/// Keywords that hold schemas by name.
const NAMED: [&str; 4] = ["properties", "patternProperties", "dependentSchemas", "dependencies"];

/// Refuses a schema that nests too deep, or that refers to itself for the same value.
pub(crate) fn check_schema(schema: &Value) -> Result<(), String> {
    let mut anchors = HashMap::new();
    find_anchors(schema, &mut anchors);
    let mut walk = Walk { schema, anchors, path: Vec::new(), seen: HashMap::new(), foreign: HashSet::new() };
    walk.node(schema, 0)
}

struct Walk<'a> {
    schema: &'a Value,
    anchors: HashMap<&'a str, &'a Value>,
    /// The schemas from the root to this one, each with the number of levels since the value was last descended.
    path: Vec<(*const Value, usize)>,
    /// The deepest places at which a schema was looked at: levels, and levels in place.
    seen: HashMap<*const Value, (usize, usize)>,
    foreign: HashSet<&'a str>,
}

impl<'a> Walk<'a> {
    fn node(&mut self, node: &'a Value, in_place: usize) -> Result<(), String> {
        let (Value::Object(keywords), place) = (node, std::ptr::from_ref(node)) else { return Ok(()) };
        if let Some(at) = self.path.iter().position(|(other, _)| *other == place) {
            // The way around has to descend, or a validator would go around for ever.
            let descends = in_place == 0 || self.path[at + 1..].iter().any(|(_, in_place)| *in_place == 0);
            return if descends { Ok(()) } else { Err("a schema refers to itself for the same value".into()) };
        }
        let level = self.path.len();
        if level == LEVELS || in_place > IN_PLACE {
            let reason = format!("{LEVELS} levels in all, and {IN_PLACE} of references and combinations for one value");
            return Err(format!("the schema nests too deep; possible are {reason}"));
        }
        let (levels, places) = self.seen.get(&place).copied().unwrap_or_default();
        if level < levels && in_place < places {
            return Ok(());
        }
        self.seen.insert(place, (levels.max(level + 1), places.max(in_place + 1)));
        self.path.push((place, in_place));
        for (keyword, value) in keywords {
            let keyword = keyword.as_str();
            match value {
                Value::String(to) if keyword == "$ref" || keyword == "$dynamicRef" => {
                    if let Some(target) = self.target(to)? {
                        self.node(target, in_place + 1)?;
                    }
                }
                _ if SAME.contains(&keyword) => self.children(keyword, value, in_place + 1)?,
                _ if PART.contains(&keyword) => self.children(keyword, value, 0)?,
                _ => {}
            }
        }
        self.path.pop();
        Ok(())
    }

    fn children(&mut self, keyword: &str, value: &'a Value, in_place: usize) -> Result<(), String> {
        match value {
            Value::Array(schemas) => schemas.iter().try_for_each(|schema| self.node(schema, in_place)),
            Value::Object(schemas) if NAMED.contains(&keyword) => {
                schemas.values().try_for_each(|schema| self.node(schema, in_place))
            }
            schema => self.node(schema, in_place),
        }
    }

    /// What a reference leads to, if it is in this schema.
    fn target(&mut self, to: &'a str) -> Result<Option<&'a Value>, String> {
        let Some(within) = to.strip_prefix('#') else {
            self.foreign.insert(to);
            let is_few = self.foreign.len() <= FOREIGN;
            return is_few.then_some(None).ok_or_else(|| format!("it has more than {FOREIGN} references by `$id`"));
        };
        Ok(match self.anchors.get(within) {
            Some(anchor) => Some(anchor),
            None => self.schema.pointer(&decoded(within)),
        })
    }
}

fn find_anchors<'a>(node: &'a Value, anchors: &mut HashMap<&'a str, &'a Value>) {
    match node {
        Value::Object(members) => {
            for (keyword, value) in members {
                match value {
                    Value::String(name) if keyword == "$anchor" || keyword == "$dynamicAnchor" => {
                        anchors.insert(name, node);
                    }
                    value => find_anchors(value, anchors),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| find_anchors(item, anchors)),
        _ => {}
    }
}

/// The text without its `%XX`.
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match hex.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A chain of references. Each leads to the next one, for the same value or for a part of it.
    fn chain(length: usize, is_part: bool, end: &Value) -> Value {
        let mut definitions = serde_json::Map::new();
        for number in 0..length {
            let next = json!({"$ref": format!("#/$defs/d{}", number + 1)});
            let schema = if is_part { json!({"properties": {"n": next}}) } else { next };
            definitions.insert(format!("d{number}"), schema);
        }
        definitions.insert(format!("d{length}"), end.clone());
        json!({"$defs": definitions, "$ref": "#/$defs/d0"})
    }

    fn deep(levels: usize) -> Value {
        (0..levels).fold(json!(1), |inner, _| json!({"n": inner}))
    }

    #[test]
    fn chains_of_references_are_bounded() {
        for (length, is_part, fits) in [(11, false, true), (12, false, false), (99, true, true), (100, true, false)] {
            let schema = chain(length, is_part, &json!({}));
            assert_eq!(check_schema(&schema).is_ok(), fits, "{length} {is_part}");
        }
        assert!(check_schema(&chain(1000, false, &json!({}))).is_err());
        assert!(check_schema(&json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})).is_err());
        assert!(
            check_schema(&json!({"$defs": {"a": {"$anchor": "x", "allOf": [{"$ref": "#x"}]}}, "$ref": "#x"})).is_err()
        );
        let foreign: Vec<Value> = (0..13).map(|number| json!({"$ref": format!("d{number}")})).collect();
        assert!(check_schema(&json!({"anyOf": foreign})).is_err());
    }

    #[test]
    fn schemas_that_descend_may_refer_to_themselves() {
        let tree = json!({
            "$defs": {"a/b": {"oneOf": [
                {"type": "integer"},
                {"properties": {"left": {"$ref": "#/$defs/a~1b"}, "right": {"$ref": "#/%24defs/a~1b"}}},
                {"type": "array", "items": {"$ref": "#"}},
            ]}},
            "$ref": "#/$defs/a~1b",
        });
        assert_eq!(check_schema(&tree), Ok(()));
        assert_eq!(check_schema(&json!(true)), Ok(()));
    }

    /// What the bounds allow takes part of the stack of a thread, also in a build without optimization.
    #[test]
    fn what_is_allowed_is_compiled_and_validated_on_the_stack_of_a_thread() {
        let around = json!({"type": ["object", "integer"], "properties": {"n": {"$ref": "#/$defs/d0"}}});
        for (schema, value) in [
            (chain(99, true, &json!({"type": "string"})), deep(127)),
            (chain(11, false, &around), deep(127)),
            (chain(11, false, &around), json!({"n": "x"})),
        ] {
            assert_eq!(check_schema(&schema), Ok(()));
            let small = std::thread::Builder::new().stack_size(1 << 20);
            let looked = move || jsonschema::validator_for(&schema).unwrap().is_valid(&value);
            small.spawn(looked).unwrap().join().unwrap();
        }
    }
}
