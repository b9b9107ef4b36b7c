//! What a find looks for: comparisons of fields with values, and their combinations. Made in code or read from JSON;
//! what is wrong with either is kept and told, with its place, when the filter is used.

use std::borrow::Cow;
use std::cmp::Ordering;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::json::{self, JsonError, Path, PathError};

mod parse;

/// How deeply filters nest.
const DEPTH: usize = 128;

/// Why a filter or an order cannot be used, and where in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the query is malformed at {at}: {problem}")]
pub struct FilterError {
    /// The place: operators and paths from the outside in, for example `and[1].data.age.greater`.
    pub at: String,
    /// What is wrong there.
    pub problem: FilterProblem,
}

/// What can be wrong with a filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum FilterProblem {
    /// A path that cannot be read.
    #[error("{0}")]
    Path(PathError),
    /// A path that does not say where it starts.
    #[error("{path:?} names no field; a path starts with `data`, or with `metadata.` and a field")]
    Root { path: String },
    /// An operator that does not exist.
    #[error("there is no operator {name:?}; there are {}", parse::OPERATORS.join(", "))]
    UnknownOperator { name: String },
    /// An operator with an operand that it cannot work with.
    #[error("{operator} takes {wanted}")]
    Operand { operator: Cow<'static, str>, wanted: Cow<'static, str> },
    /// A value that is no JSON.
    #[error("{0}")]
    Value(JsonError),
    /// A filter nested too deeply.
    #[error("filters nest at most {limit} deep")]
    TooDeep { limit: usize },
}

impl FilterProblem {
    fn operand(operator: &'static str, wanted: &'static str) -> FilterProblem {
        FilterProblem::Operand { operator: operator.into(), wanted: wanted.into() }
    }
}

impl FilterError {
    fn new(at: impl Into<String>, problem: FilterProblem) -> FilterError {
        FilterError { at: at.into(), problem }
    }
}

/// A place in an entity: `data`, or a path into `data` or `metadata`. It is stored as it is written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Field(Path);

impl From<Field> for String {
    fn from(field: Field) -> String {
        field.to_string()
    }
}

impl TryFrom<String> for Field {
    type Error = FilterError;

    fn try_from(text: String) -> Result<Field, FilterError> {
        Field::parse(&text)
    }
}

impl Field {
    pub(crate) fn parse(text: &str) -> Result<Field, FilterError> {
        let at = |problem| FilterError::new(format!("{text:?}"), problem);
        let path = Path::parse(text).map_err(|error| at(FilterProblem::Path(error)))?;
        match path.segments() {
            [root] if root == "data" => Ok(Field(path)),
            [root, _, ..] if root == "data" || root == "metadata" => Ok(Field(path)),
            _ => Err(at(FilterProblem::Root { path: text.into() })),
        }
    }

    pub(crate) fn find<'a>(&self, data: &'a Value, metadata: &'a Map<String, Value>) -> Option<&'a Value> {
        match self.0.segments() {
            [root, rest @ ..] if root == "data" => json::find_in(rest, data),
            [_, first, rest @ ..] => json::find_in(rest, metadata.get(first)?),
            _ => None,
        }
    }
}

impl std::fmt::Display for Field {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// A condition on entities.
///
/// Values compare as JSON values do: `1` equals `1.0` and not `"1"`; a number is neither greater nor less than a
/// string. No comparison holds of a field that is not there; `not` holds where the comparison does not.
///
/// ```
/// use latchwork::entity::{Filter, field};
/// use latchwork::json;
///
/// let adults = field("data.age").at_least(18).and(field("metadata.source").one_of(["web", "shop"]));
/// let same: Filter = json!({"data.age": {"at_least": 18}, "metadata.source": {"one_of": ["web", "shop"]}}).into();
/// assert_eq!(adults, same);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Filter(pub(crate) Result<Node, FilterError>);

/// Starts a comparison of the field at this path: `data.address.city`, `metadata.source`.
pub fn field(path: &str) -> FieldRef {
    FieldRef { field: Field::parse(path) }
}

/// A field that is about to be compared.
#[derive(Debug, Clone)]
#[must_use = "a field says nothing until it is compared"]
pub struct FieldRef {
    field: Result<Field, FilterError>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Is(Field, Comparison),
    /// Of none, true.
    All(Vec<Node>),
    /// Of none, false.
    Any(Vec<Node>),
    Not(Box<Node>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Comparison {
    Equals(Value),
    Greater(Value),
    AtLeast(Value),
    Less(Value),
    AtMost(Value),
    /// Both ends included.
    Between(Value, Value),
    OneOf(Vec<Value>),
    Contains(Value),
    HasAll(Vec<Value>),
    Exists,
    StartsWith(String),
    EndsWith(String),
}

impl FieldRef {
    fn compare(self, make: impl FnOnce() -> Result<Comparison, FilterProblem>) -> Filter {
        Filter(self.field.and_then(|field| match make() {
            Ok(comparison) => Ok(Node::Is(field, comparison)),
            Err(problem) => Err(FilterError::new(field.to_string(), problem)),
        }))
    }

    /// Holds if the field has this value.
    pub fn equals(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Equals(given(value)?)))
    }

    /// Holds if the field has another value, or is not there.
    pub fn not(self, value: impl Serialize) -> Filter {
        self.equals(value).negate()
    }

    /// Holds if the value is greater, of the same kind: numbers, strings or booleans.
    pub fn greater(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Greater(ordered("greater", given(value)?)?)))
    }

    /// Holds if the value is greater or equal, of the same kind.
    pub fn at_least(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::AtLeast(ordered("at_least", given(value)?)?)))
    }

    /// Holds if the value is less, of the same kind.
    pub fn less(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Less(ordered("less", given(value)?)?)))
    }

    /// Holds if the value is less or equal, of the same kind.
    pub fn at_most(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::AtMost(ordered("at_most", given(value)?)?)))
    }

    /// Holds if the value lies between the two, both included.
    pub fn between(self, low: impl Serialize, high: impl Serialize) -> Filter {
        self.compare(|| between(given(low)?, given(high)?))
    }

    /// Holds if the field has one of these values.
    pub fn one_of(self, values: impl IntoIterator<Item = impl Serialize>) -> Filter {
        self.compare(|| Ok(Comparison::OneOf(values.into_iter().map(given).collect::<Result<_, _>>()?)))
    }

    /// Holds if the field is an array with this element, or a string with this part.
    pub fn contains(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Contains(given(value)?)))
    }

    /// Holds if the field is an array with all of these elements.
    pub fn has_all(self, values: impl IntoIterator<Item = impl Serialize>) -> Filter {
        self.compare(|| Ok(Comparison::HasAll(values.into_iter().map(given).collect::<Result<_, _>>()?)))
    }

    /// Holds if the field is there, be it null.
    pub fn exists(self) -> Filter {
        self.compare(|| Ok(Comparison::Exists))
    }

    /// Holds if the field is a string that starts so.
    pub fn starts_with(self, prefix: impl Into<String>) -> Filter {
        self.compare(|| Ok(Comparison::StartsWith(prefix.into())))
    }

    /// Holds if the field is a string that ends so.
    pub fn ends_with(self, suffix: impl Into<String>) -> Filter {
        self.compare(|| Ok(Comparison::EndsWith(suffix.into())))
    }
}

fn given(value: impl Serialize) -> Result<Value, FilterProblem> {
    json::to_value(&value).map_err(FilterProblem::Value)
}

/// Only numbers, strings and booleans have an order that a filter can ask for.
fn ordered(operator: &'static str, value: Value) -> Result<Value, FilterProblem> {
    match value {
        Value::Number(_) | Value::String(_) | Value::Bool(_) => Ok(value),
        _ => Err(FilterProblem::operand(operator, "a number, a string or a boolean")),
    }
}

fn between(low: Value, high: Value) -> Result<Comparison, FilterProblem> {
    let (low, high) = (ordered("between", low)?, ordered("between", high)?);
    if !json::same_kind(&low, &high) {
        return Err(FilterProblem::operand("between", "two values of the same kind"));
    }
    Ok(Comparison::Between(low, high))
}

impl Filter {
    /// Holds of every entity.
    pub fn all() -> Filter {
        Filter(Ok(Node::All(Vec::new())))
    }

    /// Holds if both do.
    pub fn and(self, other: Filter) -> Filter {
        self.join(other, |nodes| match nodes {
            (Node::All(mut all), Node::All(more)) => {
                all.extend(more);
                Node::All(all)
            }
            (Node::All(mut all), node) => {
                all.push(node);
                Node::All(all)
            }
            (one, two) => Node::All(vec![one, two]),
        })
    }

    /// Holds if at least one does.
    pub fn or(self, other: Filter) -> Filter {
        self.join(other, |nodes| match nodes {
            (Node::Any(mut any), node) => {
                any.push(node);
                Node::Any(any)
            }
            (one, two) => Node::Any(vec![one, two]),
        })
    }

    /// Holds if this does not.
    pub fn negate(self) -> Filter {
        Filter(self.0.map(|node| Node::Not(Box::new(node))))
    }

    fn join(self, other: Filter, join: impl FnOnce((Node, Node)) -> Node) -> Filter {
        Filter(self.0.and_then(|one| Ok(join((one, other.0?)))))
    }

    /// The filter if it is well made.
    pub(crate) fn checked(self) -> Result<Node, FilterError> {
        let node = self.0?;
        match node.is_deeper_than(DEPTH) {
            false => Ok(node),
            true => Err(FilterError::new("its innermost part", FilterProblem::TooDeep { limit: DEPTH })),
        }
    }
}

impl From<Value> for Filter {
    fn from(json: Value) -> Filter {
        Filter(parse::filter(&json))
    }
}

impl Node {
    fn is_deeper_than(&self, depth: usize) -> bool {
        let Some(below) = depth.checked_sub(1) else { return true };
        match self {
            Node::Is(..) => false,
            Node::All(nodes) | Node::Any(nodes) => nodes.iter().any(|node| node.is_deeper_than(below)),
            Node::Not(node) => node.is_deeper_than(below),
        }
    }

    pub(crate) fn holds(&self, data: &Value, metadata: &Map<String, Value>) -> bool {
        match self {
            Node::Is(field, comparison) => field.find(data, metadata).is_some_and(|found| comparison.holds(found)),
            Node::All(nodes) => nodes.iter().all(|node| node.holds(data, metadata)),
            Node::Any(nodes) => nodes.iter().any(|node| node.holds(data, metadata)),
            Node::Not(node) => !node.holds(data, metadata),
        }
    }
}

impl Comparison {
    fn holds(&self, found: &Value) -> bool {
        let compared = |value: &Value| json::same_kind(found, value).then(|| json::compare(Some(found), Some(value)));
        match self {
            Comparison::Equals(value) => json::equal(found, value),
            Comparison::Greater(value) => compared(value) == Some(Ordering::Greater),
            Comparison::AtLeast(value) => compared(value).is_some_and(Ordering::is_ge),
            Comparison::Less(value) => compared(value) == Some(Ordering::Less),
            Comparison::AtMost(value) => compared(value).is_some_and(Ordering::is_le),
            Comparison::Between(low, high) => {
                compared(low).is_some_and(Ordering::is_ge) && compared(high).is_some_and(Ordering::is_le)
            }
            Comparison::OneOf(values) => values.iter().any(|value| json::equal(found, value)),
            Comparison::Contains(value) => match (found, value) {
                (Value::Array(items), value) => items.iter().any(|item| json::equal(item, value)),
                (Value::String(text), Value::String(part)) => text.contains(part.as_str()),
                _ => false,
            },
            Comparison::HasAll(values) => match found {
                Value::Array(items) => values.iter().all(|value| items.iter().any(|item| json::equal(item, value))),
                _ => false,
            },
            Comparison::Exists => true,
            Comparison::StartsWith(prefix) => found.as_str().is_some_and(|text| text.starts_with(prefix.as_str())),
            Comparison::EndsWith(suffix) => found.as_str().is_some_and(|text| text.ends_with(suffix.as_str())),
        }
    }
}
