//! Locks: the promises, within workflows and outside, and the same on slots.

mod examples;
mod model;
mod outside;
mod promises;
mod slots;
mod within;
