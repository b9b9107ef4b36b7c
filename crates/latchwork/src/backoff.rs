//! Pauses between tries: longer each time, and a part of them left to chance, so that those who met once do not meet
//! again.

use std::time::Duration;

use crate::store::Env;

/// A pause of at most `most`, and of at least this part of it.
pub(crate) fn jittered(most: Duration, at_least: f64, env: &Env) -> Duration {
    let chance = env.random() as f64 / u64::MAX as f64;
    most.mul_f64(at_least + (1.0 - at_least) * chance)
}

/// `first`, doubled with every try after the first.
pub(crate) fn doubled(first: Duration, tries: u32) -> Duration {
    first.saturating_mul(1 << tries.saturating_sub(1).min(16))
}
