//! Locks: the promises, within workflows and outside, and the same on slots.

mod examples;
mod grants;
mod kill;
mod letting_go;
mod line;
mod model;
mod outside;
mod promises;
mod races;
mod simulation;
mod slots;
mod turnstile;
mod within;
