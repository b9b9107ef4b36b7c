//! Locks: their promises, used inside and outside of workflows, and locks that are stored in slots.

mod again;
mod cycles;
mod damage;
mod examples;
mod forced;
mod grants;
mod kill;
mod lasting;
pub(crate) mod letting_go;
mod model;
mod outside;
mod promises;
mod queue;
mod races;
mod record;
mod requests;
mod simulation;
mod slots;
pub(crate) mod turnstile;
mod within;
