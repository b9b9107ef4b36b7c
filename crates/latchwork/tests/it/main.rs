//! Tests of the library's public API, one binary; a folder a noun.

#![allow(missing_docs)]

mod entity;
