//! Schedules: which times they mean, what overlaps and catch-up make of them, what operators do, and that every
//! occurrence starts one execution through crashes and jumps of the clock.

mod crash;
mod fires;
mod kit;
mod operating;
mod simulation;
mod times;
mod wrong;
mod year;
