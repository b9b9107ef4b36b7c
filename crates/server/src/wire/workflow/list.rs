//! The filters of a list of executions, as parameters of a query. They are the options of `latch workflow list`.

use latchwork::store::Timestamp;
use latchwork::workflow::{Attribute, ExecutionFilter, Status, WaitsFor};
use utoipa::IntoParams;

use crate::wire::page::PageQuery;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::when;

/// Which executions are listed, and in which order.
#[derive(Debug, Default, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Only executions of this workflow. If given several times: of any of these.
    #[param(required = false)]
    workflow: Vec<String>,
    /// Only executions of this status. If given several times, or with commas: of any of these. `waiting` includes
    /// those that are asleep.
    #[param(required = false)]
    status: Vec<String>,
    /// Only executions that wait for this: `timer`, `retry:STEP`, `signal:NAME`, `update:NAME`, `child:ID`,
    /// `completion:NAME`, `published:NAME`, `lock:NAME`, `review:NAME` or `admission:KEY`. If given several times: for
    /// any of these.
    #[param(required = false)]
    waits_for: Vec<String>,
    /// Only executions with this tag. If given several times: with all of these.
    #[param(required = false)]
    tag: Vec<String>,
    /// Only executions with this attribute: `NAME=VALUE`, or `>=`, `<=`, `>` or `<` in place of `=`. A value is true,
    /// false, a number, `time:2026-11-30T12:00:00Z`, or a text, in double quotes if it could be one of the others.
    #[param(required = false)]
    attribute: Vec<String>,
    /// Only executions that were started at this time or later: RFC 3339, a date in UTC, or how long ago (`90m`).
    since: Option<String>,
    /// Only executions that were started before this time.
    until: Option<String>,
    /// `descending` lists the newest first, and with limits on an attribute the highest value first; `ascending` the
    /// other way round.
    order: Option<String>,
    /// Continues after an earlier page of the same list: its `next`.
    after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// The order that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListOrder {
    Ascending,
    Descending,
}

fn wrong(detail: impl Into<String>) -> Problem {
    Problem::new(ProblemCode::InvalidQuery, detail)
}

impl ListQuery {
    /// Reads the parameters, of which some may stand several times.
    pub(crate) fn read(given: Vec<(String, String)>) -> Result<ListQuery, Problem> {
        let mut query = ListQuery::default();
        for (name, value) in given {
            let many = match name.as_str() {
                "workflow" => &mut query.workflow,
                "waits_for" => &mut query.waits_for,
                "tag" => &mut query.tag,
                "attribute" => &mut query.attribute,
                "status" => {
                    query.status.extend(value.split(',').map(Into::into));
                    continue;
                }
                "limit" => {
                    let limit = value.parse().map_err(|_| wrong(format!("limit: {value:?} is not a number")))?;
                    once(&mut query.limit, &name, limit)?;
                    continue;
                }
                _ => {
                    let single = match name.as_str() {
                        "since" => &mut query.since,
                        "until" => &mut query.until,
                        "order" => &mut query.order,
                        "after" => &mut query.after,
                        _ => return Err(wrong(format!("unknown field `{name}`"))),
                    };
                    once(single, &name, value)?;
                    continue;
                }
            };
            many.push(value);
        }
        Ok(query)
    }

    pub(crate) fn page(&self) -> PageQuery {
        PageQuery { after: self.after.clone(), limit: self.limit }
    }

    pub(crate) fn order(&self) -> Result<Option<ListOrder>, Problem> {
        match self.order.as_deref() {
            None => Ok(None),
            Some("ascending") => Ok(Some(ListOrder::Ascending)),
            Some("descending") => Ok(Some(ListOrder::Descending)),
            Some(other) => Err(wrong(format!("order is ascending or descending, not {other:?}"))),
        }
    }

    pub(crate) fn filter(&self, now: Timestamp) -> Result<ExecutionFilter, Problem> {
        let mut filter = self.workflow.iter().fold(ExecutionFilter::new(), ExecutionFilter::workflow);
        for name in &self.status {
            let known = || format!("{name:?} is not a status: write {}", Status::ALL.map(Status::name).join(", "));
            filter = filter.is(name.parse().map_err(|_| wrong(known()))?);
        }
        for what in &self.waits_for {
            filter = filter.waits_for(waits_for(what).map_err(wrong)?);
        }
        filter = self.tag.iter().fold(filter, ExecutionFilter::tag);
        for condition in &self.attribute {
            let (name, sign, value) = attribute(condition).map_err(wrong)?;
            filter = match sign {
                ">=" => filter.at_least(name, value),
                "<=" => filter.at_most(name, value),
                ">" => filter.greater_than(name, value),
                "<" => filter.less_than(name, value),
                _ => filter.attribute(name, value),
            };
        }
        if let Some(since) = &self.since {
            filter = filter.started(when::in_query(since, now)?..);
        }
        if let Some(until) = &self.until {
            filter = filter.started(..when::in_query(until, now)?);
        }
        Ok(filter)
    }
}

fn once<T>(place: &mut Option<T>, name: &str, value: T) -> Result<(), Problem> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(wrong(format!("{name} stands twice"))),
    }
}

fn waits_for(text: &str) -> Result<WaitsFor, String> {
    let known = || {
        "waits_for is timer, retry:STEP, signal:NAME, update:NAME, child:ID, completion:NAME, published:NAME, \
         lock:NAME, review:NAME or admission:KEY"
            .to_string()
    };
    let (what, name) = text.split_once(':').unwrap_or((text, ""));
    match (what, name) {
        ("timer", "") => return Ok(WaitsFor::Timer),
        (_, "") => return Err(known()),
        _ => {}
    }
    let name = name.to_string();
    Ok(match what {
        "retry" => WaitsFor::Retry(name),
        "signal" => WaitsFor::Signal(name),
        "update" => WaitsFor::Update(name),
        "child" => WaitsFor::Child(name),
        "completion" => WaitsFor::Completion(name),
        "published" => WaitsFor::Published(name),
        "lock" => WaitsFor::Lock(name),
        "review" => WaitsFor::Review(name),
        "admission" => WaitsFor::Admission(name),
        _ => return Err(known()),
    })
}

/// Reads a condition on an attribute: its name, the sign and the value.
fn attribute(text: &str) -> Result<(&str, &'static str, Attribute), String> {
    let wrong = || format!("attribute: {text:?} is not NAME=VALUE");
    let at = text.find(['=', '<', '>']).filter(|at| *at > 0).ok_or_else(wrong)?;
    let (name, rest) = text.split_at(at);
    let signs = [">=", "<=", "=", ">", "<"];
    let sign = signs.into_iter().find(|sign| rest.starts_with(sign)).ok_or_else(wrong)?;
    let rest = &rest[sign.len()..];
    if rest.starts_with(['=', '<', '>']) {
        let signs = signs.join(" ");
        return Err(format!("attribute: the sign is one of {signs}; quote a text that begins with one of them"));
    }
    Ok((name, sign, value(rest)?))
}

fn value(text: &str) -> Result<Attribute, String> {
    if let Some(time) = text.strip_prefix("time:") {
        return when::absolute(time).map(Attribute::from);
    }
    Ok(match serde_json::from_str::<latchwork::Value>(text) {
        Ok(latchwork::Value::Bool(value)) => value.into(),
        Ok(latchwork::Value::String(value)) => value.into(),
        Ok(latchwork::Value::Number(number)) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => text.into(),
        },
        _ => text.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &str) -> Result<ExecutionFilter, Problem> {
        let pairs = query.split('&').map(|pair| pair.split_once(':').unwrap());
        let query = ListQuery::read(pairs.map(|(name, value)| (name.into(), value.into())).collect())?;
        query.order()?;
        query.filter(Timestamp(1_700_000_000_000_000))
    }

    #[test]
    fn a_query_is_the_filter_of_the_library() {
        let filter = ExecutionFilter::new().workflow("a").workflow("b").is(Status::Parked).is(Status::TimedOut);
        assert_eq!(read("workflow:a&workflow:b&status:parked,timed_out").unwrap(), filter);
        let filter = ExecutionFilter::new().waits_for(WaitsFor::Signal("x:y".into())).tag("t");
        assert_eq!(read("waits_for:signal:x:y&tag:t").unwrap(), filter);
        let filter = ExecutionFilter::new().at_least("price", 42).attribute("shop", "north").less_than("x", 1.5);
        assert_eq!(read("attribute:price>=42&attribute:shop=north&attribute:x<1.5").unwrap(), filter);
        let filter = ExecutionFilter::new().attribute("n", "42").started(Timestamp(1_699_920_000_000_000)..);
        assert_eq!(read("attribute:n=\"42\"&since:2023-11-14").unwrap(), filter);
    }

    #[test]
    fn a_query_that_cannot_be_read_is_a_problem() {
        for query in [
            "moon:full",
            "status:sleepy",
            "waits_for:signal",
            "waits_for:moon:full",
            "attribute:price",
            "attribute:price==4",
            "since:soon",
            "since:1h&since:2h",
            "limit:x",
            "order:upwards",
        ] {
            assert_eq!(read(query).unwrap_err().code(), ProblemCode::InvalidQuery, "{query}");
        }
    }
}
