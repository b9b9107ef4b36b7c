//! Entities, on every backend.

mod bugs;
mod conformance;
mod crash;
mod examples;
mod model;
mod queries;
