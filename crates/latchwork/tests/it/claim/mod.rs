//! Tests of claims.

mod crash;
mod durable;
mod effects;
mod examples;
mod firing;
pub(crate) mod kit;
mod recovery;
mod simulation;
mod table;
mod table_kills;
mod timers;
mod validator;
