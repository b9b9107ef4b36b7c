//! Locks: the promises, within workflows and outside, and the same on slots.

mod examples;
mod grants;
mod kill;
mod model;
mod outside;
mod promises;
mod simulation;
mod slots;
mod within;
