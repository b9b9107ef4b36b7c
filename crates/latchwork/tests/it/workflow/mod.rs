//! Workflows: steps, waiting, replay, recovery.

mod crash;
mod kill;
mod kit;
mod recovery;
mod replay;
mod slots;
mod starts;
mod steps;
mod transactions;
mod waiting;
