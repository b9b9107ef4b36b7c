#![allow(missing_docs, clippy::unwrap_used, unreachable_pub)]
#[path = "it/node/mod.rs"]
mod node;
