//! The operations of an execution, page by page: for executions with more operations than one read should return.

use std::collections::BTreeMap;

use crate::page::{Asked, Page, mark, paged};
use crate::store::{Order, Timestamp};
use crate::workflow::engine::Engine;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::operate::executions::Executions;
use crate::workflow::operate::history::{Operation, read_entry};
use crate::workflow::stored::keys::{journal_key, run_key};
use crate::workflow::stored::record::{Entry, Intent};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// A page of an execution's operations that is about to be read: first those of the function itself, then those of its
/// branches, branch by branch.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Operations {
    stored: Executions,
    id: ExecutionId,
    asked: Asked,
}

paged!(Operations => Operation, WorkflowError);

impl Engine {
    /// The recorded operations of an execution, page by page. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let page = engine.operations("order-7").limit(20).await?;
    /// let rest = engine.operations("order-7").after(page.next).await?;
    /// # Ok(()) }
    /// ```
    pub fn operations(&self, id: impl Into<ExecutionId>) -> Operations {
        Operations::new(self.inner.stored(), id.into())
    }
}

impl Operations {
    pub(crate) fn new(stored: Executions, id: ExecutionId) -> Operations {
        Operations { stored, id, asked: Asked::of("operations") }
    }

    async fn page(self) -> Result<Page<Operation>> {
        let Operations { stored, id, asked } = self;
        let mark = mark(&id);
        let place = |position: &[u8]| std::str::from_utf8(position).ok()?.parse::<Place>().ok();
        let after = match asked.position(mark)? {
            Some(position) => Some(place(position).ok_or_else(|| asked.unknown())?),
            None => None,
        };
        let view = stored.store.view().await?;
        let (spaces, execution, changed) = stored.read(&view, &id).await?;
        let key = |place: &Place| spaces.journal.key(journal_key(&id, execution.run, place));
        let mut found: EntriesByKey = BTreeMap::new();
        let mut intents: Vec<(Place, Entry, Timestamp)> = Vec::new();
        let mut range = spaces.journal.prefix(run_key(&id, execution.run));
        if let Some(after) = &after {
            let key = key(after);
            // The record at this place may also hold the intent of the next operation.
            if let Some(item) = view.get(&key).await? {
                let next = read_entry(&id, &key, &item.value)?.2;
                intents.extend(next.map(|next| (after.branch.at(after.number + 1), next, item.time)));
            }
            range = range.after(&key);
        } else if let Some(first) = execution.intent.clone().and_then(Intent::into_entry) {
            intents.push((BranchPath::default().at(0), first, changed));
        }
        for (key, item) in view.scan(&range, Order::Ascending, asked.limit + 1).await? {
            let (place, entry, next) = read_entry(&id, &key, &item.value)?;
            intents.extend(next.map(|next| (place.branch.at(place.number + 1), next, item.time)));
            found.insert(key, (place, entry, item.time));
        }
        for (place, entry) in &execution.tail {
            if range.contains(&key(place)) {
                found.insert(key(place), (place.clone(), entry.clone(), changed));
            }
        }
        // An entry of its own replaces an intent. The entry of the last intent may not have been read, but then the
        // operation is not on this page.
        for (place, entry, recorded) in intents {
            found.entry(key(&place)).or_insert((place, entry, recorded));
        }
        let found: Vec<(String, _)> = found.into_values().map(|found| (found.0.to_string(), found)).collect();
        Ok(asked.page(mark, found).map(|(place, entry, recorded)| Operation::new(&place, entry, recorded)))
    }
}

/// Operations in the order of their keys.
type EntriesByKey = BTreeMap<crate::store::Key, (Place, Entry, Timestamp)>;
