//! Workflows: steps, waiting, slots, transactions, replay, recovery, and the kit for testing them.

mod crash;
mod everything;
mod forking;
mod halves;
mod kill;
mod kit;
mod listing;
mod measured;
mod meddling;
mod namesakes;
mod once_wrong;
mod reading;
mod recovery;
mod replay;
mod runtimes;
pub(crate) mod simulation;
mod slots;
mod starts;
mod steps;
mod talk;
mod talking;
mod transactions;
mod waiting;
