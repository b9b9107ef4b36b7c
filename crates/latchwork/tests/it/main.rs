//! Tests of the library's public API, one binary; a folder a noun.

// A test ends where something unexpected happens, and nothing here is reached from outside.
#![allow(missing_docs, clippy::unwrap_used, unreachable_pub)]

mod backends;
mod claim;
mod entity;
mod golden;
mod json;
mod lock;
mod owned;
mod state;
mod workflow;
