//! Rate limits for executions and other callers: a bucket in one slot, in which each caller reserves its time. The
//! rules are pure functions. The slot stores the bucket and makes the commit.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::state::{Changed, Slot};
use crate::store::Timestamp;
use crate::workflow::ctx::Ctx;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// The longest name, in bytes. The name of the slot is the name after `rate:`.
const NAME_BYTES: usize = 256;

/// The longest period. It keeps times far below the largest number.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Why a rate limit or an acquisition is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum RateLimitError {
    /// The name is not allowed.
    #[error("{name:?} cannot be the name of a rate limit: it must have 1 to 256 bytes")]
    Name { name: String },
    /// The limit allows no acquisition.
    #[error("rate limit {name:?} allows no acquisition; the maximum is at least 1")]
    NoRoom { name: String },
    /// The period is not allowed.
    #[error("rate limit {name:?} has a period of {period:?}; it must be longer than zero and at most 100 years")]
    Period { name: String, period: Duration },
    /// The acquisition asks for nothing, or for more than the bucket can hold.
    #[error("{asked} cannot be acquired at once from rate limit {name:?}, only 1 to {max}")]
    Count { name: String, asked: u32, max: u32 },
    /// So much is reserved that the time of this caller is beyond the largest timestamp.
    #[error("rate limit {name:?} has reservations beyond the largest timestamp")]
    Exhausted { name: String },
}

/// The stored state of a rate limit: the content of its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SlotBucket {
    /// When the bucket is full again if nothing more is acquired, in nanoseconds since 1970.
    full_ns: u64,
    /// The latest time that was seen, in nanoseconds since 1970. This time never goes back, whatever the clock does.
    seen_ns: u64,
}

/// The number of acquisitions per period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rate {
    max: u32,
    /// The time until there is room for one more. Rounded up, so that the rate is not exceeded.
    interval_ns: u64,
}

impl Rate {
    fn new(name: &str, max: u32, period: Duration) -> Result<Rate, RateLimitError> {
        let name = || name.to_string();
        if max == 0 {
            return Err(RateLimitError::NoRoom { name: name() });
        }
        if period.is_zero() || period > LONGEST {
            return Err(RateLimitError::Period { name: name(), period });
        }
        let interval_ns = (period.as_nanos() as u64).div_ceil(u64::from(max));
        Ok(Rate { max, interval_ns })
    }

    /// The time until an empty bucket is full.
    fn whole_ns(&self) -> u64 {
        self.interval_ns.saturating_mul(u64::from(self.max))
    }

    /// Reserves the time at which `count` are acquired, behind all earlier reservations. None if that time is later
    /// than now and the caller may not wait, or if it is beyond the largest timestamp.
    fn take(&self, bucket: Option<SlotBucket>, now: Timestamp, count: u32, may_wait: bool) -> Option<SlotBucket> {
        let bucket = bucket.unwrap_or(SlotBucket { full_ns: 0, seen_ns: 0 });
        let seen_ns = bucket.seen_ns.max(now.0.saturating_mul(1000));
        let cost = self.interval_ns.checked_mul(u64::from(count))?;
        let after = SlotBucket { full_ns: bucket.full_ns.max(seen_ns).checked_add(cost)?, seen_ns };
        (may_wait || self.wait(&after).is_none()).then_some(after)
    }

    /// The time until which the caller must wait whose reservation led to this bucket.
    fn wait(&self, bucket: &SlotBucket) -> Option<Timestamp> {
        let time_ns = bucket.full_ns.saturating_sub(self.whole_ns());
        (time_ns > bucket.seen_ns).then(|| Timestamp(time_ns.div_ceil(1000)))
    }
}

/// A limit that was asked for: its name, and its rate if that is allowed.
#[derive(Debug, Clone)]
struct NamedRate {
    name: String,
    rate: Result<Rate, RateLimitError>,
}

impl NamedRate {
    fn new(name: &str, max: u32, period: Duration) -> NamedRate {
        let rate = match name.len() {
            1..=NAME_BYTES => Rate::new(name, max, period),
            _ => Err(RateLimitError::Name { name: name.into() }),
        };
        NamedRate { name: name.into(), rate }
    }

    /// The name of the slot.
    fn slot(&self) -> String {
        format!("rate:{}", self.name)
    }

    fn checked(&self, count: u32) -> Result<Rate, RateLimitError> {
        let rate = self.rate.clone()?;
        if count == 0 || count > rate.max {
            return Err(RateLimitError::Count { name: self.name.clone(), asked: count, max: rate.max });
        }
        Ok(rate)
    }

    /// The time until which the caller waits, from the change of the slot. None if the acquisition was refused.
    fn understood(&self, rate: Rate, changed: &Changed<SlotBucket>) -> Option<Option<Timestamp>> {
        changed.changed.then(|| rate.wait(&changed.value))
    }

    fn exhausted(&self) -> RateLimitError {
        RateLimitError::Exhausted { name: self.name.clone() }
    }
}

/// Changes the bucket in a slot. A refused acquisition changes nothing. It is recorded like any other answer, so it is
/// the same on every replay, whatever the clock says then.
async fn reserve(
    engine: &EngineInner,
    slot: Slot<SlotBucket>,
    rate: Rate,
    count: u32,
    may_wait: bool,
) -> Result<Changed<SlotBucket>, crate::state::StateError> {
    let env = engine.store.env().clone();
    let none = SlotBucket { full_ns: 0, seen_ns: 0 };
    let slot = slot.initial(none);
    let taken = slot.update(move |bucket| {
        // The time is as close to the commit as possible: the caller may have waited in the slot's queue.
        rate.take(bucket, env.now(), count, may_wait).or(bucket).unwrap_or(none)
    });
    taken.await
}

/// A rate limit, inside a workflow.
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct CtxRateLimiter {
    ctx: Ctx,
    limit: NamedRate,
    scope: Scope,
}

/// Which callers share a bucket.
#[derive(Debug, Clone)]
enum Scope {
    Global,
    Workflow(String),
    Tree(ExecutionId),
}

impl Ctx {
    /// A rate limit: at most `max` acquisitions at once, and then one more each `per / max`. All code that uses this
    /// name shares the limit, also outside of workflows ([`Engine::rate_limit`]).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.rate_limit("vendor", 10, Duration::from_secs(1)).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn rate_limit(&self, name: &str, max: u32, per: Duration) -> CtxRateLimiter {
        CtxRateLimiter { ctx: self.clone(), limit: NamedRate::new(name, max, per), scope: Scope::Global }
    }
}

impl CtxRateLimiter {
    /// Shares the limit only with executions of this workflow.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.rate_limit("vendor", 10, Duration::from_secs(1)).of_workflow().acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_workflow(mut self) -> CtxRateLimiter {
        self.scope = Scope::Workflow(self.ctx.run.definition.name.clone());
        self
    }

    /// Shares the limit only within this execution's tree: the root, its children and theirs.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.rate_limit("vendor", 10, Duration::from_secs(1)).of_tree().acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_tree(mut self) -> CtxRateLimiter {
        self.scope = Scope::Tree(self.ctx.run.root());
        self
    }

    /// Acquires one, and waits as long as needed. Callers are served in the order in which they came, because each
    /// reserves its time when it comes. If an execution is cancelled while it waits, its reservation is used up.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.rate_limit("vendor", 10, Duration::from_secs(1)).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire(&self) -> impl Future<Output = Result<(), Failure>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires `count` at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.rate_limit("vendor", 10, Duration::from_secs(1)).acquire_many(3).await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire_many(&self, count: u32) -> impl Future<Output = Result<(), Failure>> + Send + use<> {
        let limiter = self.clone();
        async move {
            match limiter.take(count, true).await? {
                Some(None) => Ok(()),
                Some(Some(until)) => limiter.ctx.sleep_until(until).await,
                None => Err(Failure::typed(limiter.limit.exhausted())),
            }
        }
    }

    /// Acquires one if that is possible at once. Returns false if it is not; then nothing is reserved.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let is_allowed = ctx.rate_limit("vendor", 10, Duration::from_secs(1)).try_acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self) -> impl Future<Output = Result<bool, Failure>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires `count` if that is possible at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let is_allowed = ctx.rate_limit("vendor", 10, Duration::from_secs(1)).try_acquire_many(3).await?;
    /// # Ok(()) }
    /// ```
    pub fn try_acquire_many(&self, count: u32) -> impl Future<Output = Result<bool, Failure>> + Send + use<> {
        let limiter = self.clone();
        async move { Ok(limiter.take(count, false).await?.is_some()) }
    }

    async fn take(&self, count: u32, may_wait: bool) -> Result<Option<Option<Timestamp>>, Failure> {
        let rate = self.limit.checked(count).map_err(|error| Failure::typed(error).not_retryable())?;
        let (ctx, name) = (&self.ctx, self.limit.slot());
        if ctx.is_cancelled().await {
            // A change of a slot does not fail when the execution is cancelled. It would use up what other callers
            // could get.
            ctx.sleep_until(Timestamp(0)).await?;
        }
        let slot = match &self.scope {
            Scope::Global => ctx.state().global(&name),
            Scope::Workflow(_) => ctx.state().workflow(&name),
            Scope::Tree(_) => ctx.state().tree(&name),
        };
        let changed = reserve(ctx.engine(), slot, rate, count, may_wait).await?;
        Ok(self.limit.understood(rate, &changed))
    }
}

/// A rate limit, for code outside of workflows.
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct RateLimiter {
    engine: Engine,
    limit: NamedRate,
    scope: Scope,
}

impl Engine {
    /// A rate limit, for code outside of workflows. It shares the limits of workflows ([`Ctx::rate_limit`]).
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.rate_limit("vendor", 10, Duration::from_secs(1)).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn rate_limit(&self, name: &str, max: u32, per: Duration) -> RateLimiter {
        RateLimiter { engine: self.clone(), limit: NamedRate::new(name, max, per), scope: Scope::Global }
    }
}

impl RateLimiter {
    /// Uses the limit that the executions of this workflow share.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.rate_limit("vendor", 10, Duration::from_secs(1)).of_workflow("order").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_workflow(mut self, workflow: impl Into<String>) -> RateLimiter {
        self.scope = Scope::Workflow(workflow.into());
        self
    }

    /// Uses the limit that the tree with this root shares.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.rate_limit("vendor", 10, Duration::from_secs(1)).of_tree("order-7").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_tree(mut self, root: impl Into<ExecutionId>) -> RateLimiter {
        self.scope = Scope::Tree(root.into());
        self
    }

    /// Acquires one, and waits as long as needed. If the caller is dropped while it waits, its reservation is used up.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.rate_limit("vendor", 10, Duration::from_secs(1)).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires `count` at once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.rate_limit("vendor", 10, Duration::from_secs(1)).acquire_many(3).await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire_many(&self, count: u32) -> impl Future<Output = Result<()>> + Send + use<> {
        self.clone().acquired(count)
    }

    async fn acquired(self, count: u32) -> Result<()> {
        let until = self.take(count, true).await?.ok_or_else(|| WorkflowError::RateLimit(self.limit.exhausted()))?;
        let env = self.engine.store().env();
        while let Some(left) = until.and_then(|until| until.0.checked_sub(env.now().0)).filter(|left| *left > 0) {
            env.sleep(Duration::from_micros(left)).await;
        }
        Ok(())
    }

    /// Acquires one if that is possible at once. Returns false if it is not; then nothing is reserved.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::Engine;
    /// # let engine = Engine::on(&Store::memory().await?).start().await?;
    /// let vendor = engine.rate_limit("vendor", 1, Duration::from_secs(3600));
    /// assert!(vendor.try_acquire().await?);
    /// assert!(!vendor.try_acquire().await?);
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self) -> impl Future<Output = Result<bool>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires `count` if that is possible at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::Engine;
    /// # let engine = Engine::on(&Store::memory().await?).start().await?;
    /// let vendor = engine.rate_limit("vendor", 3, Duration::from_secs(3600));
    /// assert!(vendor.try_acquire_many(2).await?);
    /// assert!(!vendor.try_acquire_many(2).await?);
    /// # Ok(()) }
    /// ```
    pub fn try_acquire_many(&self, count: u32) -> impl Future<Output = Result<bool>> + Send + use<> {
        let limiter = self.clone();
        async move { Ok(limiter.take(count, false).await?.is_some()) }
    }

    async fn take(&self, count: u32, may_wait: bool) -> Result<Option<Option<Timestamp>>> {
        let rate = self.limit.checked(count).map_err(WorkflowError::RateLimit)?;
        let states = self.engine.states();
        let slots = match &self.scope {
            Scope::Global => states.global(),
            Scope::Workflow(workflow) => states.workflow(workflow),
            Scope::Tree(root) => states.tree(root),
        };
        let slot = slots.slot(&self.limit.slot());
        let changed = reserve(&self.engine.inner, slot, rate, count, may_wait).await?;
        Ok(self.limit.understood(rate, &changed))
    }
}

shown!(RateLimiter, it => name: it.limit.name);

shown!(CtxRateLimiter, it => name: it.limit.name);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn rate(max: u32, per: Duration) -> Rate {
        Rate::new("vendor", max, per).unwrap()
    }

    /// The times at which callers are served, from the times at which they came.
    fn served(rate: Rate, came: &[(u64, u32)]) -> Vec<u64> {
        let mut bucket = None;
        let mut serve = |&(now, count): &(u64, u32)| {
            bucket = rate.take(bucket, Timestamp(now), count, true);
            let after = bucket.expect("there is room before the end of time");
            rate.wait(&after).map_or(after.seen_ns / 1000, |until| until.0)
        };
        came.iter().map(&mut serve).collect()
    }

    #[test]
    fn a_burst_is_served_at_once_and_the_others_one_by_one() {
        let two = rate(2, Duration::from_secs(1));
        let half = SECOND / 2;
        let all_at_once = served(two, &[(9 * SECOND, 1); 6]);
        assert_eq!(
            all_at_once,
            [9 * SECOND, 9 * SECOND, 9 * SECOND + half, 10 * SECOND, 10 * SECOND + half, 11 * SECOND]
        );
        // After a long time without use, there is still only one burst.
        let later = served(two, &[(9 * SECOND, 2), (90 * SECOND, 1), (90 * SECOND, 1), (90 * SECOND, 1)]);
        assert_eq!(later[1..], [90 * SECOND, 90 * SECOND, 90 * SECOND + half]);
        // A caller that takes two waits for both, and later callers wait behind it.
        assert_eq!(served(two, &[(SECOND, 1), (SECOND, 2), (SECOND, 1)]), [SECOND, SECOND + half, 2 * SECOND]);
    }

    // The clock is set back by an hour, and an operator sets it forward again.
    #[test]
    fn time_stands_still_for_the_bucket_when_the_clock_is_set_back() {
        let two = rate(2, Duration::from_secs(1));
        let (hour, half) = (3600 * SECOND, SECOND / 2);
        let times = served(two, &[(2 * hour, 1), (hour, 1), (hour, 1), (2 * hour + half, 1)]);
        assert_eq!(times, [2 * hour, 2 * hour, 2 * hour + half, 2 * hour + 2 * half]);
    }

    // Random callers: no window has more than the burst and the refill in that time, and no caller overtakes another.
    #[test]
    fn no_window_holds_more_than_the_burst_and_what_was_refilled() {
        let mut seed = 7_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..200 {
            let (max, per) = (1 + random(7) as u32, 1 + random(3 * SECOND));
            let rate = rate(max, Duration::from_micros(per));
            let mut now = SECOND;
            let came: Vec<(u64, u32)> = std::iter::repeat_with(|| {
                now += random(2 * per / u64::from(max) + 1);
                (now, 1 + random(max.into()) as u32)
            })
            .take(60)
            .collect();
            let times = served(rate, &came);
            assert!(times.is_sorted(), "{max} in {per} µs: {came:?} were served at {times:?}");
            for (first, start) in times.iter().enumerate() {
                let mut sum = 0;
                for (end, (_, count)) in times.iter().zip(&came).skip(first) {
                    sum += u64::from(*count);
                    let refilled = (end - start) * u64::from(max) / per;
                    assert!(sum <= u64::from(max) + refilled + 1, "{sum} of {max} in {per} µs from {start} to {end}");
                }
            }
        }
    }

    #[test]
    fn nothing_is_reserved_that_must_be_at_once_and_cannot() {
        let one = rate(1, Duration::from_secs(1));
        let full = one.take(None, Timestamp(SECOND), 1, false);
        assert!(full.is_some());
        assert_eq!(one.take(full, Timestamp(SECOND + 1), 1, false), None);
        assert!(one.take(full, Timestamp(2 * SECOND), 1, false).is_some());
        assert_eq!(one.take(full, Timestamp(u64::MAX), 1, true), None, "no clock tells what is later");
    }
}
