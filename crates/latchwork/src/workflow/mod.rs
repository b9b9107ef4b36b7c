//! Durable workflows: asynchronous functions that go on where they were, whatever happens to the process.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::store::Store;
//! use latchwork::workflow::{Ctx, Engine, Failure, workflow};
//!
//! let greet = workflow("greet").run(async |ctx: Ctx, name: String| {
//!     let greeting = ctx.run("greeting", async || Ok::<_, Failure>(format!("Hello, {name}!"))).await?;
//!     Ok(greeting)
//! });
//! let engine = Engine::on(&Store::memory().await?).register(&greet).start().await?; // or Engine::open("./data")
//! let handle = engine.start(&greet, "Ada".to_string()).id("greet-1").await?;
//! assert_eq!(handle.result().await?, "Hello, Ada!");
//! # Ok(()) }
//! ```

mod alarm;
mod ctx;
mod definition;
pub(crate) mod drive;
mod engine;
mod error;
mod failure;
mod handle;
mod history;
mod record;
mod recover;
mod remove;
mod retry;
pub(crate) mod run;
mod slots;
mod step;
mod transaction;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

pub use ctx::Ctx;
pub use definition::{Workflow, WorkflowBuilder, workflow};
pub use engine::{Engine, EngineBuilder};
pub use error::{Result, WorkflowError};
pub use failure::Failure;
pub use handle::{Handle, Start};
pub use history::{AttemptFailure, ExecutionState, History, Operation, OperationState};
pub use record::Kind;
pub use retry::Retry;
pub use slots::CtxState;
pub use step::{Attempt, Body, Plain, Step, WithAttempt};
pub use transaction::{Transacting, Tx};

/// Names an execution: any text of 1 to 512 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
