//! Filters for lists and for operations on many executions. List keys answer every part of a filter.

use std::collections::BTreeSet;
use std::ops::{Bound, RangeBounds};

use serde::{Deserialize, Serialize};

use crate::store::Timestamp;
use crate::workflow::operate::seek::{ListReader, Prefix, Stream, Union, successor};
use crate::workflow::operate::status::Status;
use crate::workflow::stored::listed::{by_attribute, by_status, by_tag, by_value, by_wait};
use crate::workflow::stored::record::{Attribute, Execution, WaitsFor};
use crate::workflow::{Result, WorkflowError};

/// The longest text in a filter, in bytes.
const LONGEST: usize = 1024;

/// Selects the executions that meet all conditions. Without conditions, it selects all executions.
///
/// ```
/// use latchwork::workflow::{ExecutionFilter, Status};
///
/// let late = ExecutionFilter::new().workflow("order").is(Status::Waiting).tag("vip").at_least("price", 100);
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecutionFilter {
    workflows: BTreeSet<String>,
    is: BTreeSet<Status>,
    waits: Vec<WaitsFor>,
    tags: BTreeSet<String>,
    attributes: Vec<(String, Attribute)>,
    limits: Vec<AttributeBound>,
    from_us: u64,
    to_us: Option<u64>,
}

/// The condition that an attribute is on one side of a value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct AttributeBound {
    name: String,
    side: BoundSide,
    value: Attribute,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BoundSide {
    AtLeast,
    Above,
    AtMost,
    Below,
}

/// A range of values of an attribute, as a range of keys.
pub(crate) struct Values {
    pub(crate) name: String,
    start: Vec<u8>,
    end: Vec<u8>,
}

impl AttributeBound {
    /// The keys of the selected values, which are all of the same kind.
    fn keys(&self) -> (Vec<u8>, Vec<u8>) {
        let value = by_value(&self.name, &self.value);
        let kind = &value[..=by_attribute(&self.name).len()];
        match self.side {
            BoundSide::AtLeast => (value.clone(), successor(kind)),
            BoundSide::Above => (successor(&value), successor(kind)),
            BoundSide::AtMost => (kind.to_vec(), successor(&value)),
            BoundSide::Below => (kind.to_vec(), value),
        }
    }
}

impl Values {
    /// The keys of these values, in order.
    pub(crate) fn stream(&self, reader: &ListReader<'_>) -> Stream {
        Stream::new(reader.listed(by_attribute(&self.name)), self.start.clone(), self.end.clone())
    }
}

impl ExecutionFilter {
    /// Selects all executions.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// assert_eq!(ExecutionFilter::new(), ExecutionFilter::default());
    /// ```
    pub fn new() -> ExecutionFilter {
        ExecutionFilter::default()
    }

    /// Selects executions of this workflow; after several calls, of any of these workflows.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let orders = ExecutionFilter::new().workflow("order").workflow("refund");
    /// ```
    pub fn workflow(mut self, name: impl Into<String>) -> ExecutionFilter {
        self.workflows.insert(name.into());
        self
    }

    /// Selects executions of this status; after several calls, of any of these.
    ///
    /// ```
    /// # use latchwork::workflow::{ExecutionFilter, Status};
    /// let ended_badly = ExecutionFilter::new().is(Status::Failed).is(Status::TimedOut);
    /// ```
    pub fn is(mut self, is: Status) -> ExecutionFilter {
        self.is.insert(is);
        self
    }

    /// Selects executions that wait for this, out of memory; after several calls, for any of these. [`WaitsFor::Timer`]
    /// selects those that are [`Status::Asleep`].
    ///
    /// ```
    /// # use latchwork::workflow::{ExecutionFilter, WaitsFor};
    /// let unapproved = ExecutionFilter::new().waits_for(WaitsFor::Signal("approve".into()));
    /// ```
    pub fn waits_for(mut self, what: WaitsFor) -> ExecutionFilter {
        self.waits.push(what);
        self
    }

    /// Selects executions that have this tag; after several calls, all of these tags.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let urgent = ExecutionFilter::new().tag("vip").tag("express");
    /// ```
    pub fn tag(mut self, tag: impl Into<String>) -> ExecutionFilter {
        self.tags.insert(tag.into());
        self
    }

    /// Selects executions whose search attribute of this name has this value.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let northern = ExecutionFilter::new().attribute("shop", "north");
    /// ```
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> ExecutionFilter {
        self.attributes.push((name.into(), value.into()));
        self
    }

    /// Selects executions whose search attribute of this name is of the same kind as the value, and equal or greater.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let expensive = ExecutionFilter::new().at_least("price", 100);
    /// ```
    pub fn at_least(self, name: impl Into<String>, value: impl Into<Attribute>) -> ExecutionFilter {
        self.limit(name, BoundSide::AtLeast, value)
    }

    /// Selects executions whose search attribute of this name is of the same kind as the value, and greater.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let expensive = ExecutionFilter::new().greater_than("price", 100);
    /// ```
    pub fn greater_than(self, name: impl Into<String>, value: impl Into<Attribute>) -> ExecutionFilter {
        self.limit(name, BoundSide::Above, value)
    }

    /// Selects executions whose search attribute of this name is of the same kind as the value, and equal or less.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let cheap = ExecutionFilter::new().at_most("price", 10);
    /// ```
    pub fn at_most(self, name: impl Into<String>, value: impl Into<Attribute>) -> ExecutionFilter {
        self.limit(name, BoundSide::AtMost, value)
    }

    /// Selects executions whose search attribute of this name is of the same kind as the value, and less.
    ///
    /// ```
    /// # use latchwork::workflow::ExecutionFilter;
    /// let cheap = ExecutionFilter::new().less_than("price", 10);
    /// ```
    pub fn less_than(self, name: impl Into<String>, value: impl Into<Attribute>) -> ExecutionFilter {
        self.limit(name, BoundSide::Below, value)
    }

    fn limit(mut self, name: impl Into<String>, side: BoundSide, value: impl Into<Attribute>) -> ExecutionFilter {
        self.limits.push(AttributeBound { name: name.into(), side, value: value.into() });
        self
    }

    /// Selects executions that were started between these times; after several calls, within all of these ranges.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::ExecutionFilter;
    /// # fn example(now: Timestamp) {
    /// let last_hour = ExecutionFilter::new().started(now.minus(Duration::from_secs(3600))..=now);
    /// # }
    /// ```
    pub fn started(mut self, times: impl RangeBounds<Timestamp>) -> ExecutionFilter {
        self.from_us = self.from_us.max(match times.start_bound() {
            Bound::Unbounded => 0,
            Bound::Included(from) => from.0,
            Bound::Excluded(from) => from.0.saturating_add(1),
        });
        let to = match times.end_bound() {
            Bound::Unbounded => None,
            Bound::Excluded(to) => Some(to.0),
            Bound::Included(to) => to.0.checked_add(1),
        };
        self.to_us = self.to_us.into_iter().chain(to).min();
        self
    }

    /// The filter without the range of start times. A caller may compute that range anew for each page, for example
    /// from the time of day. A position is as good in any range.
    pub(crate) fn without_times(&self) -> ExecutionFilter {
        ExecutionFilter { from_us: 0, to_us: None, ..self.clone() }
    }

    /// Refuses conditions that cannot be searched for.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |reason: String| Err(WorkflowError::List { reason });
        for what in &self.waits {
            match what {
                WaitsFor::Step(_) | WaitsFor::Store => {
                    return refuse(format!("{what:?} is not a wait out of memory; only such waits are listed"));
                }
                what => what.listed().map_or(Ok(()), |(_, name)| is_short(name))?,
            }
        }
        self.workflows.iter().chain(&self.tags).try_for_each(|text| is_short(text))?;
        let limits = self.limits.iter().map(|limit| (&limit.name, &limit.value));
        for (name, value) in self.attributes.iter().map(|(name, value)| (name, value)).chain(limits) {
            is_short(name)?;
            match value {
                Attribute::Text(text) => is_short(text)?,
                Attribute::Real(number) if !number.is_finite() => {
                    return refuse(format!("attribute {name:?} cannot be {number}, which is not a finite number"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The values that the list is ordered by: those of the first attribute with a limit.
    pub(crate) fn values(&self) -> Option<Values> {
        let first = self.limits.first()?;
        let its = self.limits.iter().filter(|limit| limit.name == first.name).map(AttributeBound::keys);
        let (start, end) = its.reduce(|a, b| (a.0.max(b.0), a.1.min(b.1)))?;
        Some(Values { name: first.name.clone(), end: end.max(start.clone()), start })
    }

    /// True if the filter selects an execution.
    pub(crate) fn is_met(&self, execution: &Execution) -> bool {
        let status = Status::of(execution);
        let is_waited = |what: &WaitsFor| match what {
            WaitsFor::Timer => status == Status::Asleep,
            what => execution.waits.iter().any(|wait| wait.what == *what),
        };
        let value = |name: &str| Some(by_value(name, execution.labels.attributes.get(name)?));
        let is_within = |limit: &AttributeBound| {
            let (start, end) = limit.keys();
            value(&limit.name).is_some_and(|value| start <= value && value < end)
        };
        (self.workflows.is_empty() || self.workflows.contains(&execution.workflow))
            && (self.is.is_empty() || self.is.iter().any(|is| is.meant().contains(&status)))
            && (self.waits.is_empty() || self.waits.iter().any(is_waited))
            && self.tags.iter().all(|tag| execution.labels.tags.contains(tag))
            && self.attributes.iter().all(|(name, asked)| value(name) == Some(by_value(name, asked)))
            && self.limits.iter().all(is_within)
            && self.from_us <= execution.started_us
            && self.to_us.is_none_or(|to| execution.started_us < to)
    }

    /// The keys of the selected executions, in the order of start times: an execution must be in all of these unions.
    /// Limits of attributes are not included. The list is empty only if the filter has nothing but limits.
    pub(crate) async fn unions(&self, reader: &ListReader<'_>) -> Result<Vec<Union>> {
        let mut unions = Vec::new();
        let mut add = |prefixes: Vec<Prefix>| {
            unions.push(Union::new(prefixes.into_iter().map(|prefix| self.timed(prefix)).collect()));
        };
        self.tags.iter().for_each(|tag| add(vec![reader.listed(by_tag(tag))]));
        self.attributes.iter().for_each(|(name, value)| add(vec![reader.listed(by_value(name, value))]));
        if !self.waits.is_empty() {
            let waits: BTreeSet<Vec<u8>> = self.waits.iter().filter_map(by_wait).collect();
            let mut prefixes: Vec<Prefix> = waits.into_iter().map(|wait| reader.listed(wait)).collect();
            if self.waits.contains(&WaitsFor::Timer) {
                prefixes.extend(self.prefixes(reader, &[Status::Asleep]).await?);
            }
            add(prefixes);
        }
        let others = self.tags.len() + self.attributes.len() + self.waits.len() + self.limits.len();
        if others == 0 || !self.is.is_empty() || !self.workflows.is_empty() {
            let mut statuses: Vec<Status> = self.is.iter().flat_map(|is| is.meant()).copied().collect();
            if self.is.is_empty() {
                statuses = Status::ALL.to_vec();
            }
            statuses.sort();
            statuses.dedup();
            add(self.prefixes(reader, &statuses).await?);
        }
        Ok(unions)
    }

    /// The prefixes of keys that list executions of these statuses, of the selected workflows.
    async fn prefixes(&self, reader: &ListReader<'_>, statuses: &[Status]) -> Result<Vec<Prefix>> {
        let mut prefixes = Vec::new();
        for status in statuses {
            if self.workflows.is_empty() {
                prefixes.extend(reader.workflows(*status).await?);
            }
            for name in &self.workflows {
                match status {
                    Status::Running => prefixes.extend(reader.running(name).await?),
                    other => prefixes.push(reader.listed(by_status(*other, name))),
                }
            }
        }
        Ok(prefixes)
    }

    /// The keys of one prefix whose executions were started within the selected times.
    fn timed(&self, prefix: Prefix) -> Stream {
        let start = [&prefix.bytes[..], &self.from_us.to_be_bytes()].concat();
        let end = match self.to_us {
            Some(to) => [&prefix.bytes[..], &to.max(self.from_us).to_be_bytes()].concat(),
            None => successor(&prefix.bytes),
        };
        Stream::new(prefix, start, end)
    }
}

fn is_short(text: &str) -> Result<()> {
    if text.len() <= LONGEST {
        return Ok(());
    }
    let reason = format!("a filter cannot use a text of {} bytes; the limit is {LONGEST}", text.len());
    Err(WorkflowError::List { reason })
}
