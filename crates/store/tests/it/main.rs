//! The store's tests at its public API, one file a topic.

#![allow(unreachable_pub, clippy::unwrap_used)] // Nothing here is reached from outside, and all of it is tests.

mod crash_net;
mod crowd;
mod damage;
mod directory;
mod faults;
mod kill;
mod ledger;
mod power_loss;
mod recovered;
mod smoke;
mod workload;
