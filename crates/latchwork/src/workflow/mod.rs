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

pub(crate) mod admission;
mod beats;
mod branches;
mod bulk;
mod child;
mod close;
pub(crate) mod ctx;
mod deadlock;
mod definition;
pub(crate) mod drive;
pub(crate) mod engine;
mod error;
mod events;
mod executions;
mod failure;
mod filter;
mod finally;
mod fork;
mod handle;
mod history;
pub(crate) mod kept;
mod label;
mod list;
pub(crate) mod listed;
mod locks;
mod metrics;
pub(crate) mod place;
pub(crate) mod post;
mod publish;
mod rate;
pub(crate) mod record;
mod recover;
pub(crate) mod rehearsal;
mod remove;
mod replay;
mod retry;
mod review;
pub(crate) mod reviews;
pub(crate) mod run;
mod saga;
mod schedule;
mod seek;
mod signal;
mod slots;
mod steer;
mod step;
mod supersede;
mod token;
mod transaction;
mod unbegun;
mod update;

pub use crate::node::ExecutionId;

pub use admission::policy::{Batch, Debounce, Queue, RateLimit, WhenFull};
pub use admission::{LimitUse, PlaceInLine};
pub use branches::{Boxed, First2, First3, First4, First5, First6, JoinBranches, SelectBranches, TryJoinBranches};
pub use bulk::{Bulk, BulkReport};
pub use child::{Child, ChildCancelled, ChildTimedOut, StartChild};
pub use ctx::Ctx;
pub use definition::{BatchBuilder, Workflow, WorkflowBuilder, workflow};
pub use engine::{Engine, EngineBuilder};
pub use error::{Result, WorkflowError};
pub use events::{Operations, OperationsPage};
pub use executions::{Description, Executions};
pub use failure::{Cancelled, Failure};
pub use filter::{Filter, Is};
pub use finally::{Finished, FinishedAs};
pub use fork::Fork;
pub use handle::{Handle, Start};
pub use history::{AttemptFailure, ExecutionState, History, Operation, OperationState};
pub use list::{Cursor, List, Listed, Page};
pub use locks::{CtxGuard, CtxLock, CtxLockWithin, CtxReadWriteLock, CtxReadWriteLockWithin};
pub use rate::{CtxRateLimiter, RateLimitError, RateLimiter};
pub use record::{Attribute, Close, Kind, Supersede, Wait, WaitsFor};
pub use retry::Retry;
pub use review::{Decision, PendingReview, Review, ReviewError, ReviewFor};
pub use reviews::{ReviewDescription, ReviewHandle, ReviewState, Reviews, ReviewsPage};
pub use saga::Saga;
pub use schedule::{
    Counts, Fires, Overlap, RunCause, RunOutcome, Schedule, ScheduleDescription, ScheduleError, ScheduleRun, Schedules,
    StoredSchedules,
};
pub use signal::{Receive, ReceiveFor, Signal};
pub use slots::CtxState;
pub use steer::Why;
pub use step::{Attempt, Body, Plain, Step, WithAttempt};
pub use token::Completion;
pub use transaction::{Transacting, Tx};
pub use update::{PublishedValues, ReceiveUpdate, ReceiveUpdateFor, Request, SentUpdate, Update};
