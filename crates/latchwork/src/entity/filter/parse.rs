//! Filters as JSON: `{"data.email": "x@y.com", "data.age": {"at_least": 18}, "or": [{…}, {…}]}`. An object is true if
//! all of its parts are true. The value of a path is an object of operators, or a value that must be equal.

use serde_json::Value;

use super::{Comparison, DEPTH, Field, FilterError, FilterNode, FilterProblem, between, ordered};
use crate::json;

/// Every operator, as errors list them.
pub(super) const OPERATORS: [&str; 15] = [
    "equals",
    "not",
    "greater",
    "at_least",
    "less",
    "at_most",
    "between",
    "one_of",
    "contains",
    "has_all",
    "exists",
    "starts_with",
    "ends_with",
    "and",
    "or",
];

pub(super) fn filter(json: &Value) -> Result<FilterNode, FilterError> {
    json::check(json).map_err(|error| FilterError::new("the filter", FilterProblem::Value(error)))?;
    node(json, "", DEPTH)
}

fn below(at: &str, step: &str) -> String {
    if at.is_empty() { step.into() } else { format!("{at}.{step}") }
}

fn wrong(at: &str, operator: &'static str, wanted: &'static str) -> FilterError {
    let at = if at.is_empty() { "the filter" } else { at };
    FilterError::new(at, FilterProblem::operand(operator, wanted))
}

fn node(json: &Value, at: &str, depth: usize) -> Result<FilterNode, FilterError> {
    let Value::Object(parts) = json else { return Err(wrong(at, "a filter", "an object")) };
    let Some(depth) = depth.checked_sub(1) else {
        return Err(FilterError::new(at, FilterProblem::TooDeep { limit: DEPTH }));
    };
    let mut all = Vec::new();
    for (name, part) in parts {
        let at = below(at, name);
        match name.as_str() {
            "and" => all.push(FilterNode::All(list(part, &at, "and", depth)?)),
            "or" => all.push(FilterNode::Any(list(part, &at, "or", depth)?)),
            "not" => all.push(FilterNode::Not(Box::new(node(part, &at, depth)?))),
            path => {
                let field = Field::parse(path).map_err(|error| FilterError::new(at.as_str(), error.problem))?;
                comparisons(&field, part, &at, &mut all)?;
            }
        }
    }
    Ok(if all.len() == 1 { all.remove(0) } else { FilterNode::All(all) })
}

fn list(json: &Value, at: &str, operator: &'static str, depth: usize) -> Result<Vec<FilterNode>, FilterError> {
    let Value::Array(parts) = json else { return Err(wrong(at, operator, "a list of filters")) };
    parts.iter().enumerate().map(|(index, part)| node(part, &format!("{at}[{index}]"), depth)).collect()
}

fn comparisons(field: &Field, json: &Value, at: &str, all: &mut Vec<FilterNode>) -> Result<(), FilterError> {
    let Value::Object(operators) = json else {
        all.push(FilterNode::Is(field.clone(), Comparison::Equals(json.clone())));
        return Ok(());
    };
    if operators.is_empty() {
        return Err(wrong(at, "a path", "a value, or an object of operators; to find an empty object use equals"));
    }
    for (name, operand) in operators {
        let is = |comparison| FilterNode::Is(field.clone(), comparison);
        let refuse = |problem| FilterError::new(below(at, name), problem);
        let made = match name.as_str() {
            "not" => FilterNode::Not(Box::new(is(Comparison::Equals(operand.clone())))),
            "exists" => match operand {
                Value::Bool(true) => is(Comparison::Exists),
                Value::Bool(false) => FilterNode::Not(Box::new(is(Comparison::Exists))),
                _ => return Err(wrong(&below(at, name), "exists", "true or false")),
            },
            name => is(comparison(name, operand).map_err(refuse)?),
        };
        all.push(made);
    }
    Ok(())
}

fn values(operator: &'static str, operand: Value) -> Result<Vec<Value>, FilterProblem> {
    match operand {
        Value::Array(values) => Ok(values),
        _ => Err(FilterProblem::operand(operator, "a list of values")),
    }
}

fn text(operator: &'static str, operand: Value) -> Result<String, FilterProblem> {
    match operand {
        Value::String(text) => Ok(text),
        _ => Err(FilterProblem::operand(operator, "a string")),
    }
}

fn ends(operand: Value) -> Result<[Value; 2], FilterProblem> {
    let ends = operand.as_array().and_then(|ends| <[Value; 2]>::try_from(ends.clone()).ok());
    ends.ok_or(FilterProblem::operand("between", "[low, high]"))
}

fn comparison(name: &str, operand: &Value) -> Result<Comparison, FilterProblem> {
    let value = operand.clone();
    Ok(match name {
        "equals" => Comparison::Equals(value),
        "greater" => Comparison::Greater(ordered("greater", value)?),
        "at_least" => Comparison::AtLeast(ordered("at_least", value)?),
        "less" => Comparison::Less(ordered("less", value)?),
        "at_most" => Comparison::AtMost(ordered("at_most", value)?),
        "between" => {
            let [low, high] = ends(value)?;
            between(low, high)?
        }
        "one_of" => Comparison::OneOf(values("one_of", value)?),
        "contains" => Comparison::Contains(value),
        "has_all" => Comparison::HasAll(values("has_all", value)?),
        "starts_with" => Comparison::StartsWith(text("starts_with", value)?),
        "ends_with" => Comparison::EndsWith(text("ends_with", value)?),
        name => return Err(FilterProblem::UnknownOperator { name: name.into() }),
    })
}
