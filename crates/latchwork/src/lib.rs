//! Work that must happen once: versioned entities on conditional commits.

mod json;

pub use json::{JsonError, Path, PathError};
