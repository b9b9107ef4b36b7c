//! Stands in for `rows.rs` in a program that is built without PostgreSQL: there are no rows.

use std::convert::Infallible;
use std::sync::Arc;

use serde_json::Value;

use crate::claim::config::ClaimWorkflow;
use crate::claim::error::{ClaimError, Result};
use crate::entity::{EntityId, Standing};
use crate::store::{Commit, Outcome, Rev, Store};

/// The tables of claim workflows.
pub(crate) enum Rows {}

/// A change of a row.
pub(crate) enum RowChange {}

/// SQL of an action.
pub(crate) type SqlWork = Infallible;

impl Rows {
    pub(crate) async fn boot(_: &Store, workflows: &[ClaimWorkflow]) -> Result<Option<Arc<Rows>>> {
        match workflows.iter().find_map(|workflow| Some((workflow, workflow.meta.table.as_ref()?))) {
            None => Ok(None),
            Some((workflow, table)) => Err(ClaimError::Table {
                workflow: workflow.name.clone(),
                table: table.name.clone(),
                reason: "this program is built without the feature postgres".into(),
            }),
        }
    }

    pub(crate) fn is_row(&self, _: &EntityId) -> bool {
        match *self {}
    }

    pub(crate) async fn standing(&self, _: &EntityId) -> Result<Option<Standing>> {
        match *self {}
    }

    pub(crate) fn revise(&self, _: &Standing, _: Value) -> Result<(RowChange, Standing)> {
        match *self {}
    }

    pub(crate) fn unchanged(&self, _: &EntityId, _: Option<Rev>) -> Result<RowChange> {
        match *self {}
    }
}

/// Commits in a transaction with SQL.
pub(crate) async fn commit(
    _: &Store,
    _: &Commit,
    row: Option<&RowChange>,
    sql: &[SqlWork],
    _: &str,
) -> Result<Option<Outcome>> {
    match (row, sql.first()) {
        (Some(row), _) => match *row {},
        (None, Some(work)) => match *work {},
        (None, None) => Err(ClaimError::Stopped),
    }
}
