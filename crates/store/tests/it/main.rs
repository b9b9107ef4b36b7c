//! The store's tests at its public API, one file per topic.

// `unwrap`: a test fails when something unexpected happens. `pub`: no other crate uses this one.
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
mod guess;
mod histories;
mod kill;
mod ledger;
mod lost;
mod model;
mod moving;
mod net;
mod own;
mod postgres;
mod power_loss;
mod processes;
mod recovered;
mod reference;
mod refusals;
mod remote;
mod server;
mod session;
mod sharing;
mod threads;
mod tls;
mod told;
mod wire;
mod workload;
