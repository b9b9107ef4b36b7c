//! JSON as Latchwork stores, compares and orders it.

#[allow(dead_code)]
pub(crate) mod merge;
#[allow(dead_code)]
pub(crate) mod path;

pub use path::{Path, PathError};
