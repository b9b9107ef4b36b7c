//! How tests run an engine: with mocks, with operations that yield, or on a journal alone. Only the feature `testing`
//! can request any of this; without the feature a rehearsal is empty, and the compiler removes its checks.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

use crate::workflow::Failure;

/// What a mock returns in place of a step's body: JSON or a failure.
type Given = Result<Value, Failure>;

/// Replaces the body of a step. Its argument is the number of the attempt.
pub(crate) type Mock = Arc<dyn Fn(u32) -> Given + Send + Sync>;

/// What a test has requested.
#[derive(Default)]
pub(crate) struct Rehearsal {
    /// By step name.
    pub(crate) mocks: HashMap<String, Mock>,
    /// True if every operation yields, so that operations that overlap are found however fast the store is.
    pub(crate) is_strict: bool,
    /// True if only the journal is replayed: nothing happens that is not in it.
    pub(crate) is_replay: bool,
}

/// True if a test can request anything.
const IS_ON: bool = cfg!(feature = "testing");

impl Rehearsal {
    pub(crate) fn mocked(&self, step: &str, attempt: u32) -> Option<Given> {
        if IS_ON { self.mocks.get(step).map(|mock| mock(attempt)) } else { None }
    }

    pub(crate) fn is_strict(&self) -> bool {
        IS_ON && self.is_strict
    }

    pub(crate) fn is_replay(&self) -> bool {
        IS_ON && self.is_replay
    }
}
