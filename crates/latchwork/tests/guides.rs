//! The examples of the guides in docs/, compiled as they are, so that a guide cannot differ from the API. `build.rs`
//! makes a module of each guide. Nothing of it runs: the programs in crates/latchwork/examples do.
#![allow(warnings, clippy::all, clippy::disallowed_methods, clippy::iter_over_hash_type, clippy::unwrap_used)]
// A missing `.await` is a mistake in an example, too.
#![deny(unused_must_use)]

/// A value that examples use and do not make.
fn given<T>() -> T {
    unreachable!("examples are compiled, and never run")
}

include!(concat!(env!("OUT_DIR"), "/guides.rs"));

#[test]
fn the_examples_of_the_guides_compile() {}
