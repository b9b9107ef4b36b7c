//! The stored records of executions and their keys. Nothing here runs or decides anything.

pub(crate) mod kept;
pub(crate) mod keys;
pub(crate) mod listed;
pub(crate) mod record;
