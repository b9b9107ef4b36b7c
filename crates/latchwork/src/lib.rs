//! Work that must happen once, on one primitive: the conditional commit.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::entity::{Add, Entities, EntityError, Update};
//! use latchwork::store::Store;
//! use latchwork::json;
//!
//! let entities = Entities::on(&Store::memory().await?).await?; // or Entities::open("./data").await?
//! entities.add(Add::new("document").id("plan").data(json!({"title": "A plan"}))).await?;
//!
//! let plan = entities.get("plan").await?.unwrap();
//! entities.update(Update::new("plan").data(json!({"title": "The plan"})).if_rev(plan.rev)).await?;
//!
//! // The same rev again: another caller was faster. The error carries the entity's current rev.
//! let late = entities.update(Update::new("plan").data(json!({"title": "No plan"})).if_rev(plan.rev)).await;
//! assert!(matches!(late, Err(EntityError::RevisionConflict { expected, actual, .. }) if actual > expected));
//! # Ok(()) }
//! ```

#[macro_use]
mod shown;

mod backoff;
pub mod claim;
mod damage;
pub mod entity;
mod id;
mod json;
mod lane;
pub mod lock;
mod node;
mod panic;
mod record;
pub mod state;
#[cfg(feature = "testing")]
pub mod testing;
#[doc(hidden)]
pub mod words;
pub mod workflow;

pub use json::{JsonError, Path, PathError};
pub use latchwork_store as store;
pub use serde_json::{Map, Number, Value, json};

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
