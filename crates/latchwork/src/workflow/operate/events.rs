//! The operations of an execution, page by page: for executions with more operations than one read should return.

use std::collections::BTreeMap;
use std::future::IntoFuture;

use serde::{Deserialize, Serialize};

use crate::store::{Order, Timestamp};
use crate::workflow::engine::Engine;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::operate::executions::Executions;
use crate::workflow::operate::history::{Operation, read_entry};
use crate::workflow::stored::keys::{journal_key, run_key};
use crate::workflow::stored::record::{Entry, Intent};
use crate::workflow::{Boxed, ExecutionId, Result, WorkflowError};

/// How many operations a page holds by default, and at most.
const PAGE: usize = 100;
const MOST: usize = 1000;

/// A page of an execution's operations that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Operations {
    stored: Executions,
    id: ExecutionId,
    after: Option<String>,
    limit: usize,
}

/// A page of an execution's operations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OperationsPage {
    /// The operations: first those of the function itself, then those of its branches, branch by branch.
    pub operations: Vec<Operation>,
    /// The place after which the next page begins, if there is one.
    pub next: Option<String>,
}

impl Engine {
    /// The recorded operations of an execution, page by page. Await it for a page.
    pub fn operations(&self, id: impl Into<ExecutionId>) -> Operations {
        Operations::new(self.inner.stored(), id.into())
    }
}

impl Operations {
    pub(crate) fn new(stored: Executions, id: ExecutionId) -> Operations {
        Operations { stored, id, after: None, limit: PAGE }
    }

    /// Continues after this place: `7`, or `4.1/0` for the first operation in the second branch of the fork at place 4.
    pub fn after(mut self, place: impl Into<String>) -> Operations {
        self.after = Some(place.into());
        self
    }

    /// The size of a page: 100 by default, at least 1 and at most 1000.
    pub fn limit(mut self, limit: usize) -> Operations {
        self.limit = limit.clamp(1, MOST);
        self
    }

    async fn page(self) -> Result<OperationsPage> {
        let Operations { stored, id, after, limit } = self;
        let place = |text: String| match text.parse::<Place>() {
            Ok(place) => Ok(place),
            Err(()) => Err(WorkflowError::List { reason: format!("{text:?} is not the place of an operation") }),
        };
        let after = after.map(place).transpose()?;
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
        for (key, item) in view.scan(&range, Order::Ascending, limit + 1).await? {
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
        let is_all = found.len() <= limit;
        let page: Vec<_> = found.into_values().take(limit).collect();
        let next = page.last().filter(|_| !is_all).map(|(place, ..)| place.to_string());
        let operations = page.into_iter().map(|(place, entry, recorded)| Operation::new(&place, entry, recorded));
        Ok(OperationsPage { operations: operations.collect(), next })
    }
}

/// Operations in the order of their keys.
type EntriesByKey = BTreeMap<crate::store::Key, (Place, Entry, Timestamp)>;

impl IntoFuture for Operations {
    type Output = Result<OperationsPage>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.page())
    }
}
