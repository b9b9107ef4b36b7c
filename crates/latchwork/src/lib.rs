//! Work that must happen once: versioned entities on conditional commits.

mod json;

pub use json::{Path, PathError};
