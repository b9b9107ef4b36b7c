//! The journal of an execution: where each operation stands in it, and how an operation is replayed from it.

pub(crate) mod place;
pub(crate) mod replay;
