//! Schedules: their times, overlaps and catch-up, what operators do, and that every occurrence starts one execution
//! through crashes and jumps of the clock.

mod crash;
mod fires;
mod kit;
mod operating;
mod simulation;
mod times;
mod wrong;
mod year;
