//! Numbers of the store, as JSON has them.

use serde::{Deserialize, Serialize};

use crate::store::{Generation, Rev, Timestamp};

#[derive(Serialize, Deserialize)]
#[serde(remote = "Rev")]
pub(crate) struct RevNumber(u64);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Generation")]
pub(crate) struct GenerationNumber(u64);

/// Microseconds since 1970.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Timestamp")]
pub(crate) struct Micros(u64);
