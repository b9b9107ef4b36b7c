//! Workflows: steps, waiting, replay, recovery.

mod crash;
mod kill;
mod recovery;
mod replay;
mod steps;
mod waiting;
