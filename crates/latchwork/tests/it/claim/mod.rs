//! Tests of claims.

mod crash;
mod durable;
mod effects;
mod examples;
mod firing;
mod kit;
mod recovery;
mod simulation;
mod table;
mod timers;
mod validator;
