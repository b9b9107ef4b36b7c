//! Tests of the library's public API: one binary, with one folder for each noun.

// A test ends where something unexpected happens, and no other crate uses these items.
#![allow(missing_docs, clippy::unwrap_used, unreachable_pub)]

mod backends;
mod claim;
mod entity;
mod flow;
mod golden;
mod json;
mod lock;
mod node;
mod owned;
mod pages;
#[path = "../../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod state;
mod workflow;
