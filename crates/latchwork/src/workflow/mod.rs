//! Durable workflows: asynchronous functions that continue where they stopped, whatever happens to the process.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::store::Store;
//! use latchwork::workflow::{Ctx, Engine, workflow};
//!
//! let greet = workflow("greet").run(async |ctx: Ctx, name: String| {
//!     let greeting = ctx.run("greeting", async || Ok(format!("Hello, {name}!"))).await?;
//!     Ok(greeting)
//! });
//! let engine = Engine::on(&Store::memory().await?).register(&greet).start().await?; // or Engine::open("./data")
//! let handle = engine.start(&greet, "Ada".to_string()).id("greet-1").await?;
//! assert_eq!(handle.result().await?, "Hello, Ada!");
//! # Ok(()) }
//! ```

pub(crate) mod admission;
pub(crate) mod ctx;
mod definition;
pub(crate) mod engine;
mod error;
mod failure;
pub(crate) mod journal;
pub(crate) mod operate;
#[cfg(feature = "postgres")]
pub(crate) mod outbox;
mod retry;
pub(crate) mod run;
mod schedule;
pub(crate) mod stored;

pub use crate::node::ExecutionId;

pub use admission::policy::{Batch, Debounce, Queue, RateLimit, WhenFull};
pub use admission::{LimitUse, QueuePosition};
pub use ctx::Ctx;
pub use ctx::branches::{Boxed, First2, First3, First4, First5, First6, JoinBranches, SelectBranches, TryJoinBranches};
pub use ctx::child::{Child, ChildCancelled, ChildTimedOut, StartChild};
pub use ctx::locks::{CtxGuard, CtxLock, CtxReadWriteLock};
pub use ctx::rate::{CtxRateLimiter, RateLimitError, RateLimiter};
pub use ctx::review::{Decision, PendingReview, Review, ReviewError, ReviewFor};
pub use ctx::saga::Saga;
pub use ctx::signal::{Receive, ReceiveFor, SendSignal};
pub use ctx::slots::CtxState;
#[cfg(feature = "postgres")]
pub use ctx::sql::{NotPostgres, WithSql};
pub use ctx::step::{Attempt, Body, Plain, Step, WithAttempt};
pub use ctx::token::Completion;
pub use ctx::transaction::{Transacting, Tx};
pub use ctx::update::{PublishedValues, ReceiveUpdate, ReceiveUpdateFor, Request, SendUpdate, SentUpdate};
pub use definition::{BatchBuilder, WithShared, Workflow, WorkflowBuilder, workflow};
pub use engine::finally::{Finished, FinishedAs};
pub use engine::handle::Handle;
pub use engine::start::Start;
pub use engine::{Engine, EngineBuilder};
pub use error::{Result, WorkflowError};
pub use failure::{Cancelled, Failure, FailureError, RevisionConflict};
pub use operate::bulk::{Bulk, BulkReport};
pub use operate::canary::{CanaryReport, CheckRunning, Misfit};
pub use operate::events::Operations;
pub use operate::executions::{Description, Executions};
pub use operate::filter::ExecutionFilter;
pub use operate::fork::Fork;
pub use operate::history::{AttemptFailure, ExecutionState, History, Operation, OperationState};
pub use operate::list::{List, Listed};
pub use operate::reviews::{ReviewDescription, ReviewHandle, ReviewState, Reviews};
pub use operate::status::Status;
pub use operate::steer::{Steer, Why};
pub use operate::unrunnable::Unrunnable;
#[cfg(feature = "postgres")]
pub use outbox::{
    FailedRequest, FailedRequests, InTransaction, Outbox, OutboxError, StartInTransaction, UserTransaction,
};
pub use retry::Retry;
pub use schedule::{
    Counts, Fires, Overlap, RunCause, RunOutcome, Schedule, ScheduleDescription, ScheduleError, ScheduleList,
    ScheduleRun, ScheduleRuns, Schedules, StoredSchedules,
};
pub use stored::record::{Attribute, Close, Kind, Supersede, Wait, WaitsFor};
