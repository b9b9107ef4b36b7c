//! Names of executions.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Names an execution: any text of 1 to 512 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ExecutionId(Arc<str>);

impl Deref for ExecutionId {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ExecutionId {
    fn from(text: &str) -> ExecutionId {
        ExecutionId(text.into())
    }
}

impl From<&String> for ExecutionId {
    fn from(text: &String) -> ExecutionId {
        ExecutionId(text.as_str().into())
    }
}

impl From<String> for ExecutionId {
    fn from(text: String) -> ExecutionId {
        ExecutionId(text.into())
    }
}

impl From<&ExecutionId> for ExecutionId {
    fn from(id: &ExecutionId) -> ExecutionId {
        id.clone()
    }
}

impl fmt::Display for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ExecutionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
