//! How often a step is tried, and with which pauses.

use std::time::Duration;

use crate::backoff::jittered;
use crate::store::Env;
use crate::workflow::Failure;

/// Longer than any useful pause, and short enough to compute with.
const LONGEST: Duration = Duration::from_secs(u32::MAX as u64);

/// When a step that failed is tried again.
#[derive(Debug, Clone, PartialEq)]
pub struct Retry {
    first: Duration,
    factor: f64,
    most: Duration,
    attempts: u32,
}

impl Default for Retry {
    /// Three attempts, one second apart at first.
    fn default() -> Retry {
        Retry::exponential().max_attempts(3)
    }
}

impl Retry {
    /// Pauses that double: about 1 s, 2 s, 4 s and so on, up to 30 s. The number of attempts has no limit.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Retry};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.run("charge", async || Ok(())).retry(Retry::exponential()).await?;
    /// # Ok(()) }
    /// ```
    pub fn exponential() -> Retry {
        let (first, most) = (Duration::from_secs(1), Duration::from_secs(30));
        Retry { first, factor: 2.0, most, attempts: u32::MAX }
    }

    /// No second attempt.
    ///
    /// ```
    /// # use latchwork::workflow::Retry;
    /// assert_eq!(Retry::never(), Retry::exponential().max_attempts(1));
    /// ```
    pub fn never() -> Retry {
        Retry::exponential().max_attempts(1)
    }

    /// How often the body runs at most, including the first time.
    ///
    /// ```
    /// # use latchwork::workflow::Retry;
    /// assert_eq!(Retry::default(), Retry::exponential().max_attempts(3));
    /// ```
    pub fn max_attempts(mut self, attempts: u32) -> Retry {
        self.attempts = attempts.max(1);
        self
    }

    /// Sets the first pause. If it is longer than the longest pause, the longest pause becomes as long.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Retry;
    /// let retry = Retry::exponential().first_pause(Duration::from_millis(10));
    /// ```
    pub fn first_pause(mut self, pause: Duration) -> Retry {
        (self.first, self.most) = (pause, self.most.max(pause));
        self
    }

    /// The longest pause.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Retry;
    /// let retry = Retry::exponential().longest_pause(Duration::from_secs(3600));
    /// ```
    pub fn longest_pause(mut self, pause: Duration) -> Retry {
        self.most = pause;
        self
    }

    /// Sets the factor by which each pause is longer than the pause before.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Retry;
    /// // The pauses are all the same.
    /// let retry = Retry::exponential().first_pause(Duration::from_secs(5)).factor(1.0);
    /// ```
    pub fn factor(mut self, factor: f64) -> Retry {
        self.factor = if factor.is_finite() { factor.max(1.0) } else { 2.0 };
        self
    }

    pub(crate) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The pause after this many attempts; none if there is no further attempt. Up to a quarter of it is random.
    pub(crate) fn pause_after(&self, attempts: u32, failure: &Failure, env: &Env) -> Option<Duration> {
        if attempts >= self.attempts || !failure.is_retryable() {
            return None;
        }
        let exponent = i32::try_from(attempts.saturating_sub(1)).unwrap_or(i32::MAX);
        // The factor must stay finite: zero times infinity would not be a number.
        let factor = self.factor.powi(exponent).min(f64::MAX);
        let pause = Duration::try_from_secs_f64(self.first.as_secs_f64() * factor).unwrap_or(Duration::MAX);
        Some(jittered(pause.min(self.most).min(LONGEST), 0.75, env))
    }
}
