//! JSON as Latchwork stores, compares and orders it.

#[allow(dead_code)]
pub(crate) mod merge;
#[allow(dead_code)]
pub(crate) mod order;
#[allow(dead_code)]
pub(crate) mod path;

#[cfg(test)]
mod arbitrary;

pub use path::{Path, PathError};
