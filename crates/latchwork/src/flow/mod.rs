//! Flows: typed chains of blocks, run as durable executions. The state of a sequencer is shared by its blocks, and is
//! stored with the record of each block that ends. Needs the feature `flow`.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::flow::{flow, handler, sequencer};
//! use latchwork::json;
//! use latchwork::store::Store;
//! use latchwork::workflow::Engine;
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Default, Serialize, Deserialize, JsonSchema)]
//! struct Counted {
//!     words: u32,
//! }
//!
//! let count = handler("count").needs::<Counted>().tap(async |ctx, text: String| {
//!     ctx.sequencer().inc([("words", text.split_whitespace().count() as u64)]).await
//! });
//! let counting = sequencer("counting").state::<Counted>().tap(&count).map(|_, ctx| ctx.state().words).build()?;
//! let texts = flow("texts").action("count", counting).build()?;
//!
//! let engine = Engine::on(&Store::memory().await?).flow(&texts).start().await?; // or Engine::open("./data")
//! let request = engine.flow(&texts).run("count", "a few words").session("s-1").await?;
//! assert_eq!(request.result::<u32>().await?, 3);
//! # Ok(()) }
//! ```

mod block;
mod board;
mod chain;
mod checkpoint;
mod ctx;
mod delta;
mod error;
mod flows;
mod found;
mod frame;
mod loops;
mod many;
mod request;
mod schema;
mod sequencer;
mod state;
mod stream;
mod suspend;
mod untold;
mod work;

pub use block::{Block, Data, HandlerBuilder, NoOutput, handler, router};
pub use board::{Board, BoardState, ClaimedTask, Dispatch, NewTask, Task, TaskState, Tasks};
pub use ctx::{BlockCtx, Look, StateHandle};
pub use error::{BlockError, BoardError, BoardResult, FlowError, Result};
pub use flows::{Busy, Flow, FlowBuilder, Flows, RequestHandle, RequestInput, RunRequest, flow};
pub use loops::Carries;
pub use many::{ItemList, Parallel, ParallelBlocks};
pub use request::Asker;
#[cfg(feature = "testing")]
pub use request::FlowSabotage;
pub use schema::Transient;
pub use sequencer::{Case, SequencerBuilder, otherwise, sequencer, when};
pub use stream::{Events, FlowEvent, NumberedEvent, StepState};
pub use suspend::{Answer, AnswerKind, Suspend, Suspension, Suspensions};
