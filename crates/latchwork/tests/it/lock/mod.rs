//! Locks: the promises, within workflows and outside, and the same on slots.

mod again;
mod circles;
mod damage;
mod examples;
mod forced;
mod grants;
mod kill;
pub(crate) mod letting_go;
mod line;
mod model;
mod outside;
mod promises;
mod races;
mod record;
mod requests;
mod simulation;
mod slots;
pub(crate) mod turnstile;
mod within;
