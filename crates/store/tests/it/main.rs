//! The store's tests at its public API, one file a topic.

#![allow(clippy::unwrap_used)] // A test ends where something unexpected happens.

mod backends;
mod conformance;
mod histories;
mod model;
mod net;
mod reference;
