//! Real servers on free ports, asked by a small client, or by bytes on a socket where a client would refuse to send
//! them.

// A test ends where something unexpected happens.
#![allow(clippy::unwrap_used)]

mod client;
mod document;
mod entities;
mod idempotency;
mod malformed;
mod matrix;
mod serving;
