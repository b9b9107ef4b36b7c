//! What happened to an execution, page by page: for those that have done more than is to be read at once.

use std::collections::BTreeMap;
use std::future::IntoFuture;

use serde::{Deserialize, Serialize};

use crate::store::{Order, Timestamp};
use crate::workflow::engine::Engine;
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::operate::executions::Executions;
use crate::workflow::operate::history::{Operation, read_entry};
use crate::workflow::stored::record::{Entry, Intent, journal_key, run_key};
use crate::workflow::{Boxed, ExecutionId, Result, WorkflowError};

/// How many operations a page holds, unless it is said, and at the most.
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
    /// The place after which the next page goes on, if there is one.
    pub next: Option<String>,
}

impl Engine {
    /// What happened to an execution so far, page by page. Await it for a page.
    pub fn operations(&self, id: impl Into<ExecutionId>) -> Operations {
        Operations::new(self.inner.stored(), id.into())
    }
}

impl Operations {
    pub(crate) fn new(stored: Executions, id: ExecutionId) -> Operations {
        Operations { stored, id, after: None, limit: PAGE }
    }

    /// What comes after this place, as `7`, or `4.1/0` for the first operation in the second branch of the fork at
    /// place 4.
    pub fn after(mut self, place: impl Into<String>) -> Operations {
        self.after = Some(place.into());
        self
    }

    /// So many on a page: 100 unless this is said, 1 at the least and 1000 at the most.
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
        let mut found: Found = BTreeMap::new();
        let mut intents: Vec<(Place, Entry, Timestamp)> = Vec::new();
        let mut range = spaces.journal.prefix(run_key(&id, execution.run));
        if let Some(after) = &after {
            let key = key(after);
            // The record there may tell of the next operation, too.
            if let Some(item) = view.get(&key).await? {
                let next = read_entry(&id, &key, &item.value)?.2;
                intents.extend(next.map(|next| (after.branch.at(after.number + 1), next, item.time)));
            }
            range = range.after(&key);
        } else if let Some(first) = execution.intent.clone().and_then(Intent::into_entry) {
            intents.push((Path::default().at(0), first, changed));
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
        // What has a record of its own is told by that. The last of these may have one that was not read; but then it
        // is not on this page.
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
type Found = BTreeMap<crate::store::Key, (Place, Entry, Timestamp)>;

impl IntoFuture for Operations {
    type Output = Result<OperationsPage>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.page())
    }
}
