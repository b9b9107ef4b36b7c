//! Lists of executions: pages of the executions that a filter selects, in the order of their starts or of an attribute.
//! A page is one view of the store. Its cost depends on its size, not on the number of executions.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::json;
use crate::page::{Asked, Page, mark, paged};
use crate::record::{Record, Unreadable};
use crate::store::{ErrorKind, Order, Timestamp, View};
use crate::workflow::engine::Engine;
use crate::workflow::operate::executions::Executions;
use crate::workflow::operate::filter::{ExecutionFilter, Values};
use crate::workflow::operate::history::ExecutionState;
use crate::workflow::operate::seek::{Join, JoinNext, ListReader, Stream, To, Union};
use crate::workflow::stored::listed::{by_attribute, by_value, read_end, write_end};
use crate::workflow::stored::record::{Attribute, Execution, Wait};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// About how many keys are read for a page at most; how many before another way is tried; and how many executions are
/// sorted for a page.
const LOOKS: usize = 16 << 10;
const FEW: usize = 1 << 10;
const SORTED: usize = 4 << 10;

/// A page of executions that is about to be read. If the filter selects few of many, the page may have fewer than
/// requested although there are more: its `next` tells.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct List {
    stored: Executions,
    filter: ExecutionFilter,
    order: Option<Order>,
    asked: Asked,
}

paged!(List => Listed, WorkflowError);

/// An execution in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Listed {
    /// Its id.
    pub id: ExecutionId,
    /// The workflow's name.
    pub workflow: String,
    /// Its state.
    pub state: ExecutionState,
    /// When it was started.
    #[serde(rename = "started_us")]
    pub started: Timestamp,
    /// What it waits for, if it is out of memory.
    pub waits: Vec<Wait>,
    /// Its tags.
    pub tags: BTreeSet<String>,
    /// Its search attributes.
    pub attributes: BTreeMap<String, Attribute>,
    /// The execution that started it, if it has a parent.
    pub parent: Option<ExecutionId>,
    /// The execution that it was forked from, if it is a fork.
    pub forked: Option<ExecutionId>,
    /// The reason, if its cancellation was requested.
    pub cancel: Option<String>,
}

/// Reads the start time and the id of an execution from a position. In the order of an attribute, its value comes
/// first.
fn read_position(position: &[u8], is_valued: bool) -> Option<(u64, ExecutionId)> {
    let value = if is_valued { 1 + json::skip(position.get(1..)?)? } else { 0 };
    read_end(position.get(value..)?)
}

impl Engine {
    /// Lists executions by their state, waits and labels. Await it for a page.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result, Status};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let page = engine.list(ExecutionFilter::new().is(Status::Parked).tag("vip")).limit(20).await?;
    /// for execution in &page {
    ///     println!("{} {:?}", execution.id, execution.state);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self, filter: ExecutionFilter) -> List {
        List::new(self.inner.stored(), filter)
    }
}

impl List {
    pub(crate) fn new(stored: Executions, filter: ExecutionFilter) -> List {
        List { stored, filter, order: None, asked: Asked::of("executions") }
    }

    /// The oldest first. If the filter limits an attribute: the least value first, which is then the default.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let oldest = engine.list(ExecutionFilter::new()).ascending().limit(10).await?;
    /// # Ok(()) }
    /// ```
    pub fn ascending(mut self) -> List {
        self.order = Some(Order::Ascending);
        self
    }

    /// The newest first, which is the default. If the filter limits an attribute: the greatest value first.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let dearest = engine.list(ExecutionFilter::new().at_least("price", 100)).descending().await?;
    /// # Ok(()) }
    /// ```
    pub fn descending(mut self) -> List {
        self.order = Some(Order::Descending);
        self
    }

    async fn page(self) -> Result<Page<Listed>> {
        Ok(self.counted().await?.0)
    }

    /// Reads the page. Also returns how many keys were read for it.
    async fn counted(self) -> Result<(Page<Listed>, usize)> {
        self.filter.check()?;
        let values = self.filter.values();
        let usual = if values.is_some() { Order::Ascending } else { Order::Descending };
        let order = self.order.unwrap_or(usual);
        let mark = mark(&(order == Order::Descending, self.filter.without_times()));
        let after = match self.asked.position(mark)? {
            Some(after) if read_position(after, values.is_some()).is_none() => return Err(self.asked.unknown().into()),
            after => after.map(<[u8]>::to_vec),
        };
        let view = self.stored.store.view().await?;
        let Some(spaces) = &self.stored.spaces else { return Ok((Page::default(), 0)) };
        let reader = ListReader { view: &view, lists: &spaces.lists, order, looks: 0 };
        let unions = Join::new(self.filter.unions(&reader).await?);
        let mut looking = Looking { list: &self, reader, values, found: Vec::new() };
        let rest = match looking.values.as_ref().map(|values| values.stream(&looking.reader)) {
            None => looking.look(&mut { unions }, after, LOOKS).await?,
            Some(stream) => looking.look_by_value(stream, unions, after).await?,
        };
        let next = rest.map(|rest| self.asked.cursor(mark, &rest));
        let items = looking.found.into_iter().map(|(_, listed)| listed).collect();
        Ok((Page { items, next }, looking.reader.looks))
    }

    /// Reads an execution from a view. None if the filter does not select it.
    async fn execution(&self, view: &View, id: &ExecutionId) -> Result<Option<Execution>> {
        let Some(spaces) = &self.stored.spaces else { return Ok(None) };
        let found = match view.get(&spaces.executions.key(id.as_bytes())).await {
            Ok(None) => return Ok(None),
            Ok(Some(item)) => Execution::decode(&item.value),
            Err(error) if error.kind() == ErrorKind::Corrupt => Err(Unreadable::Damaged),
            Err(error) => return Err(error.into()),
        };
        if let Err(why) = &found {
            // The others can still be listed.
            tracing::error!(%id, ?why, "an execution cannot be read and is not listed");
        }
        Ok(found.ok().filter(|found| self.filter.is_met(found)))
    }
}

/// A page that is being read.
struct Looking<'a> {
    list: &'a List,
    reader: ListReader<'a>,
    values: Option<Values>,
    /// The executions found, with their positions.
    found: Vec<(Vec<u8>, Listed)>,
}

impl Looking<'_> {
    /// Fills the page in the order of an attribute. If few values belong to selected executions, it tries to find the
    /// executions by the other conditions instead.
    async fn look_by_value(&mut self, stream: Stream, unions: Join, after: Option<Vec<u8>>) -> Result<Option<Vec<u8>>> {
        let mut values = Join::new(vec![Union::new(vec![stream])]);
        let most = if unions.is_empty() { LOOKS } else { FEW };
        let rest = self.look(&mut values, after.clone(), most).await?;
        let limit = self.list.asked.limit;
        if rest.is_none() || self.found.len() == limit || unions.is_empty() {
            return Ok(rest);
        }
        match self.sorted(unions, after).await? {
            Some(sorted) => {
                let is_all = sorted.len() <= limit;
                self.found = sorted;
                self.found.truncate(limit);
                Ok(self.found.last().filter(|_| !is_all).map(|(last, _)| last.clone()))
            }
            None => self.look(&mut values, rest, LOOKS).await,
        }
    }

    /// Fills the page from positions in the order of the list. Returns where the next page begins.
    async fn look(&mut self, join: &mut Join, after: Option<Vec<u8>>, most: usize) -> Result<Option<Vec<u8>>> {
        let mut after = after;
        loop {
            let to = after.as_deref().map_or(To::Start, To::After);
            let position = match join.next(&mut self.reader, to, most).await? {
                JoinNext::End => return Ok(None),
                JoinNext::Tired(passed) => return Ok(Some(passed)),
                JoinNext::Found(position) => position,
            };
            if let Some(execution) = self.read(&position).await? {
                if self.found.len() == self.list.asked.limit {
                    return Ok(self.found.last().map(|(last, _)| last.clone()));
                }
                self.found.push((position.clone(), execution));
            } else if self.reader.looks >= most {
                return Ok(Some(position));
            }
            after = Some(position);
        }
    }

    /// Reads the execution at a position. None if the filter does not select it.
    async fn read(&mut self, position: &[u8]) -> Result<Option<Listed>> {
        let damaged = || WorkflowError::corrupt("a key of a list");
        let (_, id) = read_position(position, self.values.is_some()).ok_or_else(damaged)?;
        self.reader.looks += 1;
        let found = self.list.execution(self.reader.view, &id).await?;
        Ok(found.map(|found| Listed::new(id, found)))
    }

    /// Returns everything after `after` in the order of an attribute, from positions in the order of start times. None
    /// if there are too many.
    async fn sorted(&mut self, mut join: Join, after: Option<Vec<u8>>) -> Result<Option<Vec<(Vec<u8>, Listed)>>> {
        let Some(values) = &self.values else { return Ok(None) };
        let prefix = by_attribute(&values.name).len();
        let most = self.reader.looks + SORTED;
        let (mut ids, mut last): (Vec<ExecutionId>, Option<Vec<u8>>) = (Vec::new(), None);
        loop {
            let to = last.as_deref().map_or(To::Start, To::After);
            let position = match join.next(&mut self.reader, to, most).await? {
                JoinNext::End => break,
                JoinNext::Found(position) if ids.len() < SORTED => position,
                JoinNext::Found(_) | JoinNext::Tired(_) => return Ok(None),
            };
            ids.extend(read_end(&position).map(|(_, id)| id));
            last = Some(position);
        }
        let mut sorted = Vec::new();
        for id in ids {
            let Some(found) = self.list.execution(self.reader.view, &id).await? else { continue };
            let Some(value) = found.labels.attributes.get(&values.name) else { continue };
            let mut position = by_value(&values.name, value)[prefix..].to_vec();
            write_end(&mut position, found.started_us, &id);
            if after.as_ref().is_none_or(|after| self.reader.is_before(after, &position)) {
                sorted.push((position, Listed::new(id, found)));
            }
        }
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        if self.reader.order == Order::Descending {
            sorted.reverse();
        }
        Ok(Some(sorted))
    }
}

impl Listed {
    fn new(id: ExecutionId, execution: Execution) -> Listed {
        Listed {
            id,
            workflow: execution.workflow,
            state: ExecutionState::of(&execution.status),
            started: Timestamp(execution.started_us),
            waits: execution.waits,
            tags: execution.labels.tags,
            attributes: execution.labels.attributes,
            parent: execution.parent.map(|parent| parent.id),
            forked: execution.forked.map(Into::into),
            cancel: execution.cancel,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::Part;
    use crate::store::{Commit, Store};
    use crate::workflow::Status;
    use crate::workflow::stored::record;

    /// An engine with `count` executions of two workflows.
    async fn engine(count: u64) -> Engine {
        let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
        let spaces = &engine.inner.spaces;
        let mut part = Part::default();
        for number in 0..count {
            let id = ExecutionId::from(format!("e{number}"));
            let workflow = if number.is_multiple_of(2) { "order" } else { "invoice" };
            let mut execution = Execution::new(workflow, "null".into(), Timestamp(1_000_000 + number / 3));
            execution.status = match number % 10 {
                0 => record::StoredStatus::Parked("a reason".into()),
                _ => record::StoredStatus::Completed("null".into()),
            };
            execution.labels.tags.insert("every".into());
            if number.is_multiple_of(count / 10) {
                execution.labels.tags.insert("rare".into());
            }
            execution.labels.attributes.insert("price".into(), Attribute::Integer((number * 7919 % count) as i64));
            part = spaces.lists.list(part, &id, None, Some(&execution), None);
            part = part.put(&spaces.executions.key(id.as_bytes()), execution.encode());
            if number % 500 == 499 || number + 1 == count {
                assert!(
                    engine.store().commit(std::mem::take(&mut part).place(Commit::new()).0).await.unwrap().is_applied()
                );
            }
        }
        engine
    }

    #[tokio::test]
    async fn a_page_costs_as_much_over_many_executions_as_over_few() {
        let filters = [
            ExecutionFilter::new(),
            ExecutionFilter::new().workflow("order"),
            ExecutionFilter::new().is(Status::Parked),
            ExecutionFilter::new().tag("rare").tag("every"),
            ExecutionFilter::new().tag("every").is(Status::Parked).workflow("order"),
            ExecutionFilter::new().at_least("price", 10),
            ExecutionFilter::new().at_least("price", 10).tag("rare"),
            ExecutionFilter::new().attribute("price", 77).tag("every"),
            ExecutionFilter::new().started(Timestamp(1_000_010)..).is(Status::Completed),
        ];
        let (few, many) = (engine(2000).await, engine(20_000).await);
        for filter in filters {
            let mut looks = Vec::new();
            for engine in [&few, &many] {
                let (page, looked) = engine.list(filter.clone()).ascending().limit(10).counted().await.unwrap();
                assert!(!page.items.is_empty(), "{filter:?}");
                let mut again = 0;
                if let Some(next) = page.next {
                    let list = engine.list(filter.clone()).ascending().limit(10).after(next);
                    let next;
                    (next, again) = list.counted().await.unwrap();
                    assert!(next.items[0] != page.items[0], "{filter:?}");
                }
                looks.push((looked, again));
            }
            let [few, many] = looks[..] else { panic!("there are two engines") };
            for (few, many) in [(few.0, many.0), (few.1, many.1)] {
                assert!(many <= few * 2 + 64 && many < 2 * FEW, "{filter:?}: {few} and {many}");
            }
        }
    }

    #[tokio::test]
    async fn a_page_without_matches_ends_after_some_reads_and_the_next_page_continues() {
        let engine = engine(40_000).await;
        let filter =
            ExecutionFilter::new().workflow("invoice").tag("every").at_least("price", 0).greater_than("price", 39_000);
        let (mut found, mut cursor) = (0, None);
        loop {
            let (page, looks) = engine.list(filter.clone()).limit(1000).after(cursor).counted().await.unwrap();
            assert!(looks < 2 * LOOKS, "{looks}");
            (found, cursor) = (found + page.items.len(), page.next);
            if cursor.is_none() {
                break;
            }
        }
        assert_eq!(found, (39_001..40_000).filter(|price| price % 2 == 1).count());
        // No execution is parked and an invoice.
        let two = ExecutionFilter::new().at_least("price", 0).tag("every").is(Status::Parked).workflow("invoice");
        let (mut cursor, mut pages) = (None, 0);
        loop {
            let (page, _) = engine.list(two.clone()).after(cursor).counted().await.unwrap();
            assert!(page.items.is_empty());
            (cursor, pages) = (page.next, pages + 1);
            if cursor.is_none() {
                break;
            }
        }
        assert!(pages < 10, "{pages}");
    }
}
