//! JSON as Latchwork stores, compares and orders it.

mod error;
#[allow(dead_code)]
mod key;
#[allow(dead_code)]
pub(crate) mod merge;
#[allow(dead_code)]
pub(crate) mod order;
#[allow(dead_code)]
pub(crate) mod path;
#[allow(dead_code)]
pub(crate) mod write;

#[cfg(test)]
mod arbitrary;

pub use error::JsonError;
pub use path::{Path, PathError};
