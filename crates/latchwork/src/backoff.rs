//! Pauses between retries: each is longer than the one before, and partly random, so that two callers that collided
//! once do not collide again.

use std::time::Duration;

use crate::store::Env;

/// A random pause between `at_least * most` and `most`.
pub(crate) fn jittered(most: Duration, at_least: f64, env: &Env) -> Duration {
    let chance = env.random() as f64 / u64::MAX as f64;
    most.mul_f64(at_least + (1.0 - at_least) * chance)
}

/// `first`, doubled for every try after the first.
pub(crate) fn doubled(first: Duration, tries: u32) -> Duration {
    first.saturating_mul(1 << tries.saturating_sub(1).min(16))
}
