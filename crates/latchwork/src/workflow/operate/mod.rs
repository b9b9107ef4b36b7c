//! What operators and programs outside of workflows do with executions: list, read, steer, fork.

pub(crate) mod bulk;
pub(crate) mod canary;
pub(crate) mod events;
pub(crate) mod executions;
pub(crate) mod filter;
pub(crate) mod fork;
pub(crate) mod history;
pub(crate) mod list;
pub(crate) mod reviews;
pub(crate) mod seek;
pub(crate) mod status;
pub(crate) mod steer;
pub(crate) mod unrunnable;
pub(crate) mod valued;
mod words;
