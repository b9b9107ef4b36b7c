//! Entities, on every backend.

mod conformance;
mod crash;
mod examples;
mod model;
mod once_wrong;
mod queries;
