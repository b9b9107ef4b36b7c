//! The primitive under Latchwork: **conditional commits** over one ordered, versioned, durable key space.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork_store::{Commit, History, SpaceSpec, Store};
//!
//! let store = Store::memory().await?; // or Store::open("./data").await?
//! let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
//! let alice = accounts.key("alice");
//!
//! let first = store.commit(Commit::new().absent(&alice).put(&alice, "100")).await?.applied()?;
//! let rev = first.revs[0].unwrap();
//! store.commit(Commit::new().at_rev(&alice, rev).put(&alice, "70")).await?.applied()?;
//!
//! // The same check again. The key has changed since, so the commit is refused and the refusal says what it found.
//! let refusal = store.commit(Commit::new().at_rev(&alice, rev).put(&alice, "0")).await?.applied().unwrap_err();
//! assert!(refusal.to_string().ends_with("alice expected at rev 1, is at rev 2"));
//!
//! let past = store.view_at(first.generation).await?;
//! assert_eq!(past.get(&alice).await?.unwrap().value, "100");
//! # Ok(()) }
//! ```
//!
//! A commit writes everything if all its checks hold, and nothing otherwise. Every answer is based on durable state
//! only. Every commit that changes something gets the next [`Generation`]. All other parts of Latchwork are records in
//! this store.

pub mod backend;
mod codec;
mod commit;
pub mod disk;
mod env;
mod error;
mod evaluate;
mod facts;
mod file;
mod key;
mod limits;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
mod retention;
mod snapshot;
mod space;
mod store;
mod view;
mod watch;

pub use bytes::Bytes;
#[cfg(feature = "postgres")]
pub use tokio_postgres;
pub use uuid::Uuid;

pub use store::{Confirm, Store};

pub use backend::{Changes, Damage, Order, Stats};
pub use commit::{
    Actual, Change, Check, Commit, CommitId, Committed, Decided, FailedCheck, Outcome, Receipt, Refusal, Right,
    Version, Write,
};
pub use env::{Clock, Env, Random, Sleep, Timestamp, VirtualClock};
pub use error::{ErrorKind, Result, ServerFault, StoreError};
pub use file::FileOptions;
#[cfg(feature = "testing")]
pub use file::Sabotage;
pub use key::{Generation, Key, Range, Rev, SpaceId};
pub use limits::Limits;
#[cfg(all(feature = "postgres", feature = "testing"))]
pub use postgres::PostgresSabotage;
#[cfg(feature = "postgres")]
pub use postgres::{OutboxRow, Postgres, PostgresOptions, SqlEnded, SqlError, SqlTransaction, SqlTx};
pub use space::{History, Space, SpaceSpec};
pub use view::{Item, View};
pub use watch::Watch;
