//! The store on the wire: its figures, its damage, and what its errors become. Messages of errors can name paths,
//! servers and keys, so only those that speak of the client's own request are passed on.

use latchwork::store::{Damage, ErrorKind, Stats, StoreError};
use latchwork::{Cursor, CursorError};
use serde::Serialize;
use utoipa::ToSchema;

use crate::wire::problem::{Problem, ProblemCode};

/// Figures about a store. The counts of commits, groups and log bytes start at zero when the store is opened.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StoreStats)]
pub(crate) struct StatsWire {
    /// The newest generation.
    generation: u64,
    /// Keys with a value or a tombstone in the index.
    keys: u64,
    /// Overwritten and deleted versions that are still kept.
    past_versions: u64,
    /// Commits that were applied.
    applied: u64,
    /// Commits that were refused.
    refused: u64,
    /// Groups of commits that shared a sync.
    groups: u64,
    /// Bytes in memory that are not folded into the index yet.
    overlay_bytes: u64,
    /// Bytes written to the log.
    log_bytes: u64,
    /// The size of the index.
    index_bytes: u64,
    /// Open views.
    pins: u64,
}

impl From<Stats> for StatsWire {
    fn from(stats: Stats) -> StatsWire {
        let Stats { generation, keys, past_versions, applied, refused, groups, overlay_bytes, log_bytes, .. } = stats;
        let Stats { index_bytes, pins, .. } = stats;
        let generation = generation.0;
        StatsWire {
            generation,
            keys,
            past_versions,
            applied,
            refused,
            groups,
            overlay_bytes,
            log_bytes,
            index_bytes,
            pins,
        }
    }
}

/// What was found when everything was read from the medium.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Verified)]
pub(crate) struct VerifiedWire {
    /// True if nothing is damaged.
    pub(crate) is_sound: bool,
    pub(crate) damage: Vec<DamageWire>,
}

/// Stored bytes that are not what was written.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Damage)]
pub(crate) struct DamageWire {
    /// File, table or key.
    place: String,
    /// What is wrong with it.
    detail: String,
}

impl From<Vec<Damage>> for VerifiedWire {
    fn from(damage: Vec<Damage>) -> VerifiedWire {
        let shown = |Damage { place, detail }: Damage| DamageWire { place, detail };
        VerifiedWire { is_sound: damage.is_empty(), damage: damage.into_iter().map(shown).collect() }
    }
}

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
