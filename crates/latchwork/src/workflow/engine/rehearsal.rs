//! How tests run an engine: with mocks, with operations that take a moment, or on a journal alone. Only the feature
//! `testing` can ask for any of it; without the feature a rehearsal is empty, and the compiler removes its questions.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

use crate::workflow::Failure;

/// What a mock gives in place of a step's body: JSON or a failure.
type Given = Result<Value, Failure>;

/// Stands in for the body of a step. It is given the number of the attempt.
pub(crate) type Mock = Arc<dyn Fn(u32) -> Given + Send + Sync>;

/// What a test has asked for.
#[derive(Default)]
pub(crate) struct Rehearsal {
    /// By the names of steps.
    pub(crate) mocks: HashMap<String, Mock>,
    /// Whether every operation takes a moment, so that operations that overlap are found however fast the store is.
    pub(crate) is_strict: bool,
    /// Whether nothing happens that is not in a journal.
    pub(crate) is_replay: bool,
}

/// Whether anything can be asked for.
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
