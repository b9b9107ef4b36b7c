//! Errors of the store on the wire. Their messages can name paths, servers and keys, so only those that speak of the
//! client's own request are passed on.

use latchwork::store::{ErrorKind, StoreError};
use latchwork::{Cursor, CursorError};

use crate::wire::problem::{Problem, ProblemCode};

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Problem {
        match &error {
            StoreError::HistoryDropped { oldest, .. } | StoreError::TimeDropped { oldest, .. } => {
                let detail = format!("this position is no longer kept; the oldest generation left is {oldest}");
                Problem::new(ProblemCode::HistoryDropped, detail).with("oldest_generation", oldest.0)
            }
            StoreError::FutureGeneration { asked, latest } => {
                let detail = format!("generation {asked} does not exist yet; the store is at {latest}");
                Problem::new(ProblemCode::FutureGeneration, detail).with("latest_generation", latest.0)
            }
            StoreError::TooManyOperations { .. } | StoreError::CommitTooLarge { .. } => {
                Problem::new(ProblemCode::TooLarge, error.to_string())
            }
            StoreError::ValueTooLong { length, limit, .. } => {
                Problem::new(ProblemCode::TooLarge, format!("a value has {length} bytes; the limit is {limit}"))
            }
            StoreError::KeyTooLong { length, limit, .. } => {
                Problem::new(ProblemCode::Invalid, format!("a key has {length} bytes; the limit is {limit}"))
            }
            StoreError::EmptyKey { .. } => Problem::new(ProblemCode::Invalid, "a name or id is empty"),
            _ if error.kind() == ErrorKind::Corrupt => Problem::of_kind(ErrorKind::Corrupt, &error),
            // An error that the client cannot have caused: a store that was opened wrongly, or that fails.
            _ => Problem::unavailable(&error),
        }
    }
}

impl From<CursorError> for Problem {
    fn from(error: CursorError) -> Problem {
        Problem::new(ProblemCode::InvalidCursor, error.to_string())
    }
}

/// Reads a cursor from a request.
pub(crate) fn cursor(text: Option<&str>) -> Result<Option<Cursor>, Problem> {
    Ok(text.map(str::parse).transpose()?)
}
