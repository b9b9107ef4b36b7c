//! The executions: each acquires locks by a plan, one within another, and releases them in one way or another.

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::workflow::{Ctx, CtxGuard, Failure, First2, Retry, Workflow, workflow};
use serde::{Deserialize, Serialize};

use super::oracle::Log;

pub type Done<T> = Result<T, Failure>;

/// The number of permits of the semaphore.
pub const PERMITS: u32 = 3;

/// Which lock, and how much of it: two mutexes, a semaphore and a read-write lock.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum What {
    Mutex(u8),
    Permits(u32),
    Read,
    Write,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum How {
    Acquire,
    Within(u64),
    Try,
    /// In a branch that races against a sleep of so long.
    Race(u64),
    /// In a branch, beside another branch that sleeps.
    Beside(u64),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub enum Then {
    Release,
    Drop,
    /// Holds the lock while the execution continues.
    Keep,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Take {
    pub what: What,
    pub how: How,
    pub hold: u64,
    pub then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum End {
    Completes,
    Fails,
    Anew,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    pub takes: Vec<Take>,
    /// Whether it fails after a deadlock; if not, it releases everything.
    pub gives_up: bool,
    pub end: End,
}

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn taker(log: &Arc<Log>) -> Workflow<Plan, ()> {
    let log = log.clone();
    workflow("taker").run(move |ctx: Ctx, plan: Plan| {
        let log = log.clone();
        async move {
            let mut kept = Vec::new();
            let done = takes(&log, &ctx, &plan, &mut kept).await;
            // The execution ends or gives up, and its locks are released with it.
            kept.iter().for_each(|guard: &CtxGuard| log.lets_go(guard.name(), guard.token()));
            done?;
            match plan.end {
                End::Completes => Ok(()),
                End::Fails => Err(Failure::new("meant to fail")),
                End::Anew => ctx.continue_as_new(Plan { end: End::Completes, ..plan }).await,
            }
        }
    })
}

async fn acquired(ctx: &Ctx, what: What, how: How) -> Done<Option<CtxGuard>> {
    let (lock, permits) = match what {
        What::Mutex(n) => (ctx.mutex(format!("m{n}")), 1),
        What::Permits(permits) => (ctx.semaphore("s", PERMITS), permits),
        What::Read | What::Write => {
            let (lock, reads) = (ctx.rw_lock("rw"), matches!(what, What::Read));
            return match how {
                How::Within(limit) if reads => lock.read_within(ms(limit)).await,
                How::Within(limit) => lock.write_within(ms(limit)).await,
                How::Try if reads => lock.try_read().await,
                How::Try => lock.try_write().await,
                _ if reads => lock.read().await.map(Some),
                _ => lock.write().await.map(Some),
            };
        }
    };
    match how {
        How::Within(limit) => lock.acquire_many_within(permits, ms(limit)).await,
        How::Try => lock.try_acquire_many(permits).await,
        _ => lock.acquire_many(permits).await.map(Some),
    }
}

/// Acquires a lock in a branch that may be given up at any time.
async fn taken_aside(log: &Log, ctx: &Ctx, take: &Take) -> Done<()> {
    let Some(guard) = acquired(ctx, take.what, take.how).await? else { return Ok(()) };
    log.told(&format!("execution {}", ctx.id()), guard.name(), guard.token());
    log.lets_go(guard.name(), guard.token());
    ctx.sleep(ms(take.hold)).await?;
    if let Then::Release = take.then {
        guard.release().await?;
    }
    Ok(())
}

async fn taken(log: &Log, ctx: &Ctx, take: &Take, kept: &mut Vec<CtxGuard>) -> Done<()> {
    match take.how {
        How::Race(limit) => {
            let aside = async |ctx: Ctx| taken_aside(log, &ctx, take).await;
            return match ctx.select((aside, async |ctx: Ctx| ctx.sleep(ms(limit)).await)).await {
                First2::First(done) | First2::Second(done) => done,
            };
        }
        How::Beside(length) => {
            let aside = async |ctx: Ctx| taken_aside(log, &ctx, take).await;
            let (done, slept) = ctx.join((aside, async |ctx: Ctx| ctx.sleep(ms(length)).await)).await;
            return done.and(slept);
        }
        _ => {}
    }
    let Some(guard) = acquired(ctx, take.what, take.how).await? else { return Ok(()) };
    log.told(&format!("execution {}", ctx.id()), guard.name(), guard.token());
    kept.push(guard);
    ctx.sleep(ms(take.hold)).await?;
    let often = Retry::exponential().max_attempts(10_000).longest_pause(ms(4000));
    ctx.run("work", async || Ok(())).retry(often).await?;
    match (take.then, kept.pop()) {
        (Then::Release, Some(guard)) => lets_go(log, guard).await?,
        (Then::Keep, Some(guard)) => kept.push(guard),
        (_, guard) => {
            guard.iter().for_each(|guard| log.lets_go(guard.name(), guard.token()));
            drop(guard);
        }
    }
    Ok(())
}

async fn lets_go(log: &Log, guard: CtxGuard) -> Done<()> {
    let (lock, token) = (guard.name().clone(), guard.token().clone());
    log.lets_go(&lock, &token);
    if guard.release().await? {
        log.freed(&lock, &token);
    }
    Ok(())
}

async fn takes(log: &Log, ctx: &Ctx, plan: &Plan, kept: &mut Vec<CtxGuard>) -> Done<()> {
    for take in &plan.takes {
        let Err(failure) = taken(log, ctx, take, kept).await else { continue };
        match failure.get::<LockRefused>() {
            Some(LockRefused::Deadlock { .. }) if !plan.gives_up => {
                while let Some(guard) = kept.pop() {
                    lets_go(log, guard).await?;
                }
            }
            Some(LockRefused::AlreadyHeld { .. } | LockRefused::Forced { .. }) => {}
            _ => return Err(failure),
        }
    }
    Ok(())
}
