//! The store's tests at its public API, one file a topic.

// A test ends where something unexpected happens, and nothing here is reached from outside.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod backends;
mod bounded;
mod conformance;
mod crash_net;
mod crowd;
mod damage;
mod directory;
mod faults;
mod folding;
mod histories;
mod kill;
mod ledger;
mod model;
mod net;
mod postgres;
mod power_loss;
mod recovered;
mod reference;
mod remote;
mod server;
mod threads;
mod workload;
