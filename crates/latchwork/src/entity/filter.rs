//! The condition of a find: comparisons of fields with values, and their combinations, made in code or read from JSON.
//! A mistake in either is kept and reported, with its position, when the filter is used.

use std::borrow::Cow;
use std::cmp::Ordering;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::json::{self, JsonError, Path, PathError};

mod parse;

/// The most levels of a filter.
const DEPTH: usize = 128;

/// Why a filter or an order cannot be used, and the position of the mistake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("the query is malformed at {at}: {problem}")]
pub struct FilterError {
    /// The position: operators and paths from the outside in, for example `and[1].data.age.greater`.
    pub at: String,
    /// What is wrong at that position.
    pub problem: FilterProblem,
}

/// The mistakes in a filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum FilterProblem {
    /// The path cannot be read.
    #[error("{0}")]
    Path(PathError),
    /// The path does not start with `data` or `metadata`.
    #[error("{path:?} names no field; a path starts with `data`, or with `metadata.` and a field")]
    Root { path: String },
    /// The operator does not exist.
    #[error("there is no operator {name:?}; there are {}", parse::OPERATORS.join(", "))]
    UnknownOperator { name: String },
    /// The operator does not accept its operand.
    #[error("{operator} takes {wanted}")]
    Operand { operator: Cow<'static, str>, wanted: Cow<'static, str> },
    /// The value is not JSON.
    #[error("{0}")]
    Value(JsonError),
    /// The filter is nested too deeply.
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

/// A field of an entity: `data`, or a path into `data` or `metadata`. It is stored as it is written.
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
/// Values compare as JSON values: `1` equals `1.0` and not `"1"`; a number is neither greater nor less than a string.
/// No comparison is true for a missing field; `not` is true where the comparison is false.
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
pub struct Filter(pub(crate) Result<FilterNode, FilterError>);

/// Starts a comparison of the field at this path: `data.address.city`, `metadata.source`.
///
/// ```
/// # use latchwork::entity::field;
/// let in_paris = field("data.address.city").equals("Paris");
/// ```
pub fn field(path: &str) -> FieldRef {
    FieldRef { field: Field::parse(path) }
}

/// A field, before it is compared.
#[derive(Debug, Clone)]
#[must_use = "a field is not a filter until it is compared"]
pub struct FieldRef {
    field: Result<Field, FilterError>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum FilterNode {
    Is(Field, Comparison),
    /// True for an empty list.
    All(Vec<FilterNode>),
    /// False for an empty list.
    Any(Vec<FilterNode>),
    Not(Box<FilterNode>),
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
            Ok(comparison) => Ok(FilterNode::Is(field, comparison)),
            Err(problem) => Err(FilterError::new(field.to_string(), problem)),
        }))
    }

    /// True if the field has this value.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let in_paris = field("data.city").equals("Paris");
    /// ```
    pub fn equals(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Equals(given(value)?)))
    }

    /// True if the field has another value, or is missing.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let elsewhere = field("data.city").not("Paris");
    /// ```
    pub fn not(self, value: impl Serialize) -> Filter {
        self.equals(value).negate()
    }

    /// True if the value is greater, and of the same kind: number, string or boolean.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let adults = field("data.age").greater(17);
    /// ```
    pub fn greater(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Greater(ordered("greater", given(value)?)?)))
    }

    /// True if the value is greater or equal, and of the same kind.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let adults = field("data.age").at_least(18);
    /// ```
    pub fn at_least(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::AtLeast(ordered("at_least", given(value)?)?)))
    }

    /// True if the value is less, and of the same kind.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let children = field("data.age").less(18);
    /// ```
    pub fn less(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Less(ordered("less", given(value)?)?)))
    }

    /// True if the value is less or equal, and of the same kind.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let children = field("data.age").at_most(17);
    /// ```
    pub fn at_most(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::AtMost(ordered("at_most", given(value)?)?)))
    }

    /// True if the value lies between the two, both included.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let teenagers = field("data.age").between(13, 19);
    /// ```
    pub fn between(self, low: impl Serialize, high: impl Serialize) -> Filter {
        self.compare(|| between(given(low)?, given(high)?))
    }

    /// True if the field has one of these values.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let from_us = field("metadata.source").one_of(["web", "shop"]);
    /// ```
    pub fn one_of(self, values: impl IntoIterator<Item = impl Serialize>) -> Filter {
        self.compare(|| Ok(Comparison::OneOf(values.into_iter().map(given).collect::<Result<_, _>>()?)))
    }

    /// True if the field is an array with this element, or a string with this part.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let urgent = field("data.tags").contains("urgent");
    /// ```
    pub fn contains(self, value: impl Serialize) -> Filter {
        self.compare(|| Ok(Comparison::Contains(given(value)?)))
    }

    /// True if the field is an array with all of these elements.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let both = field("data.tags").has_all(["urgent", "paid"]);
    /// ```
    pub fn has_all(self, values: impl IntoIterator<Item = impl Serialize>) -> Filter {
        self.compare(|| Ok(Comparison::HasAll(values.into_iter().map(given).collect::<Result<_, _>>()?)))
    }

    /// True if the field exists, even if it is null.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let reachable = field("data.email").exists();
    /// ```
    pub fn exists(self) -> Filter {
        self.compare(|| Ok(Comparison::Exists))
    }

    /// True if the field is a string with this start.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let swiss = field("data.phone").starts_with("+41");
    /// ```
    pub fn starts_with(self, prefix: impl Into<String>) -> Filter {
        self.compare(|| Ok(Comparison::StartsWith(prefix.into())))
    }

    /// True if the field is a string with this end.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let members = field("data.email").ends_with("@example.org");
    /// ```
    pub fn ends_with(self, suffix: impl Into<String>) -> Filter {
        self.compare(|| Ok(Comparison::EndsWith(suffix.into())))
    }
}

fn given(value: impl Serialize) -> Result<Value, FilterProblem> {
    json::to_value(&value).map_err(FilterProblem::Value)
}

/// Only numbers, strings and booleans can be compared by order.
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
    /// True for every entity.
    ///
    /// ```
    /// # use latchwork::entity::Filter;
    /// let everyone = Filter::all();
    /// ```
    pub fn all() -> Filter {
        Filter(Ok(FilterNode::All(Vec::new())))
    }

    /// True if both are true.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let adults_in_paris = field("data.age").at_least(18).and(field("data.city").equals("Paris"));
    /// ```
    pub fn and(self, other: Filter) -> Filter {
        self.join(other, |nodes| match nodes {
            (FilterNode::All(mut all), FilterNode::All(more)) => {
                all.extend(more);
                FilterNode::All(all)
            }
            (FilterNode::All(mut all), node) => {
                all.push(node);
                FilterNode::All(all)
            }
            (one, two) => FilterNode::All(vec![one, two]),
        })
    }

    /// True if at least one is true.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let reachable = field("data.email").exists().or(field("data.phone").exists());
    /// ```
    pub fn or(self, other: Filter) -> Filter {
        self.join(other, |nodes| match nodes {
            (FilterNode::Any(mut any), node) => {
                any.push(node);
                FilterNode::Any(any)
            }
            (one, two) => FilterNode::Any(vec![one, two]),
        })
    }

    /// True if this filter is false.
    ///
    /// ```
    /// # use latchwork::entity::field;
    /// let without_email = field("data.email").exists().negate();
    /// ```
    pub fn negate(self) -> Filter {
        Filter(self.0.map(|node| FilterNode::Not(Box::new(node))))
    }

    fn join(self, other: Filter, join: impl FnOnce((FilterNode, FilterNode)) -> FilterNode) -> Filter {
        Filter(self.0.and_then(|one| Ok(join((one, other.0?)))))
    }

    /// The filter, if it is valid.
    pub(crate) fn checked(self) -> Result<FilterNode, FilterError> {
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

impl FilterNode {
    fn is_deeper_than(&self, depth: usize) -> bool {
        let Some(below) = depth.checked_sub(1) else { return true };
        match self {
            FilterNode::Is(..) => false,
            FilterNode::All(nodes) | FilterNode::Any(nodes) => nodes.iter().any(|node| node.is_deeper_than(below)),
            FilterNode::Not(node) => node.is_deeper_than(below),
        }
    }

    pub(crate) fn holds(&self, data: &Value, metadata: &Map<String, Value>) -> bool {
        match self {
            FilterNode::Is(field, comparison) => {
                field.find(data, metadata).is_some_and(|found| comparison.holds(found))
            }
            FilterNode::All(nodes) => nodes.iter().all(|node| node.holds(data, metadata)),
            FilterNode::Any(nodes) => nodes.iter().any(|node| node.holds(data, metadata)),
            FilterNode::Not(node) => !node.holds(data, metadata),
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
