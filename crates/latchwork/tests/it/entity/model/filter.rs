//! Conditions and orders with an evaluator of their own, which looks at every entity.

use std::cmp::Ordering;

use latchwork::entity::{Direction, Filter, Query, field};
use serde_json::{Map, Value, json};

use super::reference::Doc;

/// The fields that documents have and that indexes are on.
pub(super) const FIELDS: [&str; 3] = ["data.a", "data.b", "metadata.m"];
/// One more field, which only conditions use: an item of an array.
const INSIDE: &str = "data.a.0";

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Condition {
    Is(&'static str, Test),
    All(Vec<Condition>),
    Any(Vec<Condition>),
    Not(Box<Condition>),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Test {
    Equals(Value),
    Differs(Value),
    Greater(Value),
    AtLeast(Value),
    Less(Value),
    AtMost(Value),
    Between(Value, Value),
    OneOf(Vec<Value>),
    Contains(Value),
    Exists,
    StartsWith(&'static str),
}

/// A query, without its start position.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    pub(super) entity_type: Option<&'static str>,
    pub(super) condition: Condition,
    pub(super) order: Vec<(&'static str, bool)>,
    pub(super) limit: usize,
    /// Whether the filter is given as JSON.
    pub(super) as_json: bool,
}

/// The position of an entity in the results of a query.
#[derive(Debug, Clone)]
pub(super) struct Place {
    values: Vec<Option<Value>>,
    id: String,
}

fn find<'a>(doc: &'a Doc, path: &str) -> Option<&'a Value> {
    match path {
        "data.a" => doc.data.get("a"),
        "data.b" => doc.data.get("b"),
        "metadata.m" => doc.metadata.get("m"),
        INSIDE => doc.data.get("a")?.get(0),
        other => panic!("the model knows no field {other}"),
    }
}

/// Numbers, strings and so on; a missing value comes first.
fn kind(value: Option<&Value>) -> u8 {
    match value {
        None => 0,
        Some(Value::Null) => 1,
        Some(Value::Bool(_)) => 2,
        Some(Value::Number(_)) => 3,
        Some(Value::String(_)) => 4,
        Some(Value::Array(_)) => 5,
        Some(Value::Object(_)) => 6,
    }
}

/// Numbers of the model are small enough for floats.
pub(super) fn compare(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    match (a, b) {
        (Some(Value::Bool(a)), Some(Value::Bool(b))) => a.cmp(b),
        (Some(Value::Number(a)), Some(Value::Number(b))) => a.as_f64().partial_cmp(&b.as_f64()).expect("finite"),
        (Some(Value::String(a)), Some(Value::String(b))) => a.cmp(b),
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            let unequal = a.iter().zip(b).map(|(a, b)| compare(Some(a), Some(b))).find(|order| order.is_ne());
            unequal.unwrap_or(a.len().cmp(&b.len()))
        }
        _ => kind(a).cmp(&kind(b)),
    }
}

fn equal(a: &Value, b: &Value) -> bool {
    compare(Some(a), Some(b)).is_eq()
}

impl Test {
    fn holds(&self, found: Option<&Value>) -> bool {
        if let Test::Differs(value) = self {
            return !found.is_some_and(|found| equal(found, value));
        }
        let Some(found) = found else { return false };
        let compared =
            |value: &Value| (kind(Some(found)) == kind(Some(value))).then(|| compare(Some(found), Some(value)));
        match self {
            Test::Equals(value) => equal(found, value),
            Test::Differs(_) => unreachable!("answered above"),
            Test::Greater(value) => compared(value) == Some(Ordering::Greater),
            Test::AtLeast(value) => compared(value).is_some_and(|order| order != Ordering::Less),
            Test::Less(value) => compared(value) == Some(Ordering::Less),
            Test::AtMost(value) => compared(value).is_some_and(|order| order != Ordering::Greater),
            Test::Between(low, high) => {
                Test::AtLeast(low.clone()).holds(Some(found)) && Test::AtMost(high.clone()).holds(Some(found))
            }
            Test::OneOf(values) => values.iter().any(|value| equal(found, value)),
            Test::Contains(value) => match (found, value) {
                (Value::Array(items), value) => items.iter().any(|item| equal(item, value)),
                (Value::String(text), Value::String(part)) => text.contains(part.as_str()),
                _ => false,
            },
            Test::Exists => true,
            Test::StartsWith(start) => matches!(found, Value::String(text) if text.starts_with(start)),
        }
    }

    fn json(&self) -> Value {
        match self {
            Test::Equals(value) => json!({"equals": value}),
            Test::Differs(value) => json!({"not": value}),
            Test::Greater(value) => json!({"greater": value}),
            Test::AtLeast(value) => json!({"at_least": value}),
            Test::Less(value) => json!({"less": value}),
            Test::AtMost(value) => json!({"at_most": value}),
            Test::Between(low, high) => json!({"between": [low, high]}),
            Test::OneOf(values) => json!({"one_of": values}),
            Test::Contains(value) => json!({"contains": value}),
            Test::Exists => json!({"exists": true}),
            Test::StartsWith(start) => json!({"starts_with": start}),
        }
    }
}

impl Condition {
    pub(super) fn holds(&self, doc: &Doc) -> bool {
        match self {
            Condition::Is(path, test) => test.holds(find(doc, path)),
            Condition::All(parts) => parts.iter().all(|part| part.holds(doc)),
            Condition::Any(parts) => parts.iter().any(|part| part.holds(doc)),
            Condition::Not(part) => !part.holds(doc),
        }
    }

    fn filter(&self) -> Filter {
        match self {
            Condition::Is(path, test) => match test {
                Test::Equals(value) => field(path).equals(value),
                Test::Differs(value) => field(path).not(value),
                Test::Greater(value) => field(path).greater(value),
                Test::AtLeast(value) => field(path).at_least(value),
                Test::Less(value) => field(path).less(value),
                Test::AtMost(value) => field(path).at_most(value),
                Test::Between(low, high) => field(path).between(low, high),
                Test::OneOf(values) => field(path).one_of(values),
                Test::Contains(value) => field(path).contains(value),
                Test::Exists => field(path).exists(),
                Test::StartsWith(start) => field(path).starts_with(*start),
            },
            Condition::All(parts) => parts.iter().map(Condition::filter).fold(Filter::all(), Filter::and),
            Condition::Any(parts) => {
                let nothing = Filter::all().negate();
                parts.iter().map(Condition::filter).fold(nothing, Filter::or)
            }
            Condition::Not(part) => part.filter().negate(),
        }
    }

    fn json(&self) -> Value {
        let list = |parts: &[Condition]| parts.iter().map(Condition::json).collect::<Vec<_>>();
        match self {
            Condition::Is(path, test) => Value::Object(Map::from_iter([(path.to_string(), test.json())])),
            Condition::All(parts) => json!({"and": list(parts)}),
            Condition::Any(parts) => json!({"or": list(parts)}),
            Condition::Not(part) => json!({"not": part.json()}),
        }
    }

    /// The same JSON for all spellings of a condition that are one query: lists within lists, lists of one part, an
    /// empty `any`, `differs`, and numbers as integers or floats.
    fn one_spelling(&self) -> Value {
        let spelled = |parts: &[Condition]| parts.iter().map(Condition::one_spelling).collect::<Vec<_>>();
        match self {
            Condition::Is(path, Test::Differs(value)) => {
                json!({"not": Condition::Is(path, Test::Equals(value.clone())).one_spelling()})
            }
            Condition::Is(..) => canonical(&self.json()),
            Condition::All(parts) => {
                let parts = spelled(parts).into_iter().flat_map(|part| match part.get("and") {
                    Some(Value::Array(inner)) => inner.clone(),
                    _ => vec![part],
                });
                let mut parts: Vec<Value> = parts.collect();
                if parts.len() == 1 { parts.remove(0) } else { json!({"and": parts}) }
            }
            Condition::Any(parts) if parts.is_empty() => json!({"not": {"and": []}}),
            Condition::Any(parts) => json!({"or": spelled(parts)}),
            Condition::Not(part) => json!({"not": part.one_spelling()}),
        }
    }

    /// True if the condition directly requires one value of this field.
    fn pins(&self, path: &str) -> bool {
        match self {
            Condition::Is(of, Test::Equals(_)) => *of == path,
            Condition::All(parts) => parts.iter().any(|part| part.pins(path)),
            _ => false,
        }
    }
}

impl Asked {
    pub(super) fn query(&self) -> Query {
        let query = self.entity_type.map_or_else(Query::all, Query::of);
        let query = match self.as_json {
            true => query.filter(self.condition.json()),
            false => query.filter(self.condition.filter()),
        };
        let ordered = self.order.iter().fold(query, |query, (path, down)| {
            query.order_by(path, if *down { Direction::Descending } else { Direction::Ascending })
        });
        ordered.limit(self.limit)
    }

    /// True if a cursor of the one belongs to the other, too.
    pub(super) fn is_same_query(&self, other: &Asked) -> bool {
        let same_list = self.entity_type == other.entity_type && self.order == other.order;
        same_list && self.condition.one_spelling() == other.condition.one_spelling()
    }

    pub(super) fn matches(&self, doc: &Doc) -> bool {
        self.entity_type.is_none_or(|entity_type| entity_type == doc.entity_type) && self.condition.holds(doc)
    }

    pub(super) fn place(&self, id: &str, doc: &Doc) -> Place {
        Place { values: self.order.iter().map(|(path, _)| find(doc, path).cloned()).collect(), id: id.into() }
    }

    /// Entities that are equal in all fields of the order come by id, in the direction of the last field.
    pub(super) fn order(&self, a: &Place, b: &Place) -> Ordering {
        let turned = |order: Ordering, down: bool| if down { order.reverse() } else { order };
        let values = a.values.iter().zip(&b.values).zip(&self.order);
        let unequal = values.map(|((a, b), (_, down))| turned(compare(a.as_ref(), b.as_ref()), *down));
        let last = self.order.last().is_some_and(|(_, down)| *down);
        unequal.chain([turned(a.id.cmp(&b.id), last)]).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }

    /// True if an index that starts with this field must be used.
    pub(super) fn needs_index(&self, path: &str) -> bool {
        self.entity_type.is_some() && self.condition.pins(path)
    }
}

/// The value of a unique combination; `None` if any part is missing or null. Equal values have the same text.
pub(super) fn combined(doc: &Doc, fields: &[&'static str]) -> Option<String> {
    let mut text = String::new();
    for path in fields {
        let value = find(doc, path).filter(|value| !value.is_null())?;
        text.push_str(&canonical(value).to_string());
        text.push(';');
    }
    Some(text)
}

fn canonical(value: &Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => items.iter().map(canonical).collect(),
        Value::Object(fields) => fields.iter().map(|(name, field)| (name.clone(), canonical(field))).collect(),
        other => other.clone(),
    }
}
