//! The user's own transactions on a store in PostgreSQL: steps with SQL, the outbox, and tables that the user owns.

mod bank;
pub(crate) mod kit;
mod outbox;
mod sql;
