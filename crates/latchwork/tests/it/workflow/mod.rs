//! Workflows: steps, waiting, slots, transactions, replay, recovery, and the kit for testing them.

mod crash;
mod kill;
mod kit;
mod once_wrong;
mod recovery;
mod replay;
mod simulation;
mod slots;
mod starts;
mod steps;
mod transactions;
mod waiting;
