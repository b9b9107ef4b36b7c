//! The journal of an execution: the place of each operation in it, and how an operation is replayed from it.

pub(crate) mod place;
pub(crate) mod replay;
