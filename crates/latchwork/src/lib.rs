//! Work that must happen once, on one primitive: the conditional commit.
//!
//! Where to start, with the guide in the repository:
//!
//! - A function whose steps must each happen once, across crashes and restarts: [`workflow`](mod@workflow), with
//!   [`workflow()`](workflow::workflow), [`Engine`](workflow::Engine) and [`Ctx`](workflow::Ctx); docs/workflows.md.
//! - Something that one caller at a time may do: [`lock`], with [`Engine::mutex`](workflow::Engine::mutex), or
//!   [`Locks`](lock::Locks) without an engine; docs/locks.md.
//! - An action on an entity that one caller may run, however many ask: [`claim`], with [`Claims`](claim::Claims);
//!   docs/claims.md.
//! - JSON documents that many writers change: [`entity`], with [`Entities`](entity::Entities); docs/entities.md.
//! - Typed values and counters that many tasks share: [`state`], with [`States`](state::States) and
//!   [`Slot`](state::Slot); docs/state.md.
//! - Keys, checks and writes of your own: [`store`], with [`Store`](store::Store) and [`Commit`](store::Commit);
//!   docs/store.md.
//! - A chain of typed blocks that share state, with questions to people: `flow` (feature `flow`); docs/flows.md.
//! - A test that crashes your workflow at every commit: `testing` (feature `testing`), with `crash_everywhere`;
//!   docs/workflows/testing.md.
//!
//! Each module begins with an example that runs. All of them share one store: open it once and pass it to each `on`,
//! for example `Engine::on(&store)` and `Entities::on(&store)`.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::store::Store;
//! use latchwork::workflow::{Ctx, Engine, workflow};
//!
//! let order = workflow("order").run(async |ctx: Ctx, price: u64| {
//!     let paid = ctx.run("charge", async || Ok(format!("{price} paid"))).await?;
//!     ctx.run("ship", async || Ok(format!("{paid}, shipped"))).await
//! });
//! let store = Store::memory().await?; // or Store::open("./data").await?
//! let engine = Engine::on(&store).register(&order).start().await?;
//! let handle = engine.start(&order, 42).id("order-1").await?;
//! assert_eq!(handle.result().await?, "42 paid, shipped");
//! # Ok(()) }
//! ```

#[macro_use]
mod shown;

mod backoff;
pub mod claim;
mod damage;
pub mod entity;
#[cfg(feature = "flow")]
pub mod flow;
mod id;
mod json;
mod lane;
pub mod lock;
mod micros;
pub mod node;
mod page;
mod panic;
mod record;
pub mod state;
#[cfg(feature = "testing")]
pub mod testing;
#[doc(hidden)]
pub mod words;
pub mod workflow;

pub use json::{JsonError, Path, PathError};
pub use lane::{Once, OnceError};
pub use latchwork_store as store;
pub use page::{Cursor, CursorError, Page};
pub use serde_json::{Map, Number, Value, json};

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
