//! What a query must return, derived from the words of the specification; shares nothing with the code it checks.

use std::cmp::Ordering;

use fastrand::Rng;
use latchwork::entity::{Direction, Filter, Query, field};
use serde_json::{Value, json};

/// A filter of the tests' own.
#[derive(Debug, Clone)]
pub(super) enum Condition {
    Is(&'static str, Operator),
    And(Vec<Condition>),
    Or(Vec<Condition>),
    Not(Box<Condition>),
}

#[derive(Debug, Clone)]
pub(super) enum Operator {
    Equals(Value),
    Not(Value),
    Greater(Value),
    AtLeast(Value),
    Less(Value),
    AtMost(Value),
    Between(Value, Value),
    OneOf(Vec<Value>),
    Contains(Value),
    StartsWith(String),
    Exists(bool),
}

pub(super) const PATHS: [&str; 5] = ["data.a", "data.b", "data.c.0", "metadata.m", "data"];

/// A document under test.
#[derive(Debug, Clone)]
pub(super) struct Document {
    pub(super) id: String,
    pub(super) data: Value,
    pub(super) metadata: Value,
}

impl Document {
    pub(super) fn at(&self, path: &str) -> Option<&Value> {
        match path {
            "data" => Some(&self.data),
            "data.a" => self.data.get("a"),
            "data.b" => self.data.get("b"),
            "data.c.0" => self.data.get("c")?.get(0),
            "metadata.m" => self.metadata.get("m"),
            other => panic!("{other}"),
        }
    }
}

fn rank(value: Option<&Value>) -> u8 {
    match value {
        None => 0,
        Some(Value::Null) => 1,
        Some(Value::Bool(false)) => 2,
        Some(Value::Bool(true)) => 3,
        Some(Value::Number(_)) => 4,
        Some(Value::String(_)) => 5,
        Some(Value::Array(_)) => 6,
        Some(Value::Object(_)) => 7,
    }
}

pub(super) fn compare(a: Option<&Value>, b: Option<&Value>) -> Ordering {
    rank(a).cmp(&rank(b)).then_with(|| match (a, b) {
        // The tests' numbers are small enough to be floats.
        (Some(Value::Number(a)), Some(Value::Number(b))) => a.as_f64().partial_cmp(&b.as_f64()).unwrap(),
        (Some(Value::String(a)), Some(Value::String(b))) => a.as_bytes().cmp(b.as_bytes()),
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            let items = a.iter().zip(b).map(|(a, b)| compare(Some(a), Some(b)));
            items.fold(Ordering::Equal, Ordering::then).then(a.len().cmp(&b.len()))
        }
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let items = a.iter().zip(b).map(|(a, b)| a.0.cmp(b.0).then_with(|| compare(Some(a.1), Some(b.1))));
            items.fold(Ordering::Equal, Ordering::then).then(a.len().cmp(&b.len()))
        }
        _ => Ordering::Equal,
    })
}

fn same_kind(a: &Value, b: &Value) -> bool {
    rank(Some(a)) == rank(Some(b)) || (a.is_boolean() && b.is_boolean())
}

impl Operator {
    fn holds(&self, found: Option<&Value>) -> bool {
        let order = |value: &Value| found.filter(|found| same_kind(found, value)).map(|_| compare(found, Some(value)));
        match self {
            Operator::Equals(value) => compare(found, Some(value)).is_eq(),
            Operator::Not(value) => !compare(found, Some(value)).is_eq(),
            Operator::Greater(value) => order(value).is_some_and(Ordering::is_gt),
            Operator::AtLeast(value) => order(value).is_some_and(Ordering::is_ge),
            Operator::Less(value) => order(value).is_some_and(Ordering::is_lt),
            Operator::AtMost(value) => order(value).is_some_and(Ordering::is_le),
            Operator::Between(low, high) => {
                order(low).is_some_and(Ordering::is_ge) && order(high).is_some_and(Ordering::is_le)
            }
            Operator::OneOf(values) => values.iter().any(|value| compare(found, Some(value)).is_eq()),
            Operator::Contains(value) => match found {
                Some(Value::Array(items)) => items.iter().any(|item| compare(Some(item), Some(value)).is_eq()),
                Some(Value::String(text)) => value.as_str().is_some_and(|part| text.contains(part)),
                _ => false,
            },
            Operator::StartsWith(start) => found.and_then(Value::as_str).is_some_and(|text| text.starts_with(start)),
            Operator::Exists(there) => found.is_some() == *there,
        }
    }

    fn filter(&self, path: &str) -> Filter {
        let field = field(path);
        match self.clone() {
            Operator::Equals(value) => field.equals(value),
            Operator::Not(value) => field.not(value),
            Operator::Greater(value) => field.greater(value),
            Operator::AtLeast(value) => field.at_least(value),
            Operator::Less(value) => field.less(value),
            Operator::AtMost(value) => field.at_most(value),
            Operator::Between(low, high) => field.between(low, high),
            Operator::OneOf(values) => field.one_of(values),
            Operator::Contains(value) => field.contains(value),
            Operator::StartsWith(start) => field.starts_with(start),
            Operator::Exists(true) => field.exists(),
            Operator::Exists(false) => field.exists().negate(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Operator::Equals(value) => json!({"equals": value}),
            Operator::Not(value) => json!({"not": value}),
            Operator::Greater(value) => json!({"greater": value}),
            Operator::AtLeast(value) => json!({"at_least": value}),
            Operator::Less(value) => json!({"less": value}),
            Operator::AtMost(value) => json!({"at_most": value}),
            Operator::Between(low, high) => json!({"between": [low, high]}),
            Operator::OneOf(values) => json!({"one_of": values}),
            Operator::Contains(value) => json!({"contains": value}),
            Operator::StartsWith(start) => json!({"starts_with": start}),
            Operator::Exists(there) => json!({"exists": there}),
        }
    }
}

impl Condition {
    pub(super) fn holds(&self, document: &Document) -> bool {
        match self {
            Condition::Is(path, operator) => operator.holds(document.at(path)),
            Condition::And(all) => all.iter().all(|condition| condition.holds(document)),
            Condition::Or(any) => any.iter().any(|condition| condition.holds(document)),
            Condition::Not(condition) => !condition.holds(document),
        }
    }

    pub(super) fn filter(&self) -> Filter {
        match self {
            Condition::Is(path, operator) => operator.filter(path),
            Condition::And(all) => all.iter().fold(Filter::all(), |filter, more| filter.and(more.filter())),
            Condition::Or(any) => {
                let mut any = any.iter().map(Condition::filter);
                any.next().map_or(Filter::all().negate(), |first| any.fold(first, Filter::or))
            }
            Condition::Not(condition) => condition.filter().negate(),
        }
    }

    pub(super) fn json(&self) -> Value {
        let list = |list: &[Condition]| list.iter().map(Condition::json).collect::<Vec<_>>();
        match self {
            Condition::Is(path, operator) => json!({*path: operator.json()}),
            Condition::And(all) => json!({"and": list(all)}),
            Condition::Or(any) => json!({"or": list(any)}),
            Condition::Not(condition) => json!({"not": condition.json()}),
        }
    }
}

/// An order of the tests' own.
pub(super) type Order = Vec<(&'static str, Direction)>;

pub(super) fn ordered(query: Query, order: &Order) -> Query {
    order.iter().fold(query, |query, (path, direction)| query.order_by(path, *direction))
}

/// The ids of the matching documents, in an order; ties by id, in the direction of the last field.
pub(super) fn answer(documents: &[Document], condition: &Condition, order: &Order) -> Vec<String> {
    let mut found: Vec<&Document> = documents.iter().filter(|document| condition.holds(document)).collect();
    let directed = |direction: Direction, order: Ordering| match direction {
        Direction::Ascending => order,
        Direction::Descending => order.reverse(),
    };
    found.sort_by(|a, b| {
        let fields = order.iter().map(|(path, direction)| directed(*direction, compare(a.at(path), b.at(path))));
        let last = order.last().map_or(Direction::Ascending, |(_, direction)| *direction);
        fields.fold(Ordering::Equal, Ordering::then).then(directed(last, a.id.cmp(&b.id)))
    });
    found.into_iter().map(|document| document.id.clone()).collect()
}

/// Values of every kind, few enough to repeat.
pub(super) fn value(random: &mut Rng) -> Value {
    match random.u8(..16) {
        0 => json!(null),
        1 => json!(random.bool()),
        2..6 => json!(random.i32(-2..4)),
        6 => json!(f64::from(random.i32(-2..4)) + random.choice([0.0, 0.5]).unwrap()),
        7..13 => json!(string(random)),
        13 => json!([random.i32(..2), string(random)]),
        14 => json!({"k": random.i32(..2)}),
        _ => random.choice([json!([]), json!({}), json!("1"), json!(1.0)]).unwrap(),
    }
}

fn string(random: &mut Rng) -> String {
    (0..random.usize(..4)).map(|_| random.choice(['a', 'b', '\0', 'é']).unwrap()).collect()
}

pub(super) fn document(random: &mut Rng, id: String) -> Document {
    let mut data = json!({});
    for name in ["a", "b"] {
        if random.u8(..8) > 0 {
            data[name] = value(random);
        }
    }
    if random.bool() {
        data["c"] = if random.u8(..4) > 0 { json!([value(random), 1]) } else { value(random) };
    }
    let metadata = if random.u8(..3) > 0 { json!({"m": value(random)}) } else { json!({}) };
    Document { id, data, metadata }
}

pub(super) fn condition(random: &mut Rng, depth: usize) -> Condition {
    let list = |random: &mut Rng| (0..random.usize(..4)).map(|_| condition(random, depth - 1)).collect();
    match random.u8(..10) {
        0..3 if depth > 0 => Condition::And(list(random)),
        3 if depth > 0 => Condition::Or(list(random)),
        4 if depth > 0 => Condition::Not(Box::new(condition(random, depth - 1))),
        _ => Condition::Is(PATHS[random.usize(..4)], operator(random)),
    }
}

fn operator(random: &mut Rng) -> Operator {
    let comparable = |random: &mut Rng| match random.u8(..6) {
        0 => json!(random.bool()),
        1..4 => json!(f64::from(random.i32(-2..4)) / 2.0),
        _ => json!(string(random)),
    };
    match random.u8(..13) {
        0..3 => Operator::Equals(value(random)),
        3 => Operator::Not(value(random)),
        4 => Operator::Greater(comparable(random)),
        5 => Operator::AtLeast(comparable(random)),
        6 => Operator::Less(comparable(random)),
        7 => Operator::AtMost(comparable(random)),
        8 => {
            let low = comparable(random);
            let high = loop {
                let high = comparable(random);
                if same_kind(&low, &high) {
                    break high;
                }
            };
            Operator::Between(low, high)
        }
        9 => Operator::OneOf((0..random.usize(..5)).map(|_| value(random)).collect()),
        10 => Operator::Contains(value(random)),
        11 => Operator::StartsWith(string(random)),
        _ => Operator::Exists(random.bool()),
    }
}

pub(super) fn order(random: &mut Rng) -> Order {
    let direction = |random: &mut Rng| random.choice([Direction::Ascending, Direction::Descending]).unwrap();
    let one_way = direction(random);
    let mut order = Order::new();
    for _ in 0..random.usize(..4) {
        let path = PATHS[random.usize(..4)];
        if order.iter().all(|(known, _)| *known != path) {
            order.push((path, if random.u8(..3) > 0 { one_way } else { direction(random) }));
        }
    }
    order
}
