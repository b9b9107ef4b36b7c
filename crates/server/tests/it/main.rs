//! Real servers on free ports, asked by a small client, or by bytes on a socket where a client would refuse to send
//! them.

// A test ends where something unexpected happens.
#![allow(clippy::unwrap_used)]

mod claims;
mod client;
mod document;
mod dying;
mod entities;
mod flows;
mod following;
mod fuzz;
mod hostile;
mod idempotency;
mod kill;
mod locks;
mod malformed;
mod matrix;
mod nodes;
mod postgres;
mod reviews;
mod schedules;
mod schemathesis;
#[path = "../../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod serving;
mod state;
mod store;
mod tasks;
mod tls;
mod typescript;
mod workers;
mod workflows;
